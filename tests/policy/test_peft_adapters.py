"""Adapters of peft: found with their base, merged or kept, and measured over their own parameters alone."""

from __future__ import annotations

import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import peft, save_adapter
from support.cli import complaint
from support.gradients import sum_gradients, used_again
from support.policies import LAYERS, make_batch, make_tokenizer, save_checkpoint
from support.refusals import refused
from support.tiers import every
from torch import Tensor

from gradscope import StepSettings, apply_update
from gradscope.errors import SelfCheckError
from gradscope.gradients import MeasureSettings, TableMeasurement, measure
from gradscope.policy import flat_slices, float_parameters, load_policy, policy_hashes
from gradscope.policy.parameters import measure_only
from gradscope.rollouts import TokenBatch
from gradscope.updates import influence

refusal = partial(complaint, load_policy)

ADAPTERS = {
    "all layers, tied head": ("qwen2", {"r": 3, "target_modules": "all-linear"}),
    "all layers, own head": ("llama", {"r": 2, "target_modules": "all-linear"}),
    "queries and values": ("llama", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "the first block alone": ("qwen2", {"r": 2, "target_modules": ["down_proj"], "layers_to_transform": [0]}),
    "a head that is trained whole": ("llama", {"r": 2, "target_modules": ["o_proj"], "modules_to_save": ["lm_head"]}),
    "embeddings and norms trained whole": (
        "llama",
        {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "norm"]},
    ),
    "biases of the adapted layers": ("qwen2", {"r": 2, "target_modules": ["q_proj", "up_proj"], "bias": "lora_only"}),
    "transposed weights": ("gpt2", {"r": 2, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "magnitudes apart (DoRA)": ("qwen2", {"r": 2, "target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "biases of its own": ("qwen2", {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
}
"""What is adapted → (architecture, its LoraConfig)."""


@pytest.fixture(scope="module", params=every(2, ADAPTERS))
def adapter(request, tmp_path_factory) -> Path:
    architecture, settings = ADAPTERS[request.param]
    folder = tmp_path_factory.mktemp("adapter")
    save_checkpoint(folder / "base", architecture)
    return save_adapter(folder / "adapter", folder / "base", **settings)


@pytest.fixture(scope="module")
def simple(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("simple")
    save_checkpoint(folder / "base", "qwen2")
    return save_adapter(folder / "adapter", folder / "base", r=2, target_modules=["q_proj", "down_proj"])


@pytest.fixture
def broken(simple, tmp_path) -> Path:
    """A copy that a test may break."""
    folder = Path(shutil.copytree(simple.parent, tmp_path / "run")) / "adapter"
    change_config(folder, base_model_name_or_path="../base")
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def in_peft(folder: Path) -> tuple[Any, list[Tensor]]:
    """The adapter in float64 as peft loads it, and the parameters that peft would train."""
    adapted = peft.PeftModel.from_pretrained(
        load_policy(folder.parent / "base", dtype="float64").model, folder, is_trainable=True
    ).double()
    return adapted.eval(), [p for p in adapted.parameters() if p.requires_grad]


def brute_force(folder: Path, batch: TokenBatch) -> Tensor:
    """‖∇ log π‖ of each token over what peft would train: one autograd call each."""
    adapted, trained = in_peft(folder)
    norms = []
    for row in range(len(batch)):
        ids, targets = batch.sequence(row)
        logprobs = adapted(input_ids=ids[None]).logits[0].log_softmax(-1)
        for k in targets.tolist():
            gradients = torch.autograd.grad(logprobs[k - 1, ids[k]], trained, retain_graph=True, allow_unused=True)
            norms.append(sum(g.square().sum() for g in gradients if g is not None).sqrt())
    return torch.stack(norms).detach()


def test_norms_over_an_adapter_are_those_of_brute_force_over_its_parameters(adapter):
    policy = load_policy(adapter, params="adapter", dtype="float64")
    batch = make_batch(policy, lengths=(7, 1, 6, 4), prompt_lengths=(5, 5, 3, 3))
    found = torch.from_numpy(measure(policy, batch)["param_grad_norm"].to_numpy(np.float64))
    # Norms cast to float32 inside transformers; 3e-6 was the largest seen.
    torch.testing.assert_close(found, brute_force(adapter, batch), rtol=3e-5, atol=0)
    assert sum(p.numel() for _, p in float_parameters(policy.model)) == sum(p.numel() for p in in_peft(adapter)[1])


def test_layers_have_the_norms_of_the_merged_model(adapter):
    kept, merged = load_policy(adapter, params="adapter"), load_policy(adapter)
    assert (kept.params, merged.params) == ("adapter", "all") and kept.base == merged.base
    batch = make_batch(merged, lengths=(5, 4), prompt_lengths=(5, 5))
    ours, theirs = measure(kept, batch), measure(merged, batch)
    columns = ["logprob", "logit_grad_norm", *(f"act_grad_norm.{layer}" for layer in range(LAYERS + 1))]
    # float32 on both sides, of sums in another order
    np.testing.assert_allclose(ours[columns], theirs[columns], rtol=2e-4, atol=1e-6)
    assert (ours["param_grad_norm"] != theirs["param_grad_norm"]).all()


def test_a_merged_adapter_computes_what_peft_computes(adapter):
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        expected = in_peft(adapter)[0](input_ids=ids).logits
        found = load_policy(adapter, dtype="float64").model(input_ids=ids).logits
    # peft adds the product of float32 factors.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_self_check_sees_a_wrong_norm_of_an_adapter(simple):
    policy = load_policy(simple, params="adapter")
    batch = make_batch(policy, lengths=(4, 4), prompt_lengths=(3, 3))
    with TableMeasurement(policy, batch, MeasureSettings()) as measurement:
        assert measurement.check.tokens > 0 and measurement.check.largest_difference < 1e-4
    module = next(
        n for n, m in policy.model.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))
    )
    with refused(kind=SelfCheckError), TableMeasurement(used_again(policy, module), batch, MeasureSettings()):
        pass


def test_summed_gradients_are_of_the_adapter_alone(simple):
    policy = load_policy(simple, params="adapter", dtype="float64")
    batch = make_batch(policy, holes=False)
    seeds = torch.randn(1, *batch.input_ids.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = sum_gradients(policy.model, batch, seeds, 4)
    adapted, trained = in_peft(simple)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        ids, targets = batch.sequence(row)
        logprobs = adapted(input_ids=ids[None]).logits[0].log_softmax(-1)
        total = total + (seeds[0, row][batch.response_mask[row]] * logprobs[targets - 1, ids[targets]]).sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, trained)])
    assert found.shape == (1, len(expected))
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5 * expected.norm().item())


@pytest.mark.parametrize("params", ["all", "adapter"])
def test_loading_warns_of_nothing_that_peft_asks_of_transformers(params, simple):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_policy(simple, params=params)


def test_an_update_moves_the_adapter_alone_as_predicted(simple):
    policy = load_policy(simple, params="adapter", dtype="float64")
    batch, step = make_batch(policy), StepSettings("sgd", 1e-4)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    moved = apply_update(policy, batch, step=step)
    who = influence(policy, batch, step=step)
    actual = (moved.after.logprob - moved.before.logprob)[batch.response_mask]
    predicted = torch.tensor(who.contributions["predicted"].tolist(), dtype=torch.float64)
    # First order, and a norm's float32: the step is 1e-4 long.
    assert (predicted - actual).norm() < 5e-3 * actual.norm()
    assert moved.update_norm == pytest.approx(who.update_norm, rel=1e-6)
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    assert all("lora_" in name for name in flat_slices(policy.model))


def test_a_base_is_found_from_the_adapters_folder_then_from_here_then_where_it_is_said(broken, tmp_path, monkeypatch):
    assert load_policy(broken).base == str(broken / "../base")
    change_config(broken, base_model_name_or_path="run/base")
    assert "run/base, is not a local folder and not in the cache" in refusal(broken)
    monkeypatch.chdir(tmp_path)
    assert load_policy(broken).base == "run/base"
    change_config(broken, base_model_name_or_path="nobody/has-this")
    text = refusal(broken)
    assert "nobody/has-this" in text and "--base" in text
    assert load_policy(broken, base=broken.parent / "base").base == str(broken.parent / "base")
    change_config(broken, base_model_name_or_path=None)
    assert "names no base model" in refusal(broken)


def test_adapters_that_do_not_fit_are_refused(broken, tmp_path):
    other = save_checkpoint(tmp_path / "other", "gpt2")
    assert 'a "qwen2", but ' in (said := refusal(broken, base=other)) and 'is a "gpt2"' in said
    change_config(broken, base_model_name_or_path="not/here", auto_mapping=None)
    assert "does not fit its base model" in refusal(broken, base=other)
    change_config(broken, base_model_name_or_path="../base")
    for rank in (10**9, 0, -1, None, 1.5, "2"):
        change_config(broken, r=rank)
        assert "does not fit its base model" in refusal(broken)
    change_config(broken, r=3)
    assert "does not fit its base model" in refusal(broken)
    change_config(broken, r=2, target_modules=["q_proj"])
    assert "which its configuration does not" in refusal(broken)
    change_config(broken, target_modules=["q_proj", "k_proj", "down_proj"])
    assert "lacks base_model" in refusal(broken)
    change_config(broken, peft_type="PREFIX_TUNING")
    assert "kind 'PREFIX_TUNING'" in refusal(broken)
    change_config(broken, peft_type="LORA", target_modules="(")
    assert "does not fit its base model" in refusal(broken)
    change_config(broken, base_model_name_or_path="x" * 5000)
    assert "is not a local folder" in refusal(broken)
    for text in ("{", "[" * 100_000):
        (broken / "adapter_config.json").write_text(text)
        assert "cannot be read" in refusal(broken)


@pytest.mark.filterwarnings(
    "ignore:.lora_bias=True. was passed", "ignore:Adapter 'default'"
)  # by peft, when it is made
@pytest.mark.parametrize(
    "settings",
    [{"lora_bias": True}, {"layer_replication": [[0, 2], [1, 3]]}],
    ids=["biases where the base has none", "layers that share weights"],
)
def test_what_cannot_be_merged_is_measured_apart(settings, tmp_path):
    base = save_checkpoint(tmp_path / "base", "llama")
    folder = save_adapter(tmp_path / "adapter", base, r=2, target_modules=["q_proj", "down_proj"], **settings)
    said = refusal(folder)
    assert "cannot be merged" in said and next(iter(settings)) in said and "--params adapter" in said
    policy = load_policy(folder, params="adapter", dtype="float64")
    batch = make_batch(policy, lengths=(4, 3), prompt_lengths=(4, 4))
    found = torch.from_numpy(measure(policy, batch)["param_grad_norm"].to_numpy(np.float64))
    torch.testing.assert_close(found, brute_force(folder, batch), rtol=3e-5, atol=0)


def test_replicated_layers_that_no_longer_run_are_refused(tmp_path):
    base = save_checkpoint(tmp_path / "base", "qwen2")  # its configuration lists a kind for each layer
    settings = {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 3]]}
    folder = save_adapter(tmp_path / "adapter", base, r=2, **settings)
    for params in ("all", "adapter"):
        assert "does not run (IndexError" in refusal(folder, params=params)


def test_an_adapter_that_torch_saved_is_the_same_adapter_and_nothing_in_it_is_run(broken):
    expected, before = (
        in_peft(broken)[0](input_ids=torch.arange(4, 24)[None]).logits,
        policy_hashes(load_policy(broken)),
    )
    file = broken / "adapter_model.safetensors"
    tensors = load_file(file)
    file.unlink()
    torch.save(tensors, broken / "adapter_model.bin")  # as prime-rl does, with no more than this in the configuration
    known = ("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "bias")
    config = json.loads((broken / "adapter_config.json").read_text())
    config = {name: config[name] for name in (*known, "target_modules", "modules_to_save")}
    (broken / "adapter_config.json").write_text(json.dumps(config))
    with torch.no_grad():
        found = load_policy(broken, dtype="float64").model(input_ids=torch.arange(4, 24)[None]).logits
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)
    after = policy_hashes(load_policy(broken))
    assert after["model"] != before["model"] and after["base_model"] == before["base_model"]
    torch.save(tensors | {"more": torch.ones(1)}, broken / "adapter_model.bin")
    assert policy_hashes(load_policy(broken))["model"] != after["model"]
    torch.save(tensors | {"more": Path("x")}, broken / "adapter_model.bin")
    assert "nothing in it was run" in refusal(broken)


@pytest.mark.all
@pytest.mark.parametrize("depth", [2, 3])
def test_an_adapter_on_adapters_stands_on_all_of_them(depth, tmp_path):
    below = save_checkpoint(tmp_path / "0", "llama")
    for place in range(1, depth + 1):
        targets = ["q_proj", "k_proj", "down_proj"][:place]
        folder = save_adapter(tmp_path / str(place), below, r=2, target_modules=targets)
        change_config(folder, base_model_name_or_path=f"../{below.name}")
        below = folder
    model = load_policy(tmp_path / "0").model
    for place in range(1, depth + 1):
        model = peft.PeftModel.from_pretrained(model, tmp_path / str(place)).merge_and_unload()
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        for params in ("all", "adapter"):
            found = load_policy(below, params=params).model(input_ids=ids).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # float32, added up in another order
    before = policy_hashes(load_policy(below))
    weights = tmp_path / "1" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x80\x3f")  # the last number is 1
    assert policy_hashes(load_policy(below))["base_model"] != before["base_model"]
    change_config(tmp_path / "1", base_model_name_or_path=f"../{depth}")
    assert "leads from adapter to adapter and back" in refusal(below)


UNMERGED = {
    "PREFIX_TUNING": {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"},
    "PROMPT_TUNING": {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 2, "task_type": "CAUSAL_LM"},
}
MERGED = {
    "IA3": {"target_modules": ["q_proj"], "feedforward_modules": []},
    "VERA": {"target_modules": ["q_proj"], "r": 2},
    "LOHA": {"target_modules": ["q_proj"], "r": 2},
}


@pytest.mark.parametrize("kind", every(2, [*UNMERGED, *MERGED]))
def test_other_kinds_of_adapter_are_refused_with_what_can_be_done(kind, tmp_path):
    base = save_checkpoint(tmp_path / "base", "llama")
    settings = peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind](**(UNMERGED | MERGED)[kind])
    adapted = peft.get_peft_model(load_policy(base).model, settings)
    adapted.save_pretrained(tmp_path / "adapter")
    said = refusal(tmp_path / "adapter")
    assert kind in said and ("cannot be merged" in said) == (kind in UNMERGED)
    if kind in UNMERGED:  # as it is said
        with pytest.raises((AttributeError, NotImplementedError, ValueError)):
            adapted.merge_and_unload()
    else:
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
        load_policy(tmp_path / "merged")


def test_an_adapter_of_another_family_is_refused_though_every_shape_fits(tmp_path):
    base = save_checkpoint(tmp_path / "base", "llama")
    folder = save_adapter(tmp_path / "adapter", base, r=2, target_modules=["q_proj"])
    other = Path(shutil.copytree(base, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "mistral", "architectures": None}))
    load_policy(other)  # the same names and shapes
    assert 'is a "mistral"' in refusal(folder, base=other)  # than the base that is named, which is here
    change_config(folder, base_model_name_or_path="not/here")
    assert 'trained on a "LlamaForCausalLM"' in refusal(folder, base=other)  # as peft recorded it
    assert load_policy(folder, base=base).base == str(base)


def test_damaged_and_doubtful_adapters_are_refused(broken):
    whole = (broken / "adapter_model.safetensors").read_bytes()
    tensors = load_file(broken / "adapter_model.safetensors")
    # as from_pretrained and save_pretrained leave them where DeepSpeed's ZeRO-3 holds the weights in parts
    save_file({name: torch.zeros(0) for name in tensors}, broken / "adapter_model.safetensors")
    assert "is empty" in (said := refusal(broken)) and "ZeRO-3" in said
    (broken / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "does not fit its base model" in refusal(broken)
    (broken / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in refusal(broken)
    (broken / "adapter_model.safetensors").write_bytes(whole)
    (broken / "new_embeddings.safetensors").write_bytes(whole)  # some trainers leave such beside an adapter
    load_policy(broken)
    shutil.copy(broken.parent / "base" / "model.safetensors", broken)
    assert "an adapter and a whole model's weights" in refusal(broken)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("base_model.model.", "", "peft's names begin with base_model.model."),  # peft would load none of them
        ("lora_A.weight", "lora_A.default.weight", "save the adapter again, unwrapped"),
        ("layers.0.", "layers.0._fsdp_wrapped_module.", "save the adapter again, unwrapped"),
        ("base_model.model.", "base_model.model._orig_mod.", "save the adapter again, unwrapped"),
        ("layers.2.", "layers.7.", "layers.7.mlp.down_proj.lora_A.weight, for which the base has no layer"),
    ],
)
def test_tensors_of_other_names_are_refused_with_what_they_are(old, new, words, broken):
    file = broken / "adapter_model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(file).items()}, file)
    assert words in (said := refusal(broken)) and ("--base" in said) == ("no layer" in words)


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_an_adapted_table_that_the_head_shares_is_not_merged(tmp_path):
    base = save_checkpoint(tmp_path / "base", "qwen2")
    folder = save_adapter(tmp_path / "adapter", base, r=2, target_modules=["embed_tokens", "q_proj"])
    assert "cannot be merged" in refusal(folder)
    policy = load_policy(folder, params="adapter", dtype="float64")
    batch = make_batch(policy, lengths=(4, 3), prompt_lengths=(4, 4))
    found = torch.from_numpy(measure(policy, batch)["param_grad_norm"].to_numpy(np.float64))
    torch.testing.assert_close(found, brute_force(folder, batch), rtol=3e-5, atol=0)


def test_the_tokenizer_is_the_adapters_else_the_runs_else_the_bases(broken):
    assert load_policy(broken).encode_response("w4") == [4]
    for file in (broken.parent / "base").glob("tokenizer*"):
        file.unlink()
    assert load_policy(broken).tokenizer is None
    make_tokenizer().save_pretrained(broken.parent)  # beside the folder `adapter`
    assert load_policy(broken).encode_response("w4") == [4]


def test_the_hashes_tell_adapters_bases_and_what_is_measured_apart(broken):
    def hashes(**settings: Any) -> dict[str, str]:
        return policy_hashes(load_policy(broken, **settings))

    kept, merged = hashes(params="adapter"), hashes()
    assert {name for name in kept if kept[name] != merged[name]} == {"params"}
    config = json.loads((broken.parent / "base" / "config.json").read_text())
    (broken.parent / "base" / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert {name for name in merged if hashes()[name] != merged[name]} == {"base_configuration"}
    assert policy_hashes(load_policy(broken.parent / "base")).keys() == {"model", "configuration"}


def test_only_known_parameters_can_be_chosen():
    model = torch.nn.Linear(2, 2)
    with refused("scale"):
        measure_only(model, ["scale"])
    with refused():
        measure_only(model, [])
    measure_only(model, ["bias"])
    assert [name for name, _ in float_parameters(model)] == ["bias"] and flat_slices(model) == {"bias": slice(0, 2)}


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "as it begins"])
@pytest.mark.parametrize("params", ["all", "adapter"])
def test_an_adapter_that_acts_only_after_some_tokens_is_refused_merged_or_apart(simple, tmp_path, params, trained):
    settings = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "alora_invocation_tokens": [20, 21]}
    folder = save_adapter(tmp_path / "adapter", simple.parent / "base", **settings)
    if not trained:  # it changes no logit, and has gradients where peft gives it none
        weights = load_file(folder / "adapter_model.safetensors")
        save_file({n: 0 * w if "lora_B" in n else w for n, w in weights.items()}, folder / "adapter_model.safetensors")
    assert "aLoRA" in refusal(folder, base=simple.parent / "base", params=params)


@pytest.mark.parametrize("params", ["all", "adapter"])
def test_an_adapter_that_acts_in_pefts_own_forward_alone_is_refused_merged_or_apart(simple, monkeypatch, params):
    """A variant of LoRA that does not yet exist: its model passes its layers what only it knows."""

    def forward(self, *args, **keywords):
        found = self.get_base_model()(*args, **keywords)
        found.logits = found.logits * torch.linspace(0.9, 1.1, found.logits.shape[-1])
        return found

    assert load_policy(simple, params=params)
    monkeypatch.setattr(peft.PeftModel, "forward", forward)
    assert "peft's own forward" in refusal(simple, params=params)


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS"])
def test_the_adapter_of_a_reward_model_or_a_critic_is_no_policys(broken, task):
    change_config(broken, task_type=task)
    assert task in refusal(broken) and task in refusal(broken, params="adapter")


def test_an_adapter_of_mlx_is_named(broken):
    (broken / "adapter_model.safetensors").rename(broken / "adapters.safetensors")
    assert "mlx_lm.fuse" in refusal(broken)
