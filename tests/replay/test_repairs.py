"""What a broken link becomes in the answer."""

import pytest

from spectrace.replay.edits import Edit
from spectrace.replay.found import Broken
from spectrace.replay.links import PUBLIC
from spectrace.replay.repairs import Repairs


@pytest.mark.parametrize("fault", [*PUBLIC, "Z9"])
def test_every_fix_says_where_the_same_symptom_was_public(fault: str) -> None:
    edit = Edit("edit it", "command")
    broken = Broken(fault=fault, variant="", title="title", evidence=(), edit=edit, confidence=1.0)
    [cause] = Repairs(2.0, (1.5,)).causes([broken], 1.0)
    public = f". The same symptom was public in {', '.join(PUBLIC[fault])}: compare." if fault in PUBLIC else ""
    assert cause.fix == f"edit it{public}" and cause.command == "command"
