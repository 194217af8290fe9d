"""AReaL's trajectories: what their texts and lengths tell, and what of several turns they do not."""

from __future__ import annotations

from typing import Any

import pytest
from support.dumps import write_areal
from support.policies import make_policy, make_tokenizer, write_jsonl
from support.refusals import refused

from gradscope.objective import resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import read_checkpoint_dump, read_dump


@pytest.fixture(scope="module")
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


def row(prompt: str, completion: str, *, task: int = 0, sample: int = 0, reward: float = 0.0) -> dict[str, Any]:
    lengths = len(prompt.split()), len(completion.split())
    own = {"task_id": task, "sample_idx": sample, "seqlen": sum(lengths), "prompt_len": lengths[0], "reward": reward}
    return own | {"head_version": -1, "tail_version": 0, "prompt": prompt, "completion": completion}


def left_out(dump) -> list[int]:
    return [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"]


def test_what_may_be_of_several_turns_is_left_out_and_counts_in_its_group(policy, tmp_path):
    """AReaL cuts a sequence where as many tokens are left as were sampled: wherever that is."""
    rows = [
        row("w4", "w5 <eos>", reward=1.0),
        row("w4", "w6 <eos>", sample=1),
        row("w4 w6 w9", "w7 <eos>", sample=2, reward=0.5),
    ]
    rows += [row("w8", "w5 <eos> w9 w6 <eos>", task=1), row("w8", "w5 <eos> <eos>", task=1, sample=1)]
    dump = read_dump(write_jsonl(tmp_path / "0.jsonl", rows), policy)
    assert [dump.batch.sequence(at)[0].tolist() for at in range(3)] == [[4, 5, 2], [4, 6, 2], [8, 5, 2, 2]]
    assert left_out(dump) == [2]
    half = 0.5 / (0.5 + 1e-6)  # of 1, 0 and ½, whose deviation is ½
    found = [float(resolve_advantages(dump.batch)[at, 1]) for at in (0, 1)]
    assert found == pytest.approx([half, -half], rel=1e-6)


def test_processes_that_count_tasks_alike_do_not_share_groups(policy, tmp_path):
    rows = [row(prompt, "w5", sample=sample) for prompt in ("w4", "w8") for sample in (0, 1)]
    rows += [row("w4", "w6", sample=sample) for sample in (0, 1)]  # a resumed run's
    dump = read_dump(write_jsonl(tmp_path / "0.jsonl", rows), policy)
    assert dump.batch.group_ids.tolist() == [0, 0, 1, 1, 2, 2] and not left_out(dump)


def test_a_text_that_gives_another_number_of_tokens_is_told(policy, tmp_path):
    rows = [row("w4", "w5 w6"), row("w4", "w7 w8", sample=1) | {"seqlen": 4}]
    notes = read_dump(write_jsonl(tmp_path / "0.jsonl", rows), policy).notes
    assert [note for note in notes if note.startswith("1 of 2 responses: their text gives")]


def test_evaluations_are_left_out_and_a_checkpoint_takes_the_version_after_its_step(policy, tmp_path):
    for version in (1, 2):
        write_areal(tmp_path, version=version)
    dump = read_dump(tmp_path / "rollout", policy)
    assert dump.steps.tolist() == [1] * 4 + [2] * 4
    # globalstep1 is the second step: its weights are version 2.
    assert {*read_checkpoint_dump(tmp_path / "rollout", policy, 1).steps.tolist()} == {2}
    (tmp_path / "rollout").rename(tmp_path / "eval-rollout")
    with refused("8 of 8"):
        read_dump(tmp_path / "eval-rollout", policy)
