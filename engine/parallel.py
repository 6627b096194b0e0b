"""A tensor-parallel group: the processes that hold one model together, and how a draft is split over them.

A group is a torch.distributed world of its own, set up here with our own timeout, since torch's is hours. Its ranks are
given the same steps and come to the same answers. A group of one is no group: nothing of torch.distributed is loaded.
"""

import fcntl
import os
import re
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from xxhash import xxh3_64

from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import DraftSpec, GqaSpec, MlaSpec
from spectrace.tracer.errors import UserError
from spectrace.tracer.staging import bits_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Group", "Place", "check_draft_split", "check_target_split", "join", "listen", "sharded", "split_draft"]

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface
_SPLIT_HEADS = "layers.*.self_attn.q_proj"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands in its group, where the group meets (rank 0's host and port), and on what it computes.

    `patience_secs` is how long a rank waits for the others, when they meet and in every collective.
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    meeting: tuple[str, int] | None = None
    patience_secs: float = 60.0


@dataclass(frozen=True, slots=True)
class Group:
    """A rank's view of the group that it has joined."""

    rank: int
    size: int
    mesh: "DeviceMesh"

    def repeats(self, *tensors: Tensor | None) -> bool:
        """Whether rank 0 holds these very bytes, so that another rank need not keep them; never true of rank 0.

        All ranks must ask at the same time, since all compare: where one of them differs, it is false for all.
        """
        import torch.distributed as dist

        digest = xxh3_64()
        for tensor in tensors:
            if tensor is not None:
                digest.update(bits_of(tensor).array.reshape(-1).view("u1").data)
        own = torch.tensor(digest.intdigest() - (1 << 63), device=self.mesh.device_type)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own)
        return self.rank > 0 and len({int(one) for one in every}) == 1


def listen(host: str) -> socket.socket:
    """Rank 0's end of the meeting: a free port of this very address, and of no other."""
    meeting = socket.create_server((host, 0))
    meeting.set_inheritable(False)
    return meeting


def join(place: Place, meeting: socket.socket | None) -> Group | None:
    """Meet the other ranks; None for a group of one. Rank 0 brings the `meeting` that it listens on.

    Raises torch's DistError when not all ranks come in time.
    """
    if place.size == 1:
        return None
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh

    assert place.meeting
    host, port = place.meeting
    if place.device == "cpu" and (interface := _interface_of(host if place.rank == 0 else _own_address(host))):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    patience = timedelta(seconds=place.patience_secs)
    listener = meeting.detach() if meeting else None
    store = TCPStore(host, port, place.size, place.rank == 0, patience, master_listen_fd=listener)
    dist.init_process_group(
        "gloo" if place.device == "cpu" else "nccl",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=patience,
    )
    return Group(place.rank, place.size, init_device_mesh(place.device, (place.size,), mesh_dim_names=("tp",)))


def _own_address(peer: str) -> str:
    """This machine's address as a peer sees it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str | None:
    """The network interface of an IPv4 address, so that gloo listens there and nowhere else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    return None


def check_target_split(folder: Path, ranks: int) -> None:
    """Raises UserError for a target that so many ranks cannot share."""
    if ranks == 1:
        return
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config()
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        raise UserError(
            f"{folder}: transformers has no tensor-parallel plan for {config.model_type}, so --tp {ranks} is not "
            f"possible; use --tp 1, or another target"
        )
    shared = {"intermediate_size": "the MLP", "moe_intermediate_size": "the experts"}
    if plan.get(_SPLIT_HEADS) == "colwise":
        shared |= {"num_attention_heads": "attention", "num_key_value_heads": "attention"}
    sizes = {field: getattr(config, field, None) for field in shared}
    _check_split(f"{folder}: --tp", ranks, {field: size for field, size in sizes.items() if isinstance(size, int)})


def check_draft_split(folder: Path, spec: DraftSpec, ranks: int) -> None:
    """Raises UserError for a draft that so many ranks cannot share."""
    sizes = {"num_attention_heads": spec.attention.heads, "intermediate_size": spec.mlp_width}
    if isinstance(spec.attention, GqaSpec):
        sizes["num_key_value_heads"] = spec.attention.kv_heads
    _check_split(f"{folder}: --draft-tp", ranks, sizes)


def _check_split(what: str, ranks: int, sizes: Mapping[str, int]) -> None:
    if odd := {field: size for field, size in sizes.items() if size % ranks}:
        fit = [n for n in range(1, min(sizes.values()) + 1) if not any(size % n for size in sizes.values())]
        fields = ", ".join(f"{field} {size}" for field, size in odd.items())
        raise UserError(f"{what} {ranks} does not divide {fields}; it can be {', '.join(map(str, fit))}")


def split_draft(model: DraftModel, group: Group | None) -> None:
    """Leave every rank its share of the heads, of the MLP and of the rows of `fc` and head; nothing for a group of one.

    What is small or feeds every head whole (norms, the embedding, MLA's way down to its latents) stays on all ranks.
    """
    if group is None:
        return
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    attention = model.spec.attention
    heads = ("q", "k", "v") if isinstance(attention, GqaSpec) else _mla_up(attention)
    own = [*(f"attention.{name}" for name in heads), "mlp.gate", "mlp.up"]
    plan: dict[str, Any] = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("fc", "head")}
    for layer in ("", *(f"later.{later}." for later in range(model.spec.layers - 1))):
        plan |= {f"{layer}{name}": ColwiseParallel() for name in own}
        plan |= {f"{layer}{name}": RowwiseParallel() for name in ("attention.o", "mlp.down")}
    # Every rank has read the same file: nothing has to be sent.
    parallelize_module(model, group.mesh, plan, src_data_rank=None)


def _mla_up(attention: MlaSpec) -> tuple[str, str]:
    return ("q" if attention.q_rank is None else "q_up", "kv_up")


def sharded(model: nn.Module, group: Group | None) -> dict[str, str]:
    """How each weight that is split lies on the ranks, by name with layer numbers left out; all others are whole."""
    if group is None:
        return {}
    from torch.distributed.tensor import DTensor

    return {
        re.sub(r"\.\d+\.", ".*.", name): ", ".join(map(repr, parameter.placements))
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
    }
