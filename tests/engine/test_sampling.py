"""Draws decide the same whatever the batch, and follow their distribution."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrace.engine.sampling import Purpose, Sampling, choose, softmax, uniforms


def test_draws_depend_on_seed_purpose_request_and_position_and_on_nothing_else() -> None:
    base = (Sampling(1.0, seed=3), Purpose.VERIFY, 5, 7)
    first = uniforms(*base, 4)
    assert (uniforms(*base, 4) == first).all()
    assert (uniforms(*base, 9)[:4] == first).all()
    assert ((first >= 0) & (first < 1)).all()
    others = [
        uniforms(Sampling(1.0, seed=4), Purpose.VERIFY, 5, 7, 4),
        uniforms(Sampling(1.0, seed=3), Purpose.DRAFT, 5, 7, 4),
        uniforms(Sampling(1.0, seed=3), Purpose.VERIFY, 6, 7, 4),
        uniforms(Sampling(1.0, seed=3), Purpose.VERIFY, 5, 8, 4),
    ]
    assert not any(np.intersect1d(first, other).size for other in others)


def test_draws_of_consecutive_positions_are_uniform() -> None:
    draws = np.concatenate([uniforms(Sampling(1.0), Purpose.VERIFY, 0, position, 5) for position in range(4000)])
    counts = np.histogram(draws, 20, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-square, 19 degrees of freedom: p = 1e-4


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(lambda x: sum(x) > 0), st.floats(0, 1, exclude_max=True)
)
def test_a_chosen_token_can_occur_and_its_share_holds_the_draw(weights: list[float], draw: float) -> None:
    shares = np.array(weights)
    token = choose(shares, draw)
    assert shares[token] > 0
    below, upto = shares[:token].sum() / shares.sum(), shares[: token + 1].sum() / shares.sum()
    assert below - 1e-9 <= draw <= upto + 1e-9


def test_the_last_draw_never_chooses_a_token_that_cannot_occur() -> None:
    assert choose(np.array([0.5, 0.5, 0.0]), np.nextafter(1.0, 0.0)) == 1
    assert choose(np.array([0.1, 0.2, 0.0]), 0.9, total=1.0) == 1


@pytest.mark.parametrize("temperature", [0.1, 1.0, 7.0])
def test_probabilities_are_those_of_the_scaled_logits(temperature: float) -> None:
    logits = np.array([[1e4, 1e4 - 1, -1e4], [0.0, 0.0, 0.0]], np.float32)
    found = softmax(logits, temperature)
    assert np.allclose(found.sum(-1), 1)
    assert np.isclose(found[0, 1] / found[0, 0], np.exp(-1 / temperature))
    assert np.allclose(found[1], 1 / 3)
