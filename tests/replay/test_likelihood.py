"""How likely a draft holds a text tells how it was trained, whatever its logits are scaled by."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toy.language import VOCAB, Language
from toy.target import TARGET, load_target
from toy.train import DRAFT, RECIPES

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.replay.configuration import Configuration, Slot
from spectrace.replay.likelihood import likelihood, surprise
from spectrace.replay.texts import Text
from spectrace.replay.truth import Recomputed, TrueText, Truth

NEW, DEPTH = 24, 3
TRAINED, WRONG = (tuple(map(Slot, wiring)) for wiring in (RECIPES["draft"].wiring, (1, 4, 5)))


@pytest.fixture(scope="module")
def trained() -> Configuration:
    """The toy draft as it was trained."""
    model = build_draft(read_draft(DRAFT), target=TARGET, dtype=torch.float32)
    return Configuration(model.spec, model.state_dict(), TRAINED)


@pytest.fixture(scope="module")
def texts() -> list[TrueText]:
    """What the toy target goes on with, greedily, after four prompts."""
    target, prompts = load_target(), Language.drawn().prompts(4, np.random.default_rng(5))
    found = {}
    for number, prompt in enumerate(prompts):
        asked = torch.tensor([prompt])
        whole = target.generate(asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=NEW)
        found[number] = Text(tuple(prompt), tuple(whole[0, len(prompt) :].tolist()), DEPTH)
    truth = Truth(found, [Recomputed(TARGET, dtype=torch.float32)], 5)
    return truth.read(list(found), {*TRAINED, *WRONG})


def scaled(at: Configuration, by: float) -> Configuration:
    return replace(at, tensors={**at.tensors, "head.weight": at.tensors["head.weight"] * by})


def test_there_is_a_number_for_every_start(trained: Configuration, texts: list[TrueText]) -> None:
    found = likelihood(trained, texts, depth=DEPTH)
    assert [len(nats) for nats in found.nats] == [NEW - 1] * len(texts)
    assert np.isfinite(np.concatenate(found.nats)).all()


def test_the_text_is_likeliest_as_trained(trained: Configuration, texts: list[TrueText]) -> None:
    right = np.concatenate(likelihood(trained, texts).nats)
    wrong = np.concatenate(likelihood(replace(trained, wiring=WRONG), texts).nats)
    assert right.mean() - wrong.mean() > 1


@pytest.mark.parametrize("by", [0.5, 2.0])
def test_how_sure_the_draft_is_does_not_count(trained: Configuration, texts: list[TrueText], by: float) -> None:
    plain, other = likelihood(trained, texts, depth=DEPTH), likelihood(scaled(trained, by), texts, depth=DEPTH)
    assert other.sharpness == plain.sharpness / by
    np.testing.assert_allclose(np.concatenate(other.nats), np.concatenate(plain.nats), atol=1e-5)


def test_surprise_grows_with_confidence_in_what_is_wrong(trained: Configuration, texts: list[TrueText]) -> None:
    wrong = replace(trained, wiring=WRONG)
    assert surprise(trained, texts) < 0 < surprise(wrong, texts) < surprise(scaled(wrong, 2.0), texts)


def test_a_token_that_cannot_be_drafted_is_never_likely(trained: Configuration, texts: list[TrueText]) -> None:
    table = set(trained.build().table().tolist())
    outside = next(token for token in range(VOCAB) if token not in table)
    one = texts[0]
    text = replace(one.text, output=(one.text.output[0], outside, *one.text.output[2:]))
    found = likelihood(trained, [replace(one, text=text)], sharpness=1.0).nats[0]
    assert found[0] == pytest.approx(np.log(0.02 / VOCAB))
    assert found[0] < found[1:].min() + 1e-9


def test_ids_that_stand_for_one_token_share_its_probability(trained: Configuration, texts: list[TrueText]) -> None:
    model, token = trained.build(), texts[0].text.output[1]
    ids = torch.arange(model.spec.draft_vocab)
    twin = {**trained.tensors, "d2t": torch.full_like(trained.tensors["d2t"], token) - ids}
    found = likelihood(replace(trained, tensors=twin), texts[:1], sharpness=1.0).nats[0]
    assert found[0] == pytest.approx(np.log(0.98 + 0.02 / VOCAB), abs=1e-5)
