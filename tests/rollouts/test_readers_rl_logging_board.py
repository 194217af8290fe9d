"""RLLoggingBoard's rows: ids are found by the text of each token, and nothing is guessed."""

from __future__ import annotations

from typing import Any

import pytest
from support.dumps import SAMPLES, write_rl_logging_board
from support.policies import make_policy, make_tokenizer, write_jsonl
from support.refusals import refused
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gradscope.policy import Policy
from gradscope.rollouts import read_dump

PIECES = ["<pad>", "<bos>", "<eos>", "<unk>", "a", "b", "ab", "abb", "▁a", "▁b"]


@pytest.fixture(scope="module")
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


@pytest.fixture(scope="module")
def subwords(policy) -> Policy:
    """Pieces as of SentencePiece: those that begin a word decode, alone, like those that do not."""
    ids = {piece: at for at, piece in enumerate(PIECES)}
    backend = Tokenizer(models.BPE(ids, [("a", "b"), ("ab", "b")], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    return Policy(policy.model, PreTrainedTokenizerFast(tokenizer_object=backend, **special), policy.blocks_name)


def row(prompt: str, tokens: list[str], **changes: Any) -> dict[str, Any]:
    numbers = [-0.5 - at for at in range(len(tokens))]
    own = {"prompt": prompt, "response": " ".join(tokens), "response_tokens": tokens, "logprobs": numbers}
    return own | {"ref_logprobs": numbers, "reward": 1.0, "step": 1} | changes


def test_ids_are_those_of_the_text_or_of_each_token_or_not_known(subwords, tmp_path):
    rows = [
        row("ab", ["abb", "a"], response="abba"),  # as the text is tokenized: "a" alone has two ids
        row("ab", ["ab", "abb"], response="abb ab"),  # whatever the text: each token has one id
        row("ab", ["a", "b"], response="ab"),  # nor so, and two ids each
    ]
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", rows), subwords)
    assert [dump.batch.sequence(at)[0].tolist() for at in range(len(dump.batch))] == [[6, 7, 4], [6, 6, 7]]
    assert [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"] == [1]
    assert dump.batch.old_logprobs[dump.batch.response_mask].tolist() == [-0.5, -1.5] * 2
    assert [note for note in dump.notes if note.startswith("1 of 2 responses: the text of some")]


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_padding_is_cut_off_and_the_end_stays(policy, tmp_path, pad):
    """Also where a tokenizer pads with the token that ends responses."""
    rows = [row(f"{pad} {pad} w4", ["w5", "w6", "<eos>", pad, pad], response=f"w5 w6 <eos> {pad} {pad}")]
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", rows), policy)
    assert dump.batch.sequence(0)[0].tolist() == [4, 5, 6, 2]
    assert dump.batch.ref_logprobs[dump.batch.response_mask].tolist() == [-0.5, -1.5, -2.5]


def test_log_probabilities_that_are_no_longer_than_the_tokens_are_refused(policy, tmp_path):
    with refused("row 0", "logprobs"):
        read_dump(write_jsonl(tmp_path / "r.jsonl", [row("w4", ["w5", "w6"], logprobs=[-0.5])]), policy)
    for changes in ({"response_tokens": [5, 6]}, {"prompt": [4]}, {"response": None}):
        rows = [row("w4", ["w5"]), row("w4", ["w5", "w6"]) | changes]
        with refused("row 1"):
            read_dump(write_jsonl(tmp_path / "r.jsonl", rows), policy)


def test_another_turn_in_the_text_is_told_also_between_special_tokens(tmp_path, policy):
    tokenizer = make_tokenizer(others=("assistant",))
    tokenizer.chat_template = "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}" + (
        "{% if add_generation_prompt %}\n<bos>assistant\n{% endif %}"
    )
    own = Policy(policy.model, tokenizer, policy.blocks_name)
    several = row("w4", ["w5", "<bos>", "assistant", "w6"], response="w5 \n<bos>assistant\nw6")
    notes = read_dump(write_jsonl(tmp_path / "r.jsonl", [row("w4", ["w5"]), several]), own).notes
    assert [note for note in notes if note.startswith("1 of 2 responses: their text shows the opening")]


def test_the_boards_rows_without_a_policy_are_refused_and_rows_of_ids_are_native(policy, tmp_path):
    path = write_rl_logging_board(tmp_path)
    with refused("policy"):
        read_dump(path)
    # Its rows without tokens, of an evaluation, and rows with native columns beside are native ones.
    plain = {"prompt": "w4", "response": "w5", "reward": 1.0, "step": 1, "ref_response": "w6", "ref_reward": 0.0}
    assert read_dump(write_jsonl(tmp_path / "e.jsonl", [plain]), policy).format == "native"
    ids = row("w4", ["w5"]) | {"prompt_ids": [4], "response_ids": [5], "old_logprobs": [-0.25]}
    dump = read_dump(write_jsonl(tmp_path / "n.jsonl", [ids]), policy)
    assert dump.format == "native" and dump.batch.old_logprobs[dump.batch.response_mask].tolist() == [-0.25]
    assert SAMPLES[0].trainer != SAMPLES[0].sampler
