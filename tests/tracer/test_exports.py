"""The package has what it lists; that nobody imports what a module keeps to itself is in `tests/test_packaging.py`."""

import pytest

import spectrace.tracer


def test_the_package_exports_what_it_lists_and_nothing_else() -> None:
    assert sorted(spectrace.tracer.__all__, key=str.lower) == sorted(set(spectrace.tracer.__all__), key=str.lower)
    assert all(hasattr(spectrace.tracer, name) for name in spectrace.tracer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Pump'"):
        spectrace.tracer.Pump  # noqa: B018
