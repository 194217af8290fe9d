"""ms-swift's log beyond what one run shows: Megatron's and ray's lines, parts of a generation, turns, images."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policies import make_policy, make_tokenizer, write_jsonl
from support.refusals import refused

from gradscope.rollouts import read_dump


@pytest.fixture(scope="module")
def policy():
    return make_policy("llama", tokenizer=True)


def line(step, words, *, name="step", **columns):
    """One of `words` each, by twos on a prompt."""
    prompts = [f"w{20 + index // 2}" for index in range(len(words))]
    advantages = [0.5 - index % 2 for index in range(len(words))]
    steps = {name: [str(step) if name == "step" else step] * len(words)}
    return steps | {"prompt": prompts, "completion": [*words], "advantages": advantages} | columns


def read(path, policy, *lines, **how):
    return read_dump(write_jsonl(path / "completions.jsonl", [*lines]), policy, format="ms_swift", **how)


def words_of(dump, policy):
    pairs = zip(dump.steps.tolist(), range(len(dump.batch)), strict=True)
    return [(step, policy.tokenizer.decode(dump.batch.sequence(row)[0][1:])) for step, row in pairs]


def test_megatrons_lines_count_the_steps_before_and_others_those_after(policy, tmp_path):
    lines = [line(step, [f"w{5 + step}", "w4"], name="gen_step") for step in (0, 1)]
    dump = read(tmp_path, policy, *lines)
    assert dump.steps.tolist() == [1, 1, 2, 2] and dump.first_step == 1  # initial weights sampled step 1
    assert read(tmp_path, policy, line(1, ["w5", "w6"])).steps.tolist() == [1, 1]


def test_a_line_that_goes_on_with_a_generation_adds_the_rest_of_it(policy, tmp_path):
    # With log_entropy a line holds what was trained so far.
    first, second = ["w5", "w6", "w7", "w8"], ["w9", "w10", "w11", "w12"]
    lines = [line(1, first[:2]), line(2, first), line(3, second[:2]), line(4, second), line(4, second)]
    dump = read(tmp_path, policy, *lines)
    found = words_of(dump, policy)
    assert found == [(1, "w5"), (1, "w6"), (2, "w7"), (2, "w8"), (3, "w9"), (3, "w10"), (4, "w11"), (4, "w12")]


def test_another_line_of_the_same_step_is_an_evaluation(policy, tmp_path):
    lines = [line(1, ["w5", "w6"]), line(1, ["w7", "w8"]), line(2, ["w9", "w10"]), line(2, ["w7", "w8"])]
    dump = read(tmp_path, policy, *lines)
    assert words_of(dump, policy) == [(1, "w5"), (1, "w6"), (2, "w9"), (2, "w10")]
    assert [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"] == [4]


def test_a_line_of_step_0_is_an_evaluation(policy, tmp_path):
    dump = read(tmp_path, policy, line(0, ["w5", "w6"]), line(1, ["w7", "w8"]))
    assert words_of(dump, policy) == [(1, "w7"), (1, "w8")]


def test_what_a_resumed_run_makes_again_replaces_what_it_made_before(policy, tmp_path):
    # The same file goes on from a checkpoint of step 1, where steps 2 and 3 were written already.
    steps = [1, 2, 3, 2, 3, 4]
    lines = [line(step, [f"w{10 + 2 * at}", f"w{11 + 2 * at}"]) for at, step in enumerate(steps)]
    dump = read(tmp_path, policy, *lines)
    kept = [(1, 0), (2, 3), (3, 4), (4, 5)]
    assert words_of(dump, policy) == [(step, f"w{10 + 2 * at + more}") for step, at in kept for more in (0, 1)]
    assert [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"] == [4]


def test_on_ray_a_line_is_a_completion_and_its_reward(policy, tmp_path):
    rows = [
        {"gen_step": step, "prompt": "w4", "completion": f"w{5 + reward}", "reward": float(reward)}
        for step in (0, 1)
        for reward in (0, 1)
    ]
    dump = read_dump(write_jsonl(tmp_path / "completions.jsonl", rows), policy)
    assert dump.format == "ms_swift" and dump.batch.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert dump.steps.tolist() == [1, 1, 2, 2] and dump.batch.group_ids.tolist() == [0, 0, 1, 1]


def test_completions_of_several_turns_are_counted(policy, tmp_path):
    told = read(tmp_path, policy, line(1, ["w5", "w6", "w7", "w8"], num_turns=[1, 2, 3, 1])).notes
    assert [note.split(":")[0] for note in told if "num_turns" in note] == ["2 of 4 responses"]
    told = read(tmp_path, policy, line(1, ["w5", "w6"], num_turns=[1, 1])).notes
    assert not [note for note in told if "num_turns" in note]


def test_a_prompt_with_an_image_is_refused_and_arithmetic_is_not(policy, tmp_path):
    words = ["[95 * 256]", "[2", "[7", "*", "3]", "256]"]
    tokenizer = make_tokenizer(others=words)
    tokenizer.add_special_tokens({"additional_special_tokens": [words[-1]]})
    other = replace(policy, tokenizer=tokenizer)
    row = line(1, ["w5", "w6"]) | {"prompt": ["w4 [95 * 256]"] * 2}
    with refused("image"):
        read(tmp_path, other, row)
    for fine in ("w4 [2 * 3]", "w4 [7 * 3]"):  # the end-of-sequence token's number, and a word's
        assert len(read(tmp_path, other, row | {"prompt": [fine] * 2}).batch) == 2
