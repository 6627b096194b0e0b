"""Findings about a draft beside the target that it is for: sizes, tokenizer, embedding, RoPE, context, types.

Shapes: V tokens, H width.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from spectrace.engine.rope_fields import read_rope, rope_of_kind
from spectrace.replay.lint.finding import LintFinding, Severity
from spectrace.replay.lint.subject import Subject, Target
from spectrace.replay.profiles.profile import StandIn
from spectrace.replay.profiles.spectrace import GENERIC
from spectrace.tracer.errors import UserError
from spectrace.tracer.fingerprint import file_fingerprint

__all__ = [
    "UNRELATED",
    "context",
    "dtypes",
    "embedding",
    "likeness",
    "rope",
    "same_values",
    "sizes",
    "tokenizer",
    "weights",
]

_OTHER: Final = "this is the draft of another target: give the one that it was trained on"
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
UNRELATED: Final = 0.1  # the mean cosine with the target's rows, below which a table has nothing to do with it
_ROWS: Final = 4096
_NOISE: Final = 1.2


def sizes(subject: Subject) -> Iterator[LintFinding]:
    """Whether widths and vocabulary are the target's."""
    target, spec = subject.target, subject.draft.spec
    if target is None:
        return
    told = {
        "hidden_size": (spec.target_width, "the features of its slots", "feature"),
        "vocab_size": (spec.target_vocab, "the tokens that d2t and the embedding are of", "token"),
    }
    for name, (ours, what, unit) in told.items():
        theirs = target.config.get(name)
        if isinstance(theirs, int) and theirs != ours and not (name == "vocab_size" and _padded(ours, theirs)):
            yield LintFinding(
                code="target-differs",
                severity=Severity.ERROR,
                title=f"the draft is for a target with {name} {ours}, and this one has {theirs}",
                evidence=(
                    f"{subject.folder / 'config.json'} makes {what} {ours}; {target.folder} has {name} {theirs}",
                ),
                consequence=f"an engine fails, or takes one {unit} for another",
                fix=_OTHER,
            )


def _padded(ours: int, theirs: int) -> bool:
    """Whether two vocabularies may be one, rounded up for the sake of kernels."""
    return abs(ours - theirs) < 256 and max(ours, theirs) % 64 == 0


def tokenizer(subject: Subject) -> Iterator[LintFinding]:
    """Whether a tokenizer that lies beside the draft is the target's."""
    target = subject.target
    if target is None:
        return
    both = [name for name in _TOKENIZERS if (subject.folder / name).is_file() and (target.folder / name).is_file()]
    if differ := [name for name in both if _hash(subject.folder / name) != _hash(target.folder / name)]:
        yield LintFinding(
            code="tokenizer-differs",
            severity=Severity.WARNING,
            title=f"{differ[0]} is not the target's",
            evidence=(f"{subject.folder / differ[0]} and {target.folder / differ[0]} are different files",),
            consequence="where ids mean other tokens, or a template writes other texts, it was trained on other inputs",
            fix="look what differs; the draft has to be trained on texts of the tokenizer and template that are served",
        )


def _hash(path: Path) -> str:
    return file_fingerprint(path)


def embedding(subject: Subject) -> Iterator[LintFinding]:
    """Whether an embedding of the draft's own is the target's, is like it, or has nothing to do with it."""
    target, own = subject.target, subject.draft.tensors.get("embedding.weight")
    if target is None or own is None:
        return
    name, theirs = subject.draft.names["embedding.weight"], target.embedding
    if theirs is None or theirs.shape != own.shape:
        return  # of another width: it cannot be shared
    if same_values(own, theirs):
        yield LintFinding(
            code="embedding-copied",
            severity=Severity.NOTE,
            title=f"{name} is the target's, bit for bit",
            evidence=(f"{list(own.shape)} values are equal",),
            consequence=f"{own.numel() * own.element_size() / 1e6:,.0f} MB are stored and loaded twice",
            fix=f"leave {name} out of the files",
        )
        return
    alike = likeness(own, theirs)
    told: tuple[str, ...] = (f"rows have a mean cosine of {alike:.2f} with the target's rows of the same tokens",)
    if alike >= UNRELATED:
        yield LintFinding(
            code="embedding-own",
            severity=Severity.NOTE,
            title=f"{name} was trained on from the target's",
            evidence=told,
            consequence="an engine that takes the target's in its place serves another draft",
            fix="nothing, where the engine keeps it",
        )
        return
    told += ("and no direction that stands out: they look like numbers drawn at random",) if _is_noise(own) else ()
    kept = subject.running is None or subject.running.taken.get("embedding.weight") is not StandIn.EMBEDDING
    yield LintFinding(
        code="embedding-unrelated",
        severity=Severity.WARNING,
        title=f"{name} has nothing to do with the target's embedding",
        evidence=told,
        consequence="exporters have written tables that nothing was loaded into: such a draft is fed noise"
        if kept
        else f"{subject.engine} takes the target's in its place",
        fix=f"if the draft was trained with the target's embedding, remove {name} from the files",
    )


def weights(subject: Subject) -> Iterator[LintFinding]:
    """Whether the target's own weights could be read, where they were asked for."""
    if subject.target is not None and subject.target.unread:
        yield LintFinding(
            code="target-unread",
            severity=Severity.NOTE,
            title="the target's weights are not compared with",
            evidence=(subject.target.unread,),
            consequence="whether embedding and head go with the target's is not known; all else is told",
            fix=f"put the target's *.safetensors into {subject.target.folder}, if that is of interest",
        )


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tables hold the same numbers, a few rows at a time."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:
        return torch.equal(one, other)
    pairs = zip(torch.split(one, _ROWS), torch.split(other, _ROWS), strict=True)
    return all(torch.equal(mine.float(), theirs.float()) for mine, theirs in pairs)


def likeness(own_VH: Tensor, theirs_VH: Tensor) -> float:
    """The mean cosine of rows of the same token, over some of them."""
    sample = torch.linspace(0, len(own_VH) - 1, min(_ROWS, len(own_VH))).long()
    own, theirs = (table[sample].float() for table in (own_VH, theirs_VH))
    return float(torch.nn.functional.cosine_similarity(own, theirs, dim=-1).mean())


def _is_noise(table_VH: Tensor) -> bool:
    """Whether rows have no direction in common: their largest singular value is that of independent numbers.

    That is std * (sqrt(rows) + sqrt(width)), the edge of Marchenko and Pastur's law.
    """
    sample = torch.linspace(0, len(table_VH) - 1, min(_ROWS, len(table_VH))).long()
    rows = table_VH[sample].float()
    edge = rows.std() * (rows.shape[0] ** 0.5 + rows.shape[1] ** 0.5)
    return bool(torch.linalg.matrix_norm(rows, 2) < _NOISE * edge)


def rope(subject: Subject) -> Iterator[LintFinding]:
    """RoPE that is not the target's: a note, since good drafts differ on purpose."""
    if subject.target is None:
        return
    ours, theirs = subject.draft.spec.rope, _rope_of(subject.target)
    if theirs is None:
        return
    differ = [name for name in ("theta", "kind", "factor") if getattr(ours, name) != getattr(theirs, name)]
    if differ:
        told = ", ".join(f"{name} {_said(ours, name)} where the target has {_said(theirs, name)}" for name in differ)
        yield LintFinding(
            code="rope-differs",
            severity=Severity.NOTE,
            title="RoPE is not the target's",
            evidence=(told,),
            consequence="right if it was trained so, as some are on purpose; else it drafts worse in long texts",
            fix="look into the training's config; never set it to the target's because it differs",
        )


def _said(rope: Any, name: str) -> str:
    value = getattr(rope, name)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rope_of(target: Target) -> Any:
    try:
        scaling, latent = rope_of_kind(target.fields), "kv_lora_rank" in target.config
        return read_rope(target.fields, scaling, latent=latent, interleaved=False)
    except UserError:
        return None  # of a kind that no draft has


def context(subject: Subject) -> Iterator[LintFinding]:
    """A context that ends before the target's."""
    ours, target = subject.draft.spec.context, subject.target
    theirs = None if target is None else target.facts.context
    if target is not None and ours is not None and theirs is not None and ours < theirs:
        refused = subject.profile is not None and subject.profile.refuses_shorter
        yield LintFinding(
            code="context-shorter",
            severity=Severity.ERROR if refused else Severity.WARNING,
            title=f"the draft is for {ours} positions, and the target for {theirs}",
            evidence=(f"max_position_embeddings is {ours} in {subject.folder}, and {theirs} in {target.folder}",),
            consequence=(subject.profile or GENERIC).context,
            fix=f"serve texts of up to {ours} positions with it, or raise it if RoPE and training reach further",
        )


def dtypes(subject: Subject) -> Iterator[LintFinding]:
    """Weights of several types, or of another one than the target's."""
    kinds: dict[torch.dtype, list[str]] = {}
    for name in subject.draft.tensors:
        if name != "d2t":
            kinds.setdefault(subject.stored[subject.draft.names[name]].dtype, []).append(subject.draft.names[name])
    if len(kinds) > 1:
        told = "; ".join(f"{_short(kind)}: {', '.join(sorted(names)[:3])}" for kind, names in kinds.items())
        yield LintFinding(
            code="dtype-differs",
            severity=Severity.NOTE,
            title=f"weights are of {len(kinds)} types",
            evidence=(told,),
            consequence="engines round them all to one",
            fix="nothing, if the rounding is known",
        )
    elif subject.target is not None and kinds:
        [own] = kinds
        table = subject.target.embedding
        theirs = own if table is None else table.dtype
        if own != theirs:
            yield LintFinding(
                code="dtype-differs",
                severity=Severity.NOTE,
                title=f"weights are {_short(own)}, and the target's {_short(theirs)}",
                evidence=(f"{subject.folder}: {_short(own)}; {subject.target.folder}: {_short(theirs)}",),
                consequence="an engine serves both in the target's type, and rounds the draft's weights to it",
                fix="nothing; small differences to training are rounding",
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
