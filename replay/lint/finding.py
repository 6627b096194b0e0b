"""What is to be said of a draft by its files alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from spectrace.replay.rewriting import Edit

__all__ = ["CODES", "LintFinding", "Severity", "fixed_by"]


class Severity(StrEnum):
    """Whether what is served is not what was trained, may not be, or is as it is and should be known."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


CODES: Mapping[str, str] = {
    "unreadable": "the folder cannot be read as a draft",
    "not-eagle3": "the folder is something else than an EAGLE-3 draft",
    "quantised": "weights are of fewer bits than are read",
    "files": "tensors lie twice, or not where the index puts them",
    "files-passed-over": "files of tensors lie there that nobody reads",
    "tensor-misnamed": "a tensor is there under a name that nobody reads",
    "tensor-missing": "a tensor is not there",
    "tensor-unused": "a tensor is there that nothing is computed from",
    "tensor-shape": "a tensor is not of the shape that the config makes it",
    "tensor-values": "a tensor holds no numbers that weights are",
    "tensor-unwritten": "a tensor holds what memory held, not weights",
    "tensor-constant": "a weight is one number throughout",
    "tensor-twice": "two weights are the same, bit for bit",
    "d2t-missing": "the draft has a part of the vocabulary, and no table that says which",
    "d2t-absolute": "d2t holds tokens in place of offsets",
    "d2t-zero": "d2t is all zero",
    "d2t-shifted": "d2t is shifted by a row",
    "d2t-range": "d2t leads to tokens that are not there",
    "d2t-broken": "d2t is no table: ids share tokens, or it is not that of t2d",
    "d2t-whole": "there is a d2t though the draft has all tokens",
    "head-missing": "the draft has a part of the vocabulary, and no head of its own",
    "head-rows": "rows of the head are not those of the tokens that d2t leads to",
    "wiring-fit": "layer ids and fc do not go together",
    "wiring-range": "a boundary is named that the target does not have",
    "wiring-twice": "a boundary feeds two slots",
    "wiring-unsorted": "layer ids are not in ascending order",
    "wiring-absent": "no layer ids are named, and engines take their default",
    "wiring-contradiction": "two keys name different boundaries",
    "wiring-convention": "ids look as if they were written in another convention than their key is read in",
    "wiring-unread": "the engine does not read the key that names the layer ids",
    "wiring-misread": "the engine makes other boundaries of the layer ids than they mean",
    "wiring-graphs": "the engine replays graphs that capture its default, whatever the layer ids",
    "engine-refuses": "the engine does not serve such a draft",
    "engine-unwritten": "the engine computes with memory that nothing was written to",
    "engine-replaces": "the engine takes a tensor of the target in place of the draft's own",
    "engine-ignores": "the engine computes otherwise than the files mean",
    "engine-drops": "the engine passes over a tensor that the draft is computed from",
    "switch-untrained": "a switch is set that no trainer of this layout trains with",
    "norm-twice": "trained with a norm that no engine applies",
    "target-unread": "the target's weights are not there to be compared with",
    "target-differs": "the draft was made for another target",
    "tokenizer-differs": "the draft comes with another tokenizer than its target's",
    "embedding-unrelated": "the draft's own embedding has nothing to do with the target's",
    "rope-differs": "RoPE is not the target's",
    "context-shorter": "the draft's context is shorter than the target's",
    "dtype-differs": "weights are of another type than the target's, or of several",
    "embedding-own": "the draft's own embedding is not the target's",
    "embedding-copied": "the draft's own embedding is the target's, bit for bit",
    "field-unread": "a field of the config that nothing is computed by",
    "field-assumed": "a field is absent, and its default counts",
    "odd": "something is read in more than one way",
}
"""Every kind of finding, in the order in which they are told of one severity: causes before what follows from them."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One finding: `evidence` are sentences, `fix` is what mends it, with the command where there is one."""

    code: str
    severity: Severity
    title: str
    evidence: tuple[str, ...]
    consequence: str
    fix: str

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands among others: the most severe first, then causes."""
        return [*Severity].index(self.severity), [*CODES].index(self.code)

    def to_json(self) -> dict[str, Any]:
        """As `lint --json` prints it."""
        return {
            "code": self.code, "severity": str(self.severity), "title": self.title, "evidence": list(self.evidence),
            "consequence": self.consequence, "fix": self.fix,
        }  # fmt: skip


def fixed_by(edit: Edit) -> str:
    """An edit as a finding tells it."""
    return f"{edit.text}\n{edit.command}" if edit.command else edit.text
