"""A wrong wiring is called by the way in which it went wrong, and by all names that fit it."""

import pytest

from spectrace.engine.checkpoint import default_wiring
from spectrace.engine.faults import FAULTS
from spectrace.replay.configuration import Slot, View
from spectrace.replay.wirings import name_wiring

LAYERS = 30
RIGHT = (0, 3, 16)
WRONG = {
    (0, 2, 15): ("W1", ""),
    (0, 1, 13): ("W1", "mixed"),
    (0, 0, 14): ("W6", ""),
    (0, 1, 14): ("W1", "2"),
    (1, 4, 17): ("W2", ""),
    (3, 6, 19): ("W2", "3"),
    (3, 16, 27): ("W3", ""),
    (2, 15, 27): ("W4", ""),
    (16, 3, 0): ("W5", ""),
    (3, 0, 16): ("W5", ""),
    (0, 0, 3): ("W6", ""),
    (0, 4, 16): ("W2", "slot1"),
    (0, 3, 14): ("W1", "slot2"),
    (0, 9, 12): ("W4", "other"),
}


def slots(wiring: tuple[int, ...]) -> tuple[Slot, ...]:
    return tuple(Slot(boundary) for boundary in wiring)


@pytest.mark.parametrize("wrong", WRONG)
def test_each_pattern_has_its_name(wrong: tuple[int, ...]) -> None:
    (fault, variant, title), _ = name_wiring(slots(RIGHT), slots(wrong), LAYERS)
    assert (fault, variant) == WRONG[wrong]
    assert title


def test_a_wiring_that_fits_two_patterns_has_both_names() -> None:
    (fault, variant, _), alike = name_wiring(slots((0, 3, 4)), slots((0, 4, 4)), 5)
    assert (fault, variant, alike) == ("W2", "slot1", ("W6",))


@pytest.mark.parametrize(("view", "fault"), [(View.NORMED, "W7"), (View.BRANCH, "W8")])
def test_what_was_taken_of_a_boundary_counts_before_which_one(view: View, fault: str) -> None:
    wrong = (Slot(1), Slot(30, view))
    assert name_wiring(slots((0, 30)), wrong, LAYERS)[0][0] == fault
    assert name_wiring(wrong, slots((0, 30)), LAYERS)[0][:2] == (fault, "reverse")


@pytest.mark.parametrize("layers", [7, 16, 61])
def test_the_default_that_is_served_is_the_one_that_is_called_so(layers: int) -> None:
    served = FAULTS["W4"].wiring((0, 1, layers), layers)
    assert served == default_wiring(layers)
    assert name_wiring(slots((0, 1, layers)), slots(served), layers)[0][0] == "W4"
