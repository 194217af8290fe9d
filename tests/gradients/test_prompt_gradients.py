"""Summed gradients whole, in slices and as sketches: against one autograd call per prompt and row, and each other."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from support.adapters import save_adapter
from support.policies import make_batch, make_policy, save_checkpoint
from support.tiers import every
from torch import Tensor

from gradscope.diagnosis import Products, block_products, gradient_rows
from gradscope.errors import InputError
from gradscope.gradients import PromptGradients, Way, interval_gradients, own_rows, zero_vectors
from gradscope.gradients.summed.plan import Sizes, plan_sums, slices_memory
from gradscope.gradients.summed.prompts import SEED
from gradscope.gradients.summed.sketches import BLOCKS, Sketcher
from gradscope.gradients.summed.sweep import Sweep
from gradscope.gradients.summed.weighted import differentiable
from gradscope.objective import micro_batches
from gradscope.policy import AdamWState, Policy, flat_slices, float_parameters, load_policy
from gradscope.rollouts import TokenBatch

ROWS = 3


def make_seeds(batch: TokenBatch) -> Tensor:
    """ROWS rows of random numbers, each 0 on some tokens, the last on all of the first prompt."""
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randn(ROWS, *batch.input_ids.shape, generator=generator, dtype=torch.float64)
    seeds *= torch.rand(seeds.shape, generator=generator) < 0.6
    seeds[-1, batch.group_ids == 0] = 0.0
    return seeds


def make_source(policy: Policy, batch: TokenBatch, way: Way, *, width: int | None = None, **more) -> PromptGradients:
    """width: of a slice."""
    seeds, held = make_seeds(batch), ROWS * len(own_rows(batch))
    memory = 1 << 34
    if width is not None:
        memory = slices_memory(Sizes.of(policy, batch, micro_batch_size=1), rows=ROWS, held=held, width=width)
    return PromptGradients(
        policy,
        batch,
        lambda index, piece, logprobs: seeds[:, index[0], index[1]].to(logprobs),
        rows=ROWS,
        held=held,
        memory=memory,
        way=way,
        micro_batch_size=1,
        **more,
    )


def collect(source: PromptGradients, prompts: int = 3, **scaled: Tensor) -> Tensor:
    """All vectors [n, R, P], from parts that together hold each entry once."""
    slices, found, seen = flat_slices(source.model), None, torch.zeros_like(zero_vectors(source.model))
    for part, vectors in source.parts(**scaled):
        part.add(torch.ones(part.size), seen, slices)
        for prompt, values in vectors:
            if found is None:
                found = zero_vectors(source.model, prompts, ROWS)
            for vector, row in zip(found[prompt], values, strict=True):
                part.add(row, vector, slices)
    assert (seen == 1).all()
    return found


def brute_force(policy: Policy, batch: TokenBatch) -> Tensor:
    """[n, R, P]: one autograd call for each prompt and row, over each response alone."""
    seeds, prompts = make_seeds(batch), own_rows(batch)
    out = torch.zeros(len(prompts), ROWS, zero_vectors(policy.model).numel(), dtype=torch.float64)
    parameters = [p for _, p in float_parameters(policy.model)]
    with differentiable(policy.model):
        for n, rows in enumerate(prompts):
            for response in rows.tolist():
                ids, kept = batch.sequence(response)
                first = int(batch.attention_mask[response].nonzero()[0])
                logits = policy.model(input_ids=ids[None], use_cache=False).logits[0].double()
                logits = logits[kept - 1] / batch.temperature[response]
                logprobs = torch.log_softmax(logits, -1).gather(1, ids[kept][:, None])[:, 0]
                for r in range(ROWS):
                    scalar = (seeds[r, response, first + kept] * logprobs).sum()
                    made = torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True)
                    flat = [torch.zeros_like(p) if g is None else g for g, p in zip(made, parameters, strict=True)]
                    out[n, r] += torch.cat([g.flatten() for g in flat])
    return out


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


SLICED = [
    *((name, torch.float64, 2e-6) for name in ("qwen2", "gpt2", "mixtral", "opt")),
    ("qwen2", torch.float32, 2e-5),
]
"""A tied head, matrices stored the other way round, experts, learned positions; and rounding."""


@pytest.mark.parametrize(("name", "dtype", "tolerance"), every(2, SLICED))
def test_slices_of_any_width_are_the_whole_and_those_of_single_autograd_calls(name, dtype, tolerance):
    policy = make_policy(name, dtype)
    batch = make_batch(policy)
    expected = brute_force(policy, batch)
    whole = collect(make_source(policy, batch, "whole"))
    assert distance(whole, expected) < tolerance
    sizes = Sizes.of(policy, batch)
    # One block and more, a third of one, all at once, and entries of one parameter at a time.
    for width in (sizes.segments[0] * 3 // 2, sizes.segments[0] // 3, sizes.parameters, 1000):
        source = make_source(policy, batch, "slices", width=width)
        assert source.plan.slice_width == min(width, sizes.parameters)
        assert distance(collect(source), whole) < (1e-9 if dtype == torch.float64 else 1e-5)


def test_only_an_adapters_parameters_are_summed_in_slices_too(tmp_path):
    save_checkpoint(tmp_path / "base", "llama")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", r=3, target_modules=["q_proj", "down_proj"])
    policy = load_policy(adapter, params="adapter", dtype="float64")
    batch = make_batch(policy)
    whole = collect(make_source(policy, batch, "whole"))
    assert distance(whole, brute_force(policy, batch)) < 2e-6
    for width in (100, 700):
        assert distance(collect(make_source(policy, batch, "slices", width=width)), whole) < 1e-9


def test_a_model_whose_blocks_share_a_parameter_or_hear_of_each_other_is_not_swept():
    policy = make_policy("llama")
    batch = make_batch(policy)
    piece = micro_batches(batch, 2)[0][1]

    def holds() -> bool:
        with differentiable(policy.model):
            return Sweep(policy.model, policy.blocks).holds(piece)

    assert holds()
    attention = policy.blocks[2].self_attn
    first, seen = policy.blocks[0], []
    handles = [
        first.register_forward_hook(lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)),
        attention.register_forward_hook(lambda _m, _a, out: (out[0] + 0.1 * seen[-1], *out[1:])),
    ]
    assert not holds()
    for handle in handles:
        handle.remove()
    assert holds()
    attention.q_proj.weight = policy.blocks[1].self_attn.q_proj.weight
    assert not holds()
    with pytest.raises(InputError, match="block by block"):
        make_source(policy, batch, "slices", width=1000)


@pytest.mark.parametrize("way", every(2, ["whole", "slices", "sketches"]))
def test_a_policy_whose_modules_accelerate_wraps_has_the_same_sums(way):
    plain, spread = make_policy("llama"), make_policy("llama")
    for module in (*spread.blocks, spread.model.lm_head, spread.model.model.embed_tokens):
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))  # as a device map does
    batch, width = make_batch(plain), 1000 if way == "slices" else None
    found = []
    for policy in (plain, spread):
        source = make_source(policy, batch, way, width=width)
        found.append([vectors.clone() for _, part in source.parts() for _, vectors in part])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("way", ["whole", "slices", "sketches"])
def test_the_total_is_the_sum_of_all_vectors_and_a_scale_multiplies_each_entry(way):
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy)
    whole = collect(make_source(policy, batch, "whole"))
    source = make_source(policy, batch, way, width=1000 if way == "slices" else None)
    total, scale = zero_vectors(policy.model), torch.linspace(0.5, 2.0, whole.shape[-1], dtype=torch.float64)
    for _, vectors in source.parts(totals=total[None]):
        assert len(list(vectors)) == 3
    assert distance(total, whole.sum((0, 1))) < 1e-9
    if way != "sketches":
        assert distance(collect(source, scale=scale), whole * scale) < 1e-9


@pytest.mark.parametrize("shared", [False, True], ids=["block by block", "by the whole graph"])
def test_sketches_are_those_of_the_whole_vectors(shared):
    policy = make_policy("llama", torch.float64)
    if shared:
        policy.blocks[2].self_attn.q_proj.weight = policy.blocks[0].self_attn.q_proj.weight
    batch = make_batch(policy)
    whole = collect(make_source(policy, batch, "whole"))
    source = make_source(policy, batch, "sketches")
    sketcher, expected = Sketcher(source.plan.sketch_size, seed=SEED), torch.zeros(3, ROWS, source.plan.sketch_size)
    expected = expected.double()
    for number, part in enumerate(flat_slices(policy.model).values()):
        for vectors, into in zip(whole, expected, strict=True):
            for vector, row in zip(vectors, into, strict=True):
                sketcher.add(vector[part], number, row)
    found = torch.stack([vectors.clone() for _, part in source.parts() for _, vectors in part])
    assert distance(found, expected) < 1e-9


@pytest.mark.all
def test_sketched_inner_products_are_unbiased_and_err_as_they_say():
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy)
    whole = collect(make_source(policy, batch, "whole")).flatten(0, 1)
    expected = whole @ whole.T
    norms = expected.diagonal().sqrt()
    sd = ((norms[:, None] * norms) ** 2 + expected**2).sqrt() / 32
    found = []
    for seed in range(30):
        source = make_source(policy, batch, "sketches", sketch_seed=seed)
        source.plan = replace(source.plan, slice_width=1024)
        sketches = torch.cat([v.clone() for _, vectors in source.parts() for _, v in vectors])
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
    signal = rng.normal(size=(1, intervals, size)) * np.array([3.0, 1.0, 0.5, 2.0])[:, None]
    return signal / 4 + rng.normal(size=(prompts, intervals, size))


def sketch_products(vectors: np.ndarray, seed: int, size: int = 512) -> Products:
    sketcher, out = Sketcher(size, seed=seed), torch.zeros(*vectors.shape[:2], size, dtype=torch.float64)
    for prompt, rows in enumerate(vectors):
        for a, vector in enumerate(rows):
            sketcher.add(torch.from_numpy(vector), 0, out[prompt, a])
    blocks = tuple(block_products(block) for block in out.chunk(BLOCKS, dim=2))
    return Products(sum(blocks), blocks)


def test_errors_of_sketched_statistics_are_those_that_other_sketches_show():
    vectors = plant_vectors()
    exact = Products(np.einsum("pax,qbx->paqb", vectors, vectors))

    def statistics(pairs: np.ndarray) -> np.ndarray:
        """Shares, norms over the whole's, and signals."""
        products, own = pairs.sum((0, 2)), np.einsum("papa->a", pairs)
        squares, whole = np.diag(products), products.sum()
        return np.concatenate([products.sum(1) / whole, np.sqrt(squares / whole), 8 / 7 * (squares - own)])

    truth, found, errors = statistics(exact.pairs), [], []
    for seed in range(200):
        products = sketch_products(vectors, seed)
        found.append(statistics(products.pairs))
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
        for p in (Products(products.pairs), products)
    )
    pd.testing.assert_series_equal(plain["value"], wide["value"])
    bounded = plain["lower"].notna() & (plain["statistic"] != "signal_fraction")
    assert bounded.sum() > 8
    assert (wide["upper"] - wide["lower"] >= plain["upper"] - plain["lower"])[bounded].all()
    share = products.error(lambda pairs: pairs.sum((0, 2, 3)) / pairs.sum())
    rows = (wide["statistic"] == "gradient_share").to_numpy()
    reach = np.hypot((plain["upper"] - plain["value"])[rows], 1.96 * share)
    np.testing.assert_allclose((wide["upper"] - wide["value"])[rows], reach, rtol=1e-3)


@pytest.mark.parametrize("way", ["whole", "slices", "sketches"])
def test_intervals_gradients_are_the_same_by_every_way_raw_and_in_adamws_metric(way):
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy, temperature=0.7)
    optimizer = torch.optim.AdamW(policy.model.parameters())
    for parameter in policy.model.parameters():
        moments = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        optimizer.state[parameter] = {"step": torch.tensor(9.0), "exp_avg": 0 * moments, "exp_avg_sq": 1e-6 * moments}
    state = AdamWState.from_state_dict(policy.model, optimizer.state_dict(), max_grad_norm=0.5)
    expected = interval_gradients(policy, batch, optimizer_state=state)
    memory = 1 << (22 if way == "whole" else 21)
    found = interval_gradients(policy, batch, optimizer_state=state, way=way, memory=memory)
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


SIZES = Sizes(
    500_000_000, (15_000_000,) * 24 + (140_000_000,), 136_000_000, 896, 4_000, 1_000_000, prompts=4, piece=1_000
)


def test_the_cheapest_exact_way_that_fits_is_taken_and_sketches_where_there_are_many_prompts():
    few = {"rows": 4, "held": 16}
    assert plan_sums(SIZES, memory=1 << 40, **few).way == "whole"
    assert plan_sums(SIZES, memory=4 << 30, **few).way == "slices"
    many = replace(SIZES, prompts=64, positions=100_000)
    plan = plan_sums(many, rows=4, held=256, memory=4 << 30)
    assert (plan.way, plan.sketch_size) == ("sketches", 1 << 16)
    short = plan_sums(many, rows=4, held=256, memory=12 * SIZES.largest + (1 << 27) + (1 << 25), way="sketches")
    assert short.sketch_size < 1 << 16


@pytest.mark.parametrize("way", every(2, ["whole", "slices", "sketches"]))
def test_weights_that_are_upcast_give_the_gradients_of_their_float32_copies(way, tmp_path):
    make_policy("qwen2", torch.bfloat16).model.save_pretrained(tmp_path)
    half, whole = (load_policy(tmp_path, dtype=dtype) for dtype in ("upcast", "float32"))
    batch = make_batch(whole)
    width = 1000 if way == "slices" else None
    ours, theirs = (make_source(policy, batch, way, width=width) for policy in (half, whole))
    if way == "sketches":
        found, expected = (
            torch.cat([v.clone() for _, vectors in source.parts() for _, v in vectors]) for source in (ours, theirs)
        )
    else:
        found, expected = collect(ours), collect(theirs)
    assert found.dtype == torch.float32
    assert distance(found, expected.double()) < 1e-5
