"""Edits of a draft's tensors: those in the wrong order put into the right one, those that are too many removed.

Each comes with the command that makes it, over every file of the folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from spectrace.engine.spec import DraftSpec
from spectrace.engine.turned import head_order, rotated
from spectrace.replay.profiles.profile import Profile
from spectrace.replay.rewriting import Edit, python_command, tensor_command

__all__ = ["copy_tensors", "drop_tensors", "put_in_order", "turn_rows"]


def drop_tensors(folder: Path, names: Sequence[str], why: str) -> Edit:
    """For tensors that a draft holds and should not."""
    each = [f"for n in {list(names)!r}:", "    changed = t.pop(n, None) is not None or changed"]
    index = [
        "for p in d.glob('*.index.json'):",
        "    c = json.loads(p.read_text())",
        f"    c['weight_map'] = {{n: f for n, f in c['weight_map'].items() if n not in {list(names)!r}}}",
        "    p.write_text(json.dumps(c, indent=2))",
    ]
    what = "the tensor" if len(names) == 1 else "the tensors"
    return Edit(f"remove {what} {', '.join(names)} from {folder}: {why}", tensor_command(folder, index, each))


def copy_tensors(source: Path, to: Path, names: Sequence[str], edit: Edit) -> Edit:
    """An edit of a copy that has lost these tensors as well: they are put into a file beside the others."""
    found = to / "recovered.safetensors"
    lines = [
        "t = {}",
        f"for f in pathlib.Path({str(source)!r}).glob('*.safetensors'):",
        f"    t |= {{n: v for n, v in load_file(f).items() if n in {list(names)!r}}}",
        f"p = pathlib.Path({str(found)!r})",
        "save_file(t, p, metadata={'format': 'pt'})",
        "for i in p.parent.glob('*.index.json'):",
        "    c = json.loads(i.read_text())",
        "    c['weight_map'] |= {n: p.name for n in t}",
        "    i.write_text(json.dumps(c, indent=2))",
    ]
    text = f"{edit.text}; and copy {', '.join(names)} from {source}, which the copy lost, too"
    return Edit(text, " && ".join(filter(None, (edit.command, python_command(lines)))))


def put_in_order(profile: Profile, folder: Path, boundaries: Sequence[int], edit: Edit) -> Edit:
    """For an engine that sorts: the slots of a draft that was trained on another order, moved into that one."""
    order = sorted(range(len(boundaries)), key=lambda slot: boundaries[slot])
    text = (
        f"{profile.engine} sorts layer ids, so it cannot deliver {list(boundaries)}: in {folder} put the column "
        f"blocks of fc.weight, and gains of norms before it, into the order {order}, and {edit.text}"
    )
    each = [
        "for n in {'fc.weight', 'input_norm.weight'} & t.keys():",
        "    parts, changed = t[n].chunk(slots, -1), True",
        "    t[n] = torch.cat([parts[i] for i in order], -1).contiguous()",
        "names = [f'fc_norm.{i}.weight' for i in range(slots)]",
        "if names[0] in t:",
        "    t |= {names[s]: t[names[i]].clone() for s, i in enumerate(order)}",
        "    changed = True",
    ]
    command = tensor_command(folder, [f"order, slots = {order}, {len(order)}"], each)
    return Edit(text, f"{command} && {edit.command}")


def turn_rows(folder: Path, names: Mapping[str, str], spec: DraftSpec, *, back: bool) -> Edit:
    """For rows of q and k in the order of the other kind of RoPE: those of each head put into this one's.

    `names` are what a `DraftModel`'s tensors are called in the folder; `back` rights rows that were put into the other
    order, else those that were put into this one twice.
    """
    rows = {names[name]: count for name, count in rotated(names, spec)}
    orders = {count: head_order(spec, count, back=back) for count in set(rows.values())}
    each = [
        "for n in rows.keys() & t.keys():",
        "    r, changed = rows[n], True",
        "    t[n] = t[n].reshape(-1, r, *t[n].shape[1:])[:, orders[r]].reshape(t[n].shape).contiguous()",
    ]
    pairs = "(2i, 2i + 1)" if spec.rope.interleaved else "(i, i + D/2)"
    text = (
        f"in {folder} put the rows of each head of {', '.join(sorted(rows))} into the order in which {pairs} are "
        f"pairs: they are in another one"
    )
    return Edit(text, tensor_command(folder, [f"rows, orders = {rows!r}, {orders!r}"], each))
