"""Logged log-probabilities that contradict the policy: missing and shifted ones are refused, others are said."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.policies import BOS, make_batch, make_policy
from support.refusals import refused
from support.tiers import every

from gradscope.diagnosis import diagnose
from gradscope.gradients import measure
from gradscope.gradients.logged_logprobs import Reading, find_contradictions, note_logged, refuse_foreign_logprobs
from gradscope.objective import batch_statistics
from gradscope.rollouts import Response, collate


def plant(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(n, generator=generator).clamp(1e-4).log() for n in (12, 30, 1, 18)]


def test_a_log_near_the_policy_or_of_a_drifted_one_passes():
    own = plant()
    generator = torch.Generator().manual_seed(1)
    for size in (0.0, 0.1, 1.0, 3.0):
        refuse_foreign_logprobs(own, [o + size * torch.randn(o.shape, generator=generator) for o in own], "old_logprob")
    refuse_foreign_logprobs(own, [torch.full_like(o, torch.nan) for o in own], "old_logprob")
    refuse_foreign_logprobs(own[:1], [torch.zeros_like(o) for o in own[:1]], "old_logprob")  # too few to tell
    sure = [torch.full((40,), -0.01)]
    refuse_foreign_logprobs(sure, [torch.zeros(40)], "old_logprob")  # a probability that rounds to 1


@pytest.mark.parametrize("missing", [1.0, 0.95])
def test_zeros_are_no_log_probabilities(missing):
    own = plant()
    generator = torch.Generator().manual_seed(2)
    logged = [torch.where(torch.rand(o.shape, generator=generator) < missing, 0.0, o) for o in own]
    with refused():
        refuse_foreign_logprobs(own, logged, "sampler_logprob")
    half = [torch.where(torch.rand(o.shape, generator=generator) < 0.5, 0.0, o) for o in own]
    refuse_foreign_logprobs(own, half, "sampler_logprob")


@pytest.mark.parametrize(("shift", "named"), [(1, "next"), (-1, "previous")])
def test_another_tokens_are_told_by_how_far_they_are_off(shift, named):
    own = plant()
    logged = []
    for values in own:
        told = torch.full_like(values, torch.nan)
        if shift == 1:
            told[:-1] = values[1:]
        else:
            told[1:] = values[:-1]
        logged.append(told + 0.01)
    with refused(named):
        refuse_foreign_logprobs(own, logged, "old_logprob")


@pytest.mark.parametrize("name", ["teacher_logprob", "ref_logprob"])
def test_another_policys_column_is_told_from_a_shifted_one(name):
    """Where it differs by up to half a nat per token from the policy; one further off is not judged."""
    generator, found = torch.Generator().manual_seed(3), []
    for seed in range(20):
        for size in (0.1, 0.3, 0.5, 1.0, 2.0):
            own = plant(seed)
            logged = [o + size * torch.randn(o.shape, generator=generator) for o in own]
            refuse_foreign_logprobs(own, logged, name)
            if size > 0.5:
                continue
            for shift, named in ((1, "previous"), (-1, "next")):
                with refused(named, name):
                    refuse_foreign_logprobs(own, [o.roll(shift) for o in logged], name)
                found.append(named)
    assert len(found) == 20 * 3 * 2


def test_measuring_refuses_them_before_anything_else():
    policy = make_policy("llama")
    batch = make_batch(policy)
    zeros = torch.where(batch.response_mask, 0.0, torch.nan)
    for name in ("old_logprobs", "sampler_logprobs", "teacher_logprobs"):
        with refused(name[:-1]):
            measure(policy, replace(batch, **{name: zeros}))


def truncate(logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """log π after temperature, top-k, then top-p of what that leaves, one token at a time; −inf where it is cut."""
    out = torch.full_like(logits, -torch.inf)
    for row, values in enumerate(logits / temperature):
        order = values.argsort(descending=True)
        kept = order if top_k is None else order[:top_k]
        if top_p is not None:
            kept = kept[: int((values[kept].softmax(0).cumsum(0) < top_p).sum()) + 1]
        out[row, kept] = values[kept].log_softmax(0)
    return out


def sampled(policy, temperature: float, top_k: int | None = None, top_p: float | None = None, seed: int = 0):
    """Responses drawn token by token from the truncated policy, and their log π by it."""
    generator, responses = torch.Generator().manual_seed(seed), []
    for prompt in range(12):
        ids, logged = [BOS, 5 + prompt], []
        for _ in range(12):
            with torch.no_grad():
                logprobs = truncate(
                    policy.model(torch.tensor([ids])).logits[0, -1:].double(), temperature, top_k, top_p
                )[0]
            ids.append(int(torch.multinomial(logprobs.exp(), 1, generator=generator)))
            logged.append(float(logprobs[ids[-1]]))
        responses.append(Response(ids[:2], ids[2:], group=prompt, old_logprobs=logged))
    return collate(responses)


def found(policy, batch, temperature: float):
    """What is found of the batch, said to be sampled at this temperature."""
    batch = batch.at_temperature(temperature)
    own = batch_statistics(policy.model, batch, micro_batch_size=4, device=policy.device).logprob
    columns = {"logprob": own, "old_logprob": batch.old_logprobs}
    return find_contradictions(policy, batch, {name: values[batch.response_mask] for name, values in columns.items()})


@pytest.mark.parametrize("noise", every(2, [0.005, 0.0]))
@pytest.mark.parametrize(
    ("sampling", "stated", "reading"),
    every(
        2,
        [
            ({"temperature": 1.0}, 0.6, Reading(temperature=1.0)),
            ({"temperature": 0.6}, 1.0, Reading(temperature=0.6)),
            ({"temperature": 1.0, "top_p": 0.8}, 1.0, Reading(top_p=0.8)),
            ({"temperature": 0.7, "top_k": 10}, 0.7, Reading(top_k=10)),
            ({"temperature": 1.0, "top_p": 0.8}, 0.6, Reading(temperature=1.0, top_p=0.8)),
        ],
    ),
)
def test_the_reading_that_was_planted_is_found(sampling, stated, reading, noise):
    policy = make_policy("llama")
    batch = sampled(policy, **sampling)
    batch = replace(batch, old_logprobs=batch.old_logprobs + noise * torch.randn(batch.old_logprobs.shape))
    [contradiction] = found(policy, batch, stated)
    assert contradiction.reading == reading
    assert contradiction.distance < 0.005 + noise < contradiction.stated_distance
    if not reading.truncates:
        assert contradiction.kept_mass == 1
        return
    # The kept mass is what the log says: own − logged = log S, by brute force over all tokens.
    at = batch.at_temperature(reading.temperature or stated)
    own = batch_statistics(policy.model, at, micro_batch_size=4, device=policy.device).logprob
    mass = (own - batch.old_logprobs)[batch.response_mask].exp()
    assert contradiction.kept_mass == pytest.approx(float(mass.mean()), abs=3 * float(mass.std()) / 96**0.5 + noise)


@pytest.mark.parametrize("size", every(2, [0.0, 0.02, 0.05, 0.1, 0.3]))
def test_an_older_policys_log_probabilities_are_no_other_temperatures(size):
    policy, older = make_policy("llama"), make_policy("llama")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in older.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(size * parameter.std() * noise if parameter.numel() > 1 else 0)
    assert found(policy, sampled(older, 1.0), 1.0) == []


@pytest.mark.all
@pytest.mark.parametrize(
    ("written", "reading"),
    [
        (lambda logprob: logprob / math.log(2), Reading(base=2)),
        (lambda logprob: logprob / math.log(10), Reading(base=10)),
        (lambda logprob: logprob.clamp(min=-3.0), Reading(floor=-3.0)),
    ],
    ids=["log2", "log10", "floor"],
)
def test_other_logarithms_and_floors_are_found(written, reading):
    policy = make_policy("llama")
    batch = sampled(policy, 1.0)
    batch = replace(batch, old_logprobs=written(batch.old_logprobs))
    [contradiction] = found(policy, batch, 1.0)
    assert contradiction.reading == reading and contradiction.distance < 1e-4


def repeat_penalty(policy, batch, penalty: float) -> torch.Tensor:
    """log π with the logits of tokens that occurred before divided (or, below 0, multiplied) by the penalty."""
    out = torch.full_like(batch.old_logprobs, torch.nan)
    for row in range(len(batch)):
        ids, targets = batch.sequence(row)
        with torch.no_grad():
            logits = policy.model(ids[None]).logits[0].double()
        for target in targets.tolist():
            own, seen = logits[target - 1].clone(), ids[:target].unique()
            own[seen] = torch.where(own[seen] > 0, own[seen] / penalty, own[seen] * penalty)
            out[row, target] = own.log_softmax(-1)[ids[target]]
    return out


@pytest.mark.parametrize("name", every(3, ["penalty", "bias", "cap", "another checkpoint"]))
def test_what_no_reading_explains_is_said_with_its_distance(name):
    policy = make_policy("llama")
    batch = sampled(policy, 1.0)
    true, generator = batch.old_logprobs, torch.Generator().manual_seed(5)
    told = {
        "penalty": lambda: repeat_penalty(policy, batch, 1.8),
        "bias": lambda: true - 0.3 * (batch.input_ids % 3 == 0).float() - 0.15,
        "cap": lambda: -true * torch.tanh(true),
        "another checkpoint": lambda: true - 0.5 * torch.rand(true.shape, generator=generator),
    }[name]()
    batch = replace(batch, old_logprobs=told.clamp(max=0))
    own = batch_statistics(policy.model, batch, micro_batch_size=4, device=policy.device).logprob
    kept = {"logprob": own[batch.response_mask], "old_logprob": batch.old_logprobs[batch.response_mask]}
    assert find_contradictions(policy, batch, kept) == []
    [note] = note_logged(policy, batch, kept)
    apart = float((kept["logprob"] - kept["old_logprob"]).abs().mean())
    assert note.kind == "logged-logprobs" and f"{apart:.2g}" in note
    near = replace(batch, old_logprobs=true - 0.05)  # of a few updates
    assert not note_logged(policy, near, kept | {"old_logprob": near.old_logprobs[batch.response_mask]})


def test_measuring_says_it_and_a_diagnosis_says_it_first():
    policy = make_policy("llama")
    batch = replace(sampled(policy, 0.6).at_temperature(1.0), advantages=None)
    batch = replace(batch, rewards=torch.arange(12) % 2.0, group_ids=torch.arange(12) // 4)
    with pytest.warns(UserWarning):
        table = measure(policy, batch)
    diagnosis = diagnose(policy, batch, table, minutes=0.01, compare=False)
    assert diagnosis.warnings[0].kind == "logged-logprobs"
