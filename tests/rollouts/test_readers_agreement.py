"""Ids beside their own text: another tokenizer's are refused, few that differ are not; and a checkpoint's own step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import dumps
from support.policies import VOCAB, make_policy, make_tokenizer, write_jsonl
from support.refusals import refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gradscope.policy import Policy
from gradscope.rollouts import Dump, read_dump, select_checkpoint_step


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


# Of a dump of several steps, the one that a checkpoint sampled.


def make_dump(tmp_path, steps: list[int]) -> Dump:
    """prime-rl's export of four responses in each of these steps."""
    for step in steps:
        dumps.write_prime_rl(tmp_path, step=step)
    return read_dump(tmp_path / "token_exports")


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
    dump = make_dump(tmp_path, steps)
    assert len(dump.batch) == 4 * len(steps)
    kept = select_checkpoint_step(dump, checkpoint)
    assert kept.steps.tolist() == [own] * 4
    told = f"the log holds 3 training steps, {min(steps)} to {max(steps)}; step {own}{why}"
    assert kept.notes == (*dump.notes, told)
    # All that goes with a response went with it: the same as if only that step had been read.
    alone = read_dump(tmp_path / "token_exports", step=own)
    for name in ("entropy", "logprobs", "sampler_logprobs", "clipped"):
        torch.testing.assert_close(getattr(kept, name), getattr(alone, name), rtol=0, atol=0, equal_nan=True)
    assert kept.batch.tensors().keys() == alone.batch.tensors().keys()
    for name in alone.batch.tensors().keys() - {"group_ids"}:
        torch.testing.assert_close(
            getattr(kept.batch, name), getattr(alone.batch, name), rtol=0, atol=0, equal_nan=True
        )
    groups = [ids.unique(return_inverse=True)[1].tolist() for ids in (kept.batch.group_ids, alone.batch.group_ids)]
    assert groups[0] == groups[1] == [0, 0, 1, 1]


def test_a_dump_of_one_step_or_of_none_is_whole_and_without_a_checkpoints_step_all_are_taken(tmp_path):
    one = make_dump(tmp_path / "one", [7])
    assert select_checkpoint_step(one, 6) is one and select_checkpoint_step(one, None) is one
    for checkpoint in (3, 7):
        kept = select_checkpoint_step(one, checkpoint)
        told = "step 7 is used, though a different checkpoint sampled it: this one's would be step"
        assert kept.batch.input_ids is one.batch.input_ids
        assert kept.notes == (*one.notes, f"{told} {checkpoint + 1}") and kept.notes[-1].kind == "other-step"
    none = read_dump(write_jsonl(tmp_path / "r.jsonl", rows("w7 w8 w9")))
    assert none.steps is None and select_checkpoint_step(none, 3) is none
    two = make_dump(tmp_path / "two", [7, 8])
    kept = select_checkpoint_step(two, None)
    assert kept.batch.input_ids is two.batch.input_ids and kept.steps.tolist() == [7] * 4 + [8] * 4
    assert kept.notes[-1] == (
        "the log holds 2 training steps, 7 to 8; which of them this checkpoint sampled is unknown, so all are taken"
    )
