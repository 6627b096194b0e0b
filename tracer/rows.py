"""What a trace can hold: six families of rows, declared once, as data.

Writer, reader, checks and docs all follow `FAMILIES`; a new column or family is one entry here. Positions in
`FAMILIES` and in `Family.wides` are written into ledgers: append only, never reorder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Final

import numpy as np
import pyarrow as pa

__all__ = [
    "DRAFTED",
    "EMITTED",
    "FAMILIES",
    "FAMILY",
    "HASHES",
    "POINTER",
    "RECEIVED",
    "REFERENCE",
    "REQUESTS",
    "STREAMS",
    "TOKENS",
    "TOP_K",
    "VERIFIED",
    "Column",
    "Family",
    "Level",
    "Phase",
    "Stream",
    "Wide",
    "numpy_dtype",
]


class Phase(IntEnum):
    """Which kind of forward a row belongs to."""

    PREFILL = 0
    VERIFY = 1
    DRAFT_EXTEND = 2
    DRAFT_DECODE = 3


class Level(IntEnum):
    """How much is kept. Keys, tokens and hashes are kept at every level."""

    LIGHT = 0
    FEATURES = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class Column:
    """One narrow column. Nullable integers take any negative number as null, nullable floats take NaN."""

    name: str
    type: pa.DataType
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Wide:
    """One kind of tensor of a family, kept in segments of its own from `level` upwards.

    `columns` are the tensors of one row; empty when the caller names them. `hashes` is the narrow column that holds
    the hashes of this kind, at every level.
    """

    kind: str
    columns: tuple[str, ...]
    level: Level
    hashes: str | None = None

    @property
    def pointer(self) -> str:
        """The narrow column that points at rows of this kind."""
        return f"payload_{self.kind}"


@dataclass(frozen=True, slots=True)
class Family:
    """One family: its narrow columns, and the tensors its rows may point at."""

    name: str
    columns: tuple[Column, ...]
    wides: tuple[Wide, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        fields = [pa.field(column.name, column.type, column.nullable) for column in self.columns]
        return pa.schema(fields + [pa.field(wide.pointer, POINTER) for wide in self.wides])

    def wide(self, kind: str) -> Wide:
        return next(wide for wide in self.wides if wide.kind == kind)


@dataclass(frozen=True, slots=True)
class Stream:
    """The segments of one family's narrow rows (`wide` is None) or of one of its tensor kinds."""

    number: int
    family: Family
    wide: Wide | None

    @property
    def name(self) -> str:
        return self.family.name if self.wide is None else f"{self.family.name}.{self.wide.kind}"


@cache
def numpy_dtype(kind: pa.DataType) -> np.dtype:
    """numpy's name for an Arrow type. `to_pandas_dtype` would do, but older pyarrow then asks for pandas."""
    empty: np.ndarray = pa.array([], kind).to_numpy(zero_copy_only=False)
    return empty.dtype


U8, U16, U32, U64 = pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()
I32, I64, F32, F64 = pa.int32(), pa.int64(), pa.float32(), pa.float64()
TOP_K: Final = 16
"""How many logits of a row are kept, the best."""
POINTER: Final = pa.struct([pa.field(name, U32, nullable=False) for name in ("segment", "batch", "row")])
HASHES: Final = pa.list_(pa.field("item", U64, nullable=False))
TOKENS: Final = pa.list_(pa.field("item", I32, nullable=False))

KEY: Final = (
    Column("incarnation", U16),
    Column("rank", U16),
    Column("request", U32),
    Column("pass", U32),
    Column("depth", U16),
    Column("node", U32),
    Column("position", I32),
    Column("phase", U8),
    Column("round", I32),
    Column("step", U64),
    Column("live", pa.bool_()),
)

EMITTED: Final = Family(
    "emitted",
    (
        *KEY,
        Column("token", I32),
        Column("hashes", HASHES),
        Column("target_token", I32, nullable=True),
        Column("logsumexp", F32, nullable=True),
        Column("forward_secs", F32, nullable=True),
    ),
    (Wide("slots", ("slots",), Level.FULL, hashes="hashes"), Wide("logits", ("ids", "values"), Level.FULL)),
)
RECEIVED: Final = Family(
    "received",
    (*KEY, Column("parent", I32, nullable=True), Column("token", I32), Column("hashes", HASHES)),
    (
        Wide("features", ("features",), Level.FEATURES, hashes="hashes"),
        Wide("state", ("state",), Level.FULL, hashes="hashes"),
    ),
)
DRAFTED: Final = Family(
    "drafted",
    (
        *KEY,
        Column("draft_token", I32, nullable=True),
        Column("token", I32, nullable=True),
        Column("state_hash", U64, nullable=True),
        Column("logsumexp", F32, nullable=True),
        Column("forward_secs", F32, nullable=True),
    ),
    (
        Wide("fused", ("fused",), Level.FULL),
        Wide("hidden", ("hidden",), Level.FULL),
        Wide("state", ("state",), Level.FULL, hashes="state_hash"),
        Wide("logits", ("ids", "values"), Level.FULL),
    ),
)
VERIFIED: Final = Family(
    "verified",
    (
        *KEY,
        Column("parent", I32),
        Column("token", I32),
        Column("target_token", I32),
        Column("accepted", pa.bool_()),
        Column("cut", pa.bool_()),
        Column("source_row", I32),
        Column("p", F32, nullable=True),
        Column("q", F32, nullable=True),
        Column("p_emitted", F32, nullable=True),
        Column("uniform", F32, nullable=True),
    ),
)
REQUESTS: Final = Family(
    "requests",
    (
        *KEY,
        Column("id", pa.string()),
        Column("prompt_tokens", TOKENS),
        Column("output_tokens", TOKENS),
        Column("cached_prefix", I32),
        Column("temperature", F32),
        Column("seed", I64, nullable=True),
        Column("arrived_secs", F64, nullable=True),
        Column("first_token_secs", F64, nullable=True),
        Column("finished_secs", F64, nullable=True),
        Column("finish_reason", pa.string()),
        Column("rounds", I32),
        Column("correct_drafts", I32),
        Column("depth_limit", I32),
    ),
)
REFERENCE: Final = Family(
    "reference",
    (*KEY, Column("token", I32), Column("hashes", HASHES)),
    (Wide("boundaries", (), Level.FEATURES, hashes="hashes"),),
)

FAMILIES: Final = (EMITTED, RECEIVED, DRAFTED, VERIFIED, REQUESTS, REFERENCE)
FAMILY: Final[Mapping[str, Family]] = {family.name: family for family in FAMILIES}


def _streams() -> dict[int, Stream]:
    """Stream number = family's place (from 1) << 8 | place of the tensor kind (from 1; 0 is the narrow rows)."""
    return {
        (at << 8 | kind): Stream(at << 8 | kind, family, wide)
        for at, family in enumerate(FAMILIES, 1)
        for kind, wide in enumerate((None, *family.wides))
    }


STREAMS: Final[Mapping[int, Stream]] = _streams()
