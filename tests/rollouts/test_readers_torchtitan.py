"""torchtitan's rollout samples: what its own sample builder makes of them is what is read."""

from __future__ import annotations

import json
import math
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.dumps import write_torchtitan
from support.policies import make_policy, make_tokenizer, write_jsonl
from support.refusals import refused

from gradscope.policy import Policy
from gradscope.rollouts import read_dump


@pytest.fixture(scope="module")
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


def turn(prompt: list[int], completion: list[int], *, version: int = 3, **changes: Any) -> dict[str, Any]:
    own = {"prompt_token_ids": prompt, "completion_token_ids": completion, "prompt_messages": []}
    own |= {"completion_logprobs": [-0.5] * len(completion)}
    return own | {"min_policy_version": version, "max_policy_version": version} | changes


NUMBERS = count()


def rollout(*turns: dict[str, Any], group: int = 0, advantage: float = 0.5, **changes: Any) -> dict[str, Any]:
    row = {
        "is_validation": False,
        "group_id": group,
        "rollout_id": next(NUMBERS),
        "status": "completed",
        "reward": advantage,
    }
    return row | {"reward_breakdown": {}, "advantage": advantage, "turns": [*turns]} | changes


def left_out(dump) -> list[int]:
    return [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"]


def test_turns_whose_prompt_does_not_continue_the_one_before_are_another_sequence(tmp_path):
    turns = turn([4, 5], [6, 7]), turn([4, 5, 6, 7, 8], [9]), turn([4, 8], [10, 11])
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", [rollout(*turns)]))
    assert [dump.batch.sequence(row)[0].tolist() for row in (0, 1)] == [[4, 5, 6, 7, 8, 9], [4, 8, 10, 11]]
    assert [dump.batch.sequence(row)[1].tolist() for row in (0, 1)] == [[2, 3, 5], [2, 3]]
    assert (
        dump.batch.group_ids.tolist() == [0, 0]
        and dump.batch.advantages[dump.batch.response_mask].tolist() == [0.5] * 5
    )


def test_a_group_with_a_rollout_that_sampled_nothing_is_not_trained(tmp_path):
    rows = [rollout(turn([4], [5])), rollout(turn([4], [])), rollout(turn([8], [9]), group=1), rollout(group=2)]
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", rows))
    assert dump.batch.sequence(0)[0].tolist() == [8, 9] and len(dump.batch) == 1
    assert left_out(dump) == [3]


def test_a_token_without_a_finite_log_probability_is_dropped_as_in_the_loss(tmp_path):
    rows = [rollout(turn([4], [5, 6, 7], completion_logprobs=[-0.25, math.nan, -math.inf]))]
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", rows))
    assert dump.batch.sequence(0)[1].tolist() == [1] and not any(note.kind == "unknown-values" for note in dump.notes)


def test_the_step_is_the_version_that_began_the_group(tmp_path):
    rows = [rollout(turn([4], [5])), rollout(turn([4], [6], version=4)), rollout(turn([7], [8], version=4), group=1)]
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", rows))
    assert dump.steps.tolist() == [3, 3, 4] and dump.first_step == 0
    assert [note for note in dump.notes if note.startswith("1 of 3 responses: some of their tokens were sampled by")]


def test_a_resumed_run_that_counts_its_groups_again_makes_new_ones(tmp_path):
    first, second = ([{"role": "user", "content": word}] for word in ("w4", "w5"))
    rows = [rollout(turn([4], [5], prompt_messages=first)), rollout(turn([5], [6], prompt_messages=second))]
    rows += [rollout(turn([4], [7], prompt_messages=first, version=9), rollout_id=rows[0]["rollout_id"])]
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", rows))
    assert dump.batch.group_ids.tolist() == [0, 1, 2] and dump.steps.tolist() == [3, 3, 9]


def test_groups_of_equal_rewards_are_told(tmp_path):
    rows = [rollout(turn([4], [5]), advantage=0.0), rollout(turn([4], [6]), advantage=0.0)]
    rows += [rollout(turn([7], [8]), group=1), rollout(turn([7], [9]), group=1, advantage=0.0)]
    notes = read_dump(write_jsonl(tmp_path / "r.jsonl", rows)).notes
    assert [note for note in notes if note.startswith("2 of 4 responses: all advantages")]


def test_messages_of_one_turn_are_tokenized_and_others_left_out(policy, tmp_path):
    path = write_torchtitan(tmp_path, ids=False)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["turns"][0]["completion_message"]["reasoning_content"] = "w9"
    rows[2]["turns"] *= 2
    dump = read_dump(write_jsonl(tmp_path / "some.jsonl", rows), policy)
    assert [dump.batch.sequence(row)[0][-2:].tolist() for row in (0, 1)] == [[7, 8], [16, 17]]
    assert left_out(dump) == [2] and dump.batch.old_logprobs is None
    with refused("policy"):
        read_dump(path)


@pytest.mark.parametrize(
    "changes", [{"turns": 3}, {"turns": [3]}, {"turns": [turn([4], [5], completion_logprobs=[-0.5, -1.0])]},
                {"turns": [turn([4], [5], prompt_token_ids="w4")]}, {"group_id": 0.5}]
)  # fmt: skip
def test_a_line_that_is_none_of_torchtitans_is_named(tmp_path, changes):
    rows = [rollout(turn([4], [5])), rollout(turn([4], [6]), **changes)]
    with refused("row 1"):
        read_dump(write_jsonl(tmp_path / "r.jsonl", rows), format="torchtitan")


def test_validations_alone_leave_nothing_to_measure(tmp_path):
    path: Path = write_torchtitan(tmp_path, is_validation=True)
    with refused("4 of 4"):
        read_dump(path)
