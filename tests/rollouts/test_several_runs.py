"""Rows of several runs in one log, rows that cannot be measured, lines that were cut off: counted, and left out."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support import dumps
from support.policies import CONTEXT, VOCAB, make_policy, make_tokenizer, write_jsonl
from support.refusals import refused

from gradscope.objective import resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import list_steps, read_checkpoint_dump, read_dump, read_rollouts, write_rollouts


@pytest.fixture(scope="module")
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


def row(step: int, prompt: int, answer: int, reward: float = 0.0, **more) -> dict:
    return {
        "prompt_ids": [4, prompt],
        "response_ids": [answer, 7],
        "reward": reward,
        "step": step,
        "temperature": 1.0,
    } | more


def steps_of(run: int, first: int, last: int, **more) -> list[dict]:
    """Two answers to each of two prompts a step, other ones in each run."""
    return [row(step, 20 + prompt, 30 + 10 * run + 2 * step + one, float(one), **more)
            for step in range(first, last + 1) for prompt in (0, 1) for one in (0, 1)]  # fmt: skip


def answers(dump) -> list[int]:
    return [int(dump.batch.input_ids[r, start]) for r, start in enumerate(dump.batch.response_start.tolist())]


def kinds(dump, kind: str) -> list[str]:
    return [note for note in dump.notes if note.kind == kind]


def board(rows: list[dict]) -> list[dict]:
    """The same rows in RLLoggingBoard's columns."""
    return [
        {"step": r["step"], "reward": r["reward"], "prompt": f"w4 w{r['prompt_ids'][1]}",
         "response": f"w{r['response_ids'][0]} w7", "response_tokens": [f"w{r['response_ids'][0]}", "w7"],
         "logprobs": [-0.5, -0.25]} for r in rows
    ]  # fmt: skip


@pytest.mark.parametrize("made", [list, board], ids=["native", "rl_logging_board"])
@pytest.mark.parametrize("cut", [0, 1])
def test_steps_that_a_restart_wrote_again_are_left_out_with_those_behind_them(policy, tmp_path, made, cut):
    first, second = steps_of(0, 1, 5), steps_of(1, 3, 4)
    first = first[: len(first) - cut]  # the first run died while it wrote its last step
    path = write_jsonl(tmp_path / "r.jsonl", made(first + second))
    dump = read_dump(path, policy)
    kept = [r for r in first if r["step"] < 3] + second
    assert answers(dump) == [r["response_ids"][0] for r in kept]
    assert f"{12 - cut} of {20 + 8 - cut} rows left out" in kinds(dump, "left-out")[0]
    assert list_steps(path).known == (1, 2, 3, 4)
    one = read_dump(path, policy, step=3)
    assert answers(one) == [r["response_ids"][0] for r in second if r["step"] == 3]
    assert len(one.batch.group_ids.unique()) == 2
    alone = read_dump(write_jsonl(tmp_path / "one.jsonl", made([r for r in second if r["step"] == 3])), policy)
    assert resolve_advantages(one.batch).equal(resolve_advantages(alone.batch))
    assert {*read_checkpoint_dump(path, policy, 8).steps.tolist()} == {4}


def test_an_empty_answer_of_the_first_run_does_not_count_in_the_seconds_group(tmp_path):
    first = steps_of(0, 1, 4)
    first[8] |= {"response_ids": [], "reward": 9.0}
    dump = read_dump(write_jsonl(tmp_path / "r.jsonl", first + steps_of(1, 3, 4)), step=3)
    alone = read_dump(write_jsonl(tmp_path / "one.jsonl", steps_of(1, 3, 3)))
    assert resolve_advantages(dump.batch).equal(resolve_advantages(alone.batch))


def test_a_third_run_replaces_what_the_second_made(tmp_path):
    rows = steps_of(0, 1, 4) + steps_of(1, 3, 4) + steps_of(2, 2, 3)
    kept = [r for r in steps_of(0, 1, 1)] + steps_of(2, 2, 3)
    assert answers(read_dump(write_jsonl(tmp_path / "r.jsonl", rows))) == [r["response_ids"][0] for r in kept]


def test_rows_of_processes_one_after_another_and_in_no_order_are_all_kept(tmp_path):
    by_process = [r | {"process": process} for process in (0, 1) for r in steps_of(process, 1, 3, micro_batch=0)]
    of_prompts = sorted(steps_of(0, 1, 4), key=lambda r: (r["prompt_ids"], r["step"]))
    shuffled = random.Random(0).sample(steps_of(0, 1, 4), 16)
    newest_first = sorted(steps_of(0, 1, 4), key=lambda r: -r["step"])
    for name, rows in {
        "process": by_process,
        "prompts": of_prompts,
        "shuffled": shuffled,
        "newest": newest_first,
    }.items():
        dump = read_dump(write_jsonl(tmp_path / f"{name}.jsonl", rows))
        assert len(dump.batch) == len(rows), name
        assert bool(kinds(dump, "several-runs")) == (name in ("process", "prompts")), name


def test_a_restart_at_the_step_that_was_the_last_is_told(tmp_path):
    rows = steps_of(0, 1, 3) + steps_of(1, 3, 4)
    path = write_jsonl(tmp_path / "r.jsonl", rows)
    [note] = kinds(read_dump(path, step=3), "several-runs")
    assert "step 3 comes back" in note
    assert not kinds(read_dump(path, step=2), "several-runs")
    mixed = [r for one in (0, 1) for r in steps_of(0, 1, 3)[one::2]]  # an answer to each prompt, then another to each
    assert not kinds(
        read_dump(write_jsonl(tmp_path / "m.jsonl", sorted(mixed, key=lambda r: r["step"]))), "several-runs"
    )


def test_files_of_an_earlier_longer_run_are_told_where_they_are_read(tmp_path):
    for step in range(1, 8):
        path = write_rollouts(tmp_path / f"step_{step}.parquet", steps_of(step > 4, step, step))
        age = 1_000_000 + 600 * step + (100_000 if step <= 4 else 0)  # the second run ended with step 4
        os.utime(path, (age, age))
    assert not kinds(read_dump(tmp_path, step=3), "several-runs")
    assert len(kinds(read_dump(tmp_path, step=6), "several-runs")) == 1
    [note] = kinds(read_dump(tmp_path), "several-runs")
    assert "3 steps, 5 to 7" in note
    for at, path in enumerate(sorted(tmp_path.iterdir())):
        os.utime(path, (2_000_000 - at, 2_000_000 - at))  # a copy
    assert not kinds(read_dump(tmp_path), "several-runs")


def test_files_of_ranks_that_a_smaller_second_run_left_are_told(tmp_path):
    for rank in range(3):
        path = dumps.write_prime_rl(tmp_path, step=4, rank=rank)
        os.utime(path, (1_000_000 - 5_000 * (rank == 2),) * 2)
    told = kinds(read_dump(path.parent), "several-runs")  # also that the ranks hold the same rows
    assert any(note.startswith("1 of the log's files, of step 4") for note in told)


@pytest.mark.parametrize("name", ["verl", "trl", "nemo_rl", "slime"])
def test_so_are_a_trainers_files(policy, tmp_path, name):
    (tmp_path / "log").mkdir()
    for step in (1, 2, 3):
        before = {*tmp_path.rglob("*")}
        told = {"rollout_id": step} if name == "slime" else {"step": step}
        told |= {"samples": dumps.SAMPLES[step - 1 :]} if name == "trl" else {}  # else it is the generation before
        path = getattr(dumps, f"write_{name}")(tmp_path / "log", **told)
        for file in {*tmp_path.rglob("*")} - before:
            os.utime(file, (1_000_000 - 700 * step,) * 2)
    [note] = kinds(read_dump(path if path.is_dir() else path.parent, policy), "several-runs")
    assert "2 steps, 2 to 3," in note


def test_rows_that_are_all_there_twice_and_long_ones_are_counted(tmp_path):
    twice = [r for r in steps_of(0, 1, 1) for _ in (0, 1)]
    dump = read_dump(write_jsonl(tmp_path / "twice.jsonl", twice))
    [note] = kinds(dump, "several-runs")
    assert note.startswith("8 of 8 responses") and "4 different" in note and len(dump.batch) == 8
    once = steps_of(0, 1, 1)
    assert not kinds(
        read_dump(write_jsonl(tmp_path / "once.jsonl", [once[0], *once])), "several-runs"
    )  # a short answer
    long = [row(1, 20, 5, response_ids=[7 + at % 9 for at in range(30)], old_logprobs=[-0.5] * 30) for _ in (0, 1)]
    [note] = kinds(read_dump(write_jsonl(tmp_path / "long.jsonl", [*long, *once])), "several-runs")
    assert note.startswith("2 of 6 responses")
    other = [long[0], long[1] | {"old_logprobs": [-0.25] * 30}]
    assert not kinds(read_dump(write_jsonl(tmp_path / "other.jsonl", [*other, *once])), "several-runs")


# Rows that cannot be measured


UNFIT = {
    "greedy": {"temperature": 0.0},
    "too cold": {"temperature": 1e-30},
    "unknown": {"temperature": "nan"},
    "too long": {"response_ids": [7] * CONTEXT},
    "no response": {"response_ids": None},
    "an id beyond the vocabulary": {"response_ids": [7, VOCAB]},
    "a prompt of other ids": {"prompt_ids": [4, VOCAB + 9]},
}


@pytest.mark.parametrize("fault", UNFIT)
def test_a_row_that_cannot_be_measured_is_left_out_counted_and_named_and_most_are_refused(policy, tmp_path, fault):
    odd = {n: float("nan") if v == "nan" else v for n, v in UNFIT[fault].items()}
    good = [row(1, 20, 30 + at, float(at % 2), group=0) for at in range(3)]
    path = write_jsonl(tmp_path / "r.jsonl", [good[0], row(1, 20, 40, 1.0, group=0) | odd, *good[1:]])
    batch = read_rollouts(path, policy)
    assert len(batch) == 3
    [note] = [note for note in batch.notes if note.kind == "left-out"]
    assert "1 of 4 rows" in note and "row 1 (line 2)" in note
    rewards = [0.0, 1.0, 1.0, 0.0]  # that of the row counts in its group
    mean, std = sum(rewards) / 4, (sum((r - 0.5) ** 2 for r in rewards) / 3) ** 0.5
    wanted = [(r - mean) / (std + 1e-6) for r in (0.0, 1.0, 0.0)]
    assert resolve_advantages(batch)[:, 2].tolist() == pytest.approx(wanted, rel=1e-5)
    most = write_jsonl(tmp_path / "most.jsonl", [good[0], good[1] | odd])
    with refused("row 1 (line 2)"):
        read_rollouts(most, policy)


def test_a_rewarded_sample_of_slime_that_was_aborted_counts_and_is_told(tmp_path):
    import torch

    [path] = dumps.write_slime(tmp_path).rglob("*.pt")
    content = torch.load(path, weights_only=True)
    content["samples"][1]["status"] = "aborted"
    torch.save(content, path)
    dump = read_dump(path)
    assert len([note for note in dump.notes if note.startswith("1 of") and "aborted or failed, but" in note]) == 1


TORN: dict[str, Callable[[Path], Path]] = {
    "native": lambda folder: write_jsonl(folder / "r.jsonl", steps_of(0, 1, 1)),
    **{n: getattr(dumps, f"write_{n}") for n in ("verl", "ms_swift", "open_instruct", "verifiers", "prime_rl", "roll")},
    **{n: getattr(dumps, f"write_{n}") for n in ("nemo_rl", "torchtitan", "areal", "rl_logging_board")},
}


@pytest.mark.parametrize("name", TORN)
def test_a_last_line_that_a_kill_tore_is_left_out_and_counted(policy, tmp_path, name):
    path = TORN[name](tmp_path)
    files = [path] if path.is_file() else [file for file in path.rglob("*.jsonl")]
    whole = len(read_dump(path, policy).batch)
    lines = files[0].read_text().splitlines()
    files[0].write_text("\n".join([*lines, lines[-1][: len(lines[-1]) // 2]]))
    dump = read_dump(path, policy)
    assert len(dump.batch) == whole
    assert len([note for note in kinds(dump, "left-out") if "cut off" in note]) == 1
    files[0].write_text("\n".join([lines[-1][:9], *lines]) + "\n")  # a line in the middle is another matter
    with refused("row 0"):
        read_dump(path, policy)


def test_a_file_of_nothing_but_a_torn_line_is_refused(tmp_path):
    (tmp_path / "r.jsonl").write_text(json.dumps(row(1, 4, 5))[:30])
    with refused("cut off"):
        read_dump(tmp_path / "r.jsonl")


# Ids beside text


def test_ids_are_taken_wherever_a_row_has_them(policy, tmp_path):
    both = {"prompt": "w4 w5", "response": "w8 w9", "response_ids": [8, 9, 2]}
    rows = [both, both | {"prompt_ids": [4, 5]}, {"prompt": "w4 w5", "response_ids": [8, 9, 2]}]
    rows += [
        {"prompt_ids": [4, 5], "response": "w8 w9"},
        {"prompt": [{"role": "user", "content": "w5"}], "response_ids": [9]},
    ]
    batch = read_rollouts(write_jsonl(tmp_path / "r.jsonl", rows), policy)
    found = [batch.sequence(at)[0].tolist() for at in range(5)]
    assert found[:4] == [[4, 5, 8, 9, 2]] * 3 + [[4, 5, 8, 9]]
    assert found[4] == [*policy.encode_prompt([{"role": "user", "content": "w5"}]), 9]
    with refused("row 0", "w8 w9", "response_ids"):  # another tokenizer's
        read_rollouts(write_jsonl(tmp_path / "o.jsonl", [both | {"response_ids": [11, 12]}]), policy)
    with refused("policy"):
        read_rollouts(tmp_path / "r.jsonl")
