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
from torch import nn

from gradscope.errors import InputError
from gradscope.policy import (
    Policy,
    check_prompt,
    fetch_policy,
    find_blocks,
    load_policy,
    load_tokenizer,
    takes,
    weights_hash,
)
from gradscope.policy.loading import is_causal, round_trips

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
    ids = torch.randint(4, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = policy.model(input_ids=ids).logits, made.model(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)  # float32, another attention implementation


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "qwen3_moe"])
def test_a_policy_in_float64_runs(checkpoints, name):
    policy = load_policy(checkpoints / name, dtype="float64", device="cpu")
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[4, 5, 6]])).logits
        expected = make_policy(name, torch.float64).model(input_ids=torch.tensor([[4, 5, 6]])).logits
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)  # saved in float32


@pytest.mark.parametrize("name", ["./nope", "../nope", "a/..", "foo--bar/x", "a/b.git", "nope", "a" * 300, "a/b/c"])
def test_what_is_no_name_of_the_hub_is_a_folder_that_is_not_there(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    assert fetch_policy(name) == name
    assert "holds no config.json" in refusal(name)


def test_what_the_hub_does_not_give_is_refused(monkeypatch):
    def fail(name, **_settings):
        raise OSError(f"{name} is nowhere\nat all")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(InputError, match=r"could not be fetched from the model hub \(owner/model is nowhere\)"):
        fetch_policy("owner/model")


def test_weights_of_its_layers_that_the_model_has_no_use_for_are_refused_others_are_not(checkpoint):
    from safetensors.torch import load_file, save_file

    config = checkpoint / "config.json"
    given = json.loads(config.read_text())
    config.write_text(json.dumps(given | {"num_hidden_layers": given["num_hidden_layers"] - 1, "layer_types": None}))
    last = f"model.layers.{given['num_hidden_layers'] - 1}"
    assert f"weights that config.json makes no use of ({last}." in refusal(checkpoint)
    config.write_text(json.dumps(given))
    weights = load_file(checkpoint / "model.safetensors") | {"v_head.summary.weight": torch.ones(1, 32)}
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()  # as GPT-J's and GPT-Neo's checkpoints hold it
    weights |= {"model.layers.0.attn.bias": mask, "model.layers.1.attn.attention.masked_bias": mask.clone()}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert "v_head" not in "".join(name for name, _ in load_policy(checkpoint).model.named_parameters())


@pytest.mark.parametrize("vocab", [1, 2])
def test_a_model_of_one_or_two_words_is_seen_to_be_causal(vocab):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocab, **sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    assert is_causal(LlamaForCausalLM(config).eval())


def test_an_unknown_dtype_is_refused_with_the_known_ones(checkpoint):
    assert "'float8' is not one of float32, float64, bfloat16, float16" in refusal(checkpoint, dtype="float8")


def test_a_policy_without_a_tokenizer_loads_and_says_so_only_when_text_comes(checkpoint):
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    (checkpoint / "chat_template.jinja").unlink()
    policy = load_policy(checkpoint)
    assert policy.tokenizer is None and policy.decode([4, 5]) == "<4><5>"
    for encode in (policy.encode_prompt, policy.encode_response):
        with pytest.raises(InputError, match=r"text needs a tokenizer and .*llama has none"):
            encode("w4")


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2"])
def test_a_word_level_tokenizer_is_read_whatever_class_the_model_type_suggests(checkpoints, name):
    policy = load_policy(checkpoints / name)
    assert policy.encode_response("w4 w95") == [4, 95]
    assert policy.decode([4, 95]) == "w4 w95"


def test_a_tokenizer_that_loses_text_is_refused(checkpoint):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0} | {f"W{i}": i for i in range(1, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert round_trips(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    from tokenizers import normalizers

    backend.normalizer = normalizers.Lowercase()  # "W5" becomes "w5", which is unknown
    lossy = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert not round_trips(lossy)
    lossy.save_pretrained(checkpoint)
    assert "does not give back the text" in refusal(checkpoint)


@pytest.mark.parametrize("text", ["5", '{"added_tokens": [], "model": {"type": "none"}}', "[" * 100_000])
def test_a_tokenizers_file_that_makes_no_sense_is_refused(checkpoint, text):
    (checkpoint / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match=r"the tokenizer in .* cannot be used"):
        load_policy(checkpoint)


def test_a_folder_without_a_tokenizer_gives_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_a_chat_is_templated_and_an_assistants_last_turn_stays_open():
    made = make_policy("llama")
    policy = Policy(made.model, make_tokenizer(chat=True), made.blocks_name)
    user = {"role": "user", "content": "w4"}
    assert policy.encode_prompt([user]) == [1, 4, 1]
    assert policy.encode_prompt([user, {"role": "assistant", "content": "w5 w6"}]) == [1, 4, 1, 5, 6]
    with pytest.raises(InputError, match="no chat template"):
        make_policy("llama", tokenizer=True).encode_prompt([user])


@pytest.mark.parametrize("prompt", [None, 5, [], ["w4"], [{"role": "user"}], {"role": "user", "content": "w4"}])
def test_what_is_no_prompt_is_named(prompt):
    with pytest.raises(InputError, match=r"^row 3: the prompt is neither a string nor a chat but "):
        check_prompt(prompt, "row 3")


def test_half_a_character_is_refused():
    policy = make_policy("llama", tokenizer=True)
    for encode in (policy.encode_prompt, policy.encode_response):
        with pytest.raises(InputError, match=r"holds what is no text \(.*surrogates not allowed\)"):
            encode("w4 \ud800")
    with pytest.raises(InputError, match="the prompt holds what is no text"):
        check_prompt([{"role": "user", "content": "w4 \udc00"}])


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
    with pytest.raises(InputError, match=r"2 candidates for its blocks \(model\.layers, model\.twin\).*--blocks"):
        find_blocks(model)
    assert find_blocks(model, "model.layers") == "model.layers"


def test_blocks_of_another_depth_do_not_compete():
    model = make_model("llama")
    model.model.heads = nn.ModuleList([nn.Linear(2, 2)])
    assert find_blocks(model) == "model.layers"


def test_an_unknown_name_of_blocks_is_refused_with_the_known_ones(checkpoint):
    with pytest.raises(InputError, match=r"no ModuleList 'h'; it has model\.layers"):
        find_blocks(make_model("llama"), "h")
    assert "it has model.layers" in refusal(checkpoint, blocks="model.norm")


def test_a_model_without_any_module_list_is_refused():
    model = make_model("llama")
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(InputError, match="0 candidates for its blocks"):
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


def test_the_repr_says_what_was_loaded(checkpoints):
    text = repr(load_policy(checkpoints / "llama", device="cpu"))
    assert text.startswith("Policy(LlamaForCausalLM, ") and "3 blocks at 'model.layers'" in text
    assert f"vocabulary {VOCAB}, float32 on cpu)" in text


def test_what_a_model_takes_is_asked_of_the_forward_that_it_has():
    model = make_policy("llama").model
    assert takes(model, "logits_to_keep") and not takes(model, "colour")
    model.forward = lambda input_ids, colour: None
    assert takes(model, "colour") and not takes(model, "logits_to_keep")
