"""Both folders of an analytic pair, and the rule that says what they must do."""

from pathlib import Path

from analytic.codes import Rule, rule_of
from analytic.draft import save_draft
from analytic.target import save_target

__all__ = ["make_pair"]


def make_pair(family: str, folder: Path) -> tuple[Path, Path, Rule]:
    """Write `folder/target` and `folder/draft`, the same bytes at every call; takes seconds."""
    rule = rule_of(family)
    return save_target(rule, folder / "target"), save_draft(rule, folder / "draft"), rule
