"""Packed tracks are read as their folders were, and nothing is packed, or lost, that is not whole."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from support.refusals import refused

from analyses.common import experiments, kept_runs, make_run, measurements, pack_runs, read_runs
from analyses.common.experiments import find_run, list_runs
from analyses.common.kept_runs import is_finished, list_seeds, read_about, read_tables
from analyses.common.tables import write_csv, write_parquet

SMALL = """
[variants]
grpo = { label = "GRPO" }
lopti = { label = "Lopti", lopti_eta = 0.5 }
[scales.small.tracks.puzzles]
preset = "kk-embedded"
stages = [{ variants = ["lopti", "grpo"], seeds = [2, 10] }]
settings = { steps = 3 }
test = { task = "kk-compact-test", temperature = 0.7, max_new_tokens = 120, checkpoints = 2 }
[scales.small.tracks.math]
like = "puzzles"
[measurements]
start = { module = "none", after = [], figures = [], scales = ["small"] }
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Folder of a small scale's runs: two tracks, of two variants at two seeds each."""
    file = tmp_path / "small.toml"
    file.write_text(SMALL, encoding="utf-8")
    monkeypatch.setattr(experiments, "FILE", file)
    experiments.read.cache_clear()
    for module in (kept_runs, measurements, pack_runs, read_runs):
        monkeypatch.setattr(module, "RUNS", tmp_path / "kept")
    for run in list_runs("small"):
        plant(tmp_path / "kept" / run.place, run)
    yield tmp_path / "kept" / "small"
    experiments.read.cache_clear()


def plant(folder, run):
    """A run's files; the tracks have other columns, levels of another kind, and answers or none."""
    rng, math = np.random.default_rng(run.seed + 100 * (run.variant == "grpo")), run.track == "math"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"steps": 3, "seed": run.seed}))
    (folder / "manifest.json").write_text(json.dumps({"ended": "as planned", "track": run.track}))
    metrics = pd.DataFrame({"step": [1, 2, 3], "reward_mean": rng.normal(size=3), "clipped": [0, 1, run.seed]})
    write_csv(metrics.assign(dual=rng.random(3)) if math else metrics, folder / "metrics.csv.gz")
    test = pd.DataFrame({"level": ["2", "all"] * 2, "step": [2, 2, 3, 3], "greedy_accuracy": rng.random(4)})
    test["avg@16" if math else "avg@4"] = [np.nan, *rng.random(3)] if run.seed == 2 else np.nan
    write_csv(test, folder / "test.csv")
    if not math:
        write_csv(pd.DataFrame({"source": ["a", "b"], "mass": rng.random(2)}), folder / "rare_mass.csv")
    answers = pd.DataFrame({"level": pd.array([3, 2], "Int64"), "greedy": [True, False], "logprob": rng.normal(size=2)})
    write_parquet(answers.iloc[:0] if math else answers, folder / f"{make_run.LAST}.parquet")


def read_all():
    kinds = ("puzzles", "metrics"), ("puzzles", "test"), ("puzzles", "responses"), ("puzzles", "rare_mass")
    kinds += (("math", "metrics"), ("math", "test"))
    tables = {(*kind, v): read_tables("small", kind[0], v, kind[1]) for kind in kinds for v in ("grpo", "lopti")}
    return tables, {run.place: read_about(run.place) for run in list_runs("small")}


def test_what_is_packed_is_read_as_it_was_in_its_folders(kept, capsys):
    (tables, about), figure = read_all(), read_runs.read_tests(["lopti", "grpo"], scale="small")
    files = sorted(path for path in kept.rglob("*") if path.is_file())
    assert len(files) == 8 * 5 + 4
    pack_runs.main(scale="small")
    names = ("metrics", "rare_mass", "responses", "runs", "test")
    assert sorted(path.name for path in kept.rglob("*")) == [f"{name}.parquet" for name in names]
    assert all(map(is_finished, list_runs("small")))
    again, about_again = read_all()
    assert about_again == about
    for kind, own in tables.items():
        assert list(own) == list(again[kind]) == list_seeds("small", kind[0], kind[2], kind[1]) == [2, 10]
        for seed in own:
            pd.testing.assert_frame_equal(again[kind][seed], own[seed], check_exact=True)
    found = read_runs.read_tests(["lopti", "grpo"], scale="small")
    pd.testing.assert_frame_equal(found, figure, check_exact=True)
    assert "avg@16" not in found and found["variant"].tolist() == ["lopti"] * 8 + ["grpo"] * 8
    with refused("reproduce"):
        read_runs.read_responses(["grpo"], scale="small", track="math")

    before = {path: path.read_bytes() for path in kept.rglob("*.parquet")}
    pack_runs.main(scale="small")
    assert {path: path.read_bytes() for path in kept.rglob("*")} == before


def test_a_track_is_packed_once_its_planned_runs_are_all_finished_and_none_before(kept):
    last = find_run("small", "puzzles", "grpo", 10)
    (kept.parent / last.place / "responses.parquet").unlink()
    assert not is_finished(last)
    with refused("1 of 4", str(last.place)):
        pack_runs.main(("puzzles",), scale="small")
    pack_runs.main(scale="small")
    assert not (kept / "math").exists() and len(list(kept.glob("puzzles/*/seed*"))) == 4
    assert list_seeds("small", "puzzles", "grpo", "responses") == [2]
    assert list(read_tables("small", "puzzles", "grpo", "test")) == [2, 10]

    # Packed later, or again, the same bytes.
    shutil.rmtree(kept.parent / last.place)
    plant(kept.parent / last.place, last)
    pack_runs.main(scale="small")
    packed = (kept / "metrics.parquet").read_bytes()
    for run in list_runs("small"):
        plant(kept.parent / run.place, run)
    pack_runs.main(("puzzles", "math"), scale="small")
    assert (kept / "metrics.parquet").read_bytes() == packed


@pytest.mark.parametrize("name", ["config.json", "metrics.csv.gz", "rare_mass.csv"])
def test_a_finished_run_that_lacks_a_file_is_refused_and_nothing_is_written(kept, name):
    (kept / "puzzles" / "grpo" / "seed2" / name).unlink()
    with refused(name.split(".")[0], "seed2"):
        pack_runs.main(("puzzles",), scale="small")
    assert not list(kept.glob("*.parquet"))


def test_a_run_whose_steps_end_early_is_refused(kept):
    file = kept / "puzzles" / "grpo" / "seed2" / "metrics.csv.gz"
    write_csv(pd.read_csv(file).head(2), file)
    with refused("step 2 of 3", "seed2"):
        pack_runs.main(("puzzles",), scale="small")


def test_a_run_made_again_goes_before_the_packed_one_and_takes_its_place(kept):
    run = find_run("small", "puzzles", "grpo", 2)
    pack_runs.main(scale="small")
    plant(kept.parent / run.place, find_run("small", "puzzles", "lopti", 2))
    expected = read_tables("small", "puzzles", "lopti", "metrics")[2]
    for _ in range(2):
        found = read_tables("small", "puzzles", "grpo", "metrics")
        assert list(found) == [2, 10]
        pd.testing.assert_frame_equal(found[2], expected)
        pack_runs.main(scale="small")
    assert len(pd.read_parquet(kept / "runs.parquet")) == 8


def test_a_damaged_packed_table_is_refused_with_the_remedy(kept):
    pack_runs.main(scale="small")
    (kept / "test.parquet").write_bytes(b"PAR1")
    with refused("restore"):
        read_tables("small", "puzzles", "grpo", "test")


def test_a_packed_manifest_holds_as_long_as_its_tables_are_there(kept):
    own = measurements.folder("start", "small")
    measurements.keep(own, {"start.csv": pd.DataFrame({"sampled": [0.5]})}, vocab_size=70)
    facts = measurements.read_facts("start", scale="small")
    pack_runs.main(("start",), scale="small")
    assert [path.name for path in own.iterdir()] == ["start.csv"]
    assert measurements.is_measured("start", "small") and measurements.read_facts("start", scale="small") == facts
    measurements.keep(own, {"start.csv": pd.DataFrame({"sampled": [0.5]})}, vocab_size=71)
    for _ in range(2):
        assert measurements.read_facts("start", scale="small")["vocab_size"] == 71
        pack_runs.main(("start",), scale="small")
    (own / "start.csv").unlink()
    assert not measurements.is_measured("start", "small")
    with refused("start"):
        pack_runs.main(("start",), scale="small")
    with refused("puzzles"):
        pack_runs.main(("strat",), scale="small")
