"""The dry run: what is there and in order, what is absent, what fails, on made-up files; and on the real data."""

import random

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analyses.common import experiments
from analyses.common.dry_run import Options, dry_run, main
from gradscope.errors import InputError
from gradscope.tasks.knights_knaves import generate_puzzle

TRACKS = """
[variants]
grpo = { label = "GRPO" }
lopti = { label = "Lopti", lopti_eta = 0.5 }
[scales.tiny.launch]
processes = 4
sharded = true
[scales.tiny.tracks.puzzles-tiny]
kind = "puzzles"
preset = "kk-qwen2.5-3b"
paper = { steps = 9, optimizer_steps = 2 }
settings = { model = "embedded", epochs = 3, questions_per_step = 2, mini_batch_size = 8, max_new_tokens = 64 }
stages = [ { variants = ["grpo", "lopti"], seeds = [0, 1] } ]
test = { task = "knights-knaves", data = ["kk/test.parquet"], temperature = 0.7, max_new_tokens = 64, checkpoints = 1 }
[scales.tiny.tracks.math-tiny]
preset = "math-qwen2.5-7b"
settings = { data = ["math/train.parquet"], questions_per_step = 2, mini_batch_size = 8, max_new_tokens = 64 }
stages = [ { variants = ["grpo"], seeds = [0] } ]
test = { task = "math-plain", data = ["math/nowhere.parquet"], temperature = 1.0, max_new_tokens = 64, checkpoints = 1 }
[figures]
fig4 = { puzzles = ["grpo"] }
table1 = { math-tiny = ["grpo"] }
"""
TRUTHS = ["5", r"\frac{1}{2}", "]", '["1", "6:00"]']


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Six puzzles to train on, two to test, four problems; no file of problems to test."""
    (tmp_path / "tiny.toml").write_text(TRACKS, encoding="utf-8")
    monkeypatch.setattr(experiments, "FILE", tmp_path / "tiny.toml")
    monkeypatch.setenv("GRADSCOPE_DATA", str(tmp_path))
    experiments.read.cache_clear()
    rng = random.Random(0)
    write(tmp_path / "kk/1/train.parquet", [puzzle(3, rng) for _ in range(6)])
    write(tmp_path / "kk/test.parquet", [puzzle(4, rng) for _ in range(2)])
    write(tmp_path / "math/train.parquet", [problem(truth) for truth in TRUTHS])
    yield tmp_path
    experiments.read.cache_clear()


def test_everything_that_is_there_is_counted_and_what_is_absent_is_named_with_its_place(made_up):
    found = dry_run("tiny", progress=False)
    states = found.table.set_index(["subject", "what"])["state"].to_dict()
    absent = {("math/nowhere.parquet", "files"), ("math-tiny", "prompts")}  # no hub model's tokenizer is here
    assert {key for key, state in states.items() if state == "absent"} == absent
    assert not found.named("fails")
    details = found.table.set_index(["subject", "what"])["detail"]
    assert details["kk/*/train.parquet", "questions"].startswith("6 rows, 6 of level 3; prompts of ")
    assert details["kk/*/train.parquet", "answers"] == "6 of 6 reference answers earn 3"
    assert str(made_up / "math/nowhere.parquet") in details["math/nowhere.parquet", "files"]
    # 3 epochs of 6 questions, 2 a step; 2 × 8 responses, 8 to an optimizer step, twice that for Lopti.
    assert details["puzzles-tiny", "batches"] == (
        "2 questions × 8 = 16 responses, 8 to an optimizer step: 2 a batch, 4 with lopti; 9 batches in all, "
        "3.0 an epoch (the paper: 9 steps, 2 optimizer steps)"
    )
    assert details["puzzles-tiny", "runs"] == "4: 2 variants, seeds 0, 1"


def test_a_reference_answer_that_does_not_earn_all_fails_the_run_in_one_line(made_up, capsys):
    rng = random.Random(1)
    wrong = puzzle(3, rng)
    truth = wrong["reward_model"]["ground_truth"]
    truth["solution_text_format"] = truth["solution_text_format"].replace("knave", "k").replace("knight", "knave")
    write(made_up / "kk/1/train.parquet", [puzzle(3, rng), wrong])
    with pytest.raises(InputError, match=r"^kk/\*/train.parquet, answers: 1 of 2 reference answers earn 3") as error:
        main(Options(scale="tiny", only=("fig4",), out=made_up / "out" / "listed.csv"))
    assert "\n" not in str(error.value)
    listed = pd.read_csv(made_up / "out" / "listed.csv")
    assert listed[["file", "row", "why"]].values.tolist() == [["kk/1/train.parquet", 1, "earns -1"]]
    assert "kk/*/train.parquet  answers" in capsys.readouterr().out


def test_at_scale_cpu_all_is_in_order_and_prompts_are_encoded_by_the_policys_tokenizer():
    found = dry_run("cpu", progress=False)
    assert {check.state for check in found.checks} == {"ok"}
    details = found.table.set_index(["subject", "what"])
    assert details["state"]["puzzles", "prompts"] == "ok"
    assert " tokens; prompts of " in details["detail"]["puzzles", "prompts"]
    assert "150 batches in all" in details["detail"]["puzzles", "batches"]


def test_the_papers_puzzles_are_all_there_and_their_answers_all_earn_three(data_folder):
    found = dry_run("paper", only=("fig4",), progress=False)
    details = found.table.set_index(["subject", "what"])["detail"]
    assert details["kk/*/train.parquet", "answers"] == "4,500 of 4,500 reference answers earn 3"
    assert details["kk/*/test.parquet", "answers"] == "500 of 500 reference answers earn 3"
    assert not found.named("fails") and len(found.unverified) == 0
    for track in ("puzzles-3b", "puzzles-7b"):
        assert "351 batches in all" in details[track, "batches"]


def puzzle(people, rng):
    made = generate_puzzle(people, rng)
    people = enumerate(zip(made.names, made.solution, strict=True), 1)
    told = [f"({i}) {name} is a {'knight' if knight else 'knave'}" for i, (name, knight) in people]
    return {
        "names": list(made.names),
        "statements": repr(made.statements),
        "solution": list(made.solution),
        "quiz": made.quiz,
        "reward_model": {"ground_truth": {"solution_text_format": "\n".join(told)}, "style": "rule"},
    }


def problem(truth):
    return {"prompt": [{"role": "user", "content": "What is it?"}], "reward_model": {"ground_truth": truth}}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
