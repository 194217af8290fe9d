"""Which format a log is: a whole set of one format's columns, whatever other columns somebody added."""

from __future__ import annotations

import pytest
from support import dumps
from support.policies import make_policy, make_tokenizer, write_jsonl
from support.refusals import refused

from gradscope.policy import Policy
from gradscope.rollouts import read_dump


@pytest.fixture(scope="module")
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


LOGS = {
    "trl": {"step": 1, "prompt": "w4 w5", "completion": "w7 w8", "advantage": 0.5, "accuracy": 1.0},
    "verl": {"step": 1, "input": "w4 w5", "output": "w7 w8", "gts": "w9", "score": 1.0},
    "ms_swift": {"step": ["1"], "prompt": ["w4 w5"], "completion": ["w7 w8"], "advantages": [0.5]},
    "verifiers": {"example_id": 3, "prompt": "w4 w5", "completion": "w7 w8", "reward": 1.0},
}


@pytest.mark.parametrize("extra", [{"response": "w20"}, {"response": "w20", "prompt": "w21"}, {"output": "w20"}])
@pytest.mark.parametrize("name", LOGS)
def test_a_column_that_a_reward_function_added_changes_neither_the_format_nor_the_tokens(policy, tmp_path, name, extra):
    own = {column: [v] if name == "ms_swift" else v for column, v in extra.items() if column not in LOGS[name]}
    path = write_jsonl(tmp_path / "log.jsonl", [own | LOGS[name]])
    dump = read_dump(path, policy)
    assert dump.format == name
    assert dump.batch.sequence(0)[0].tolist() == [4, 5, 7, 8]


def test_two_whole_sets_are_asked_about_and_the_answer_is_taken(policy, tmp_path):
    both = LOGS["trl"] | LOGS["verl"]
    ids = LOGS["trl"] | {"prompt_ids": [4, 5], "response_ids": [7]}
    one = LOGS["trl"] | {"response_ids": [7]}
    plain = {"prompt": "w4", "response": "w7", "reward": 1.0, "input": "w5", "output": "w8", "score": 1.0}
    for row, names in (
        (plain, ("verl", "native")),
        (both, ("trl", "verl")),
        (ids, ("trl", "native")),
        (one, ("trl", "native")),
    ):
        path = write_jsonl(tmp_path / "log.jsonl", [row])
        with refused("--format", *names):
            read_dump(path, policy)
        for name in names:
            assert read_dump(path, policy, format=name).format == name


def test_a_set_that_includes_anothers_is_the_larger_ones(tmp_path):
    path = dumps.write_prime_rl(tmp_path)
    assert read_dump(path).format == "prime_rl"
    graph = dumps.write_verifiers_graph(tmp_path)
    assert read_dump(graph).format == "verifiers_graph"


OWN = """
from gradscope.rollouts import Column, Format

mine = Format(
    "mine",
    (
        Column("prompt", "question.text", required=True),
        Column("response_ids", "sample.ids", required=True),
        Column("old_logprobs", "sample.logp"),
        Column("old_logprobs", "logp"),
        Column("reward", "grade"),
        Column("step", "iteration"),
    ),
    has_parts=True,
)
number = 3
"""


def test_a_format_of_ones_own_is_a_list_of_columns_in_a_file(policy, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    rows = [
        {"question": {"text": "w4 w5"}, "sample": {"ids": [7, 8], "logp": [-0.5, -1.0]}, "grade": 1, "iteration": 2},
        {
            "question": '{"text": "w4 w5"}',
            "sample": {"ids": [9]},
            "logp": [-0.25],
            "grade": 0,
            "iteration": 2,
            "len": 5,
        },
    ]
    path = write_jsonl(tmp_path / "log.jsonl", rows)
    dump = read_dump(path, policy, format=f"{tmp_path / 'own.py'}:mine")
    assert dump.format == "mine" and dump.steps.tolist() == [2, 2] and dump.batch.rewards.tolist() == [1.0, 0.0]
    assert [dump.batch.sequence(row)[0].tolist() for row in (0, 1)] == [[4, 5, 7, 8], [4, 5, 9]]
    assert dump.batch.old_logprobs[dump.batch.response_mask].tolist() == [-0.5, -1.0, -0.25]
    assert dump.batch.reward_parts["len"][1] == 5
    for name, said in (("other", "other"), ("number", "number")):
        with refused(said):
            read_dump(path, policy, format=f"{tmp_path / 'own.py'}:{name}")
    with refused("none.py"):
        read_dump(path, policy, format="none.py:mine")


def test_a_first_row_with_a_null_is_of_its_trainer_too(policy, tmp_path):
    rows = [LOGS["trl"] | {"advantage": None, "response": "w20"}, LOGS["trl"] | {"response": "w20"}]
    dump = read_dump(write_jsonl(tmp_path / "log.jsonl", rows), policy)
    assert dump.format == "trl" and dump.batch.sequence(0)[0].tolist() == [4, 5, 7, 8]
    plain = {"prompt": "w4", "response": "w7", "completion": None, "step": 1, "advantage": 1.0}
    assert read_dump(write_jsonl(tmp_path / "native.jsonl", [plain]), policy).format == "native"


def test_ids_that_trl_was_asked_to_log_beat_its_text(policy, tmp_path):
    row = LOGS["trl"] | {"completion_ids": [7, 8, 2]}
    dump = read_dump(write_jsonl(tmp_path / "log.jsonl", [row]), policy)
    assert dump.format == "trl" and dump.batch.sequence(0)[0].tolist() == [4, 5, 7, 8, 2]


@pytest.mark.parametrize("extra", [{"example_id": 3}, {"tokens": [1, 2]}])
def test_native_rows_with_a_column_of_a_trainers_are_native(policy, tmp_path, extra):
    row = {"prompt": "w4 w5", "response": "w7 w8", "reward": 1.0} | extra
    dump = read_dump(write_jsonl(tmp_path / "log.jsonl", [row]), policy)
    assert dump.format == "native" and dump.batch.sequence(0)[0].tolist() == [4, 5, 7, 8]
