"""Kept tables come back bit for bit, the same table in the same bytes, and a damaged file is one line."""

import gzip
import io

import numpy as np
import pandas as pd
import pytest
from support.refusals import refused

from analyses.common import kept_runs, read_runs
from analyses.common.tables import read_whole, write_csv, write_parquet

N = 3_000


def make_table() -> pd.DataFrame:
    """Of each kind of column that is kept; floats down to the smallest, and those that are no numbers."""
    rng = np.random.default_rng(0)
    norms = rng.lognormal(size=N).astype(np.float32)
    norms[:6] = [np.nan, np.inf, -np.inf, -0.0, 1e-45, 0.1]
    return pd.DataFrame(
        {
            "response": [f"{a} + {b} =\n" for a, b in rng.integers(9, size=(N, 2))],
            "group": rng.integers(50, size=N).astype(np.int16),
            "act_grad_norm.0": norms,
            "logprob": rng.normal(size=N),
            "few": rng.integers(3, size=N) / 10,
            "correct": rng.random(N) < 0.5,
            "format_ok": pd.array([True, None, False] * (N // 3), dtype="boolean"),
            "tokens": pd.array([1, None, 3] * (N // 3), dtype="Int64"),
        }
    )


def test_a_parquet_table_comes_back_bit_for_bit_and_smaller_than_by_default(tmp_path):
    table, default = make_table(), io.BytesIO()
    write_parquet(table, tmp_path / "new" / "t.parquet")
    found = pd.read_parquet(tmp_path / "new" / "t.parquet")
    pd.testing.assert_frame_equal(found, table, check_exact=True)
    for name in ("act_grad_norm.0", "logprob", "few"):
        assert found[name].to_numpy().tobytes() == table[name].to_numpy().tobytes()
    table.to_parquet(default, index=False)
    assert (tmp_path / "new" / "t.parquet").stat().st_size < 0.9 * len(default.getvalue())


def test_a_packed_csv_is_the_csv_and_the_same_bytes_whenever_it_is_written(tmp_path, monkeypatch):
    table = make_table()
    write_csv(table, tmp_path / "t.csv", float_format="%.6g")
    written = []
    for now in (1e9, 2e9):
        monkeypatch.setattr("time.time", lambda now=now: now)
        write_csv(table, tmp_path / "t.csv.gz", float_format="%.6g")
        written.append((tmp_path / "t.csv.gz").read_bytes())
    assert written[0] == written[1] and gzip.decompress(written[0]) == (tmp_path / "t.csv").read_bytes()
    pd.testing.assert_frame_equal(read_whole(tmp_path / "t.csv.gz", "again"), pd.read_csv(tmp_path / "t.csv"))


@pytest.mark.parametrize("name", ["t.csv.gz", "t.parquet"])
def test_a_damaged_file_is_refused_with_the_remedy(tmp_path, name):
    file = tmp_path / name
    (write_parquet if name == "t.parquet" else write_csv)(make_table(), file)
    whole = file.read_bytes()
    half = len(whole) // 2
    for damaged in (b"", whole[:half], whole[:4] + bytes(half) + whole[4 + half :]):
        file.write_bytes(damaged)
        with refused("measure it again"):
            read_whole(file, "measure it again")


def test_the_log_of_a_run_is_read_packed_or_not_and_once(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_runs, "RUNS", tmp_path)
    for seed, names in enumerate((["metrics.csv"], ["metrics.csv.gz"], ["metrics.csv", "metrics.csv.gz"])):
        for name in names:
            log = pd.DataFrame({"step": [1, 2], "reward_mean": [0.25, len(name)]})
            write_csv(log, tmp_path / "cpu" / "puzzles" / "grpo" / f"seed{seed}" / name)
    found = read_runs.read_metrics(["grpo"])
    assert found["seed"].tolist() == [0, 0, 1, 1, 2, 2]
    assert found["reward_mean"].tolist() == [0.25, 11, 0.25, 14, 0.25, 14]
