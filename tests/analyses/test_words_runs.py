"""The runs of a pretrained policy: what is judged of planted folders, and that no question is trained on and tested."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.processes import Command

import analyses.common.dealt_problems  # noqa: F401  (registers its tasks)
from analyses.common import make_run
from analyses.common.experiments import configure, list_runs
from analyses.paper import decision, words_gates
from analyses.paper_repro import render
from gradscope.tasks import get_task
from gradscope.trainer import list_checkpoints

START = 0.3
ENDS = {
    ("varied-low", "grpo"): 0.50,
    ("varied-low", "reweight"): 0.47,
    ("varied-low", "lopti"): 0.51,
    ("varied-high", "grpo"): 0.42,
    ("varied-high", "reweight"): 0.52,
    ("varied-high", "lopti"): 0.53,
}
"""Mean accuracy of the last three checkpoints; the tokens below ¼ fall to .10 at step 30 of the low rate, .05 of the
high one."""


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


def plant_validation(kept: Path) -> None:
    for (track, variant), end in ENDS.items():
        for seed in (20, 21):
            off = 0.01 if seed == 20 else -0.01
            plant(kept, track, variant, seed, (end + off - 0.02, end + off, end + off + 0.02), LOW[track])
    measured = kept / "words" / "measured" / "words_start_varied"
    measured.mkdir(parents=True)
    pd.DataFrame({"level": ["1", "all"], "sampled": [0.9, START]}).to_csv(measured / "start.csv", index=False)
    (measured / "manifest.json").write_text("{}")


LOW = {"varied-low": 0.1, "varied-high": 0.05}


def judge(kept: Path, out: Path) -> dict[str, pd.DataFrame]:
    done = Command("-m", "analyses.paper.words_gates", "--out", out, GRADSCOPE_RUNS=str(kept)).wait()
    assert done.status == 0, done.stderr
    names = ("gates", "rates", "runs", "power")
    return {name: pd.read_csv(out / f"words_{name}.csv") for name in names} | {"said": done.stdout}


def test_gates_and_rates_are_those_of_the_planted_runs(tmp_path):
    plant_validation(tmp_path / "kept")
    found = judge(tmp_path / "kept", tmp_path / "out")
    gates = found["gates"].set_index(["track", "gate"])
    assert gates.loc["varied-low", "value"].tolist() == pytest.approx([0.3, 0.2, 0.5, 0.12, 0.1], abs=1e-3)
    assert gates.loc["varied-high", "value"].tolist() == pytest.approx([0.3, 0.12, 0.42, 0.12, 0.05], abs=1e-3)
    assert (gates.loc["varied-low", "state"] == "passes").all() and (gates.loc[list(LOW), "seeds"] == 2).all()
    assert (gates.loc["words-low", "state"] == "not run").all()
    fails = gates.loc["varied-high", "state"] == "fails"
    assert fails[fails].index.tolist() == ["gain", "tokens with π < ¼ at step 30"]
    assert all(name in found["said"] for name in fails[fails].index)  # a gate that fails is named
    chosen = found["rates"].query("chosen").set_index("variant")["track"].to_dict()
    # Lopti's rates differ by .02, so that it gets GRPO's; Reweight's by .05.
    assert chosen == {"grpo": "varied-low", "reweight": "varied-high", "lopti": "varied-low"}
    planned = {variant: configure("words", "words", variant).learning_rate for variant in chosen}
    assert found["rates"].set_index("variant")["in_decision"].to_dict() == planned
    rates = {track: configure("words", track, "grpo").learning_rate for track in LOW}
    other = [variant for variant, track in chosen.items() if rates[track] != planned[variant]]
    told = [line for line in found["said"].splitlines() if line.startswith("runs.toml has")]
    assert [line.split(" for ")[1].split()[0] for line in told] == other
    assert found["runs"].set_index("part")["made"].to_dict() == {"gates": 4, "learning rates": 8, "decision": 0}


def test_what_is_not_run_is_said_so_with_a_command_that_makes_it(tmp_path):
    kept = tmp_path / "kept"
    plant(kept, "varied-low", "grpo", 20, (0.5, 0.5, 0.5))
    found = judge(kept, tmp_path / "out")
    assert (found["gates"]["state"] == "not run").all() and found["gates"]["value"].isna().all()
    assert not found["rates"]["chosen"].any() and found["rates"]["seeds"].tolist() == [1, 0, 0, 0, 0, 0]
    runs = found["runs"].set_index("part")
    assert runs["made"].tolist() == [1, 0, 0] and runs["planned"].tolist() == [6, 8, 24]
    for command in runs["command"]:
        listed = Command(*command.split()[1:], "--dry-run", GRADSCOPE_RUNS=str(kept)).wait()
        assert listed.status == 0 and f"{command.split('--only ')[1].split()[0]}" in command
        planned = {line.split(",")[0].strip() for line in listed.stdout.splitlines() if line.startswith("  words/")}
        assert len(planned) == {"words_gates": 6, "words_rates": 12, "decision": 24}[command.split()[6]]


@pytest.mark.parametrize(("spread", "seeds", "verdicts"), [(0.02, 8, True), (0.08, 12, False)])
def test_the_decision_finds_what_was_planted_with_the_seeds_that_the_rule_asks_for(tmp_path, spread, seeds, verdicts):
    rng, gains = np.random.default_rng(0), {"grpo": 0.0, "reweight": 0.0, "lopti": -0.2}
    plain = 0.5 + 0.1 * rng.normal(size=8)  # what a seed is worth
    for variant, gain in gains.items():
        noise = rng.normal(size=8)
        noise = (noise - noise.mean()) / noise.std(ddof=1) * spread * (variant != "grpo")
        for seed, end in enumerate(plain + gain + noise):
            plant(tmp_path / "kept", "words", variant, seed, (end, end, end))
    out = tmp_path / "out"
    command = ("-m", "analyses.paper.decision", "--scale", "words", "--out", out)
    done = Command(*command, GRADSCOPE_RUNS=str(tmp_path / "kept")).wait()
    assert done.status == 0, done.stderr
    found = pd.read_csv(out / "decision_words.csv").set_index(["variant", "baseline"])
    assert (found["seeds_asked"] == seeds).all() and (out / "decision_words.png").is_file()
    assert found.loc[decision.PLANS["words"].named, "seeds"].tolist() == [8, 8]
    assert found.loc[("lopti", "random-split"), "seeds"] == 0
    lopti, reweight = (found.loc[(name, "grpo")] for name in ("lopti", "reweight"))
    assert lopti["difference"] == pytest.approx(-0.2, abs=1e-9) and lopti["differs"] == verdicts
    assert found["split_asked"].all() == verdicts and found["split_asked"].any() == verdicts
    assert (lopti["verdict"] == "lower") == verdicts and reweight["gain_excluded"] == verdicts


def test_the_page_says_what_the_decision_found_once_there_are_runs(tmp_path, repository):
    for path in (repository / "figures").iterdir():
        if path.name != "words":
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(repository / "figures" / "words", tmp_path / "words")
    runs = pd.read_csv(tmp_path / "words" / "words_runs.csv")
    runs.loc[runs["part"] == "decision", "made"] = 24
    runs.to_csv(tmp_path / "words" / "words_runs.csv", index=False)
    found = {"seeds": [8, 8, 0], "difference": [0.0123, -0.0456, np.nan], "lower": [-0.02, -0.06, np.nan]}
    found |= {"upper": [0.04, -0.03, np.nan], "p_holm": [0.4, 0.01, np.nan], "differs": [False, True, False]}
    pairs = {"variant": ["reweight", "lopti", "lopti"], "baseline": ["grpo", "grpo", "random-split"]}
    verdict = ["the first verdict", "the second verdict", ""]
    pd.DataFrame(pairs | found | {"verdict": verdict}).to_csv(tmp_path / "words" / "decision_words.csv", index=False)
    page = render(tmp_path)
    numbers = ("+.012 [−.020, .040]", "−.046 [−.060, −.030]", *verdict[:2], "| decision | 24 of 24 |")
    assert all(words in page for words in numbers)


def test_problems_of_training_validation_and_test_have_none_in_common():
    parts = [get_task(f"word-problems-{part}") for part in ("train", "validation", "test")]
    drawn = [{str(question.prompt) for seed in range(3) for question in t.questions(300, seed=seed)} for t in parts]
    assert len(set.union(*drawn)) == sum(map(len, drawn)) > 2600
    (question,) = parts[0].questions(1, seed=0)
    assert parts[0].grade(f"So it is {question.answer[0]}. The answer is {question.answer[0]}.", question).correct
    assert [each.level for each in parts[2].questions(6, seed=0)] == [1, 2, 3] * 2


def test_the_runs_are_those_that_were_named():
    runs = list_runs("words")
    decided = [run for run in runs if run.track == "words"]
    assert {run.variant for run in decided} >= {"grpo", "reweight", "lopti"}
    assert {run.seed for run in decided}.isdisjoint(run.seed for run in runs if run.track != "words")
    assert {run.test.task for run in decided} == {"word-problems-test"}
    assert {run.test.task for run in runs if run.track != "words"} == {"word-problems-validation"}
    low, high = (configure("words", track, "grpo") for track in words_gates.RATED)
    assert low.learning_rate < high.learning_rate and low.task == high.task == "word-problems-train"
    assert {run.config.learning_rate for run in decided} <= {low.learning_rate, high.learning_rate}


def test_a_finished_run_leaves_the_weights_that_its_scale_keeps(tmp_path):
    for step in (10, 20, 30):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "optimizer.pt"):
            (folder / name).touch()
    make_run.clear(tmp_path, 2)
    left = {folder.name: sorted(file.name for file in folder.iterdir()) for folder in list_checkpoints(tmp_path)}
    assert left == {f"step-0000{step}": ["config.json", "model.safetensors"] for step in (20, 30)}
