"""Measuring apart from drawing: what is kept has every digit and is made once, and what draws it loads no policy."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyses import figures
from analyses.common import experiments, measurements
from analyses.common.in_training import PLACE, RUN
from analyses.measure.base_policy import slim
from analyses.paper import base_policy, fig2, influence, layer_constants
from gradscope.errors import InputError
from gradscope.intervals import interval_labels

CHEAP = ("fig3", "influence", "drivers", "cost_growth")
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


def keep_base_policy(tokens: pd.DataFrame) -> None:
    rows = {"interval": [0, 1, 2, 3, "all"], "label": [*interval_labels(), "all"], "batches": 2, "num_tokens": 80}
    rows |= {"norm": [5.0, 4.0, 3.0, 2.0, 6.0], "norm_sd": 0.5, "share": [0.4, 0.3, 0.2, 0.1, 1.0], "half_cosine": 0.5}
    cosines = pd.DataFrame(np.eye(4) + 0.25 * (1 - np.eye(4)))
    tables = {"tokens.parquet": slim(tokens), "gradients.csv": pd.DataFrame(rows), "cosines.csv": cosines}
    measurements.keep(measurements.folder("base_policy"), tables, vocab_size=VOCAB)


def test_what_is_kept_comes_back_with_every_digit(runs):
    rng = np.random.default_rng(1)
    numbers = rng.normal(size=500) * 10.0 ** rng.uniform(-30, 20, 500)
    table = pd.DataFrame({"few": np.float32(0.1), "number": numbers, "single": numbers.astype(np.float32) / 3})
    table = table.assign(unknown=np.where(numbers > 0, numbers, np.nan), count=np.arange(500), word="π, ½")
    out = measurements.folder("drivers")
    measurements.keep(out, {"a.csv": table, "b.parquet": table}, batches=2)
    pd.testing.assert_frame_equal(measurements.read_table("drivers", "b.parquet"), table)
    text = measurements.read_table("drivers", "a.csv")
    for column in table:
        # A float32 is written with the digits that tell it from other float32s.
        back = text[column].astype(table[column].dtype)
        pd.testing.assert_series_equal(back, table[column], rtol=0, atol=0)
    assert measurements.read_facts("drivers")["batches"] == 2
    assert sorted(file.name for file in out.iterdir()) == ["a.csv", "b.parquet", "manifest.json"]


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


def test_every_measurement_of_the_file_has_its_module_and_its_runs():
    places = {f"{run.track}/{run.variant}" for run in experiments.list_runs("cpu")}
    for measurement in measurements.list_measurements():
        assert set(measurement.after) <= places and set(measurement.figures) <= set(figures.SCRIPTS)
        if measurement.module.startswith("analyses.measure."):
            assert (
                Path(experiments.__file__)
                .parents[1]
                .joinpath("measure", f"{measurement.module.rpartition('.')[2]}.py")
                .is_file()
            )


def test_the_run_in_training_is_that_of_the_file():
    [run] = [run for run in experiments.list_runs("cpu") if run.track == PLACE[1]]
    assert experiments.WORK / run.place == RUN
    assert (run.config.steps, run.config.save_every, run.config.learning_rate) == (40, 4, 2e-4)
    assert (run.config.questions_per_step, run.config.mini_batch_size, run.config.seed) == (16, 64, 0)


def test_a_measurement_that_is_not_there_is_named_with_its_command(runs):
    with pytest.raises(InputError, match=r"errors\.csv is not there; measure it: python -m .*measurements influence$"):
        measurements.read_table("influence", "errors.csv")
    with pytest.raises(InputError, match=r"has no manifest\.json .*; measure it: python -m .*measurements drivers$"):
        measurements.read_facts("drivers")
    with pytest.raises(InputError, match=r"fits\.csv is not there; drivers is measured at scale cpu alone$"):
        measurements.read_table("drivers", "fits.csv", scale="gpu")
    with pytest.raises(InputError, match="no scale is called 'moon'; give one of cpu, gpu, paper"):
        measurements.list_measurements("moon")


@pytest.mark.parametrize("name", ["a.csv", "b.parquet", "manifest.json"])
def test_a_measurement_that_is_damaged_is_named_and_not_taken_for_measured(runs, name):
    table = pd.DataFrame({"number": [1.0, 2.0]})
    out = measurements.folder("drivers")
    measurements.keep(out, {"a.csv": table, "b.parquet": table})
    (out / name).write_bytes(b"")
    with pytest.raises(InputError, match=rf"{name}.* restore .*drivers, or remove it and measure again: python"):
        measurements.read_facts("drivers") if name == "manifest.json" else measurements.read_table("drivers", name)


def test_a_measured_table_without_one_of_its_columns_is_named_with_the_remedy(runs):
    out = measurements.folder("drivers")
    measurements.keep(out, {"a.csv": pd.DataFrame({"level": ["1"], "r2": [0.5]})})
    assert measurements.read_facts("drivers")["columns"] == {"a.csv": ["level", "r2"]}
    pd.DataFrame({"level": ["1"], "R2": [0.5]}).to_csv(out / "a.csv", index=False)
    with pytest.raises(InputError, match=r"a\.csv has no column 'r2'; restore .*drivers, or remove it"):
        measurements.read_table("drivers", "a.csv")


def test_figure_2_is_drawn_from_the_kept_tokens(runs, tokens, tmp_path, capsys):
    keep_base_policy(tokens)
    fig2.main(fig2.Options(out=tmp_path))
    drawn = pd.read_csv(tmp_path / "fig2.csv")
    panels = dict(list(drawn.groupby("panel", sort=False)))
    assert list(panels) == ["logits", "input of block 1", "output of block 1"]
    for panel, column in zip(panels.values(), ("logit_grad_norm", "act_grad_norm.0", "act_grad_norm.1"), strict=True):
        points = panel.dropna(subset="norm").sort_values("prob")
        own = tokens[tokens[column].notna()].sort_values("prob")
        np.testing.assert_allclose(points["norm"], own[column], rtol=1e-6)  # float32, written with its own digits
        gains = own[column].astype(float) / own["logit_grad_norm"]
        cone = panel.dropna(subset="upper").set_index("prob")
        low, high = (1.0, 1.0) if panel is panels["logits"] else (gains.min(), gains.max())
        assert cone.loc[0.5, "upper"] == pytest.approx(high * 2**0.5 / 2, rel=1e-6)
        assert cone.loc[0.5, "lower"] == pytest.approx(low * (VOCAB / (VOCAB - 1)) ** 0.5 / 2, rel=1e-6)
    assert "400 of 400 tokens" in capsys.readouterr().out


def test_the_base_policys_pictures_are_drawn_from_the_kept_tokens(runs, tokens, tmp_path, capsys):
    keep_base_policy(tokens)
    base_policy.main(base_policy.Options(out=tmp_path))
    pictures = ["cosines", "fig1_base", "layers_by_interval", "norm_against_one_minus_prob"]
    assert sorted(file.stem for file in tmp_path.glob("*.png")) == pictures
    drawn = pd.read_csv(tmp_path / "fig1_base.csv")
    assert drawn["tokens"].head(4).tolist() == np.bincount(tokens["interval"]).tolist()
    norms = drawn.dropna(subset="norm")
    assert norms["norm"].tolist() == [5.0, 4.0, 3.0, 2.0, 6.0]
    assert norms["paper_scaled"].tolist() == pytest.approx([6 * p / 0.82 for p in (0.71, 0.36, 0.24, 0.15, 0.82)])
    heat = pd.read_csv(tmp_path / "cosines.csv").set_index("interval").to_numpy()
    np.testing.assert_array_equal(heat, np.eye(4) + 0.25 * (1 - np.eye(4)))
    theory = pd.read_csv(tmp_path / "base_policy_theory.csv").set_index("quantity")
    fitted = tokens[(tokens["log_one_minus_prob"] > np.log(1e-3)) & tokens["param_grad_norm"].notna()].astype(
        {"log_one_minus_prob": float, "param_grad_norm": float}
    )
    slope = np.polyfit(fitted["log_one_minus_prob"], np.log(fitted["param_grad_norm"]), 1)[0]
    assert theory.loc["param_grad_norm", "slope"] == pytest.approx(slope, rel=1e-6)
    gains = (tokens["act_grad_norm.0"].astype(float) / tokens["logit_grad_norm"]).dropna()
    assert theory.loc["act_grad_norm.0", "gain_ratio"] == pytest.approx(gains.max() / gains.min(), rel=1e-6)
    said = (tmp_path / "base_policy.txt").read_text(encoding="utf-8")
    assert said in capsys.readouterr().out
    measured = tokens.dropna(subset="param_grad_norm")
    means = measured.groupby("interval")["param_grad_norm"].mean()
    assert (
        f"200 of 400 response tokens were measured.\nOne by one: a token with π < ¼ has {means[0] / means[3]:.1f}"
        in said
    )


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


def test_sources_of_influence_are_intervals_by_number_and_others_by_name(runs):
    rows = {"optimizer": "sgd", "source": ["0", "3", "kl"], "target": ["all", "0", "3"], "share": [0.5, 0.25, 0.25]}
    errors = pd.DataFrame({"optimizer": ["sgd"], "relative_error": [0.01]})
    measurements.keep(measurements.folder("influence"), {"influence.csv": pd.DataFrame(rows), "errors.csv": errors})
    shares, _ = influence.table(influence.Options())
    assert (shares["source"].tolist(), shares["target"].tolist()) == ([0, 3, "kl"], ["all", 0, 3])


def test_every_script_that_draws_is_listed():
    texts = {
        file.stem: file.read_text(encoding="utf-8") for file in (Path(figures.__file__).parent / "paper").glob("*.py")
    }
    drawing = {name for name, text in texts.items() if "from analyses.common.script import Options" in text}
    assert drawing | {"tables2_4"} == set(figures.SCRIPTS)  # tables2_4 says itself what its scale is for
    for name in figures.SCRIPTS:
        options = importlib.import_module(f"analyses.paper.{name}").Options
        defaults = {field.name: field.default for field in fields(options)}
        assert defaults == {"out": Path("figures"), "scale": "cpu"}


def test_drawing_loads_no_policy_and_no_transformers(tmp_path):
    """In a process of its own, for others here have loaded both."""
    draw = "\n".join(
        [
            "import sys; from pathlib import Path; import gradscope.policy.loading; from analyses import figures",
            "gradscope.policy.loading.load_policy = None",
            f"status = figures.main(figures.Options(out=Path({str(tmp_path)!r})))",
            "loaded = [name for name in sys.modules if name == 'transformers' or name.startswith('analyses.measure_')]",
            "assert not loaded, loaded",
            "sys.exit(status)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", draw], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("name", CHEAP)
def test_a_figure_is_the_same_byte_by_byte(name, tmp_path):
    for folder in ("one", "two"):
        assert figures.draw_one(name, figures.Options(out=tmp_path / folder)) is None
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / folder).iterdir()} for folder in ("one", "two"))
    assert one == two and f"{name}.png" in one


def test_what_cannot_be_drawn_is_named_at_the_end_and_the_rest_is_drawn(runs, tmp_path, monkeypatch, capsys):
    errors = pd.DataFrame({"optimizer": ["sgd", "adamw"], "relative_error": 0.5})
    rows = {"optimizer": ["sgd", "adamw"], "source": "0", "target": "0", "share": 1.0}
    measurements.keep(measurements.folder("influence"), {"influence.csv": pd.DataFrame(rows), "errors.csv": errors})
    options = figures.Options(out=tmp_path / "out", only=("drivers", "influence"))
    assert figures.main(options) == 2
    said = capsys.readouterr()
    assert said.err.startswith("drivers: ") and "python -m analyses.common.measurements drivers" in said.err
    assert said.err.count("\n") == 1
    assert [line.partition(":")[0] for line in said.out.splitlines()] == ["drivers", "influence"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "influence.png",
        "influence.csv",
        "influence_errors.csv",
    }
    assert figures.main(figures.Options(out=tmp_path / "out", only=("influence",))) == 0
    with pytest.raises(InputError, match="no figure is called 'fig99'; give some of fig1, "):
        figures.main(figures.Options(only=("fig99",)))
