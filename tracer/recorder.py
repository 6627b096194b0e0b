"""The recorder: a verb per family, called from an engine's thread, which it never stops, waits for or fails.

A verb copies what it is given and returns; hashing and writing happen on the recorder's own thread. Memory is
bounded: what does not fit in the queue is dropped and counted, and every loss ends up in the ledger.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

from spectrace.tracer.account import Account
from spectrace.tracer.batching import Item, Tensors, kept
from spectrace.tracer.errors import RecordingFailed, UserError
from spectrace.tracer.fingerprint import ROW_HASH
from spectrace.tracer.keys import Keys
from spectrace.tracer.ledger import Reason
from spectrace.tracer.manifest import manifest_hash
from spectrace.tracer.pump import Pump
from spectrace.tracer.rows import DRAFTED, EMITTED, FAMILY, RECEIVED, REFERENCE, REQUESTS, VERIFIED, Family, Level
from spectrace.tracer.staging import stage
from spectrace.tracer.status import Status
from spectrace.tracer.writer import FolderWriter

__all__ = ["Recorder", "writer_name"]

_ITEM_BYTES: Final = 1 << 10
_Wides: TypeAlias = Mapping[str, tuple[Mapping[str, object], int | None]]


def writer_name(role: str, rank: int, incarnation: int = 0) -> str:
    """The folder of a recording process: `role-rank`, with `.incarnation` after a restart."""
    return f"{role}-{rank}" + (f".{incarnation}" if incarnation else "")


class Recorder:
    """Records into one writer's folder of a trace made by `create_trace`; one per process.

    Arrays are numpy arrays, sequences or torch tensors of any device. In nullable columns a negative number, NaN or
    None is null. A call with `hash_only` keeps hashes and no tensors, whatever the level: for a rank that holds what
    another one records. `strict` raises in the engine what is otherwise only logged and counted: for tests. `status` is
    asked now and then, and at the end, on the recorder's own thread: what it says lies next to the rows.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        role: str,
        rank: int = 0,
        incarnation: int = 0,
        level: Level = Level.FEATURES,
        facts: Mapping[str, Any] | None = None,
        queue_bytes: int = 256 << 20,
        batch_bytes: int = 1 << 20,
        batch_secs: float = 0.2,
        segment_bytes: int = 2 << 30,
        strict: bool = False,
        status: Callable[[], Status] | None = None,
    ) -> None:
        folder = Path(folder)
        own = {
            "role": role,
            "rank": rank,
            "incarnation": incarnation,
            "level": level.name.lower(),
            "row_hash": ROW_HASH,
            "trace": manifest_hash(folder),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_unix_secs": time.time(),
        }
        if taken := sorted(set(own) & set(facts or {})):
            raise UserError(f"facts {taken} of writer {role}-{rank} are the recorder's own: rename them")
        self.name = writer_name(role, rank, incarnation)
        self._level = level
        self._strict = strict
        writer = FolderWriter(folder / self.name, {**own, **(facts or {})}, segment_bytes=segment_bytes)
        self._pump = Pump(
            writer,
            fixed={"incarnation": incarnation, "rank": rank},
            queue_bytes=queue_bytes,
            batch_bytes=batch_bytes,
            batch_secs=batch_secs,
            status=status,
        )

    def emitted(
        self,
        keys: Keys,
        *,
        token: object,
        slots: object = None,
        slot_width: int | None = None,
        logits: tuple[object, object] | None = None,
        target_token: object = None,
        logsumexp: object = None,
        forward_secs: object = None,
        hash_only: bool = False,
    ) -> None:
        """Rows of a target's forward: input token, captured slots [rows, slots * slot_width], top-k (ids, values)."""
        self._record(
            EMITTED,
            keys,
            {"token": token, "target_token": target_token, "logsumexp": logsumexp, "forward_secs": forward_secs},
            {"slots": ({"slots": slots}, slot_width), "logits": (_top_k(logits), None)},
            hash_only=hash_only,
        )

    def received(
        self,
        keys: Keys,
        *,
        token: object,
        features: object = None,
        slot_width: int | None = None,
        state: object = None,
        parent: object = None,
        hash_only: bool = False,
    ) -> None:
        """Rows a draft was fed, as delivered: `features` [rows, slots * slot_width] at depth 0, or `state` deeper.

        A deeper row's `parent` is the node, of the same pass and one depth up, whose token and state it was fed.
        """
        wides: _Wides = {"features": ({"features": features}, slot_width), "state": ({"state": state}, None)}
        self._record(RECEIVED, keys, {"token": token, "parent": parent}, wides, hash_only=hash_only)

    def drafted(
        self,
        keys: Keys,
        *,
        draft_token: object = None,
        token: object = None,
        fused: object = None,
        hidden: object = None,
        state: object = None,
        logits: tuple[object, object] | None = None,
        logsumexp: object = None,
        forward_secs: object = None,
        hash_only: bool = False,
    ) -> None:
        """A draft's results: the head's input `hidden`, the `state` fed back, its token before and after d2t."""
        self._record(
            DRAFTED,
            keys,
            {"draft_token": draft_token, "token": token, "logsumexp": logsumexp, "forward_secs": forward_secs},
            {
                "fused": ({"fused": fused}, None),
                "hidden": ({"hidden": hidden}, None),
                "state": ({"state": state}, None),
                "logits": (_top_k(logits), None),
            },
            hash_only=hash_only,
        )

    def verified(
        self,
        keys: Keys,
        *,
        parent: object,
        token: object,
        target_token: object,
        accepted: object,
        cut: object,
        source_row: object,
        p: object = None,
        q: object = None,
        p_emitted: object = None,
        uniform: object = None,
    ) -> None:
        """Nodes of rounds; node 0 is the root, the last token already emitted: parent -1, accepted."""
        given = {
            "parent": parent,
            "token": token,
            "target_token": target_token,
            "accepted": accepted,
            "cut": cut,
            "source_row": source_row,
            "p": p,
            "q": q,
            "p_emitted": p_emitted,
            "uniform": uniform,
        }
        self._record(VERIFIED, keys, given, {})

    def requests(
        self,
        keys: Keys,
        *,
        id: object,
        prompt_tokens: object,
        output_tokens: object,
        cached_prefix: object,
        temperature: object,
        finish_reason: object,
        rounds: object,
        correct_drafts: object,
        depth_limit: object,
        seed: object = None,
        arrived_secs: object = None,
        first_token_secs: object = None,
        finished_secs: object = None,
    ) -> None:
        """Finished requests: tokens (a sequence per request), sampling, timings and untrimmed counts."""
        given = {
            "id": id,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "cached_prefix": cached_prefix,
            "temperature": temperature,
            "seed": seed,
            "arrived_secs": arrived_secs,
            "first_token_secs": first_token_secs,
            "finished_secs": finished_secs,
            "finish_reason": finish_reason,
            "rounds": rounds,
            "correct_drafts": correct_drafts,
            "depth_limit": depth_limit,
        }
        self._record(REQUESTS, keys, given, {})

    def reference(
        self, keys: Keys, *, token: object, boundaries: Mapping[int, object], hash_only: bool = False
    ) -> None:
        """True states by canonical boundary, each [rows, width]; hashes follow the mapping's order."""
        columns = {f"b{boundary}": tensor for boundary, tensor in boundaries.items()}
        self._record(REFERENCE, keys, {"token": token}, {"boundaries": (columns, None)}, hash_only=hash_only)

    def sampled_away(self, family: str, rows: int) -> None:
        """Declare rows that were left out on purpose, so that they are not taken for missing."""
        self._guard(family, rows, lambda: self._pump.lose(FAMILY[family].name, Reason.SAMPLED, rows))

    def dropped(self, family: str, rows: int) -> None:
        """Declare rows for which there was no room before they came to a verb."""
        self._guard(family, rows, lambda: self._pump.lose(FAMILY[family].name, Reason.DROPPED, rows))

    @property
    def account(self) -> Account:
        """What became of the rows so far; rows still in the queue are in none of the counts."""
        return self._pump.account

    @property
    def failure(self) -> str | None:
        """The first error of the writer, if there was one."""
        return self._pump.failure

    def flush(self, timeout_secs: float = 60.0) -> bool:
        """Wait until everything handed over so far is acknowledged or lost; False if that took too long."""
        return self._pump.flush(timeout_secs)

    def close(self) -> Account:
        """Write what is left and seal the writer. Closing again changes nothing; strict raises if rows failed."""
        self._pump.close()
        if self._strict and self.failure:
            raise RecordingFailed(self.failure)
        return self.account

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # the engine's own error is the one to see
            self._pump.close()

    def _record(
        self, family: Family, keys: Keys, given: Mapping[str, object], wides: _Wides, *, hash_only: bool = False
    ) -> None:
        try:
            rows = len(keys)
        except Exception as error:
            self._lost(family.name, 0, error)
            return
        level = Level.LIGHT if hash_only else self._level
        columns = {**keys.columns(), **given}
        self._guard(family.name, rows, lambda: self._hand_over(family, rows, columns, wides, level))

    def _hand_over(self, family: Family, rows: int, given: Mapping[str, object], wides: _Wides, level: Level) -> None:
        """Copy what will be stored or hashed and queue it; too much for the queue is dropped before it is copied."""
        wanted = {kind: of for kind, of in wides.items() if _given(of[0]) and kept(family.wide(kind), level)}
        nbytes = sum(_nbytes(tensor) for columns, _ in wanted.values() for tensor in columns.values())
        nbytes += sum(_nbytes(value) for value in given.values()) + _ITEM_BYTES
        if not self._pump.reserve(family.name, rows, nbytes):
            if self._strict:
                raise RecordingFailed(f"the recorder's queue is full: {rows} {family.name} rows dropped")
            return
        try:
            columns = {name: _copied(value) for name, value in given.items() if value is not None}
            tensors = {
                kind: Tensors({name: stage(tensor) for name, tensor in by_name.items()}, slot_width)
                for kind, (by_name, slot_width) in wanted.items()
            }
        except BaseException:
            self._pump.release(nbytes)
            raise
        self._pump.put(Item(family, rows, columns, tensors, level, nbytes))

    def _guard(self, family: str, rows: int, act: Callable[[], None]) -> None:
        """Never let an error reach the engine, unless strict."""
        if self._strict and self.failure:
            raise RecordingFailed(self.failure)
        try:
            act()
        except RecordingFailed:
            raise
        except Exception as error:
            self._lost(family, rows, error)

    def _lost(self, family: str, rows: int, error: Exception) -> None:
        self._pump.fail(family, rows, error)
        if self._strict:
            raise RecordingFailed(f"{rows} {family} rows lost: {error}") from error


def _top_k(logits: tuple[object, object] | None) -> Mapping[str, object]:
    return {} if logits is None else {"ids": logits[0], "values": logits[1]}


def _given(columns: Mapping[str, object]) -> bool:
    return bool(columns) and all(tensor is not None for tensor in columns.values())


def _nbytes(value: object) -> int:
    """Close to what a copy will take, without touching the data."""
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    return 8 * len(value) if isinstance(value, (list, tuple)) else 8


def _copied(value: object) -> object:
    """Scalars and strings as they are; sequences of sequences (token lists) one by one; the rest staged."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        nested = len(value) > 0 and hasattr(value[0], "__len__") and not isinstance(value[0], str)
        return [stage(one) for one in value] if nested else list(value)
    return stage(value)
