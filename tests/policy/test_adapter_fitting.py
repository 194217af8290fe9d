"""Adapters of another class of their base, or of another vocabulary: what peft computes with them is what is loaded."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.adapters import peft
from support.cli import complaint
from support.policies import HIDDEN, LLAMA_LIKE, VOCAB, make_batch, save_checkpoint
from support.tiers import every
from torch import Tensor, nn

from gradscope.gradients import measure
from gradscope.policy import load_policy

refusal = partial(complaint, load_policy)
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}:UserWarning")  # peft's, of tables that are tied or saved
    for words in ("Setting `save_embedding_layers", "Model (has|with) `tie_word_embeddings", "Input and output embed")
]

IDS = torch.arange(4, 24)[None]
TEXT = LLAMA_LIKE | {"vocab_size": VOCAB, "hidden_size": HIDDEN, "max_position_embeddings": 64, "pad_token_id": 0}
EYE = {"hidden_size": 16, "intermediate_size": 16}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
IMAGE_TEXT = {
    "Gemma3": (
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
        {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        {"mm_tokens_per_image": 4, "image_token_index": 90},
    ),
    "Qwen3_5": (
        LINEAR | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        {"depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": HIDDEN, "num_position_embeddings": 16},
        {"image_token_id": 90, "video_token_id": 91},
    ),
}
"""Settings of the text part, of what sees, and of both; the first is loaded whole, the second as text."""


def make_image_text(family: str) -> nn.Module:
    text, eye, both = IMAGE_TEXT[family]
    config = getattr(transformers, f"{family}Config")(text_config=TEXT | text, vision_config=EYE | eye, **both)
    return getattr(transformers, f"{family}ForConditionalGeneration")(config)


def adapt(model: nn.Module, folder: Path, *, saving: dict[str, Any] | None = None, **settings: Any) -> nn.Module:
    """The model with an adapter, with nothing left at its initial value, that peft has saved in the folder."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **settings))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape)
    adapted.save_pretrained(folder, **(saving or {}))
    return adapted.eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).logits


def assert_same(folder: Path, adapted: nn.Module) -> None:
    """Kept apart and merged, the adapter computes what peft computes."""
    kept, merged = load_policy(folder, params="adapter"), load_policy(folder)
    expected = logits(adapted)
    # float32; merging adds up in another order. 1.6e-5 was the largest seen, of logits up to 10.
    torch.testing.assert_close(logits(kept.model), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(merged.model), expected, rtol=1e-4, atol=1e-4)
    assert kept.vocab_size == merged.vocab_size == expected.shape[-1]


@pytest.fixture(scope="module", params=IMAGE_TEXT)
def image_text(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("image-text") / request.param
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_image_text(request.param)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return folder


LAYERS_OF_TEXT = r"model\.language_model\.layers\.\d+\.(self_attn\.q_proj|mlp\.down_proj)"


@pytest.mark.parametrize(
    "settings",
    every(
        3,
        [
            {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"},
            {"target_modules": "all-linear", "rank_pattern": {r"language_model\.layers\.1\.mlp\.up_proj": 3}},
            {"target_modules": LAYERS_OF_TEXT, "alpha_pattern": {"layers.0.mlp.down_proj": 5}, "use_rslora": True},
            {"target_modules": ["q_proj"], "modules_to_save": ["model.language_model.norm", "lm_head"]},
        ],
    ),
    ids=["by their ends", "all linear, towers too", "by an expression", "trained whole"],
)
def test_an_adapter_of_an_image_text_class_computes_on_text_what_it_computes_in_peft(image_text, settings, tmp_path):
    kind = getattr(transformers, f"{image_text.name}ForConditionalGeneration")
    adapted = adapt(kind.from_pretrained(image_text), tmp_path / "adapter", **settings)
    assert_same(tmp_path / "adapter", adapted)


def test_norms_over_the_text_part_of_such_an_adapter_are_those_of_plain_autograd(image_text, tmp_path):
    kind = getattr(transformers, f"{image_text.name}ForConditionalGeneration")
    adapted = adapt(kind.from_pretrained(image_text), tmp_path, target_modules="all-linear").double()
    policy = load_policy(tmp_path, params="adapter", dtype="float64")
    batch = make_batch(policy, lengths=(3, 2), prompt_lengths=(3, 3))
    trained, norms = [p for p in adapted.parameters() if p.requires_grad], []
    for row in range(len(batch)):
        ids, targets = batch.sequence(row)
        logprobs = adapted(input_ids=ids[None]).logits[0].log_softmax(-1)
        for k in targets.tolist():
            gradients = torch.autograd.grad(logprobs[k - 1, ids[k]], trained, retain_graph=True, allow_unused=True)
            norms.append(sum(g.square().sum() for g in gradients if g is not None).sqrt().item())
    found = measure(policy, batch)["param_grad_norm"].to_numpy(np.float64)
    np.testing.assert_allclose(found, norms, rtol=3e-5)  # norms cast to float32 inside transformers


def test_adapted_experts_of_an_image_text_class_are_found_by_their_parameters(tmp_path):
    text, eye, both = IMAGE_TEXT["Qwen3_5"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text = TEXT | text | experts | {"shared_expert_intermediate_size": 16}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=EYE | eye, **both)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.Qwen3_5MoeForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    kind = transformers.Qwen3_5MoeForConditionalGeneration
    for place, parameters in enumerate(
        (["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ["language_model.layers.1.mlp.experts.gate_up_proj"])
    ):
        model = kind.from_pretrained(tmp_path / "base", experts_implementation="eager")
        adapted = adapt(model, tmp_path / str(place), target_modules=["q_proj"], target_parameters=parameters)
        assert_same(tmp_path / str(place), adapted)


def test_an_adapter_of_the_text_class_fits_the_whole_model(tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = make_image_text("Gemma3")
    whole.save_pretrained(tmp_path / "whole")
    text = transformers.Gemma3ForCausalLM(whole.config.text_config)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.tie_weights()
    text.save_pretrained(tmp_path / "text")
    adapted = adapt(text, tmp_path / "adapter", target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "../whole"}))
    assert_same(tmp_path / "adapter", adapted)


GROWN = {
    "tables trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tables saved beside it": {"target_modules": ["q_proj"]},
    "new tokens trained": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [96, 97, 98, 99]}},
}


@pytest.mark.parametrize(("how", "rows"), [*((how, 100) for how in GROWN), *((how, 90) for how in list(GROWN)[:2])])
# The head is the embedding, and has weights of its own.
@pytest.mark.parametrize("architecture", every(2, ["qwen2", "llama"]))
def test_the_base_gets_the_vocabulary_that_the_adapter_was_trained_with(architecture, how, rows, tmp_path):
    model = load_policy(save_checkpoint(tmp_path / "base", architecture)).model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(rows, mean_resizing=False)
    adapted = adapt(model, tmp_path / "adapter", **GROWN[how])
    assert logits(adapted).shape[-1] == rows
    assert_same(tmp_path / "adapter", adapted)


@pytest.mark.parametrize(("target", "lost"), [("embed_tokens", "lm_head"), ("lm_head", "model.embed_tokens")])
def test_new_rows_that_nobody_saved_are_refused(target, lost, tmp_path):
    model = load_policy(save_checkpoint(tmp_path / "base", "llama")).model
    model.resize_token_embeddings(100, mean_resizing=False)
    model.save_pretrained(tmp_path / "grown")
    adapted = adapt(model, tmp_path / "adapter", target_modules=["q_proj", target])
    said = refusal(tmp_path / "adapter")
    assert "with 100 tokens, its base has 96" in said and f"the rows of {lost}" in said and "--base" in said
    found = load_policy(tmp_path / "adapter", base=tmp_path / "grown", params="adapter")
    torch.testing.assert_close(logits(found.model), logits(adapted), rtol=1e-5, atol=1e-5)


def test_a_trained_token_that_the_base_has_not_got_is_named(tmp_path):
    model = load_policy(save_checkpoint(tmp_path / "base", "llama")).model
    model.resize_token_embeddings(100, mean_resizing=False)
    settings = {"target_modules": ["q_proj"], "trainable_token_indices": [97, 99]}
    adapt(model, tmp_path / "adapter", saving={"save_embedding_layers": False}, **settings)
    said = refusal(tmp_path / "adapter")
    assert "trained the token 99, its base has 96" in said and "--base" in said
