"""Measuring apart from drawing: what is kept has every digit and is made once, and what draws it loads no policy."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyses import figures
from analyses.common import measurements
from analyses.paper import layer_constants
from gradscope.errors import InputError

VOCAB = 131


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A place of one's own for what is kept."""
    monkeypatch.setattr(measurements, "RUNS", tmp_path / "kept")
    return tmp_path / "kept"


@pytest.fixture
def tokens():
    """A token table of two batches, in which every second token was measured below the logits."""
    rng = np.random.default_rng(0)
    prob = rng.random(400).astype(np.float32)
    table = pd.DataFrame({"batch": np.arange(400) // 200, "group": np.arange(400) // 40, "prob": prob})
    table["log_one_minus_prob"] = np.log1p(-prob)
    table["interval"] = np.minimum((4 * prob).astype(int), 3)
    table["advantage"] = table["weight"] = rng.choice([-1.5, -0.25, 0.75], 400).astype(np.float32)
    table["logit_grad_norm"] = (1.0 - prob) * rng.uniform(1.02, 1.4, 400).astype(np.float32)
    for name, gain in (("act_grad_norm.0", 8.0), ("act_grad_norm.1", 2.0), ("param_grad_norm", 40.0)):
        norm = gain * table["logit_grad_norm"] * rng.uniform(0.5, 1.5, 400).astype(np.float32)
        table[name] = norm.where(np.arange(400) % 2 == 0).astype(np.float32)
    return table.assign(token="dropped", entropy=0.5)


def test_a_part_is_made_once_and_goes_when_the_measurement_is_finished(runs):
    out, made = measurements.folder("drivers"), []

    def make(number: int) -> pd.DataFrame:
        made.append(number)
        if len(made) == 2:
            raise KeyboardInterrupt
        return pd.DataFrame({"x": [0.1 * number, np.nan]}, index=[0, 1])

    def measure() -> pd.DataFrame:
        return pd.concat([measurements.part(out, f"p{i}", lambda i=i: make(i)) for i in (1, 2, 3)])

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert not measurements.is_measured("drivers")
    whole = measure()
    assert made == [1, 2, 2, 3]
    assert whole["x"].dropna().tolist() == [0.1, 0.2, 0.1 * 3]
    assert not measurements.is_measured("drivers")
    measurements.keep(out, {"x.csv": whole})
    assert measurements.is_measured("drivers") and not (out / measurements.PARTS).exists()


def test_measurements_are_made_where_they_are_not_there_yet(runs, monkeypatch, capsys):
    needs = {"after": ["in-training/grpo"], "figures": ["fig1"], "scales": ["cpu"]}
    entries = {name: {"module": f"made_up_{name}"} | needs for name in ("one", "two")}
    entries["three"] = entries["one"] | {"module": "made_up_three", "scales": ["cpu", "gpu"]}
    monkeypatch.setattr(measurements, "read", lambda: {"measurements": entries})
    made = []

    class Module:
        def __init__(self, name: str) -> None:
            self.name = name

        def measure(self, out: Path, **settings: str) -> None:
            made.append((self.name, out, settings))
            measurements.keep(out, {})

    monkeypatch.setattr(importlib, "import_module", Module)
    measurements.main(("two",))
    measurements.main()
    measurements.main(scale="gpu")
    assert made == [
        ("made_up_two", runs / "cpu/measured/two", {}),
        ("made_up_one", runs / "cpu/measured/one", {}),
        ("made_up_three", runs / "cpu/measured/three", {"scale": "cpu"}),
        ("made_up_three", runs / "gpu/measured/three", {"scale": "gpu"}),
    ]
    assert measurements.list_measurements()[0] == measurements.Measurement(
        "one", "made_up_one", ("in-training/grpo",), ("fig1",), ("cpu",)
    )
    with pytest.raises(InputError, match="no measurement is called 'four'; give some of one, two, three"):
        measurements.main(("four",))


def test_a_measurement_that_is_not_there_is_named_with_its_command(runs):
    with pytest.raises(InputError, match=r"errors\.csv is not there; measure it: python -m .*measurements influence$"):
        measurements.read_table("influence", "errors.csv")
    with pytest.raises(InputError, match=r"has no manifest\.json .*; measure it: python -m .*measurements drivers$"):
        measurements.read_facts("drivers")
    with pytest.raises(
        InputError, match=r"fits\.csv is not there; drivers is measured at scale cpu and certain alone$"
    ):
        measurements.read_table("drivers", "fits.csv", scale="gpu")
    with pytest.raises(InputError, match="no scale is called 'moon'; give one of certain, cpu, gpu, paper"):
        measurements.list_measurements("moon")


def test_layer_constants_are_held_against_the_kept_tokens(runs, tokens):
    table = tokens.drop(columns=["token", "entropy"]).assign(context=np.where(np.arange(400) == 10, 0.0, np.nan))
    constants = pd.DataFrame(
        {"context": 0, "layer": [0, 1], "module": ["block 1", "head"], "product_kind": "certified"}
    )
    constants = constants.assign(outputs=VOCAB, inputs=128, sigma_min=0.1, c=0.5, d=2.0)
    constants = constants.assign(product_c=[1e-4, 0.1], product_d=[500.0, 9.0], reach_min=1.0, reach_max=[20.0, 4.0])
    out = measurements.folder("layer_constants")
    measurements.keep(out, {"tokens.parquet": table, "constants.csv": constants}, vocab_size=VOCAB)
    report = layer_constants.table(layer_constants.Options())
    assert report.layer_bounds["tokens"].tolist() == [1, 1]
    spans = layer_constants.spans(report).set_index(["layer", "span"])
    for layer in (0, 1):
        gains = (tokens[f"act_grad_norm.{layer}"].astype(float) / tokens["logit_grad_norm"]).dropna()
        row = spans.loc[(layer, "gains of real tokens, anywhere")]
        assert (row["lower"], row["upper"]) == pytest.approx((gains.min(), gains.max()), rel=1e-6)
        assert tuple(spans.loc[(layer, "∏c … ∏d, certified")]) == ([1e-4, 0.1][layer], [500.0, 9.0][layer])


@pytest.mark.all
@pytest.mark.parametrize("scale", ["cpu", "certain"])
def test_drawing_loads_no_policy_and_no_transformers(scale, tmp_path):
    """In a process of its own, for others here have loaded both; what takes the time, the pictures, is left out."""
    draw = "\n".join(
        [
            "import sys; from pathlib import Path; import gradscope.policy.loading; from analyses import figures",
            "from matplotlib.figure import Figure; Figure.savefig = lambda self, path, **_: Path(path).touch()",
            "gradscope.policy.loading.load_policy = None",
            f"status = figures.main(figures.Options(out=Path({str(tmp_path)!r}), scale={scale!r}))",
            "loaded = [name for name in sys.modules if name == 'transformers' or name.startswith('analyses.measure.')]",
            "assert not loaded, loaded",
            "sys.exit(status)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", draw], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr


def test_what_cannot_be_drawn_is_named_at_the_end_and_the_rest_is_drawn(runs, tmp_path, monkeypatch, capsys):
    errors = pd.DataFrame({"optimizer": ["sgd", "adamw"], "relative_error": 0.5})
    rows = {"optimizer": ["sgd", "adamw"], "source": "0", "target": "0", "share": 1.0}
    measurements.keep(measurements.folder("influence"), {"influence.csv": pd.DataFrame(rows), "errors.csv": errors})
    options = figures.Options(out=tmp_path / "out", scale="cpu", only=("drivers", "influence"))
    assert figures.main(options) == 2
    said = capsys.readouterr()
    assert said.err.startswith("cpu, drivers: ") and "python -m analyses.common.measurements drivers" in said.err
    assert said.err.count("\n") == 1
    assert [line.partition(":")[0] for line in said.out.splitlines()] == ["cpu, drivers", "cpu, influence"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "influence.png",
        "influence.csv",
        "influence_errors.csv",
    }
    assert figures.main(figures.Options(out=tmp_path / "out", scale="cpu", only=("influence",))) == 0
    with pytest.raises(InputError, match="no figure is called 'fig99'; give some of fig1, "):
        figures.main(figures.Options(only=("fig99",)))
