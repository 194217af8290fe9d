"""Loading a policy: what cannot be measured is refused with a line that helps; blocks and tokenizers are found."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from support.cli import complaint
from support.policies import (
    ARCHITECTURES,
    CAUSAL,
    CONTEXT,
    EOS,
    LAYERS,
    VOCAB,
    make_model,
    make_policy,
    make_tokenizer,
    save_checkpoint,
)
from support.refusals import refused
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from gradscope.policy import (
    Policy,
    check_prompt,
    find_blocks,
    find_checkpoint,
    load_policy,
    weights_hash,
)
from gradscope.policy.loading import find_lossy_text

refusal = partial(complaint, load_policy)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in (*CAUSAL, "bert"):
        save_checkpoint(folder / name, name, chat=True)
    return folder


@pytest.fixture
def checkpoint(checkpoints, tmp_path) -> Path:
    """A copy of one that a test may break."""
    return Path(shutil.copytree(checkpoints / "llama", tmp_path / "llama"))


@pytest.mark.parametrize("name", CAUSAL)
def test_a_saved_policy_loads_in_eval_mode_with_its_logits(checkpoints, name):
    policy, made = load_policy(checkpoints / name, device="cpu"), make_policy(name)
    assert not policy.model.training and policy.dtype == torch.float32
    assert (policy.vocab_size, policy.context, len(policy.blocks)) == (VOCAB, CONTEXT, LAYERS)
    notes = [policy.length_notes(longest) for longest in (CONTEXT, CONTEXT + 1)]
    assert [len(told) for told in notes] == [0, 1] and f"context of {CONTEXT:,} tokens" in notes[1][0]
    ids = torch.randint(4, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = policy.model(input_ids=ids).logits, made.model(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)  # float32, another attention implementation


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "camembert", "data2vec-text", "bert"])
def test_the_context_is_the_longest_sequence_that_the_model_takes(kind):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = AutoConfig.for_model(kind, vocab_size=30, max_position_embeddings=30, is_decoder=True, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    longest = Policy(model, None, find_blocks(model)).context
    ids = torch.full((1, longest + 1), 5)
    assert model(input_ids=ids[:, :longest]).logits.shape[1] == longest
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids)


@pytest.mark.parametrize("name", ["./nope", "../nope", "a/..", "foo--bar/x", "a/b.git", "nope", "a" * 300, "a/b/c"])
def test_what_is_no_name_of_the_hub_is_a_folder_that_is_not_there(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    assert find_checkpoint(name) == name
    assert "holds no config.json" in refusal(name)


def test_a_name_of_the_hub_is_found_in_the_local_cache_or_told_how(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "run `hf download somebody/tiny`" in refusal("somebody/tiny")
    cached = tmp_path / "hub" / "models--somebody--tiny"
    shutil.copytree(checkpoint, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert load_policy("somebody/tiny").path == str(cached / "snapshots" / "abc")


def test_weights_of_its_layers_that_the_model_has_no_use_for_are_refused_others_are_not(checkpoint):
    from safetensors.torch import load_file, save_file

    config = checkpoint / "config.json"
    given = json.loads(config.read_text())
    config.write_text(json.dumps(given | {"num_hidden_layers": given["num_hidden_layers"] - 1, "layer_types": None}))
    last = f"model.layers.{given['num_hidden_layers'] - 1}"
    assert f"weights that config.json does not use ({last}." in refusal(checkpoint)
    config.write_text(json.dumps(given))
    weights = load_file(checkpoint / "model.safetensors") | {"v_head.summary.weight": torch.ones(1, 32)}
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()  # as GPT-J's and GPT-Neo's checkpoints hold it
    weights |= {"model.layers.0.attn.bias": mask, "model.layers.1.attn.attention.masked_bias": mask.clone()}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert "v_head" not in "".join(name for name, _ in load_policy(checkpoint).model.named_parameters())


def test_an_unknown_dtype_is_refused_with_the_known_ones(checkpoint):
    assert "'float8' is not one of float32, float64, bfloat16, float16" in refusal(checkpoint, dtype="float8")


def test_a_policy_without_a_tokenizer_loads_and_says_so_only_when_text_comes(checkpoint):
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    (checkpoint / "chat_template.jinja").unlink()
    policy = load_policy(checkpoint)
    assert policy.tokenizer is None and policy.decode([4, 5]) == "<4><5>"
    for encode in (policy.encode_prompt, policy.encode_response):
        with refused("llama"):
            encode("w4")


def test_a_tokenizer_that_loses_text_is_refused(checkpoint):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0} | {f"W{i}": i for i in range(1, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert find_lossy_text(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")) is None
    from tokenizers import normalizers

    backend.normalizer = normalizers.Lowercase()  # "W5" becomes "w5", which is unknown
    lossy = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    text, back = find_lossy_text(lossy)
    assert text.strip() != back.strip()
    lossy.save_pretrained(checkpoint)
    with pytest.warns(UserWarning, match="tokenizer"):
        policy = load_policy(checkpoint)
    assert f"it makes {back!r} of {text!r}" in complaint(policy.encode_prompt, "w4")


def test_a_chat_is_templated_and_an_assistants_last_turn_stays_open():
    made = make_policy("llama")
    policy = Policy(made.model, make_tokenizer(chat=True), made.blocks_name)
    user = {"role": "user", "content": "w4"}
    assert policy.encode_prompt([user]) == [1, 4, 1]
    assert policy.encode_prompt([user, {"role": "assistant", "content": "w5 w6"}]) == [1, 4, 1, 5, 6]
    with refused():
        make_policy("llama", tokenizer=True).encode_prompt([user])


def test_a_tokenizer_that_renders_chats_itself_needs_no_template():
    """mistral_common's, of a folder with tekken.json."""
    made, tokenizer = make_policy("llama"), make_tokenizer()

    class Rendering(type(tokenizer)):
        def apply_chat_template(self, chat, **_):
            return [1, *(int(turn["content"][1:]) for turn in chat)]

    tokenizer.__class__ = Rendering
    assert tokenizer.chat_template is None
    policy = Policy(made.model, tokenizer, made.blocks_name)
    assert policy.encode_prompt([{"role": "user", "content": "w4"}]) == [1, 4]


@pytest.mark.parametrize("prompt", [None, 5, [], ["w4"], [{"role": "user"}], {"role": "user", "content": "w4"}])
def test_what_is_no_prompt_is_named(prompt):
    with refused("row 3"):
        check_prompt(prompt, "row 3")


def test_a_response_gets_no_special_token():
    policy = make_policy("llama", tokenizer=True)
    assert EOS not in policy.encode_response("w4 w5")


@pytest.mark.parametrize("name", CAUSAL)
def test_blocks_are_found_by_themselves_and_by_name(name):
    model = make_model(name)
    found = find_blocks(model)
    assert found == ARCHITECTURES[name].last_norm.rpartition(".")[0] + (".h" if name == "gpt2" else ".layers")
    assert find_blocks(model, found) == found
    assert len(Policy(model, None, found).blocks) == LAYERS


def test_blocks_that_are_ambiguous_must_be_named():
    model = make_model("llama")
    model.model.twin = nn.ModuleList(nn.Linear(2, 2) for _ in range(LAYERS))
    with refused("model.layers", "model.twin"):
        find_blocks(model)
    assert find_blocks(model, "model.layers") == "model.layers"


def test_a_model_without_any_module_list_is_refused():
    model = make_model("llama")
    model.model.layers = nn.Sequential(*model.model.layers)
    with refused():
        find_blocks(model)


def test_the_hash_of_the_weights_changes_with_a_weight_and_with_nothing_else(checkpoint, checkpoints):
    from safetensors.torch import load_file, save_file

    before = weights_hash(checkpoint)
    assert before == weights_hash(checkpoints / "llama") and len(before) == 64
    (checkpoint / "notes.txt").write_text("more")
    assert weights_hash(checkpoint) == before
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert weights_hash(checkpoint) != before
