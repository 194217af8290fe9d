"""The benchmarks compare like with like, and count all time once."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import gradscope
from analyses.benchmarks.real_size_stages import IMPORTS, REST, STAGES
from analyses.benchmarks.token_gradients import METHODS, OUTSIDE, Options, benchmark
from analyses.benchmarks.trainer import compare_lopti, time_parts
from analyses.benchmarks.trainer_loops import Size, finishing, random_workload
from gradscope.rollouts import write_rollouts

TINY = Size("tiny", vocab=64, hidden=16, heads=2, mlp=24, layers=2, questions=2, group=4, prompt=5, response=10)


@pytest.mark.all
def test_every_method_of_the_benchmark_gives_the_same_norms():
    pytest.importorskip("opacus")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus and torch.func warn about their own internals.
        table = benchmark("S", 24, Options(rounds=1, sequences=1))
    assert list(table["method"]) == list(METHODS)
    # float32 autograd on both sides.
    assert (table["max_relative_error"] < 1e-5).all()
    assert table["ratio"].iloc[-1] == 1
    assert (table["peak_mb"] > 0.1).all()  # one sequence's activations at least


def test_the_parts_of_a_step_of_the_trainer_add_up_to_it_with_and_without_lopti(tmp_path):
    workload = replace(random_workload(TINY, tmp_path), micro_batch_size=8)
    with finishing():
        table = time_parts(workload, tmp_path / "runs", rounds=2)
    assert list(table["method"]) == ["plain", "Lopti"]
    # Medians of two steps are their means, so they add up.
    parts = table.filter(regex="^cpu_(sampling|old|reference|training|rest)$")
    np.testing.assert_allclose(parts.sum(axis=1), table["cpu_s"], rtol=1e-9)
    assert list(table["tokens"]) == [80, 80]


def test_lopti_takes_the_wanted_share_of_the_same_tokens_first(tmp_path):
    workload = replace(random_workload(TINY, tmp_path), micro_batch_size=8)
    table = compare_lopti(workload, [0.25, 0.5], rounds=2)
    assert list(table["method"]) == ["plain", "Lopti", "Lopti"] and (table["tokens"] == 80).all()
    # At most the one token at the quantile is off.
    np.testing.assert_allclose(table["low_share"], [0, 0.25, 0.5], atol=1.01 / 80)
    assert (table["cpu_ratio"] > 0).all() and table["cpu_ratio"][0] == 1


@pytest.mark.all
def test_every_stage_of_the_clock_is_met(tmp_path):
    batch = gradscope.sample("embedded", task="knights-knaves-compact", questions=2, n=2, max_new_tokens=20, seed=0)
    write_rollouts(tmp_path / "rollouts.jsonl", batch)
    met = set()
    for command in ("measure embedded rollouts.jsonl --out a", "diagnose embedded --rollouts rollouts.jsonl --out b"):
        start = [sys.executable, "-m", "analyses.benchmarks.real_size_stages", "events"]
        subprocess.run([*start, *command.split()], cwd=tmp_path, check=True, capture_output=True)
        met |= {json.loads(line)["stage"] for line in (tmp_path / "events").read_text().splitlines()}
    assert met == {IMPORTS, REST, *STAGES.values()}


def test_the_documented_speeds_are_those_of_their_csv():
    root = Path(__file__).parents[2]
    measured = pd.read_csv(root / "figures/cost/data" / "benchmark_token_gradients_xeon.csv")
    lines = (root / "docs" / "cost.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").replace("*", "").split(" | ") for line in lines if line.startswith(("| S, ", "| M, "))]
    assert len(rows) == 6
    for name, *cells in rows:
        size, length = name.split(", ")
        own = measured[(measured["size"] == size) & (measured["length"] == int(length))].set_index("method")
        wanted = [*own["ms_per_token"].reindex(METHODS), own.reindex(OUTSIDE)["ratio"].min(), own["ratio"]["graph"]]
        wanted += [own["fraction_of_floor"]["gradscope"]]
        found = [float(cell.rstrip("×").replace("–", "nan")) for cell in cells]
        np.testing.assert_allclose(found, wanted, rtol=0.006, atol=0.005)  # three digits, two after the point
