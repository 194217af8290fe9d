"""verl's log beyond what one run shows: shapes of `uid`, penalties of length, tools, sessions of several outputs."""

from __future__ import annotations

import statistics
from dataclasses import replace
from uuid import UUID

import pytest
from support.policies import make_policy, make_tokenizer, write_jsonl

from gradscope.objective import resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import read_dump

FIRST, SECOND = str(UUID(int=7, version=4)), str(UUID(int=8, version=4))


@pytest.fixture(scope="module")
def policy():
    return make_policy("llama", tokenizer=True)


def read(path, policy, rows):
    full = [{"input": "w4", "output": f"w{5 + i}", "score": float(i), "step": 1} | row for i, row in enumerate(rows)]
    return read_dump(write_jsonl(path / "1.jsonl", full), policy, format="verl")


@pytest.mark.parametrize(
    ("uids", "groups"),
    [
        ([f"{FIRST}_0_0", f"{FIRST}_1_0", f"{SECOND}_0_0", f"{SECOND}_11_0"], [0, 0, 1, 1]),
        ([FIRST, FIRST, SECOND, SECOND], [0, 0, 1, 1]),
        (["uid_sample_0_12", "uid_sample_0_12", "uid_sample_0_13", "uid_sample_0_13"], [0, 0, 1, 1]),
        (["math_1_0", "math_1_1", "math_2_0", "math_2_1"], [0, 1, 2, 3]),
        ([f"{FIRST}_0", f"{FIRST}_1", f"x{FIRST}_0_0", f"x{FIRST}_1_0"], [0, 1, 2, 3]),
        ([7, 7, 8, 8], [0, 0, 1, 1]),
    ],
    ids=["sessions", "prompts", "samples", "names", "other-keys", "numbers"],
)
def test_only_the_default_trainers_keys_are_taken_apart(policy, tmp_path, uids, groups):
    assert read(tmp_path, policy, [{"uid": uid} for uid in uids]).batch.group_ids.tolist() == groups


def test_without_a_key_identical_prompts_are_a_group_and_other_prompts_are_not(policy, tmp_path):
    rows = [{"input": "w4", "request_id": "a"}, {"input": "w9"}, {"input": "w4", "request_id": "b"}]
    assert read(tmp_path, policy, rows).batch.group_ids.tolist() == [0, 1, 0]


def test_step_0_is_of_a_validation(policy, tmp_path):
    dump = read(tmp_path, policy, [{"step": 0, "score": 4.0}, {"step": 1}, {"step": 1}])
    assert dump.steps.tolist() == [1, 1] and dump.batch.rewards.tolist() == [1.0, 2.0]
    assert [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"] == [1]


def test_a_column_that_validations_have_is_told_and_another_of_its_name_is_not(policy, tmp_path):
    def counts(rows):
        return [int(note.split()[0]) for note in read(tmp_path, policy, rows).notes if "validation" in note]

    assert counts([{"reward": 0.0}, {"reward": 1.0}]) == [2]
    assert counts([{"reward": 5.0}, {"reward": 7.0}]) == counts([{}, {}]) == []


def test_lines_without_a_step_are_of_that_in_the_name_of_their_file(policy, tmp_path):
    for step in (7, 12):
        rows = [{"input": "w4", "output": f"w{5 + i}", "score": float(i)} for i in (0, 1)]
        write_jsonl(tmp_path / f"{step}.jsonl", rows)
    dump = read_dump(tmp_path, policy)
    assert dump.steps.tolist() == [7, 7, 12, 12] and dump.batch.group_ids.tolist() == [0, 0, 1, 1]


def test_a_session_counts_once_in_its_group_by_its_last_output(policy, tmp_path):
    # Sessions 0 and 1 of two and three outputs, whose lines may come in any order, and session 2 of one.
    lines = [("1_2", 4.0), ("0_0", 1.0), ("1_0", 4.0), ("0_1", 1.0), ("2_0", 0.0), ("1_1", 4.0)]
    dump = read(tmp_path, policy, [{"uid": f"{FIRST}_{key}", "score": score} for key, score in lines])
    mean, std = statistics.mean([4, 1, 0]), statistics.stdev([4, 1, 0])
    found = resolve_advantages(dump.batch)[dump.batch.response_mask].tolist()
    assert found == pytest.approx([(score - mean) / (std + 1e-6) for _, score in lines], rel=1e-6)


def test_lines_that_fill_up_the_batch_are_no_group_and_no_responses(policy, tmp_path):
    keys = [f"{FIRST}_0_0", f"{FIRST}_1_0", "pad" + "0f" * 16 + "_0_0", "pad" + "0f" * 16 + "_1_0"]
    dump = read(tmp_path, policy, [{"uid": key} for key in keys])
    assert len(dump.batch) == 2
    assert [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"] == [2]


@pytest.mark.parametrize("scored", ["dictionary", "number", "switched-off"])
def test_a_lengths_penalty_is_part_of_the_reward_once(policy, tmp_path, scored):
    answers, penalties = [1.0, -1.0, -1.0, 1.0], [0.0, -1.0, -0.25, -0.5]
    rows = []
    for answer, penalty in zip(answers, penalties, strict=True):
        if scored == "dictionary":
            rows.append({"score": answer, "acc": answer > 0, "overlong_reward": penalty, "overlong": penalty < 0})
        elif scored == "number":
            rows.append({"score": answer + penalty, "acc": answer, "overlong_reward": penalty})
        else:
            rows.append({"score": answer, "acc": answer > 0})
    wanted = answers if scored == "switched-off" else [a + p for a, p in zip(answers, penalties, strict=True)]
    assert read(tmp_path, policy, rows).batch.rewards.tolist() == wanted


@pytest.mark.parametrize("thinks", ["", "<think>\n\n</think>\n\n"])
def test_text_of_several_turns_is_counted_by_the_opening_that_the_template_writes(policy, tmp_path, thinks):
    tokenizer = make_tokenizer(others=["user", "assistant", "<think>", "</think>"])
    tokenizer.chat_template = (
        "{% for m in messages %}<bos>{{ m['role'] + '\n' + m['content'] + '<eos>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant\n" + thinks + "{% endif %}"
    )
    model = Policy(policy.model, tokenizer, policy.blocks_name)
    once, said = "w5 assistant w6\nw7", "w5\nuser\nw6\nassistant\n" + thinks + "w7"
    rows = [{"output": said}, {"output": once}, {"output": "assistant\nw6"}]
    write_jsonl(tmp_path / "n.jsonl", [{"prompt": "w4", "response": text, "reward": 1.0} for text in (said, once)])
    for notes, of in ((read(tmp_path, model, rows).notes, 3), (read_dump(tmp_path / "n.jsonl", model).notes, 2)):
        assert [note.split()[:3] for note in notes if "turns" in note] == [["1", "of", str(of)]]
    assert not [note for note in read(tmp_path, policy, [{"output": "w5\nw6"}]).notes if "turns" in note]


def test_text_of_a_tool_is_counted_in_a_note(policy, tmp_path):
    words = ["<tool_response>", "</tool_response>", "<tool_call>", "</tool_call>"]
    model = replace(policy, tokenizer=make_tokenizer(others=words))
    rows = [{"output": "w5 <tool_response> w6 </tool_response> w7"}, {"output": "<tool_call> w5 </tool_call>"}, {}]
    told = [note for note in read(tmp_path, model, rows).notes if "tool" in note]
    assert [note.split(":")[0] for note in told] == ["1 of 3 responses"]
    assert not [note for note in read(tmp_path, policy, [{}]).notes if "tool" in note]
