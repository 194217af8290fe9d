"""The differences at three learning rates and on two policies, of planted accuracies."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analyses.common import read_runs
from analyses.paper import rates
from gradscope.errors import InputError

STEPS = (50, 75, 100)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Reweight is worth .1 at the highest rate in the paper's regime, Lopti −.05 everywhere; seeds add their own."""
    monkeypatch.setattr(read_runs, "RUNS", tmp_path / "runs")
    rng, found = np.random.default_rng(0), {}
    for scale in ("cpu", "certain"):
        for track in rates.TRACKS:
            for seed in range(20, 26):
                base = 0.5 + 0.02 * rng.normal()
                gain = {"grpo": 0.0, "random-split": 0.0, "lopti": -0.05}
                gain["reweight"] = 0.1 if (scale, track) == ("cpu", "rate-high") else 0.0
                for variant, value in gain.items():
                    value += base + 0.01 * rng.normal()
                    found[scale, track, variant, seed] = value
                    folder = tmp_path / "runs" / scale / track / variant / f"seed{seed}"
                    folder.mkdir(parents=True)
                    shifts = zip(STEPS, (-0.1, 0.0, 0.1), strict=True)  # the mean of three checkpoints is `value`
                    rows = [{"step": s, "level": "all", "avg@4": value + d, "greedy_accuracy": 0.9} for s, d in shifts]
                    pd.DataFrame(rows).to_csv(folder / "test.csv", index=False)
    return found


def test_cells_and_claims_are_those_of_the_paired_differences(runs, tmp_path):
    rates.main(rates.Options(out=tmp_path / "out"))
    cells = pd.read_csv(tmp_path / "out" / "rates.csv").set_index(["scale", "track", "variant"])
    claims = pd.read_csv(tmp_path / "out" / "rates_claims.csv").set_index(["variant", "claim"])

    def differences(scale, track, method, other):
        return np.array([runs[scale, track, method, s] - runs[scale, track, other, s] for s in range(20, 26)])

    own = differences("cpu", "rate-high", "reweight", "grpo")
    row = cells.loc[("cpu", "rate-high", "reweight")]
    assert (row["mean"], row["seeds"]) == (pytest.approx(own.mean(), rel=1e-4), 6)
    low, high, other_low, other_high = (
        differences(scale, track, "reweight", "grpo")
        for scale in ("cpu", "certain")
        for track in ("rate-low", "rate-high")
    )
    values = (high - low) - (other_high - other_low)
    row = claims.loc[("reweight", "interaction")]
    assert row["difference"] == pytest.approx(values.mean(), rel=1e-4)
    assert row["p"] == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-3)
    told = claims["differs"].astype(bool)
    assert told[("reweight", "interaction")] and told[("reweight", "highest rate − lowest")]
    assert not told["lopti"].any()  # worse everywhere alike: no claim of these
    accuracy = pd.read_csv(tmp_path / "out" / "rates_accuracy.csv").set_index(["scale", "track", "variant"])["mean"]
    wanted = np.mean([runs["certain", "rate-low", "lopti", seed] for seed in range(20, 26)])
    assert accuracy["certain", "rate-low", "lopti"] == pytest.approx(wanted, rel=1e-4)


def test_a_method_has_a_rate_of_its_own_where_that_is_clearly_better_than_grpos(runs, tmp_path):
    """Reweight's accuracy is .1 higher at the highest rate, seeds' spread .02; the others' intervals overlap."""
    rates.main(rates.Options(out=tmp_path / "out"))
    table = pd.read_csv(tmp_path / "out" / "rates_accuracy.csv")
    chosen = table[table["chosen"]].set_index("variant")["track"]
    own = table[(table["scale"] == "cpu") & (table["variant"] == "grpo")]
    plain = own.loc[own["mean"].idxmax(), "track"]
    assert chosen.to_dict() == {"grpo": plain, "random-split": plain, "lopti": plain, "reweight": "rate-high"}


def test_what_is_not_there_yet_claims_nothing(runs, tmp_path):
    for folder in (tmp_path / "runs/certain/rate-high").rglob("seed2[1-5]"):
        (folder / "test.csv").unlink()
    runs = rates.read_accuracies()
    found = rates.claim(rates.pair(runs))
    assert rates.choose(runs) and not rates.choose(runs[runs.index != runs.index[0]])
    assert found["seeds"].tolist() == [1] * 6 and not found["differs"].any() and found["p"].isna().all()


def test_without_any_run_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(read_runs, "RUNS", tmp_path)
    with pytest.raises(InputError, match=r"rate-low has no run of .*; make them: "):
        rates.read_accuracies()
