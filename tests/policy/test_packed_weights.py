"""Bases whose weights are packed in few bits: measured as the plain model of the weights that the bits stand for."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from support.cli import complaint
from support.gradients import token_gradients
from support.packings import PACKINGS, load_packed, save_full
from support.policies import make_batch, make_tokenizer
from torch import Tensor, nn

from gradscope import TokenJacobian
from gradscope.errors import InputError
from gradscope.gradients import measure
from gradscope.policy import float_parameters, load_policy

refusal = partial(complaint, load_policy)


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    return save_full(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module", params=PACKINGS)
def packed(request, full, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    load_packed(full, quantization_config=PACKINGS[request.param]).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(packed) -> Path:
    """A LoRA trained on the packed base (QLoRA), with nothing left at its initial value."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    adapted = peft.get_peft_model(load_packed(packed), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    adapted.save_pretrained(packed / "adapter")
    return packed / "adapter"


def logits(model: nn.Module) -> Tensor:
    return model(input_ids=torch.arange(4, 24)[None]).logits.detach()


def test_a_packed_base_is_the_plain_model_of_its_dequantized_weights(packed, full):
    policy = load_policy(packed, device="cpu")
    plain = {name: tuple(p.shape) for name, p in load_policy(full).model.named_parameters()}
    assert {name: tuple(p.shape) for name, p in policy.model.named_parameters()} == plain
    assert {type(p) for p in policy.model.parameters()} == {nn.Parameter}
    assert dict(float_parameters(policy.model)).keys() == plain.keys()
    # bitsandbytes multiplies in float32 by weights that it rounds to their scales' dtype; torchao's fp8 is exact.
    torch.testing.assert_close(logits(policy.model), logits(load_packed(packed)), rtol=1e-4, atol=1e-4)


def test_the_norms_of_a_packed_base_are_those_of_full_autograd_on_its_dequantized_weights(packed):
    policy = load_policy(packed, device="cpu")
    batch = make_batch(policy, lengths=(3, 4), prompt_lengths=(3, 2))
    norms = measure(policy, batch)["param_grad_norm"]
    plain = load_policy(packed, device="cpu")
    plain.model.double()
    wanted = token_gradients(plain, batch).norm(dim=1)
    assert wanted.min() > 0
    torch.testing.assert_close(torch.tensor(norms.to_numpy()).double(), wanted, rtol=1e-5, atol=0)


def test_the_adapter_of_a_packed_base_has_the_norms_of_autograd_through_the_packed_layers(packed, adapter):
    peft = pytest.importorskip("peft")
    policy = load_policy(adapter, params="adapter", base=packed, device="cpu")
    batch = make_batch(policy, lengths=(3, 4), prompt_lengths=(3, 2))
    table = measure(policy, batch)
    model = peft.PeftModel.from_pretrained(load_packed(packed), adapter, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(p.numel() for _, p in float_parameters(policy.model))
    logprobs, norms = [], []
    for row in range(len(batch)):
        ids, targets = batch.sequence(row)
        for target in targets.tolist():
            scores = model(input_ids=ids[None]).logits[0, target - 1] / batch.temperature[row]
            logprobs.append(scores.log_softmax(-1)[ids[target]])
            norms.append(torch.cat([g.flatten() for g in torch.autograd.grad(logprobs[-1], trained)]).norm())
    assert min(norms) > 0
    ours = torch.tensor(table[["logprob", "param_grad_norm"]].to_numpy())
    theirs = torch.stack([torch.stack(logprobs).detach(), torch.stack(norms)], 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_an_adapter_is_merged_into_the_dequantized_base(packed, adapter):
    merged = load_policy(adapter, base=packed, device="cpu")
    apart = load_policy(adapter, params="adapter", base=packed, device="cpu")
    torch.testing.assert_close(logits(merged.model), logits(apart.model), rtol=1e-4, atol=1e-4)
    assert merged.base == str(packed)


def test_a_model_with_packed_weights_is_refused_where_all_its_weights_are_asked_for(packed):
    batch = make_batch(load_policy(packed, device="cpu"), lengths=(3,), prompt_lengths=(3,))
    with pytest.raises(InputError, match="packed"):
        TokenJacobian(load_packed(packed), batch).vjp(torch.ones(1, batch.num_tokens))


def test_scoring_a_packed_model_changes_neither_its_bits_nor_how_it_trains(packed):
    model = load_packed(packed)
    batch = make_batch(load_policy(packed, device="cpu"), lengths=(3,), prompt_lengths=(3,))
    before = logits(model)
    scored = TokenJacobian(model, batch).statistics.logprob[batch.response_mask]
    assert torch.equal(logits(model), before)
    hidden = model.get_input_embeddings()(torch.arange(4, 24)[None]).detach().requires_grad_(True)
    model(inputs_embeds=hidden).logits.square().mean().backward()
    assert hidden.grad.norm() > 0
    wanted = TokenJacobian(load_policy(packed, device="cpu"), batch).statistics.logprob[batch.response_mask]
    torch.testing.assert_close(scored, wanted, rtol=1e-4, atol=1e-4)


def test_a_base_whose_activations_are_rounded_has_the_gradients_of_its_dequantized_weights(full, tmp_path):
    """compressed-tensors' W8A8 rounds every layer's input, through which autograd finds no gradient."""
    library = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor

    model, plain = load_policy(full).model, {}
    groups = {"g": library.preset_name_to_scheme("W8A8", ["Linear"])}
    library.apply_quantization_config(model, library.QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.copy_(module.weight.abs().amax(1, keepdim=True) / 127)
            plain[f"{name}.weight"] = (module.weight / module.weight_scale).round() * module.weight_scale
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    wanted, policy = load_policy(full), load_policy(tmp_path, device="cpu")
    wanted.model.load_state_dict(plain, strict=False)
    batch = make_batch(wanted, lengths=(3, 4), prompt_lengths=(3, 2))
    norms = [measure(each, batch)["param_grad_norm"] for each in (policy, wanted)]
    assert norms[0].to_numpy() == pytest.approx(norms[1].to_numpy(), rel=1e-4)


def test_weights_that_cannot_be_dequantized_are_refused_in_one_line(full, tmp_path):
    folder = Path(shutil.copytree(full, tmp_path / "gptq"))
    path = folder / "config.json"
    packed = {"quantization_config": {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | packed))
    assert "hqq" in refusal(folder, device="cpu").lower()
