"""The runs of a pretrained policy: what is missing of a planted folder, and no question is trained on and tested."""

import json
from pathlib import Path

import pandas as pd
import pytest
from support.processes import Command

import analyses.common.dealt_problems  # noqa: F401  (registers its tasks)
from analyses.common import make_run
from analyses.common.experiments import configure, list_runs
from gradscope.tasks import get_task
from gradscope.trainer import list_checkpoints

LOW = {"varied-low": 0.1, "varied-high": 0.05}
"""Share of the tokens below ¼ at step 30."""


def plant(kept: Path, track: str, variant: str, seed: int, accuracies: tuple[float, ...], low: float = 0.1) -> None:
    folder = kept / "words" / track / variant / f"seed{seed}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"steps": 60}))
    (folder / "manifest.json").write_text(json.dumps({"ended": "as planned"}))
    tests = pd.DataFrame({"level": "all", "greedy_accuracy": 0.0, "avg@4": accuracies, "step": (40, 50, 60)})
    # A level that is not asked about, and right twice as often.
    easy = tests.assign(level="1", **{"avg@4": 2 * tests["avg@4"]})
    pd.concat([easy, tests]).to_csv(folder / "test.csv", index=False)
    # Shares of other steps do not count; those around a named one do by their mean.
    shares = pd.Series(0.5, index=range(1, 61), name="token_share_0")
    shares.loc[1:3], shares.loc[29:31] = [0.16, 0.1, 0.1], [low - 0.02, low + 0.01, low + 0.01]
    shares.rename_axis("step").reset_index().assign(reward_mean=0.0).to_csv(folder / "metrics.csv.gz", index=False)


def judge(kept: Path, out: Path) -> dict[str, pd.DataFrame]:
    done = Command("-m", "analyses.paper.words_gates", "--out", out, GRADSCOPE_RUNS=str(kept)).wait()
    assert done.status == 0, done.stderr
    return {name: pd.read_csv(out / f"words_{name}.csv") for name in ("gates", "runs")} | {"said": done.stdout}


@pytest.mark.all
def test_what_is_not_run_is_said_so_with_a_command_that_makes_it(tmp_path):
    kept = tmp_path / "kept"
    plant(kept, "varied-low", "grpo", 20, (0.5, 0.5, 0.5))
    found = judge(kept, tmp_path / "out")
    assert (found["gates"]["state"] == "not run").all() and found["gates"]["value"].isna().all()
    [row] = found["runs"].to_dict("records")
    assert (row["made"], row["planned"]) == (1, 6) and row["command"] in found["said"]
    listed = Command(*row["command"].split()[1:], "--dry-run", GRADSCOPE_RUNS=str(kept)).wait()
    planned = {line.split(",")[0].strip() for line in listed.stdout.splitlines() if line.startswith("  words/")}
    assert listed.status == 0 and len(planned) == 6


def test_problems_of_training_validation_and_test_have_none_in_common():
    parts = [get_task(f"word-problems-{part}") for part in ("train", "validation", "test")]
    drawn = [{str(question.prompt) for seed in range(3) for question in t.questions(300, seed=seed)} for t in parts]
    assert len(set.union(*drawn)) == sum(map(len, drawn)) > 2600
    (question,) = parts[0].questions(1, seed=0)
    assert parts[0].grade(f"So it is {question.answer[0]}. The answer is {question.answer[0]}.", question).correct
    assert [each.level for each in parts[2].questions(6, seed=0)] == [1, 2, 3] * 2


def test_the_runs_are_those_that_were_named():
    runs = list_runs("words")
    assert {run.variant for run in runs} == {"grpo"}
    assert {run.test.task for run in runs} == {"word-problems-validation"}
    low, high = (configure("words", track, "grpo") for track in LOW)
    assert low.learning_rate < high.learning_rate and low.task == high.task == "word-problems-train"


def test_a_finished_run_leaves_the_weights_that_its_scale_keeps(tmp_path):
    for step in (10, 20, 30):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "optimizer.pt"):
            (folder / name).touch()
    make_run.clear(tmp_path, 2)
    left = {folder.name: sorted(file.name for file in folder.iterdir()) for folder in list_checkpoints(tmp_path)}
    assert left == {f"step-0000{step}": ["config.json", "model.safetensors"] for step in (20, 30)}
