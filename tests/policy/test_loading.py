"""Checkpoints as trainers leave them: shards, half precisions, runs' folders, code of their own, several devices."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import save_adapter
from support.cli import complaint
from support.policies import (
    CAUSAL,
    LAYERS,
    VOCAB,
    make_batch,
    make_model,
    make_policy,
    make_tokenizer,
    save_checkpoint,
    write_jsonl,
)
from support.processes import Command
from support.tiers import every

from gradscope.gradients import TokenGradientMeter, measure, measuring
from gradscope.policy import checkpoint as checkpoint_files, checkpoint_step, hash_ahead, load_policy, weights_hash
from gradscope.rollouts import read_checkpoint_dump, read_rollouts

refusal = partial(complaint, load_policy)

IDS = torch.arange(4, 24)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_weights_in_shards_are_those_in_one_file(folder, tmp_path):
    make_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-0*.safetensors"))) > 2
    assert torch.equal(logits(load_policy(tmp_path).model), logits(load_policy(folder).model))
    before = weights_hash(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    assert weights_hash(tmp_path) != before
    shard.unlink()
    assert "no usable weights in" in refusal(tmp_path)


def test_a_hash_that_was_begun_beside_loading_is_the_same_and_no_older_than_the_files(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "WORTH_A_THREAD", 0)
    make_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    plain = weights_hash(tmp_path)
    hash_ahead(tmp_path)
    assert len(checkpoint_files._AHEAD) == 1
    assert weights_hash(tmp_path) == plain and not checkpoint_files._AHEAD
    hash_ahead(tmp_path)
    (begun,) = checkpoint_files._AHEAD.values()
    assert begun.result() == plain  # before the files change
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes() + b" ")
    assert weights_hash(tmp_path) != plain
    checkpoint_files._AHEAD.clear()
    hash_ahead(tmp_path / "nothing")
    hash_ahead("x" * 5000)


MEMORY = """
import sys, threading, time
import torch
from gradscope.policy import load_policy

def resident():
    with open("/proc/self/status") as lines:
        return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Rss")}

def watch():
    while True:
        peak[0] = max(peak[0], resident()["RssAnon"])
        time.sleep(0.001)

load_policy(sys.argv[1], dtype="bfloat16", device="cpu")  # what is imported on the way counts for nothing
peak = [0]
before = resident()["RssAnon"]
threading.Thread(target=watch, daemon=True).start()
model = load_policy(sys.argv[1], dtype=sys.argv[2], device="cpu").model
peak[0] = max(peak[0], resident()["RssAnon"])
print(peak[0] - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""
"""Prints what loading takes at most of memory that is not the page cache's, and the size of the weights."""


@pytest.mark.all
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_in_shards_is_never_twice_in_memory(dtype, tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {"vocab_size": 20_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    settings |= {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**settings))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    peak, weights = map(int, Command("-c", MEMORY, tmp_path, dtype).wait().stdout.split())
    assert weights > 60e6
    # As they are in the files they stay the files' own pages, of the page cache; else they are there once.
    assert peak < (1.15 * weights if dtype == "float32" else 0.3 * weights) + 16e6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_checkpoint_in_half_precision_is_computed_with_in_float32_on_the_cpu(dtype, tmp_path):
    narrow = make_model("llama").to(getattr(torch, dtype))
    narrow.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, device="cpu")
    assert policy.dtype == torch.float32
    pairs = zip(policy.model.parameters(), narrow.parameters(), strict=True)
    assert all(torch.equal(ours, theirs.float()) for ours, theirs in pairs)  # widening rounds nothing
    assert load_policy(tmp_path, dtype=dtype, device="cpu").dtype == getattr(torch, dtype)


def test_a_checkpoint_of_a_run_finds_the_tokenizer_above_it(tmp_path):
    save_checkpoint(tmp_path / "checkpoint-20", "llama", tokenizer=False)
    assert load_policy(tmp_path / "checkpoint-20").tokenizer is None
    make_tokenizer().save_pretrained(tmp_path)
    assert load_policy(tmp_path / "checkpoint-20").encode_response("w4 w95") == [4, 95]
    elsewhere = Path(shutil.copytree(tmp_path / "checkpoint-20", tmp_path / "final"))
    assert load_policy(elsewhere).tokenizer is None  # it is no checkpoint by its name


@pytest.mark.parametrize("beside", ["actor/huggingface", "actor", ".", ".."])
def test_a_part_of_a_checkpoint_finds_the_tokenizer_in_another(beside, folder, tmp_path):
    part = tmp_path / "global_step_20" / "actor" / "merged"
    shutil.copytree(folder, part, ignore=shutil.ignore_patterns("tokenizer*"))
    assert load_policy(part).tokenizer is None
    make_tokenizer().save_pretrained(tmp_path / "global_step_20" / beside)
    assert load_policy(part).encode_response("w4 w95") == [4, 95]


def test_the_folder_of_a_run_is_refused_with_its_newest_checkpoint(folder, tmp_path):
    for step in (20, 100, 3):
        shutil.copytree(folder, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-best").mkdir()
    assert f"such as the newest: {tmp_path / 'checkpoint-100'}" in refusal(tmp_path)
    for name in ("global_step_200", "iter_0000300", "checkpoints/step-000400"):
        (tmp_path / name / "actor").mkdir(parents=True)
        assert f"the newest: {tmp_path / name}" in refusal(tmp_path)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)  # the trained model itself, saved in the end
    load_policy(tmp_path)


@pytest.mark.parametrize("part", ["actor/huggingface", "policy/weights/hf", "lora_adapter"])
def test_the_folder_around_a_checkpoints_parts_is_refused_with_the_one_that_holds_the_model(part, folder, tmp_path):
    outer, inner = tmp_path / "run" / "global_step_5", tmp_path / "run" / "global_step_5" / part
    if part == "lora_adapter":
        save_adapter(inner, folder, r=2, target_modules=["q_proj"])
    else:
        shutil.copytree(folder, inner)
    (outer / "critic").mkdir()
    for given in (outer, outer.parent, inner.parent):
        assert str(inner) in refusal(given)
    load_policy(inner)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_weights_that_are_named_as_a_wrapper_names_them_are_refused_with_that_name(prefix, tmp_path):
    from safetensors.torch import load_file, save_file

    file = save_checkpoint(tmp_path, "llama") / "model.safetensors"
    weights = load_file(file)
    save_file({prefix + name: weight for name, weight in weights.items()}, file, metadata={"format": "pt"})
    said = refusal(tmp_path)
    assert f"as {prefix}lm_head.weight" in said and "wrapped" in said
    names = {name.removeprefix("model."): weight for name, weight in weights.items()}  # of the body, saved alone
    save_file(names, file, metadata={"format": "pt"})
    torch.testing.assert_close(
        logits(load_policy(tmp_path).model), logits(make_model("llama")), rtol=1e-4, atol=1e-4
    )  # float32, another attention implementation


def test_text_with_tokens_that_the_model_has_not_got_is_refused(folder, tmp_path):
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<x{place}>" for place in range(VOCAB + 4 - len(tokenizer))])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    last = tokenizer.convert_ids_to_tokens(VOCAB + 3)
    tokenizer.save_pretrained(model)
    policy = load_policy(model)
    assert policy.encode_response("w4 w5") == [4, 5]
    for encode, text in (
        (policy.encode_response, f"w4 {last}"),
        (policy.encode_prompt, last),
        (policy.encode_prompt, [{"role": "user", "content": f"w4 {last}"}]),
    ):
        said = complaint(encode, text)
        assert f"{VOCAB + 3} of {last!r}" in said and f"has {VOCAB} tokens" in said


@pytest.mark.parametrize(
    ("name", "state", "step"),
    [
        ("checkpoint-7", {"global_step": 500}, 500),  # transformers and TRL
        ("step-000040", {"step": 40, "nonfinite_in_a_row": 0}, 40),  # gradscope
        ("checkpoint-7", None, 7),
        ("global_step_20", None, 20),
        ("checkpoint-7", {"epoch": 1}, 7),
        ("final", {"global_step": True}, None),
        ("qwen2.5", None, None),
    ],
)
def test_the_step_of_a_checkpoint_is_its_trainers_word_or_its_name(name, state, step, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    if state is not None:
        (folder / "trainer_state.json").write_text(json.dumps(state))
    assert checkpoint_step(folder) == step
    for part in ("adapter", "actor/huggingface", "policy/weights"):
        (folder / part).mkdir(parents=True)
        assert checkpoint_step(folder / part) == step


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("verl/global_step_500/actor/huggingface", 500),
        ("verl/global_step_500/actor/lora_adapter", 500),
        ("verl/global_step_500/actor", 500),
        ("verl/global_step_500/actor/merged_hf_model", 500),
        ("nemo/step_500/policy/weights", 500),
        ("nemo/step_500/policy/weights/iter_0000000", 500),
        ("nemo/step_500/policy/weights/model/consolidated", 500),
        ("slime/iter_0000500", 500),
        ("slime/iter_0000000", 0),
        ("slime/iter_0000500_hf", 500),
        ("Qwen3-4B_slime_hf_iter_0000500", 500),
        ("Qwen3-4B_slime_hf/500", 500),  # --save-hf Qwen3-4B_slime_hf/{rollout_id}
        ("ours/checkpoints/step-000060", 60),
        ("prime-rl/weights/step_500", 500),
        ("prime-rl/weights/step_500/lora_adapters", 500),
        ("v0-20261120-101500/checkpoint-500", 500),
        ("v0-2026-11-20/checkpoint-500/merged", 500),
        ("openrlhf/global_step500_hf", 500),
        ("checkpoint-500/global_step480", 480),
        ("areal/default/epoch0epochstep9globalstep499", 499),
        ("lightning/epoch=0-step=500", 500),
        ("grpo-500-steps", 500),
        ("tunix/actor/500", 500),
        ("sft/checkpoint-1000/grpo/global_step_20/actor", 20),
        ("sft/checkpoint-1000/grpo/final", None),  # of a run of its own, which began at an older one
        ("v0-20261120-101500", None),
        ("run-2026-11-20", None),
        ("checkpoint-2026-11-20", None),
        ("checkpoint-20261120", None),
        ("checkpoints/20261120", None),
        ("phi-4", None),
        ("qwen-2", None),
        ("Mistral-Small-24B-Instruct-2501", None),
        ("step-7b", None),
        ("seeds/7", None),
        ("verl/global_step_500/actor/my-own-export", 500),
        ("verl/global_step_500/qwen3-4b", 500),
        ("checkpoint-500-merged", 500),
        ("epoch_1_step_500_hf", 500),
        ("model--val_loss=0.1-step=500-consumed_samples=4000.0", 500),
        ("ckpt_2026-11-20_step_500", 500),
        ("step_500_20261120", 500),
        ("recipe/step_2_rl/model", None),
        ("recipe/step_2_rl/checkpoint-500", 500),
    ],
)
def test_the_step_is_read_off_whichever_part_of_the_path_has_it(path, step, tmp_path, monkeypatch):
    folder = tmp_path / path
    folder.mkdir(parents=True)
    assert checkpoint_step(folder) == checkpoint_step(path) == step
    monkeypatch.chdir(folder)
    assert checkpoint_step(".") == step
    (tmp_path / "latest").symlink_to(folder)
    assert checkpoint_step(tmp_path / "latest") == step
    monkeypatch.chdir(tmp_path)
    assert checkpoint_step("latest") == step
    named = tmp_path / "checkpoint-3"
    named.symlink_to(folder)  # the name that was given comes first
    assert checkpoint_step(named) == 3


@pytest.mark.parametrize("layout", ["global_step_500/actor/huggingface", "step_500/policy/weights", "iter_0000500"])
def test_the_rollouts_that_a_checkpoint_sampled_are_taken_in_every_layout(layout, folder, tmp_path):
    model = Path(shutil.copytree(folder, tmp_path / layout))
    (tmp_path / "dumps").mkdir()
    for step in range(499, 503):
        row = {"input": "w4", "output": f"w{step - 450}", "score": 1.0, "step": step, "gts": "w5"}
        (tmp_path / "dumps" / f"{step}.jsonl").write_text(json.dumps(row) + "\n")
    dump = read_checkpoint_dump(tmp_path / "dumps", load_policy(model), checkpoint_step(model))
    assert dump.steps.tolist() == [501] and dump.notes[-1].kind == "step"
    assert dump.batch.input_ids[dump.batch.response_mask].tolist() == [51]


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({ran!r}).write_text("ran")
class OddConfig(LlamaConfig):
    model_type = {kind!r}
class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


def write_odd(folder: Path, kind: str, ran: Path) -> Path:
    """A checkpoint that brings its own code, which leaves a file behind as soon as it is imported."""
    save_checkpoint(folder, "llama")
    (folder / "odd.py").write_text(CODE.format(ran=str(ran), kind=kind))
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    changed = {"model_type": kind, "auto_map": own, "architectures": ["OddForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def test_a_checkpoints_own_code_runs_only_where_it_is_asked_for(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    ran = tmp_path / "ran"
    odd = write_odd(tmp_path / "odd", "odd_llama", ran)
    assert "brings its own code (odd.OddConfig)" in refusal(odd) and "--trust-remote-code" in refusal(odd)
    assert not ran.exists()
    policy = load_policy(odd, trust_remote_code=True)
    assert ran.exists() and type(policy.model).__name__ == "OddForCausalLM"
    assert torch.equal(logits(policy.model), logits(load_policy(folder).model))


@pytest.mark.parametrize("name", every(2, CAUSAL))
def test_dispatched_over_devices_a_policy_has_the_norms_that_it_has_whole(name):
    # accelerate's hooks replace each module's forward; with a single device they move nothing.
    from accelerate import dispatch_model

    whole, spread = make_policy(name), make_policy(name)
    batch = make_batch(whole, lengths=(5, 3), prompt_lengths=(4, 4))
    dispatch_model(spread.model, {"": "cpu"}, force_hooks=True)
    assert "forward" in vars(spread.blocks[0])
    expected, found = measure(whole, batch), measure(spread, batch)
    assert [*found] == [*expected]
    for column in (c for c in expected if "norm" in c):
        assert found[column].tolist() == expected[column].tolist(), column
    with measuring(spread.model), measuring(whole.model):
        meters = [TokenGradientMeter(policy, batch.sequence(0)[0]) for policy in (spread, whole)]
    assert meters[0].ownership == meters[1].ownership  # nothing went the slow way for the hooks' sake


def test_a_forward_that_is_replaced_by_anyone_else_is_still_no_rules():
    policy = make_policy("llama")
    layer = policy.blocks[0].mlp.up_proj
    layer.forward = lambda x: torch.nn.functional.linear(x, 2 * layer.weight)
    batch = make_batch(policy, lengths=(4, 3), prompt_lengths=(4, 4))
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, batch.sequence(0)[0])
    assert [*meter.ownership.general] == ["model.layers.0.mlp.up_proj.weight"]


def test_a_map_of_devices_places_the_policy_and_an_unknown_device_is_refused(folder):
    for device in ("auto", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}):
        policy = load_policy(folder, device=device)
        assert {p.device.type for p in policy.model.parameters()} <= {"cpu", "cuda"}
    assert "'nonsense'" in refusal(folder, device="nonsense")


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""What the four bits of an FP4 number stand for."""


def save_mxfp4(folder: Path) -> torch.nn.Module:
    """A tiny gpt-oss whose experts are saved in MXFP4, as OpenAI's are: 32 numbers share a power of two.

    Returned is the same model with the numbers that were packed, in float32.
    """
    from safetensors.torch import save_file
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 2}
    config = GptOssConfig(**sizes, layer_types=["sliding_attention", "full_attention"], max_position_embeddings=64)
    generator, model, packed = torch.Generator().manual_seed(0), GptOssForCausalLM(config), {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_((0.2 * torch.randn(weight.shape, generator=generator)).bfloat16())
            if not name.endswith(("gate_up_proj", "down_proj")):
                packed[name] = weight.bfloat16()
                continue
            experts, inner, outer = weight.shape
            bits = torch.randint(16, (experts, outer, inner // 32, 32), generator=generator)
            exponents = torch.randint(122, 126, (experts, outer, inner // 32), generator=generator)
            numbers = FP4[bits] * torch.exp2(exponents[..., None] - 127.0)
            weight.copy_(numbers.reshape(experts, outer, inner).transpose(1, 2))
            packed[f"{name}_blocks"] = (bits[..., ::2] | bits[..., 1::2] << 4).to(torch.uint8)
            packed[f"{name}_scales"] = exponents.to(torch.uint8)
    config.save_pretrained(folder)
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    changed = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}, "dtype": "bfloat16"}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed | {"architectures": ["GptOssForCausalLM"]}))
    return model.eval()


def test_experts_in_mxfp4_are_unpacked_into_the_dtype_that_is_asked_for(tmp_path):
    packed = save_mxfp4(tmp_path)
    for dtype in ("float32", "float64", "bfloat16"):
        policy = load_policy(tmp_path, dtype=dtype, device="cpu")
        pairs = zip(policy.model.named_parameters(), packed.parameters(), strict=True)
        assert all(p.dtype == policy.dtype and torch.equal(p.float(), q) for (_, p), q in pairs)
    policy = load_policy(tmp_path, device="cpu")
    assert policy.dtype == torch.float32
    torch.testing.assert_close(logits(policy.model), logits(packed), rtol=1e-5, atol=1e-5)
    assert load_policy(tmp_path, dtype="upcast", device="cpu").dtype == torch.float32
    measure(policy, make_batch(policy, lengths=(3, 2), prompt_lengths=(3, 3)))  # the self-check is plain autograd's


def test_weights_that_predict_tokens_further_ahead_are_no_part_of_the_policy(tmp_path):
    """DeepSeek-V3's and GLM-4.5's checkpoints hold a layer behind the last block that log π does not depend on."""
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    wanted = logits(load_policy(tmp_path, device="cpu").model)
    weights, last = load_file(tmp_path / "model.safetensors"), f"model.layers.{LAYERS}."
    block = {name: weight.clone() for name, weight in weights.items() if "layers.0." in name}
    more = {name.replace("model.layers.0.", last): weight for name, weight in block.items()}
    save_file(weights | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert last in refusal(tmp_path)  # a block that config.json does not count
    more |= {f"{last}eh_proj.weight": torch.ones(2, 4), f"{last}enorm.weight": torch.ones(2)}
    save_file(weights | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(load_policy(tmp_path, device="cpu").model), wanted)


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification", "RewardModel"])
def test_a_model_that_scores_text_is_no_policy(folder, tmp_path, head):
    """A tied head would be filled by the embedding, and a reward model or a critic measured as a policy."""
    copy = Path(shutil.copytree(folder, tmp_path / "scores"))
    change_config(copy, architectures=[f"Llama{head}"], tie_word_embeddings=True)
    assert head in refusal(copy)


def test_a_model_without_a_head_is_called_so(tmp_path):
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=16, **sizes)).save_pretrained(tmp_path)
    assert "BertModel" in refusal(tmp_path)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("asked", ["flash_attention_2", "kernels-community/flash-attn"])
def test_attention_that_another_machine_had_is_left_out(folder, tmp_path, key, asked):
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    change_config(copy, **{key: asked})
    assert torch.equal(logits(load_policy(copy, device="cpu").model), logits(load_policy(folder, device="cpu").model))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_ids_are_measured_without_the_tokenizer_that_cannot_be_used(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "broken"))
    (copy / "tokenizer.json").write_text("{}")
    with pytest.warns(UserWarning, match="tokenizer"):
        policy = load_policy(copy, device="cpu")
    assert policy.tokenizer is None and policy.decode([5]) == "<5>"
    rows = [{"prompt_ids": [5, 6], "response_ids": [7, 8], "advantage": 1.0}]
    assert len(measure(policy, read_rollouts(write_jsonl(tmp_path / "ids.jsonl", rows), policy))) == 2
    rows = [{"prompt": "w5 w6", "response": "w7", "advantage": 1.0}]
    assert "cannot be used" in complaint(read_rollouts, write_jsonl(tmp_path / "text.jsonl", rows), policy)


def test_a_tokenizer_that_brings_its_own_code_names_the_flag_that_runs_it(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "own"))
    (copy / "tokenizer.json").unlink()
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "tokenizer_class": "Own"}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.warns(UserWarning, match="--trust-remote-code"):
        policy = load_policy(copy, device="cpu")
    assert "--trust-remote-code" in complaint(policy.encode_prompt, "w5")


@pytest.mark.all
def test_python_without_docstrings_is_refused_by_its_flag(tmp_path):
    """transformers reads the docstrings of some architectures."""
    text = f"import sys, gradscope\ngradscope.load_policy({str(save_checkpoint(tmp_path, 'mixtral'))!r})"
    done = subprocess.run([sys.executable, "-OO", "-c", text], capture_output=True, text=True)
    assert done.returncode == 0 or "-OO" in done.stderr.splitlines()[-1]
