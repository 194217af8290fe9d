"""Sketched inner products: unbiased, with errors that are true, and bounds that are widened by them alone."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from support.policies import make_batch, make_policy
from support.refusals import refused

from gradscope.diagnosis import gradient_rows
from gradscope.gradients import Gram, Resources, SumsPlan, block_products, interval_gradients
from gradscope.gradients.operator.gram import Sizes, plan_gram
from gradscope.gradients.operator.sketches import BLOCKS, Sketcher, add_rows, scatter_rows
from gradscope.policy import AdamWState


@pytest.mark.all
def test_sketched_inner_products_are_unbiased_and_err_as_they_say():
    whole = torch.from_numpy(plant_vectors(3, 3)).flatten(0, 1)
    whole[4] = 0.0
    expected = whole @ whole.T
    norms = expected.diagonal().sqrt()
    sd = ((norms[:, None] * norms) ** 2 + expected**2).sqrt() / 32
    found = []
    for seed in range(30):
        sketcher, sketches = Sketcher(1024, seed=seed), torch.zeros(len(whole), 1024, dtype=torch.float64)
        for vector, sketch in zip(whole, sketches, strict=True):
            for number, part in enumerate(vector.split(1700)):
                sketcher.add(part, number, sketch)
        found.append(sketches @ sketches.T)
    found = torch.stack(found)
    active = norms > 0
    z = ((found - expected) / sd)[:, active][:, :, active]
    assert z.mean().abs() < 0.1
    assert z.mean(0).abs().max() < 4 / 30**0.5 * 1.2
    assert 0.85 < z.square().mean().sqrt() < 1.15


def plant_vectors(prompts: int = 8, intervals: int = 4, size: int = 6000) -> np.ndarray:
    """[n, A, P]: a direction of their own for each interval, and noise."""
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(1, intervals, size)) * np.array([3.0, 1.0, 0.5, 2.0])[:intervals, None]
    return signal / 4 + rng.normal(size=(prompts, intervals, size))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 5000])
def test_a_gpus_way_of_adding_rows_is_the_loops(length):
    generator, size = torch.Generator().manual_seed(length), 64
    rows = -(-length // size)
    gradient = torch.randn(length, generator=generator, dtype=torch.float64)
    signs, turned = (torch.randint(0, 2, (n,), generator=generator) * 2 - 1 for n in (size, rows))
    shifts, found = torch.randint(0, size, (rows,), generator=generator), []
    for add in (add_rows, scatter_rows):
        found.append(torch.ones(size, dtype=torch.float64))
        add(gradient, signs.double(), shifts, turned, found[-1])
    torch.testing.assert_close(*found, rtol=0, atol=1e-13)


def sketch_products(vectors: np.ndarray, seed: int, size: int = 512) -> Gram:
    sketcher, out = Sketcher(size, seed=seed), torch.zeros(*vectors.shape[:2], size, dtype=torch.float64)
    for prompt, rows in enumerate(vectors):
        for a, vector in enumerate(rows):
            sketcher.add(torch.from_numpy(vector), 0, out[prompt, a])
    parts = np.stack([block_products(block) for block in out.chunk(BLOCKS, dim=2)])
    plan = SumsPlan("sketches", 4, 64, 1 << 40, size, BLOCKS, 10.0)
    return Gram(parts, parts.sum((1, 3)), plan, tuple(range(len(vectors))))


@pytest.mark.all
def test_errors_of_sketched_statistics_are_those_that_other_sketches_show():
    vectors = plant_vectors()
    exact = Gram.exact(np.einsum("pax,qbx->paqb", vectors, vectors))

    def statistics(pairs: np.ndarray, _: np.ndarray) -> np.ndarray:
        """Shares, norms over the whole's, and signals."""
        products, own = pairs.sum((0, 2)), np.einsum("papa->a", pairs)
        squares, whole = np.diag(products), products.sum()
        return np.concatenate([products.sum(1) / whole, np.sqrt(squares / whole), 8 / 7 * (squares - own)])

    truth, found, errors = statistics(exact.products, exact.total), [], []
    for seed in range(200):
        products = sketch_products(vectors, seed)
        found.append(statistics(products.products, products.total))
        errors.append(products.error(statistics))
    found, errors = np.stack(found), np.stack(errors)
    covered = (np.abs(found - truth) < 1.96 * errors).mean()
    assert 0.93 <= covered <= 0.98
    np.testing.assert_allclose(np.sqrt((errors**2).mean(0)), found.std(0), rtol=0.2)


def test_bounds_are_widened_by_the_sketches_error_and_by_nothing_else():
    vectors = plant_vectors()
    products = sketch_products(vectors, 0)
    plain, wide = (
        gradient_rows(p, np.ones((8, 4)), ["a", "b", "c", "d"], metric="raw", seed=np.random.default_rng(1))
        for p in (Gram.exact(products.products), products)
    )
    pd.testing.assert_series_equal(plain["value"], wide["value"])
    bounded = plain["lower"].notna() & (plain["statistic"] != "signal_fraction")
    assert bounded.sum() > 8
    assert (wide["upper"] - wide["lower"] >= plain["upper"] - plain["lower"])[bounded].all()
    share = products.error(lambda pairs, _: pairs.sum((0, 2, 3)) / pairs.sum())
    rows = (wide["statistic"] == "gradient_share").to_numpy()
    reach = np.hypot((plain["upper"] - plain["value"])[rows], 1.96 * share)
    np.testing.assert_allclose((wide["upper"] - wide["value"])[rows], reach, rtol=1e-3)


@pytest.mark.parametrize("way", ["whole", "sketches"])
def test_intervals_gradients_are_the_same_by_every_way_raw_and_in_adamws_metric(way):
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy, temperature=0.7)
    optimizer = torch.optim.AdamW(policy.model.parameters())
    for parameter in policy.model.parameters():
        moments = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        optimizer.state[parameter] = {"step": torch.tensor(9.0), "exp_avg": 0 * moments, "exp_avg_sq": 1e-6 * moments}
    state = AdamWState.from_state_dict(policy.model, optimizer.state_dict(), max_grad_norm=0.5)
    expected = interval_gradients(policy, batch, optimizer_state=state)
    resources = Resources(1 << (24 if way == "whole" else 21))
    found = interval_gradients(policy, batch, optimizer_state=state, resources=resources)
    assert expected.plan.way == "whole"
    assert found.plan.way == way
    numbers = ["norm", "share", "cosine_with_all", "half_cosine", "signal", "noise"]
    for ours, theirs in ((found.table, expected.table), (found.adamw_table, expected.adamw_table)):
        if way == "sketches":
            away = (ours[numbers] - theirs[numbers]).abs() / ours[[f"{n}_error" for n in numbers]].to_numpy()
            assert away.max(axis=None) < 5
            assert (ours["share_error"] < 0.1).all()
        else:
            np.testing.assert_allclose(ours[numbers], theirs[numbers], rtol=1e-9, atol=1e-15)
            assert "share_error" not in ours


SIZES = Sizes(parameters=500_000_000, largest=408_000_000, states=896_000, blocks=24, groups=4)


def test_vectors_are_whole_where_they_fit_and_sketches_where_there_are_many_prompts():
    few, many = {"rows": 4, "pairs": "all"}, replace(SIZES, groups=64)
    assert plan_gram(SIZES, memory=1 << 40, **few).way == "whole"
    plan = plan_gram(many, memory=4 << 30, **few)
    assert (plan.way, plan.sketch_size, plan.forward_passes) == ("sketches", 1 << 16, 10.0)
    short = plan_gram(many, memory=4 * SIZES.largest + (1 << 27) + (1 << 25), **few)
    assert 1 << 10 <= short.sketch_size < 1 << 16
    with refused("--gradient-memory"):
        plan_gram(many, memory=1 << 20, **few)


def test_of_very_many_prompts_as_many_are_summed_as_their_inner_products_fit():
    small = replace(SIZES, parameters=800_000, largest=100_000, states=8_000, blocks=3)
    how = {"rows": 4, "pairs": "all"}
    plan = plan_gram(replace(small, groups=2150), memory=3 << 30, **how)
    assert 1000 < plan.groups < 2150
    assert plan_gram(replace(small, groups=plan.groups), memory=3 << 30, **how) == plan
    # One more would lack memory, or be drawn again.
    assert plan_gram(replace(small, groups=plan.groups + 1), memory=3 << 30, **how).groups == plan.groups
    assert 8 * (4 * plan.groups) ** 2 * (BLOCKS // 4 + 1) < 3 << 30
