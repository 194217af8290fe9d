"""Rollout files: what is written is read, both formats alike, and every mistake is named by its row in one line."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.policies import CONTEXT, VOCAB, make_policy, make_responses, make_tokenizer, write_jsonl
from support.refusals import refused
from transformers import PreTrainedTokenizerFast

from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch, collate, read_dump, read_rollouts, write_rollouts


@pytest.fixture(scope="module")
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


GOOD = {"prompt_ids": [4, 5, 6], "response_ids": [7, 8]}
TEXT = {"prompt": "w4 w5 w6", "response": "w7 w8"}


def rows_of(responses) -> list[dict]:
    """The native row of each response, by hand."""
    return [
        {name: value for name, value in vars(r).items() if value is not None} | {"group": f"question {r.group}"}
        for r in responses
    ]


def assert_same(ours: TokenBatch, theirs: TokenBatch) -> None:
    assert ours.run == theirs.run
    for name in vars(theirs).keys() - {"notes", "run"}:
        pair = getattr(ours, name), getattr(theirs, name)
        torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: n)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_what_is_written_is_read_back(policy, tmp_path, suffix):
    responses = make_responses(policy)
    path = write_rollouts(tmp_path / f"rollouts{suffix}", iter(rows_of(responses)))
    assert_same(read_rollouts(path, policy), collate(responses))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_parquet_as_pandas_writes_it_from_arrays_is_read(tmp_path):
    import numpy as np
    import pandas as pd

    frame = pd.DataFrame(
        {
            "prompt_ids": [np.array([4, 5]), np.array([6], dtype=np.int32)],
            "response_ids": [np.array([7]), np.array([8, 9])],
            "response_mask": [np.array([True]), np.array([False, True])],
            "old_logprobs": [np.array([-0.5], dtype=np.float32), np.array([np.nan, -1.5])],
            "reward": np.array([1, 0]),
            "group": pd.array([3, 3], dtype="Int64"),
        }
    )
    frame.to_parquet(tmp_path / "r.parquet")
    batch = read_rollouts(tmp_path / "r.parquet")
    assert batch.input_ids.tolist() == [[4, 5, 7], [6, 8, 9]]
    assert batch.response_mask.tolist() == [[False, False, True], [False, False, True]]
    assert batch.old_logprobs[batch.response_mask].tolist() == [-0.5, -1.5]
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert batch.group_ids.tolist() == [0, 0]


def test_text_and_ids_of_the_same_tokens_make_the_same_batch(policy, tmp_path):
    text = read_rollouts(write_jsonl(tmp_path / "text.jsonl", [TEXT]), policy)
    assert_same(text, read_rollouts(write_jsonl(tmp_path / "ids.jsonl", [GOOD]), policy))


def test_a_chat_goes_through_the_template_and_its_last_assistant_turn_stays_open(policy, tmp_path):
    chat = [{"role": "user", "content": "w4 w5"}]
    open_turn = [*chat, {"role": "assistant", "content": "w6"}]
    rows = [{"prompt": chat, "response": "w7"}, {"prompt": open_turn, "response": "w7"}]
    for suffix in (".jsonl", ".parquet"):
        batch = read_rollouts(write_rollouts(tmp_path / f"r{suffix}", rows), policy)
        assert batch.sequence(0)[0].tolist() == [1, 4, 5, 1, 7]
        assert batch.sequence(1)[0].tolist() == [1, 4, 5, 1, 6, 7]


@pytest.mark.parametrize("names", [[7, 3, 7], ["b", "a", "b"]])
def test_groups_may_be_numbers_or_strings(tmp_path, names):
    path = write_jsonl(tmp_path / "r.jsonl", [GOOD | {"group": name} for name in names])
    assert read_rollouts(path).group_ids.tolist() == [0, 1, 0]


def test_unknown_columns_and_blank_lines_are_ignored_and_null_is_not_given(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text("\n" + json.dumps(GOOD | {"level": 3, "prompt_id": 5, "reward": None}) + "\n\n")
    batch = read_rollouts(path)
    assert len(batch) == 1 and batch.rewards is None and batch.old_logprobs is None
    assert batch.temperature.tolist() == [1.0]


def test_dropped_tokens_may_have_unknown_logprobs(tmp_path):
    row = GOOD | {"response_mask": [0, 1], "old_logprobs": [None, -0.25], "advantage": [None, 2]}
    batch = read_rollouts(write_jsonl(tmp_path / "r.jsonl", [row, row | {"old_logprobs": [-inf, -0.25]}]))
    assert batch.old_logprobs[batch.response_mask].tolist() == [-0.25, -0.25]
    assert batch.advantages[batch.response_mask].tolist() == [2.0, 2.0]
    assert not batch.old_logprobs.isinf().any()


def test_a_logprob_above_zero_by_rounding_is_zero(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [GOOD | {"old_logprobs": [1e-4, -1.0]}])
    assert read_rollouts(path).old_logprobs[0, 3:].tolist() == [0.0, -1.0]


NEAR_MISSES = {
    "advantages": "advantage",
    "Advantage": "advantage",
    "rewards": "reward",
    "groups": "group",
    "old_logprob": "old_logprobs",
    "old_log_probs": "old_logprobs",
    "logprobs": "old_logprobs",
    "ref_logprob": "ref_logprobs",
    "ref_log_prob": "ref_logprobs",
    "mask": "response_mask",
    "response_masks": "response_mask",
    "loss_mask": "response_mask",
    "temperatures": "temperature",
}


@pytest.mark.parametrize(("name", "meant"), NEAR_MISSES.items())
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_near_miss_of_a_column_is_refused_with_the_right_name(tmp_path, name, meant, suffix):
    path = write_rollouts(tmp_path / f"r{suffix}", [GOOD | {name: [1.0, 1.0]}])
    with refused("row 0", name, repr(meant)):
        read_rollouts(path)


nan, inf = math.nan, math.inf
LONG = [7] * CONTEXT
VALID = {
    "advantage": 1.0,
    "reward": 1.0,
    "group": 1,
    "temperature": 1.0,
    "old_logprobs": [-1.0, -1.0],
    "ref_logprobs": [-1.0, -1.0],
    "sampler_logprobs": [-1.1, -0.9],
}
BAD_ROWS = {
    "no response": {"prompt_ids": [4]},
    "no prompt": {"response": "w7"},
    "ids and text of the prompt alone": {"prompt_ids": [4], "prompt": "w7"},
    "empty prompt": GOOD | {"prompt_ids": []},
    "ids that are text": GOOD | {"response_ids": ["7"]},
    "ids that are fractions": GOOD | {"prompt_ids": [4.5]},
    "an id beyond the vocabulary": GOOD | {"response_ids": [7, VOCAB]},
    "longer than the context": GOOD | {"response_ids": LONG},
    "text response that is a number": TEXT | {"response": 7},
    "prompt that is a number": TEXT | {"prompt": 7},
    "old_logprobs beyond float32": GOOD | {"old_logprobs": [-1.0, -1e39]},
    "old_logprobs one number": GOOD | {"old_logprobs": -1.0},
    "probabilities": GOOD | {"old_logprobs": [0.5, 0.9]},
    "ref_logprobs of another length": GOOD | {"ref_logprobs": [-1.0] * 5},
    "mask of another length": GOOD | {"response_mask": [1, 1, 1]},
    "mask of other numbers": GOOD | {"response_mask": [0, 2]},
    "temperature 0": GOOD | {"temperature": 0.0},
    "temperature that overflows": GOOD | {"temperature": 1e-30},
    "reward beyond float64": GOOD | {"reward": 10**400},
    "group that is a list": GOOD | {"group": [1, 2]},
}


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused_in_one_line_that_names_file_row_and_line(policy, tmp_path, row):
    good = GOOD | {name: value for name, value in VALID.items() if name in row}
    path = write_jsonl(tmp_path / "r.jsonl", [good, row])
    with refused(f"{path}, row 1 (line 2): "):
        read_rollouts(path, policy)


@pytest.mark.parametrize("name", ["group", "temperature", "step"])
def test_a_column_without_a_default_that_a_row_lacks_and_others_have_is_refused(tmp_path, name):
    path = write_jsonl(tmp_path / "r.jsonl", [GOOD | {name: 1}, GOOD | {name: None}, GOOD])
    with refused("row 1 (line 2)", name):
        read_rollouts(path)


def test_text_needs_a_policy_with_a_tokenizer_and_a_chat_a_template(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [TEXT])
    with refused("row 0"):
        read_rollouts(path)
    with refused("row 0"):
        read_rollouts(path, make_policy("llama"))
    chat = write_jsonl(tmp_path / "c.jsonl", [{"prompt": [{"role": "user", "content": "w4"}], "response": "w5"}])
    with refused("row 0"):
        read_rollouts(chat, make_policy("llama", tokenizer=True))


def test_text_that_the_tokenizer_has_no_tokens_for_is_refused_in_a_response_and_told_in_a_prompt(policy, tmp_path):
    path = write_jsonl(tmp_path / "response.jsonl", [{"prompt": "w4", "response": "w7 é"}])
    with refused("row 0", "w7 é"):
        read_dump(path, policy)
    rows = [{"prompt": prompt, "response": "w7"} for prompt in ("w4 é", "w4", "w4 <unk>")]
    dump = read_dump(write_jsonl(tmp_path / "prompt.jsonl", rows), policy)
    assert [note.kind for note in dump.notes] == ["temperature", "dump"]
    [note] = dump.remarks
    assert note == "the tokenizer cannot encode parts of 1 of 3 prompts: they become '<unk>'"
    for prompt in ("é", "w4 é ü", [{"role": "user", "content": "é ü ö"}]):
        with refused("row 0"):
            read_dump(write_jsonl(tmp_path / "most.jsonl", [{"prompt": prompt, "response": "w7"}]), policy)
    with refused():  # a word of the text does not hide it
        read_dump(write_jsonl(tmp_path / "both.jsonl", [{"prompt": "w4", "response": "<unk> é"}]), policy)
    other = make_tokenizer()
    other.bos_token = other.unk_token  # as OPT's, which begins every prompt with it
    assert not replace(policy, tokenizer=other).has_unknown("w4", [other.unk_token_id, 4])


def test_text_that_a_tokenizer_drops_or_cannot_encode_is_refused(policy, tmp_path):
    from tokenizers import Tokenizer, models

    for model, text in ((models.BPE({"a": 4, "b": 5}, []), "aéb"), (models.WordLevel({"a": 4, "b": 5}), "é")):
        blind = replace(policy, tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)))
        path = write_jsonl(tmp_path / "r.jsonl", [{"prompt": "a", "response": text}])
        with refused("row 0"):
            read_dump(path, blind)
        path = write_jsonl(tmp_path / "r.jsonl", [{"prompt": "a", "response": "b"}])
        assert read_dump(path, blind).batch.input_ids.tolist() == [[4, 5]]


def test_files_that_are_missing_empty_broken_or_of_another_kind_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text(json.dumps(GOOD) + '\n{"prompt_ids": [4,\n')
    (tmp_path / "array.json").write_text(json.dumps([GOOD]))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not at all PAR1")
    (tmp_path / "rollouts.txt").write_text("")
    columns = [pa.array([[4]]), pa.array([[5]]), pa.array([[6]])]
    pq.write_table(pa.table(columns, ["prompt_ids", "response_ids", "prompt_ids"]), tmp_path / "twice.parquet")
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("none.jsonl", "folder.jsonl", *(path.name for path in tmp_path.iterdir())):
        with refused(tmp_path / name):
            read_rollouts(tmp_path / name)


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path):
    with refused("parchment", "native"):
        read_rollouts(tmp_path / "r.jsonl", format="parchment")
