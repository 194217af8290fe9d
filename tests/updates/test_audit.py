"""Audits of a trainer's gradient: one written here with autograd, sound or with a planted fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from support.policies import make_policy, make_tokenizer
from support.tiers import every
from torch import Tensor

from gradscope.cli import main
from gradscope.errors import InputError
from gradscope.gradients import TokenJacobian
from gradscope.objective import LossSettings
from gradscope.policy import Policy, float_parameters
from gradscope.rollouts import Response, TokenBatch, TrainedRun, collate, write_rollouts
from gradscope.updates import Audit, audit, gradient_of_moments, undo_clip

LOSS = LossSettings(kl_coef=0.0)
MICRO = 4


def make_step(seed: int = 0, responses: int = 16, *, kind: str = "qwen2") -> tuple[Policy, TokenBatch]:
    """A policy in float32, and an on-policy step of prompts with four responses of unlike lengths, at T = 0.7."""
    policy, draw = make_policy(kind), torch.Generator().manual_seed(seed)
    size, rows = len(make_tokenizer()), []
    for row in range(responses):
        ids = torch.randint(4, size, (3 + int(torch.randint(3, 14, (1,), generator=draw)),), generator=draw).tolist()
        advantage = float(torch.randn(1, generator=draw))
        rows.append(Response(ids[:3], ids[3:], group=row // 4, advantage=advantage, temperature=0.7))
    return policy, collate(rows)


def token_mean(batch: TokenBatch) -> list[float]:
    return [1 / batch.num_tokens] * len(batch)


def sequence_mean(batch: TokenBatch) -> list[float]:
    return [1 / (len(batch) * int(own)) for own in batch.response_mask.sum(1)]


def mean_of_means(batch: TokenBatch, size: int = MICRO) -> list[float]:
    """The slip of gradient accumulation: each micro-batch's own mean, averaged."""
    counts = batch.response_mask.sum(1).split(size)
    return [1 / (len(counts) * int(own.sum())) for own in counts for _ in own]


def train(
    policy: Policy,
    batch: TokenBatch,
    factors: Sequence[float],
    *,
    temperature: float = 0.7,
    shift: int = 0,
) -> dict[str, Tensor]:
    """The gradient of −Σ c·Â·log π by name; shift: a token's advantage goes so far on."""
    named = dict(float_parameters(policy.model))
    sums = {name: torch.zeros_like(p) for name, p in named.items()}
    for start in range(0, len(batch), MICRO):
        loss = torch.zeros(())
        for row in range(start, min(start + MICRO, len(batch))):
            ids, kept = batch.sequence(row)
            logits = policy.model(input_ids=ids[None], use_cache=False).logits[0] / temperature
            logprobs = torch.log_softmax(logits[kept - 1], -1).gather(1, ids[kept][:, None])[:, 0]
            advantages = batch.advantages[row][batch.response_mask[row]].clone()
            if shift:
                places = torch.arange(len(advantages)) - shift
                inside = (places >= 0) & (places < len(advantages))
                advantages = torch.where(inside, advantages.roll(shift), 0.0)
            loss = loss - factors[row] * (advantages * logprobs).sum()
        found = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
        for name, gradient in zip(named, found, strict=True):
            if gradient is not None:
                sums[name] += gradient
    return sums


def check(policy: Policy, batch: TokenBatch, gradient: dict[str, Tensor] | float, **settings: object) -> Audit:
    return audit(policy, batch, gradient, **{"loss": LOSS, "micro_batch": MICRO} | settings)


@pytest.mark.parametrize("seed", every(200, range(200)))
def test_a_sound_step_gives_no_alarm(seed):
    policy, batch = make_step(seed)
    found = check(policy, batch, train(policy, batch, token_mean(batch)))
    assert (found.kind, found.reading, found.odd) == ("same", "token-mean", ())
    assert found.factor == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("reading", "make"),
    [
        ("sequence-mean", lambda p, b: train(p, b, sequence_mean(b))),
        ("micro-batches", lambda p, b: train(p, b, mean_of_means(b))),
        ("mask-late", lambda p, b: train(p, b, token_mean(b), shift=1)),
        ("no-temperature", lambda p, b: train(p, b, token_mean(b), temperature=1.0)),
    ],
)
def test_the_norm_of_another_way_of_adding_up_is_named(
    reading, make: Callable[[Policy, TokenBatch], dict[str, Tensor]]
):
    policy, batch = make_step()
    gradient = make(policy, batch)
    of_norm = check(policy, batch, float(torch.cat([own.flatten() for own in gradient.values()]).norm()))
    assert (of_norm.kind, of_norm.reading) == ("same", reading)


@pytest.mark.parametrize(
    ("shift", "reading"), every(3, [(-1, "mask-early"), (-2, "mask-early-2"), (-3, "mask-early-3")])
)
def test_a_mask_that_is_early_is_named(shift, reading):
    policy, batch = make_step()
    found = check(policy, batch, train(policy, batch, token_mean(batch), shift=shift))
    assert (found.kind, found.reading, found.odd) == ("same", reading, ())


@pytest.mark.all
def test_processes_are_told_by_number_or_by_the_batch():
    """Two processes, each with the mean over its own tokens, averaged."""
    policy, batch = make_step()
    gradient = train(policy, batch, mean_of_means(batch, 8))
    found = check(policy, batch, gradient, processes=2)
    assert (found.kind, found.reading) == ("same", "processes")
    # Dealt out in another order, as the log says.
    order = [*range(0, 16, 2), *range(1, 16, 2)]
    ranks = torch.tensor([float(order.index(row) // 8) for row in range(16)])
    dealt = replace(batch, process_ids=ranks)
    back = [order.index(row) for row in range(16)]
    factors = mean_of_means(batch.select(order), 8)
    gradient = train(policy, batch, [factors[place] for place in back])
    assert check(policy, dealt, gradient).reading == "processes"
    assert check(policy, batch, gradient, processes=2).reading != "processes"
    for wrong in (0, 3):
        with pytest.raises(InputError):
            check(policy, batch, gradient, processes=wrong)


def test_micro_batches_are_those_of_the_log_within_their_processes():
    policy, batch = make_step()
    numbers = torch.arange(16) // 4
    told = replace(batch, process_ids=(numbers // 2).float(), micro_batch_ids=(numbers % 2).float())
    found = check(policy, told, train(policy, batch, mean_of_means(batch)), micro_batch=None)
    assert (found.kind, found.reading) == ("same", "micro-batches")


def test_a_constant_divisor_is_named():
    policy, batch = make_step()
    found = check(policy, batch, train(policy, batch, [1 / (16 * 77)] * 16))
    assert found.kind == "factor" and "a constant of 77" in found.verdict


def test_known_causes_of_a_factor_are_named():
    policy, batch = make_step()
    gradient = train(policy, batch, token_mean(batch))
    norm = float(torch.cat([own.flatten() for own in gradient.values()]).norm())
    clipped = check(policy, batch, {n: g * 0.5 / norm for n, g in gradient.items()}, max_grad_norm=0.5)
    assert clipped.kind == "factor" and "clipping" in clipped.verdict
    summed = check(policy, batch, {n: g * (len(batch) // MICRO) for n, g in gradient.items()})
    assert summed.kind == "factor" and "number of micro-batches" in summed.verdict


@pytest.mark.parametrize(
    ("scaled", "rows"),
    every(
        3,
        [
            ((), []),
            (("layers.1.",), [("1", "all")]),
            (("v_proj",), [("all", "attention v")]),
            (("embed",), [("all", "embedding")]),
            (("layers.2.mlp.up",), [("2", "MLP")]),
            (("v_proj", "layers.2."), [("2", "all"), ("all", "attention v")]),
        ],
    ),
)
def test_where_they_part_is_told_by_the_fewest_layers_and_groups(scaled, rows):
    policy, batch = make_step(kind="llama")
    gradient = train(policy, batch, token_mean(batch))
    ours = {name: own.clone() for name, own in gradient.items()}
    for name in gradient:
        gradient[name] *= 3.0 if any(part in name for part in scaled) else 1.0
    found = check(policy, batch, gradient)
    assert sorted(zip(found.parting["layer"], found.parting["group"], strict=True)) == rows
    told = found.groups.set_index(["layer", "group"])
    for key, inside in {
        ("all", "attention v"): [name for name in ours if "v_proj" in name],
        ("1", "all"): [name for name in ours if ".layers.1." in name],
        ("2", "MLP"): [name for name in ours if ".layers.2.mlp" in name],
        ("outside", "norms"): ["model.norm.weight"],
    }.items():
        a, b = (torch.cat([own[name].double().flatten() for name in inside]) for own in (ours, gradient))
        row = told.loc[key]
        assert (row["norm"], row["ratio"]) == pytest.approx((float(a.norm()), float(b.norm() / a.norm())), rel=1e-4)
        assert row["cosine"] == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=1e-6)
        assert row["parameters"] == len(inside)


def test_readings_that_are_one_on_a_batch_are_all_named():
    policy, batch = make_step()
    batch = batch.select([0] * 4)  # all as long as each other
    found = check(policy, batch, train(policy, batch, token_mean(batch)), micro_batch=2)
    assert (found.reading, found.also) == ("token-mean", ("sequence-mean", "micro-batches"))
    of_norm = check(policy, batch, float(found.readings["norm"][0]), micro_batch=2)
    assert (of_norm.reading, of_norm.also) == (found.reading, found.also)


@pytest.mark.parametrize(
    ("factor", "kind"), every(3, [(1.0, "same"), (1.01, "rounding"), (0.985, "rounding"), (1.05, "factor")])
)
def test_a_norm_alone_is_not_told_from_what_bfloat16_does_to_it(factor, kind):
    policy, batch = make_step()
    norm = check(policy, batch, 1.0).readings["norm"][0]
    logged = replace(batch, run=TrainedRun("bfloat16"))
    for told, wanted in (
        (check(policy, logged, factor * float(norm)), kind),
        (check(policy, batch, factor * float(norm)), "same" if factor == 1 else "factor"),
    ):
        assert (told.kind, told.reading) == (wanted, "token-mean")
        assert told.factor == told.norm_ratio == pytest.approx(factor)


def test_parameters_without_a_gradient_are_counted():
    policy, batch = make_step()
    gradient = train(policy, batch, token_mean(batch))
    for name in [*gradient][3:5]:
        del gradient[name]
    found = check(policy, batch, gradient)
    assert found.kind == "same" and f"2 of the policy's {len(gradient) + 2} parameters" in found.verdict


@pytest.mark.all
@pytest.mark.parametrize("strength", every(3, [72.0, 1.5, 1.0]))
def test_a_multiple_is_told_from_what_passes_in_bfloat16_do(strength):
    policy, batch = make_step()
    with torch.autocast("cpu", torch.bfloat16):
        gradient = train(policy, batch, token_mean(batch))
    name = "model.layers.1.mlp.up_proj.weight"
    gradient[name] = strength * gradient[name]
    found = check(policy, replace(batch, run=TrainedRun("bfloat16")), gradient)
    planted = strength != 1.0
    assert (found.kind, found.odd) == (("parameters", (name,)) if planted else ("rounding", ()))
    assert found.parting["group"].tolist() == ["MLP"] * planted
    assert check(policy, batch, gradient).kind == "other"  # as far as is known, in float32


@pytest.mark.all
def test_half_precision_is_known_from_the_gradients_own_numbers():
    policy, batch = make_step()
    gradient = train(policy, batch, token_mean(batch))
    for dtype, precision, kept in ((torch.bfloat16, "bfloat16", torch.float32), (torch.float16, "float16", None)):
        found = check(policy, batch, {n: g.to(dtype).to(kept or dtype) for n, g in gradient.items()})
        assert found.precision == precision and found.kind in ("same", "rounding") and found.odd == ()
    assert check(policy, batch, gradient).precision is None


def weighted(policy: Policy, batch: TokenBatch, weights: Tensor, temperature: float = 0.7) -> dict[str, Tensor]:
    """The gradient of −Σ w·log π by name; weights: [B, S]."""
    named = dict(float_parameters(policy.model))
    loss = torch.zeros(())
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0] / temperature
        logprobs = torch.log_softmax(logits[kept - 1], -1).gather(1, ids[kept][:, None])[:, 0]
        loss = loss - (weights[row][batch.response_mask[row]] * logprobs).sum()
    found = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), found, strict=True)}


DIVISORS = {
    "token-mean": lambda mask: mask.sum() * torch.ones(len(mask), 1),
    "sequence-mean": lambda mask: len(mask) * mask.sum(1, keepdim=True),
    "micro-batches": lambda mask: torch.cat([4 * part.sum() * torch.ones(MICRO, 1) for part in mask.split(MICRO)]),
}


def kept_only(batch: TokenBatch, which: str) -> Tensor:
    """The mask without each response's first, or last, token."""
    mask = batch.response_mask.clone()
    for row in range(len(batch)):
        own = mask[row].nonzero()[:, 0]
        mask[row, own[0 if which == "first" else -1]] = False
    return mask


def fault_of(name: str, policy: Policy, batch: TokenBatch, aggregation: str) -> dict[str, Tensor]:
    """The gradient of a trainer with this fault, whose advantages vary by token."""
    mask, weights = batch.response_mask, torch.nan_to_num(batch.advantages)
    divisor = DIVISORS[aggregation]
    if name == "response-missing":
        weights[5] = 0.0
    if name == "micro-batch-missing":
        weights[2 * MICRO : 3 * MICRO] = 0.0
    if name.startswith(("first", "last")):
        kept = kept_only(batch, name.split("-")[0])
        return weighted(policy, batch, weights * kept / divisor(kept if "uncounted" in name else mask))
    if "mask" in name:
        rolled = weights.roll(1 if "late" in name else -1, 1)
        weights = rolled * (mask.roll(1, 1) if "late" in name else mask.roll(-1, 1)) * mask
    temperature = 1.0 if name == "no-temperature" else 0.7
    return weighted(policy, batch, weights / divisor(mask), temperature)


FOUND = (
    *("no-temperature", "mask-late", "mask-early", "last-token", "last-token-uncounted", "first-token"),
    *("first-token-uncounted", "response-missing", "micro-batch-missing"),
)


@pytest.mark.parametrize(("fault", "aggregation", "logged"), every(11, product(FOUND, DIVISORS, [False, True])))
def test_a_fault_is_named_under_every_aggregation(fault, aggregation, logged):
    policy, batch = make_step()
    noise = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(7))
    batch = replace(batch, advantages=torch.where(batch.response_mask, noise, 0.0))
    gradient = fault_of(fault, policy, batch, aggregation)
    if logged:
        divisor = DIVISORS[aggregation](batch.response_mask).expand(len(batch), 1)[:, 0]
        batch = replace(batch, loss_scales=batch.num_tokens / divisor)
    found = check(policy, batch, gradient)
    assert (found.kind, found.aggregation, found.fault) == ("same", aggregation, fault)
    assert found.part == {"response-missing": 5, "micro-batch-missing": 2}.get(fault)
    assert found.factor == pytest.approx(1, abs=1e-3)
    whole = weighted(policy, batch, batch.advantages / DIVISORS[aggregation](batch.response_mask))
    norms = [torch.cat([own.flatten() for own in one.values()]).norm().item() for one in (gradient, whole)]
    assert found.norm_ratio == pytest.approx(norms[0] / norms[1], rel=1e-4)


def test_a_missing_response_that_is_not_counted_either_is_a_factor_with_its_cause():
    policy, batch = make_step()
    mask, weights = batch.response_mask.clone(), batch.advantages.clone()
    mask[5] = False
    found = check(policy, batch, weighted(policy, batch, weights * mask / mask.sum()))
    assert (found.kind, found.fault, found.part, found.cause) == ("factor", "response-missing", 5, "part")


def test_advantages_per_response_leave_a_shift_and_a_missing_end_the_same():
    policy, batch = make_step()
    found = check(policy, batch, train(policy, batch, token_mean(batch), shift=1))
    assert {found.reading, *found.also} == {"mask-late", "first-token"}


@pytest.mark.parametrize("beta", every(2, [0.2, 0.02]))
@pytest.mark.parametrize(("fault", "sign"), every(2, [("kl-sign", -1.0), ("no-kl", 0.0), (None, 1.0)]))
@pytest.mark.parametrize("aggregation", every(2, ["token-mean", "sequence-mean"]))
def test_kl_left_out_or_of_the_wrong_sign_is_named(aggregation, fault, sign, beta):
    policy, batch = make_step()
    own = TokenJacobian(policy, batch).statistics.logprob
    gaps = 0.7 * torch.randn(own.shape, generator=torch.Generator().manual_seed(3))
    batch = replace(batch, ref_logprobs=torch.where(batch.response_mask, own + gaps, torch.nan))
    weights = torch.nan_to_num(batch.advantages + sign * beta * (gaps.exp() - 1)) / DIVISORS[aggregation](
        batch.response_mask
    )
    found = check(policy, batch, weighted(policy, batch, weights), loss=replace(LOSS, kl_coef=beta))
    assert (found.kind, found.aggregation, found.fault) == ("same", aggregation, fault)


@pytest.mark.parametrize("strength", every(2, [0.0, -1.0, 1.05, 3.0]))
def test_parameters_at_exactly_1_win_over_larger_ones(strength):
    policy, batch = make_step()
    gradient = train(policy, batch, token_mean(batch))
    wrong = {name for name in gradient if "norm" not in name}
    square = {name: float(own.square().sum()) for name, own in gradient.items()}
    assert 0.01 < 1 - sum(square[name] for name in wrong) / sum(square.values()) < 0.5
    found = check(policy, batch, {name: own * (strength if name in wrong else 1) for name, own in gradient.items()})
    assert (found.kind, found.reading, found.factor) == ("parameters", "token-mean", 1.0)
    assert {*found.odd} == wrong - {name for name in wrong if square[name] < 1e-8 * sum(square.values())}


def test_the_norm_of_a_run_with_frozen_parameters_is_that_of_the_others():
    policy, batch = make_step()
    gradient = train(policy, batch, token_mean(batch))
    frozen = frozenset(name for name in gradient if "layers.0." in name or "embed" in name)
    own = {name: part for name, part in gradient.items() if name not in frozen}
    norm = float(torch.cat([part.flatten() for part in own.values()]).norm())
    for run in (TrainedRun(frozen=frozen), TrainedRun(trained=frozenset(own))):
        logged = replace(batch, run=run)
        assert check(policy, logged, norm).kind == "same"
        whole = check(policy, logged, own)
        assert whole.kind == "same" and "has no gradient for" not in whole.verdict
    assert check(policy, batch, norm).kind == "factor"


def test_a_gradient_of_another_batch_is_that_of_no_reading():
    (policy, batch), (_, other) = make_step(), make_step(5)
    found = check(policy, batch, train(policy, other, token_mean(other)))
    assert found.kind == "other" and found.explained.empty


def test_first_moments_give_the_gradient_between_two_steps(tmp_path):
    policy, batch = make_step()
    named = float_parameters(policy.model)
    groups = [{"params": named[:5], "betas": (0.5, 0.9)}, {"params": named[5:], "betas": (0.8, 0.95)}]
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    files = []
    for step in range(3):
        gradient = train(policy, make_step(step)[1], token_mean(make_step(step)[1]))
        for name, parameter in float_parameters(policy.model):
            parameter.grad = gradient[name].clone()
        optimizer.step()
        files.append(tmp_path / f"{step}.pt")
        torch.save(optimizer.state_dict(), files[-1])
    found = gradient_of_moments(policy, files[1], files[2])
    for name, wanted in gradient.items():
        # m′ − β·m cancels: float32's rounding of m, over 1 − β.
        bound = 4 * torch.finfo(torch.float32).eps / 0.2 * max(1.0, float(wanted.abs().max()))
        assert float((found[name] - wanted).abs().max()) < bound
    first = gradient_of_moments(policy, None, files[0])
    assert check(policy, batch, first).kind == "same"
    with pytest.raises(InputError):
        gradient_of_moments(policy, files[0], files[2])


def test_clipping_is_undone_by_the_norm_before():
    policy, batch = make_step()
    gradient = train(policy, batch, token_mean(batch))
    norm = float(torch.cat([own.flatten() for own in gradient.values()]).norm())
    clipped = {name: own * 0.25 for name, own in gradient.items()}
    found, factor = undo_clip(clipped, norm)
    assert factor == pytest.approx(0.25, rel=1e-6)
    assert all(torch.allclose(found[name], own, rtol=1e-6) for name, own in gradient.items())
    for other in (norm, norm / 2):  # not clipped; more than there was, which no clipping makes
        assert undo_clip(gradient, other)[1] == 1.0


def test_the_command_reads_a_saved_gradient_and_refuses_two(tmp_path):
    policy, batch = make_step()
    policy.model.save_pretrained(tmp_path / "policy")
    make_tokenizer().save_pretrained(tmp_path / "policy")
    rows = []
    for row in range(len(batch)):
        ids, advantage = batch.sequence(row)[0].tolist(), float(batch.advantages[row][batch.response_mask[row]][0])
        rows.append({"prompt_ids": ids[:3], "response_ids": ids[3:], "advantage": advantage, "group": row // 4})
    write_rollouts(tmp_path / "step.jsonl", [own | {"temperature": 0.7} for own in rows])
    gradient = train(policy, batch, mean_of_means(batch))
    save_file(gradient, tmp_path / "grad.safetensors")
    command = ["audit", str(tmp_path / "policy"), str(tmp_path / "step.jsonl"), "--kl-coef", "0", "--micro-batch", "4"]
    given = ["--gradient", str(tmp_path / "grad.safetensors")]
    main([*command, *given, "--out", str(tmp_path / "audited")])
    readings = pd.read_csv(tmp_path / "audited" / "readings.csv").set_index("reading")
    assert readings["distance"].idxmin() == "micro-batches"
    parameters = pd.read_csv(tmp_path / "audited" / "parameters.csv")
    assert len(parameters) == len(gradient) and parameters["distance"].max() < 2e-3
    groups = pd.read_csv(tmp_path / "audited" / "groups.csv")
    assert groups[groups["layer"] == "all"]["parameters"].sum() == len(gradient) and not groups["parts"].any()
    norm = float(torch.cat([own.flatten() for own in gradient.values()]).norm())
    logged = [own | {"temperature": 0.7, "grad_norm": norm} for own in rows]
    write_rollouts(tmp_path / "logged.jsonl", logged)
    command[2] = str(tmp_path / "logged.jsonl")
    main([*command, "--out", str(tmp_path / "of-norm")])
    readings = pd.read_csv(tmp_path / "of-norm" / "readings.csv").set_index("reading")
    assert (readings["ratio"] - 1).abs().idxmin() == "micro-batches"
    clipped = {name: 0.25 * own for name, own in gradient.items()}
    save_file(clipped, tmp_path / "grad.safetensors")  # whose norm before clipping is in the log
    main([*command, *given, "--out", str(tmp_path / "of-clipped")])
    readings = pd.read_csv(tmp_path / "of-clipped" / "readings.csv").set_index("reading")
    assert readings["factor"]["micro-batches"] == pytest.approx(1, rel=1e-5)
    command[2] = str(tmp_path / "step.jsonl")
    for wrong in ([], [*given, "--grad-norm", "1"], ["--gradient", str(tmp_path / "policy" / "config.json")]):
        with pytest.raises(SystemExit) as caught:
            main([*command, *wrong])
        assert caught.value.code == 2


def test_the_command_computes_advantages_with_the_trainers_eps(tmp_path):
    policy, batch = make_step()
    policy.model.save_pretrained(tmp_path / "policy")
    make_tokenizer().save_pretrained(tmp_path / "policy")
    rewards, rows = torch.randn(len(batch), generator=torch.Generator().manual_seed(2)), []
    for row, reward in enumerate(rewards.tolist()):
        ids = batch.sequence(row)[0].tolist()
        told = {"prompt_ids": ids[:3], "response_ids": ids[3:], "reward": reward, "group": row // 4}
        rows.append(told | {"temperature": 0.7})
    write_rollouts(tmp_path / "step.jsonl", rows)
    groups = rewards.view(4, 4)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 0.3)
    weights = torch.where(batch.response_mask, advantages.view(-1, 1), 0.0)
    gradient = weighted(policy, batch, weights / batch.num_tokens)
    norm = float(torch.cat([own.flatten() for own in gradient.values()]).norm())
    command = ["audit", str(tmp_path / "policy"), str(tmp_path / "step.jsonl"), "--kl-coef", "0"]
    for eps, fits in (("0.3", True), ("1e-6", False)):
        main([*command, "--grad-norm", str(norm), "--advantage-eps", eps, "--out", str(tmp_path / eps)])
        ratio = pd.read_csv(tmp_path / eps / "readings.csv").set_index("reading")["ratio"]["token-mean"]
        assert (abs(ratio - 1) < 1e-4) == fits


@pytest.mark.parametrize(
    "spoil",
    [
        lambda gradient: {"another.weight": torch.ones(3)},
        lambda gradient: {name: torch.zeros_like(own) for name, own in gradient.items()},
        lambda gradient: {name: own * float("nan") for name, own in gradient.items()},
        lambda gradient: {name: own.flatten()[1:] for name, own in gradient.items()},
        lambda gradient: {},
        lambda gradient: float("nan"),
        lambda gradient: 0.0,
    ],
)
def test_what_is_no_gradient_of_the_policy_is_refused(spoil):
    policy, batch = make_step()
    with pytest.raises(InputError):
        check(policy, batch, spoil(train(policy, batch, token_mean(batch))))
