"""Who measures which parameter: each exactly once, by a rule only where the module is what the rule knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import handmade
from support.oracle import as_policy
from support.policies import CAUSAL, VOCAB, make_policy
from torch import nn

from gradscope.gradients.engine.ownership import Ownership, check_ownership, find_ownership, probe_model
from gradscope.policy import Policy

GENERAL = {
    # Router and experts are 3-D or bare parameters.
    "mixtral": {"mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    "qwen3_moe": {"mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    # Positions with an offset of two: not the rows of the ids it was given.
    "opt": {"embed_positions.weight"},
}
"""Endings of the parameters that no rule claims."""

TIED = {"qwen2", "gpt2", "gemma2", "gemma3", "qwen3", "opt"}


def claim(policy: Policy, vocab: int = VOCAB) -> Ownership:
    ids = torch.randint(4, vocab, (16,), generator=torch.Generator().manual_seed(0))
    return find_ownership(policy.model, policy.blocks, probe_model(policy.model, policy.blocks, ids))


def claim_handmade(name: str) -> Ownership:
    return claim(as_policy(handmade.make(name)), handmade.VOCAB)


@pytest.mark.parametrize("name", CAUSAL)
def test_every_parameter_is_claimed_once_and_only_the_unknown_goes_the_general_way(name):
    policy = make_policy(name)
    ownership = claim(policy)
    counts = dict.fromkeys(map(id, policy.model.parameters()), 0)
    for owner in ownership.rules:
        for parameter in policy.model.get_submodule(owner).parameters(recurse=False):
            counts[id(parameter)] += 1
    for parameter in ownership.general:
        counts[id(policy.model.get_parameter(parameter))] += 1
    if ownership.tied:
        counts[id(policy.model.get_submodule(ownership.tied[0]).weight)] -= 1
    assert set(counts.values()) == {1}
    assert (ownership.tied is not None) == (name in TIED)
    endings = GENERAL.get(name, set())
    assert all(any(p.endswith(e) for e in endings) for p in ownership.general)
    assert all(any(p.endswith(e) for p in ownership.general) for e in endings)


@pytest.mark.parametrize("name", handmade.EXACT | handmade.REFUSED)
def test_every_parameter_of_a_handmade_decoder_is_claimed_once(name):
    policy = as_policy(handmade.make(name))
    check_ownership(policy.model, claim(policy, handmade.VOCAB))  # As it stands, and by itself within find_ownership.


def test_a_doctored_division_is_an_error():
    policy = make_policy("mixtral")
    ownership = claim(policy)
    lost = dict(list(ownership.rules.items())[1:])
    with pytest.raises(RuntimeError):
        check_ownership(policy.model, replace(ownership, rules=lost))
    with pytest.raises(RuntimeError):
        check_ownership(policy.model, replace(ownership, general={}))
    twice = ownership.general | {"model.norm.weight": "model.norm"}
    with pytest.raises(RuntimeError):
        check_ownership(policy.model, replace(ownership, general=twice))
    tied = make_policy("qwen2")
    with pytest.raises(RuntimeError):
        check_ownership(tied.model, replace(claim(tied), tied=None))


def test_the_scale_of_an_embedding_is_read_from_what_it_returns():
    assert claim(make_policy("gemma2")).embedding_scale["model.embed_tokens"] == pytest.approx(32**0.5, rel=1e-6)
    assert claim(make_policy("qwen2")).embedding_scale["model.embed_tokens"] == pytest.approx(1.0, rel=1e-6)
    assert claim_handmade("scaled_and_padded_embedding").embedding_scale["model.embed"] == pytest.approx(4.0)


RULES_GIVEN_UP = {
    "weights_shared_by_modules": {"layers.0.up", "layers.2.up", "layers.1.ln1", "layers.0.ln2"},
    "weights_used_without_their_module": {"layers.0.up", "layers.0.down"},
    "weight_made_by_a_hook": {"layers.0.up"},
    "linear_with_a_parameter_more": {"layers.0.up"},
    "outputs_changed_by_hooks": {"layers.0.up", "layers.0.ln1"},
    "activations_changed_in_place": {"layers.0.up"},
    "module_that_is_never_called": {"layers.0.unused"},
    "head_that_calls_its_modules_twice": {"norm", "embed"},
    "clamped_embedding": {"embed"},
    "embedding_called_twice": {"embed"},
    "vectors_owned_by_the_block": {"layers.0"},
    "table_shared_three_ways": {"embed"},
}


@pytest.mark.parametrize("name", RULES_GIVEN_UP)
def test_a_module_that_is_not_what_a_rule_knows_goes_the_general_way(name):
    ownership = claim_handmade(name)
    general = set(ownership.general.values())
    for module in RULES_GIVEN_UP[name]:
        assert f"model.{module}" not in ownership.rules
        # A parameter of several owners goes under the first of them.
        assert f"model.{module}" in general or "shared" in name
    assert not any(n in ownership.rules for n, m in handmade.make(name).named_modules() if isinstance(m, nn.ModuleList))
