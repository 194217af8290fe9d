"""Causal language models of many kinds, built tiny from their configurations: measured exactly, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from support.shrunk import MODEL_TYPES, make_shrunk_model

from analyses.docs.architectures import EXACT, measure_exactness, save_and_load
from gradscope.errors import InputError
from gradscope.gradients import TokenGradientMeter, measuring
from gradscope.policy import Policy, load_policy
from gradscope.policy.loading import is_causal

KINDS = {
    "bloom": "ALiBi",
    "deepseek_v3": "latent attention, and groups of experts",
    "deepseek_v4": "residual streams that are mixed, and compressed keys",
    "dots3_note_text": "layers of two sizes (transformers 5.24), some with an index of keys",
    "falcon": "attention beside the MLP, one head of keys",
    "gemma3n_text": "streams before the batch, soft caps, windows, keys that layers share",
    "gpt_neo": "learned positions, local attention",
    "gptj": "attention beside the MLP, positions by pairs",
    "gpt_oss": "experts, windows, and attention sinks",
    "mamba2": "a state-space model",
    "qwen3_next": "a gated delta rule beside gated attention",
    "rwkv": "a recurrence, token shifts",
    "xlm": "blocks that are norms, changed in place afterwards",
}
DEAR = ("deepseek_v3", "deepseek_v4", "dots3_note_text", "gemma3n_text", "gpt_oss", "mamba2", "qwen3_next", "rwkv")
REFUSED = {
    "blt": "model.global_transformer.layers",  # patches are not tokens
    "hrm_text": "model.H_module.layers",  # each block more than once
    "reformer": None,  # no graph
    "xlm": "transformer.ffns",  # the residual stream passes them by
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.all] if kind in DEAR else []) for kind in KINDS if kind in MODEL_TYPES],
)
def test_a_model_of_another_kind_equals_brute_force_at_both_temperatures(kind, tmp_path):
    found = measure_exactness(save_and_load(kind, str(tmp_path)))
    assert max(found["worst_error_t1"], found["worst_error_t0.7"]) < EXACT
    assert found["path"] == "autograd"


def test_blocks_that_are_norms_count_among_the_parameters():
    found = measure_exactness(Policy(make_shrunk_model("xlm"), None, "transformer.layer_norm1"))
    assert max(found["worst_error_t1"], found["worst_error_t0.7"]) < EXACT


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_tokens_cannot_be_followed_through_its_blocks_is_refused(kind):
    policy = Policy(make_shrunk_model(kind), None, REFUSED[kind] or "reformer.encoder.layers")
    with measuring(policy.model), pytest.raises(InputError):
        TokenGradientMeter(policy, torch.arange(4, 24))


def test_lists_that_tokens_do_not_pass_are_refused():
    model = make_shrunk_model("blt")
    for blocks in ("model.patcher.layers", "model.local_encoder.layers"):
        with measuring(model), pytest.raises(InputError):
            TokenGradientMeter(Policy(model, None, blocks), torch.arange(4, 24))


def test_a_checkpoint_that_transformers_cannot_run_is_refused(tmp_path: Path):
    make_shrunk_model("xlnet").save_pretrained(tmp_path)
    with pytest.raises(InputError):  # it makes its positions in float32
        load_policy(tmp_path, dtype="float64")


def test_a_hybrid_without_attention_is_causal():
    # transformers' cache of such a one knows no length.
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    assert is_causal(transformers.JambaForCausalLM(transformers.JambaConfig(vocab_size=96, **sizes)).eval())
