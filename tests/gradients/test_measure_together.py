"""Several sequences in one pass: each has its own numbers, whatever stands beside it and wherever it is filled up."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from support.decoders import COMMON, LATE, SANDWICHED, attend_eagerly, windowed
from support.exact import FLOAT32, TRUE_FLOAT64, cached_policy, random_ids
from support.oracle import TrueFloat64, Truth, as_policy, brute_force, largest_error
from support.policies import HIDDEN, LAYERS, RULED, make_model, make_policy
from support.tiers import every
from transformers.models.llama import modeling_llama

from gradscope.gradients import SequenceTokens, TokenGradientMeter, measuring
from gradscope.gradients.engine.grouping import MOST_SEQUENCES
from gradscope.gradients.engine.results import TokenGradients
from gradscope.gradients.engine.stack import Stack
from gradscope.objective import TokenStatistics
from gradscope.policy import Policy


def sequence(length: int, targets: range | list[int], every: int = 1, temperature: float = 1.0) -> SequenceTokens:
    """With repeats; every so many-th target is measured."""
    ids = random_ids(length, seed=length)
    ids[2::5] = 9
    targets = torch.tensor(list(targets))
    return SequenceTokens(ids, targets, torch.arange(len(targets))[::every], temperature)


TOGETHER = {
    "alike": [sequence(24, range(8, 24)), sequence(24, range(8, 24), temperature=0.7), sequence(24, range(9, 24))],
    "unlike": [sequence(6, [5]), sequence(40, range(3, 40, 2)), sequence(17, range(1, 17)), sequence(2, [1])],
    "samples": [sequence(30, range(4, 30), every=5), sequence(28, range(4, 28), every=3), sequence(20, [4, 19])],
    "what follows the last target": [sequence(30, [2, 3, 4]), sequence(12, [6, 11])],
    "one sequence twice": [sequence(20, range(5, 20)), sequence(20, range(5, 20))],
}


def measured_part(gradients: TokenGradients, picks: torch.Tensor) -> TokenGradients:
    statistics = gradients.statistics
    return TokenGradients(
        TokenStatistics(*(getattr(statistics, f.name)[picks] for f in fields(statistics))),
        gradients.logit_grad_norm[picks],
        gradients.act_grad_norm[picks],
        gradients.param_grad_norm[picks],
        {name: norms[picks] for name, norms in gradients.module_grad_norm.items()},
    )


def find_truths(policy: Policy, sequences: list[SequenceTokens]) -> list[Truth]:
    with TrueFloat64():
        return [brute_force(policy, s.ids, s.targets[s.measured], temperature=s.temperature) for s in sequences]


def errors(
    policy: Policy, sequences: list[SequenceTokens], *, truths: list[Truth] | None = None, **settings
) -> list[float]:
    """Largest difference of each sequence's measured tokens from brute force, which is by `policy` unless given."""
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, random_ids(20), **settings)
        found = meter.measure_together(sequences)
    out = []
    for s, ours, truth in zip(sequences, found, truths or find_truths(policy, sequences), strict=True):
        others = torch.ones(len(s.targets), dtype=torch.bool)
        others[s.measured] = False
        assert ours.param_grad_norm[others].isnan().all() and not ours.statistics.entropy[s.measured].isnan().any()
        out.append(largest_error(measured_part(ours, s.measured), truth))
    return out


@pytest.mark.parametrize(
    "name, case",
    every(9, [*product(["qwen2"], TOGETHER), *product(("qwen3", "llama", *SANDWICHED, *RULED), ["unlike"])]),
)
def test_every_sequence_is_exact_whatever_is_beside_it(name, case):
    truths = find_truths(cached_policy(name), TOGETHER[case])
    # One chunk for many tokens of all; one token of each; logits in several passes, probabilities not kept.
    for settings in ({}, {"rows": 60}, {"memory": 1}) if name in COMMON else ({},):
        with TrueFloat64():
            assert max(errors(cached_policy(name), TOGETHER[case], truths=truths, **settings)) < TRUE_FLOAT64
    assert max(errors(make_policy(name), TOGETHER[case], truths=truths)) < FLOAT32


def test_a_sequence_that_the_rules_do_not_fit_spoils_no_others(monkeypatch):
    def attend(*args, **kwargs):
        return attend_eagerly(*args, **kwargs, change=windowed)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    # The window shows in the longer one alone, and in whatever is filled up to its length.
    sequences = [sequence(LATE - 2, range(4, LATE - 2)), sequence(LATE + 8, range(4, LATE + 8))]
    with TrueFloat64():
        assert max(errors(make_policy("llama", torch.float64), sequences)) < TRUE_FLOAT64


def test_paddings_id_within_the_text_counts_for_no_sequence():
    model = make_model("qwen2", dtype=torch.float64)
    model.get_input_embeddings().padding_idx = 9  # which the sequences have at every fifth place
    policy = as_policy(model)
    with TrueFloat64():
        assert max(errors(policy, TOGETHER["unlike"])) < TRUE_FLOAT64


def test_a_stack_is_filled_up_on_the_right():
    stack = Stack.of(
        [sequence(6, [2, 4]), SequenceTokens(torch.tensor([7, 8, 9]), torch.tensor([1]), torch.tensor([0]))]
    )
    first = sequence(6, [2, 4]).ids
    assert stack.ids.tolist() == [first[:4].tolist(), [7, 7, 7, 7]]  # to the prefix of the last target
    assert stack.sequences.tolist() == [0, 0, 1] and stack.positions.tolist() == [1, 3, 0]
    assert stack.token_ids.tolist() == [int(first[2]), int(first[4]), 8]


@pytest.mark.parametrize("rules", [True, False])
@pytest.mark.parametrize("memory", [200_000, 1_000_000, 1 << 30])
def test_a_group_leaves_no_more_than_the_memory(rules, memory):
    policy = make_policy("qwen2")
    generator = torch.Generator().manual_seed(0)
    starts, counts = (torch.randint(2, 20, (30,), generator=generator).tolist() for _ in range(2))
    sequences = [sequence(40, range(start, start + n)) for start, n in zip(starts, counts, strict=True)]
    # Of every third one the last tokens are not measured: nothing is computed there.
    sequences[::3] = [replace(s, measured=s.measured[:1]) for s in sequences[::3]]
    with measuring(policy.model):
        groups = TokenGradientMeter(policy, random_ids(20), rules=rules, memory=memory).group(sequences)
    assert sorted(index for group in groups for index in group) == list(range(30))
    assert max(map(len, groups)) == 1 if not rules else 1 < max(map(len, groups)) <= MOST_SEQUENCES
    for group in groups if rules else []:
        longest = max(max(sequences[index].lengths) for index in group)
        # 4 bytes of what each linear layer and norm of each block takes in and gives out.
        left = len(group) * longest * LAYERS * 4 * (6 * HIDDEN + 3 * policy.model.config.intermediate_size)
        assert len(group) == 1 or left <= memory
