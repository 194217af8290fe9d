"""Ids beside their own text: another tokenizer's are refused, few that differ are not; and a checkpoint's own step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import dumps
from support.policies import VOCAB, make_policy, make_tokenizer, write_jsonl
from support.refusals import refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gradscope.policy import Policy
from gradscope.rollouts import read_checkpoint_dump, read_dump


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy("llama", tokenizer=True)


def other_tokenizer() -> PreTrainedTokenizerFast:
    """The words of tiny's tokenizer, each with the id of its neighbour."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "w95"] + [f"w{i}" for i in range(4, VOCAB - 1)]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def rows(*responses: str) -> list[dict]:
    """A native row each: ids 7, 8 and 9, and this text."""
    return [
        {"prompt_ids": [4, 5], "response_ids": [7, 8, 9], "response": text, "prompt": "w4 w5"} for text in responses
    ]


def read(tmp_path, policy: Policy | None, written: list[dict]) -> list[list[int]]:
    return read_dump(write_jsonl(tmp_path / "r.jsonl", written), policy).batch.input_ids.tolist()


@pytest.mark.parametrize("kind", ["native", "slime"])
def test_a_checkpoint_whose_tokenizer_disagrees_with_the_ids_is_refused_with_both_texts(policy, tmp_path, kind):
    path = dumps.write_slime(tmp_path)
    named = ["tokens", "w6 w7", "w7 w8", "4 of the first 4"]
    if kind == "native":
        path = write_jsonl(tmp_path / "r.jsonl", rows(*["w7 w8 w9"] * 3))
        named = ["row 0", "response_ids", "w6 w7 w8", "w7 w8 w9", "3 of the first 3"]
    with refused(*named):
        read_dump(path, replace(policy, tokenizer=other_tokenizer()))
    assert len(read_dump(path, policy).batch) == len(read_dump(path).batch) > 2  # its own, and no policy at all
    assert len(read_dump(path, replace(policy, tokenizer=None)).batch) > 2


@pytest.mark.parametrize(
    "text",
    [
        "w7 w8 w9",
        "  w7 w8\nw9 <eos>",
        "<bos>w7 w8 w9<pad>",
        "w7 w8",
        "w8 w9 and more w7 w8 w9",
        "",
        " <eos>",
        "w7w8 w9�",
    ],
)
def test_special_tokens_blanks_and_what_was_cut_are_no_difference(policy, tmp_path, text):
    assert read(tmp_path, policy, rows(text)) == [[4, 5, 7, 8, 9]]


def test_text_alone_is_encoded_and_not_compared(policy, tmp_path):
    alone = [{"prompt": "w4 w5", "response": "w7 w8 <eos>"}]
    other = replace(policy, tokenizer=other_tokenizer())
    assert read(tmp_path, policy, alone) == [[4, 5, 7, 8, 2]] and read(tmp_path, other, alone) == [[5, 6, 8, 9, 2]]
    assert make_tokenizer().decode([7]) == "w7" and other.tokenizer.decode([7]) == "w6"


# Of a log of several steps, the one that a checkpoint sampled.


def write(tmp_path, steps: list[int]) -> Path:
    """prime-rl's export of four responses in each of these steps."""
    for step in steps:
        dumps.write_prime_rl(tmp_path, step=step)
    return tmp_path / "token_exports"


OTHER = ", sampled by a different checkpoint, is used: the log lacks this one's step"
BEYOND = "(a run that goes one step beyond its last checkpoint logs it)"


@pytest.mark.parametrize(
    ("steps", "checkpoint", "own", "why"),
    [
        ([1, 2, 3], 1, 2, " is taken, the one after this checkpoint's"),
        ([1, 2, 3], 0, 1, " is taken, the one after this checkpoint's"),
        ([10, 20, 30], 12, 10, f"{OTHER} 13"),
        ([10, 20, 30], 16, 20, f"{OTHER} 17"),
        ([10, 20, 30], 14, 10, f"{OTHER} 15"),  # as near as 20
        ([1, 2, 3], 3, 3, f"{OTHER} 4 {BEYOND}"),
        ([2, 10, 9], 100, 10, f"{OTHER} 101 {BEYOND}"),
    ],
)
def test_the_step_after_a_checkpoint_is_its_own_or_the_nearest(tmp_path, steps, checkpoint, own, why):
    path = write(tmp_path, steps)
    kept, alone = read_checkpoint_dump(path, None, checkpoint), read_dump(path, step=own)
    assert kept.steps.tolist() == [own] * 4
    told = f"the log holds 3 training steps, {min(steps)} to {max(steps)}; step {own}{why}"
    assert kept.notes == (*alone.notes, told)
    assert kept.batch.digest() == alone.batch.digest()


def test_a_log_of_one_step_or_of_none_is_whole_and_without_a_checkpoints_step_all_are_taken(tmp_path):
    one = write(tmp_path / "one", [7])
    for checkpoint in (6, None):
        assert read_checkpoint_dump(one, None, checkpoint).notes == read_dump(one).notes
    for checkpoint in (3, 7):
        kept = read_checkpoint_dump(one, None, checkpoint)
        told = "step 7 is used, though a different checkpoint sampled it: this one's would be step"
        assert len(kept.batch) == 4 and kept.notes[-1].kind == "other-step"
        assert kept.notes == (*read_dump(one).notes, f"{told} {checkpoint + 1}")
    none = write_jsonl(tmp_path / "r.jsonl", rows("w7 w8 w9"))
    kept = read_checkpoint_dump(none, None, 3)
    assert kept.steps is None and kept.notes == read_dump(none).notes
    kept = read_checkpoint_dump(write(tmp_path / "two", [7, 8]), None, None)
    assert kept.steps.tolist() == [7] * 4 + [8] * 4
    assert kept.notes[-1] == (
        "the log holds 2 training steps, 7 to 8; which of them this checkpoint sampled is unknown, so all are taken"
    )
