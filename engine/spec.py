"""What a draft computes, as explicit switches. Nothing about a draft is decided by a tensor's width.

Every published EAGLE-3 dialect is a delta from EAGLE's `cnets.py`; a delta is one switch here, read by `draft.py` and
filled in by `checkpoint.py`.
"""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["DraftSpec", "FuseNorm", "GqaSpec", "IdMap", "LaterNorm", "MlaSpec", "RopeKind", "RopeSpec", "Stream"]


class Stream(StrEnum):
    """Which side of a norm a tensor is taken from."""

    PRE_NORM = "pre_norm"
    POST_NORM = "post_norm"


class FuseNorm(StrEnum):
    """The norm over the concatenated target features before `fc`: none, one over all slots, or one per slot."""

    NONE = "none"
    WHOLE = "whole"
    PER_SLOT = "per_slot"


class LaterNorm(StrEnum):
    """Which of its norms a layer after the first applies to its input: by the names of their tensors."""

    INPUT = "input_layernorm"
    HIDDEN = "hidden_norm"


class IdMap(StrEnum):
    """What `d2t` says of draft id k: it stands for token k + d2t[k], or d2t[k]; without a table it is token k."""

    OFFSET = "offset"
    ABSOLUTE = "absolute"
    NONE = "none"


class RopeKind(StrEnum):
    """How the rotary frequencies are stretched beyond the base context."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: base `theta`, the stretching, and whether pairs are (2i, 2i+1) or (i, i + D/2).

    `share` is the part of a head that is rotated, its first elements; the others carry no position. `truncate` says
    whether YaRN rounds the pairs between which it passes from one frequency to the other.
    """

    theta: float = 10000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    cos_scale: float = 1.0
    interleaved: bool = False
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Grouped-query attention: `heads` query heads over `kv_heads` key and value heads of width `head_dim`.

    `head_norms`: queries and keys are normed over each head before they are rotated, as in Qwen3.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    head_norms: bool = False


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank queries, one latent for keys and values.

    `q_rank` None means a full query projection. `softmax_scale` multiplies (nope_dim + rope_dim) ** -0.5; under YaRN
    DeepSeek sets it to mscale ** 2.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    softmax_scale: float = 1.0

    @property
    def key_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A draft's shapes and switches. Widths in elements, `slots` is the number of boundaries that `fc` takes.

    `windows` has an entry a layer: how many positions back a row sees, its own included; None: all of them. With
    `window_from_text` they are counted from the row of text that a drafted row is below, which sees its own branch,
    too. `later_norm` is of layers after the first, which take the state alone. `head_reads` is the side of the output
    norm that the head reads, `feedback` the side that the next depth is fed.
    `projects` False: rows are fed as they come, past `fc` and its norms, whose weights are there and say nothing.
    `normed_twice`: the state goes through the embedding's norm before its own, as ModelOpt trains since 0.41.
    `embedding_scale` multiplies the embedding, which the norm behind it undoes but for its epsilon;
    `unit_offset_norms`: norms multiply by 1 + weight, as in Gemma.
    `context` is how many positions it is said to be for, None where that is not said; nothing is computed by it.
    """

    width: int
    target_width: int
    slots: int
    mlp_width: int
    target_vocab: int
    draft_vocab: int
    attention: GqaSpec | MlaSpec
    rope: RopeSpec = RopeSpec()
    windows: tuple[int | None, ...] = (None,)
    window_from_text: bool = False
    fc_bias: bool = False
    mlp_bias: bool = False
    residual: Stream = Stream.PRE_NORM
    normed_twice: bool = False
    feedback: Stream = Stream.PRE_NORM
    head_reads: Stream = Stream.POST_NORM
    fuse_norm: FuseNorm = FuseNorm.NONE
    later_norm: LaterNorm = LaterNorm.INPUT
    projects: bool = True
    id_map: IdMap = IdMap.OFFSET
    own_embedding: bool = False
    own_head: bool = True
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    unit_offset_norms: bool = False
    norm_eps: float = 1e-6
    context: int | None = None

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.windows)

    @property
    def features_width(self) -> int:
        """Width of a depth-0 input row, `slots * target_width`."""
        return self.slots * self.target_width

    @property
    def rope_width(self) -> int:
        """How many dimensions of a head are rotated."""
        if isinstance(self.attention, MlaSpec):
            return self.attention.rope_dim
        return int(self.attention.head_dim * self.rope.share)
