"""The tokens that each update trains, against a double loop that asks each token by itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.passes_by_loop import by_loop, selected
from support.refusals import refused

from gradscope.objective import LossSettings
from gradscope.rollouts import TokenBatch
from gradscope.trainer import TrainConfig
from gradscope.trainer.step import plan_update
from gradscope.updates import UPDATES, make_update, old_intervals

SETTINGS = LossSettings(clip_ratio_low=0.1, kl_coef=0.02)


def make_random_batch(rows: int = 5, width: int = 14, seed: int = 0) -> TokenBatch:
    """Responses of every probability behind prompts of two tokens, with holes; the last one's mask keeps nothing."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.8
    mask[:, :2] = mask[-1] = False
    old = torch.rand(rows, width, generator=generator).log()
    old[0, 5:9] = torch.tensor([0.0, 1e-7, -1e-9, -80.0])  # certain, rounded above 0, nearly certain, impossible
    mask[0, 5:9] = True
    advantages = torch.randn(rows, width, generator=generator)
    advantages[1, 4] = 0.0
    mask[1, 4] = True
    advantages[~mask] = old[~mask] = math.nan  # what the mask drops may be anything
    return TokenBatch(
        input_ids=torch.randint(4, 90, (rows, width), generator=generator),
        attention_mask=torch.ones(rows, width, dtype=torch.bool),
        response_mask=mask,
        response_start=torch.full((rows,), 2),
        group_ids=torch.arange(rows) // 2,
        temperature=torch.ones(rows),
        advantages=advantages,
        old_logprobs=old,
    )


def spell(name: str, **parameters: float) -> str:
    """The name with those of the parameters that the update has."""
    has = {"alpha": name.startswith("reweight"), "eta": "lopti" in name or name == "random-split"}
    given = ",".join(f"{key}={value}" for key, value in parameters.items() if has[key])
    return f"{name}:{given}" if given else name


@pytest.fixture(scope="module")
def batch() -> TokenBatch:
    return make_random_batch()


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("name", [name for name in UPDATES if name != "random-split"])
def test_an_update_selects_the_tokens_that_a_double_loop_selects(batch, name, size):
    update = make_update(spell(name, eta=0.6), batch, mini_batch_size=size, loss=SETTINGS)
    expected = by_loop(name, batch, size=size, eta=0.6)
    assert update.name == spell(name, eta=0.6)
    assert len(update.steps) == len(expected)
    for part, (wanted, rows, tokens, count) in zip(update.steps, expected, strict=True):
        assert part.name == wanted
        assert torch.equal(part.batch.input_ids, batch.input_ids[rows])
        assert torch.equal(part.batch.response_mask, tokens)
        assert part.num_tokens == count
        for values in ("advantages", "old_logprobs"):
            assert torch.equal(getattr(part.batch, values)[tokens], getattr(batch, values)[rows][tokens])
    assert all(tokens.any() for _, rows, tokens, _ in expected if 4 not in rows)


@pytest.mark.parametrize("name", UPDATES)
def test_only_the_reweighted_updates_change_the_loss(batch, name):
    found = make_update(spell(name, alpha=0.25), batch, loss=SETTINGS).settings
    assert found == (replace(SETTINGS, reweight_alpha=0.25) if name.startswith("reweight") else SETTINGS)
    own = replace(SETTINGS, reweight_alpha=0.1)
    found = make_update(spell(name, alpha=0.25), batch, loss=own).settings
    assert found.reweight_alpha == (0.25 if name.startswith("reweight") else 0.1)


TRAINED = {
    "all": {},
    "reweight": {"reweight_alpha": 0.3},
    "lopti": {"lopti_eta": 0.6},
    "reweight-lopti": {"lopti_eta": 0.6, "reweight_alpha": 0.3},
    "lopti-high-first": {"lopti_eta": 0.6, "lopti_order": "high-first"},
    "random-split": {"lopti_eta": 0.6, "control": "random-split"},
}


@pytest.mark.parametrize("name", TRAINED)
def test_what_the_trainer_trains_is_planned_as_the_trainer_plans_it(batch, name):
    update = plan_update(batch, TrainConfig(**TRAINED[name], mini_batch_size=2), torch.Generator().manual_seed(8))
    drawn = torch.Generator().manual_seed(8)
    found = make_update(spell(name, eta=0.6), batch, mini_batch_size=2, generator=drawn)
    assert found.settings == update.settings
    for ours, theirs in zip(found.steps, update.steps, strict=True):
        assert (ours.name, ours.num_tokens) == (theirs.name, theirs.num_tokens)
        for value in ("input_ids", "response_mask", "advantages", "old_logprobs"):
            kept = theirs.batch.response_mask
            assert torch.equal(getattr(ours.batch, value)[kept], getattr(theirs.batch, value)[kept])
        assert torch.equal(ours.batch.response_mask, theirs.batch.response_mask)


def test_intervals_are_those_of_a_loop_and_minus_one_where_no_token_is_kept(batch):
    found = old_intervals(batch)
    for row in range(len(batch)):
        for column in range(batch.input_ids.shape[1]):
            names = [k for k in range(4) if selected(f"only-{k}", batch, row, column)]
            assert [found[row, column].item()] == (names or [-1])


@pytest.mark.parametrize(
    ("name", "changes", "choices", "named"),
    [
        ("lopti-low", {}, {}, "lopti-low"),
        ("only-", {}, {}, "only-"),
        ("only-4", {}, {}, "4"),
        ("without-1", {}, {"edges": (0.0, 1.0)}, "1"),
        ("lopti:alpha=0.1", {}, {}, "alpha"),
        ("lopti:eta=half", {}, {}, "eta"),
        ("all", {"advantages": None}, {}, "advantages"),
        ("all", {"old_logprobs": None}, {}, "old_logprobs"),
        ("all", {"response_mask": torch.zeros(5, 14, dtype=torch.bool)}, {}, "response_mask"),
        ("all", {}, {"mini_batch_size": 0}, "mini_batch_size"),
        ("all", {}, {"loss": LossSettings(kl_coef=-1.0)}, "kl_coef"),
        ("reweight:alpha=1.5", {}, {}, "reweight_alpha"),
        ("lopti:eta=1.5", {}, {}, "eta"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(batch, name, changes, choices, named):
    with refused(named):
        make_update(name, replace(batch, **changes), **choices)
