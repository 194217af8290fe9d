"""The runs of the figures: what the file lists, and a command that can be killed at any time and started again."""

import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from support.processes import Command
from support.refusals import refused

from analyses import reproduce
from analyses.common import experiments, kept_runs, make_run
from analyses.common.experiments import configure, list_runs, needs
from gradscope.errors import DivergedError, InputError
from gradscope.trainer import get_preset

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = """
[variants]
grpo = { label = "GRPO" }
lopti = { label = "Lopti", lopti_eta = 0.5 }
[scales.tiny.tracks.puzzles]
preset = "kk-embedded"
stages = [ { variants = ["grpo"], seeds = [0, 1] }, { variants = ["lopti"], seeds = [0] } ]
[scales.tiny.tracks.puzzles.settings]
task = "kk-compact-train"
people = [2]
steps = 3
questions_per_step = 1
group_size = 2
mini_batch_size = 2
max_new_tokens = 120
save_every = 1
trackers = []
device = "cpu"
[scales.tiny.tracks.puzzles.variants]
lopti = { lopti_eta = 0.25 }
[scales.tiny.tracks.puzzles.test]
task = "kk-compact-test"
people = [2, 3]
questions = 4
samples = 1
temperature = 0.7
max_new_tokens = 120
checkpoints = 2
[figures]
fig4 = { puzzles = ["grpo"] }
fig6 = { puzzles = ["lopti"], other = ["grpo"] }
"""
MAIN = """
import os, pathlib, sys
os.chdir(sys.argv[2])
import analyses.common.experiments as e
e.FILE = pathlib.Path(sys.argv[1])
from analyses import reproduce
sys.exit(reproduce.main(reproduce.Options(scale="tiny", jobs=2)))
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    file = tmp_path / "tiny.toml"
    file.write_text(TINY, encoding="utf-8")
    monkeypatch.setattr(experiments, "FILE", file)
    experiments.read.cache_clear()
    yield file
    experiments.read.cache_clear()


def start(file, folder):
    return Command("-c", MAIN, file, folder, GRADSCOPE_RUNS=str(folder / "kept"))


def stamps(folder, pattern):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob(pattern)}


def test_settings_are_the_presets_then_the_tracks_then_the_variants_then_the_tracks_of_that_variant(tiny):
    config = configure("tiny", "puzzles", "lopti")
    assert config.lopti_eta == 0.25 and config.people == (2,) and config.mini_batch_size == 2
    assert config.clip_ratio_high == get_preset("kk-embedded").clip_ratio_high
    assert configure("tiny", "puzzles", "grpo").lopti_eta is None


def test_only_what_a_figure_needs_is_chosen(tiny):
    chosen = reproduce.choose(reproduce.Options(scale="tiny", only=("fig4",)))
    assert [(run.variant, run.seed) for run in chosen] == [("grpo", 0), ("grpo", 1)]
    assert needs("fig6", "tiny") == [("puzzles", "lopti")]  # the scale has no track `other`


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[figures]", "[figures", "tiny.toml"),
        ("steps = 3", "stepps = 3", "stepps"),
        (
            "checkpoints = 2",
            "checkpoint = 2",
            "checkpoint",
        ),
        ("puzzles.test]", "puzzles.tests]", "test"),
        ("seeds = [0, 1]", "seed = [0, 1]", "seeds"),
        ('label = "GRPO"', 'name = "GRPO"', "label"),
        (
            'fig4 = { puzzles = ["grpo"',
            'fig4 = { puzzles = ["gripo"',
            "gripo",
        ),
    ],
)
def test_what_is_wrong_in_the_file_is_one_line(tiny, old, new, named):
    tiny.write_text(TINY.replace(old, new), encoding="utf-8")
    with refused(named):
        reproduce.choose(reproduce.Options(scale="tiny", only=("fig4",)))


@pytest.mark.all
def test_killed_and_started_again_it_repeats_no_finished_work_and_ends_at_the_same_numbers(tiny, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    assert start(tiny, whole).wait().status == 0
    start(tiny, killed).kill_when(lambda: list((killed / "kept").rglob("responses.parquet")))
    time.sleep(3)  # its workers see that it is gone
    finished = {path.parent for path in (killed / "kept").rglob("responses.parquet")}
    before = {path: stamps(path, "*") for path in finished}
    checkpoints = stamps(killed / "runs", "step-*/model.safetensors")

    again = start(tiny, killed).wait()
    assert again.status == 0 and f"3 runs, {len(finished)} finished" in again.stdout
    assert {path: stamps(path, "*") for path in finished} == before
    later = stamps(killed / "runs", "step-*/model.safetensors")
    assert {path: later[path] for path in checkpoints} == checkpoints
    for name in ("metrics.csv.gz", "test.csv", "responses.parquet"):
        files = sorted(path.relative_to(whole / "kept") for path in (whole / "kept").rglob(name))
        assert len(files) == 3
        for file in files:
            read = pd.read_parquet if name.endswith("parquet") else pd.read_csv
            one, other = read(whole / "kept" / file), read(killed / "kept" / file)
            timed = [c for c in one.columns if c.startswith("seconds") or c == "tokens_per_second"]
            pd.testing.assert_frame_equal(one.drop(columns=timed), other.drop(columns=timed))


@pytest.mark.all
def test_a_worker_that_is_gone_without_a_word_is_one_line():
    (failed,) = reproduce.make_all({"one": partial(os._exit, 9)}, 1, "run")
    assert failed.startswith("one: a process was killed") and "\n" not in failed


@pytest.mark.all
def test_a_run_that_diverges_is_judged_as_far_as_it_got(tiny, tmp_path, monkeypatch):
    for module in (make_run, kept_runs):
        monkeypatch.setattr(module, "RUNS", tmp_path / "kept")
    monkeypatch.setattr(make_run, "WORK", tmp_path / "work")
    run, real = list_runs("tiny")[0], make_run.train

    def diverge(*args, **keywords):
        real(*args, **keywords)
        raise DivergedError("no finite gradient.\nsecond line")

    monkeypatch.setattr(make_run, "train", diverge)
    make_run.make(run)
    kept = tmp_path / "kept" / run.place
    manifest = json.loads((kept / "manifest.json").read_text())
    assert manifest["ended"] == "no finite gradient" and kept_runs.is_finished(run)
    assert str(tmp_path) not in (kept / "manifest.json").read_text() + (kept / "config.json").read_text()
    test = pd.read_csv(kept / "test.csv")
    assert test["step"].unique().tolist() == [2, 3] and test["level"].tolist() == ["2", "3", "all"] * 2
    responses = pd.read_parquet(kept / "responses.parquet")
    sampled = responses[~responses["greedy"]]
    last = test[(test["step"] == 3) & (test["level"] == "all")].iloc[0]
    assert last["avg@1"] == pytest.approx(sampled["correct"].mean()) and len(sampled) == 4


def test_the_responses_to_so_many_questions_are_kept():
    made = pd.DataFrame(dict.fromkeys(make_run.KEPT, 0), index=range(4))
    made = made.assign(group=[0, 1, 1, 2], old_logprobs=[[-1.0, -2.0], [-1.0], [-3.0], [-4.0]])
    found = {kept: make_run.keep_responses(made, kept) for kept in (None, 2, 0)}
    assert {kept: table["group"].tolist() for kept, table in found.items()} == {None: [0, 1, 1, 2], 2: [0, 1, 1], 0: []}
    assert found[2]["tokens"].tolist() == [2, 1, 1] and found[2]["logprob"].tolist() == [-3.0, -1.0, -3.0]


def test_no_question_of_the_test_is_trained_on():
    from analyses.common.puzzles import TEST, TRAIN

    test = {question.prompt for question in TEST.questions(60, seed=0, people=(2, 3))}
    train = {question.prompt for question in TRAIN.questions(60, seed=1, people=(2, 3))}
    assert len(test) == len(train) == 60 and not test & train


@pytest.fixture
def several(tiny, tmp_path, monkeypatch):
    """The tiny scale, with two processes for each run."""
    tiny.write_text(TINY + "[scales.tiny.launch]\nprocesses = 2\nsharded = false\n", encoding="utf-8")
    experiments.read.cache_clear()
    for module, name in ((make_run, "WORK"), (make_run, "RUNS")):
        monkeypatch.setattr(module, name, tmp_path / name.lower())
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return tmp_path


@pytest.mark.all
def test_what_one_of_several_processes_complains_of_is_one_line(several):
    run = list_runs("tiny")[0]
    with pytest.raises(InputError) as found:
        make_run.train_launched(
            replace(run.config, model="no/such/folder"), several / "work", processes=2, sharded=False
        )
    assert str(found.value).startswith("2 processes under accelerate launch: ") and "no/such/folder" in str(found.value)
    assert "\n" not in str(found.value) and not list((several / "work").glob("checkpoints/*"))
