"""`gradscope compare`: what it writes, that it is done once, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.cli import assert_one_line, outcome_of
from support.policies import make_policy, make_responses, save_checkpoint, write_jsonl

from gradscope.policy import load_policy
from gradscope.resampling import TOO_FEW
from gradscope.rollouts import read_rollouts
from gradscope.updates import ComparisonSettings, compare

pytestmark = pytest.mark.usefixtures("undrawn")

FILES = {"compare.csv", "by_interval.csv", "weights.parquet", "summary.txt", "tokens.parquet", "manifest.json"}
FIELDS = ("prompt_ids", "response_ids", "group", "temperature", "reward", "old_logprobs", "response_mask")


@pytest.fixture
def run(capsys):
    """Run `gradscope compare` in this process."""
    return partial(outcome_of, capsys, "compare")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """With an optimizer that has taken steps beside it."""
    folder = save_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")
    parameters = load_policy(folder).model.named_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=2e-4)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = 1e-2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory) -> Path:
    rows = [{name: getattr(r, name) for name in FIELDS} for r in make_responses(make_policy("llama"))]
    return write_jsonl(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", rows)


def test_it_writes_what_the_function_returns_and_does_it_once(run, model, rollouts, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import numpy as np\n"
        "from gradscope.objective import Weighting\n"
        "class Halved(Weighting):\n"
        "    NAME = 'halved'\n"
        "    def factors(self, tokens):\n"
        "        return tokens.plain / 2\n"
    )
    weightings = ["reweight:alpha=0.5", "lopti", f"{own}:halved"]
    arguments = (model, rollouts, "--out", tmp_path / "out", "--weightings", *weightings, "--seed", 3)
    outcome = run(*arguments)
    assert (outcome.status, outcome.err) == (0, "")
    assert {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*")} >= FILES
    assert {p.name for p in (tmp_path / "out" / "figures").iterdir()} == {"compare.png", "compare.csv"}
    policy = load_policy(model)
    state = torch.load(model / "optimizer.pt")
    table = pd.read_parquet(tmp_path / "out" / "tokens.parquet")
    batch = read_rollouts(rollouts, policy)
    settings = ComparisonSettings(seed=3)
    expected = compare(policy, batch, weightings, table=table, optimizer_state=state, settings=settings)
    written = pd.read_csv(tmp_path / "out" / "by_interval.csv")
    numbers = expected.by_interval.select_dtypes("number").columns
    np.testing.assert_allclose(written[numbers], expected.by_interval[numbers], rtol=1e-6, atol=1e-9)
    written = pd.read_csv(tmp_path / "out" / "compare.csv", keep_default_na=False, na_values=[""])
    assert list(written) == ["method", "step", "same_as", "statistic", "value", "lower", "upper"]
    found = {}
    for row in written.itertuples():
        numbers = {"": row.value, "_lower": row.lower, "_upper": row.upper}
        found |= {(row.method, row.step, row.statistic + end): x for end, x in numbers.items() if not np.isnan(x)}
    wanted = {}
    for row in expected.table.drop(columns="same_as").to_dict("records"):
        method, step = row.pop("method"), row.pop("step")
        wanted |= {(method, step, name): x for name, x in row.items() if not np.isnan(x)}
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    weights = pd.read_parquet(tmp_path / "out" / "weights.parquet")
    names = ["grpo", "reweight:alpha=0.5", "lopti.low", "lopti.high", f"{own}:halved"]
    assert list(weights) == ["response", "position", *names]
    np.testing.assert_allclose(weights[f"{own}:halved"], table["policy_weight"] / 2, rtol=1e-6)
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert outcome.out.endswith(f"\n{summary}") and "reweight:alpha=0.5" in summary
    assert TOO_FEW in summary  # of three prompts
    before = (tmp_path / "out" / "compare.csv").stat().st_mtime_ns
    again = run(*arguments)
    assert (again.status, (tmp_path / "out" / "compare.csv").stat().st_mtime_ns) == (0, before)
    assert "already compared" in again.out
    other = run(*arguments[:-4], "--seed", 3)
    assert other.status == 0 and "already compared" not in other.out


def test_a_weighting_bears_the_name_that_it_was_given(run, model, rollouts, tmp_path):
    methods = ["reweight:alpha=0.3", "reweight", "cispo:eps_high=1.10/5", "gspo:eps_high=0.0004,eps_low=3e-4"]
    outcome = run(model, rollouts, "--out", tmp_path / "out", "--methods", *methods)
    assert outcome.status == 0, outcome.err
    names = ["grpo", *methods[:2], "cispo:eps_high=1.10", "cispo:eps_high=5", methods[3]]
    weights = pd.read_parquet(tmp_path / "out" / "weights.parquet")
    assert list(weights) == ["response", "position", *names]
    np.testing.assert_array_equal(weights["reweight:alpha=0.3"], weights["reweight"])
    written = pd.read_csv(tmp_path / "out" / "compare.csv", keep_default_na=False)
    assert list(written["method"].unique()) == names
    assert set(written.loc[written["method"] == "reweight", "same_as"]) == {"reweight:alpha=0.3"}
    assert all(name in (tmp_path / "out" / "summary.txt").read_text() for name in names)


@pytest.mark.all
def test_real_steps_are_beside_the_predicted_ones(run, model, rollouts, tmp_path):
    outcome = run(model, rollouts, "--out", tmp_path / "out", "--weightings", "reweight:alpha=.1/.5", "--take-steps")
    assert outcome.status == 0, outcome.err
    found = pd.read_csv(tmp_path / "out" / "compare.csv").set_index(["method", "statistic"])["value"]
    for name in ("grpo", "reweight:alpha=.1", "reweight:alpha=.5"):
        assert {0 <= found[name, statistic] <= 1 for statistic in ("right_adamw", "right_step", "step_cosine")} == {
            True
        }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--weightings", "lopty"), "lopti"),
        (("--weightings", "reweight:alpah=0.5"), "alpha"),
        (("--weightings", "reweight:alpha=2"), "alpha is 2"),
        (("--weightings", "icepop"), "sampler_logprob"),
        (("--take-steps", "--aggregation", "sequence"), "--take-steps"),
        (("--max-grad-norm", 0), "--max-grad-norm"),
        (("--optimizer-state", "nowhere.pt"), "nowhere.pt"),
        (("--gradient-memory", 10), "--gradient-memory"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(run, model, rollouts, tmp_path, arguments, words):
    outcome = run(model, rollouts, "--out", tmp_path / "out", *arguments)
    assert outcome.status == 2
    assert_one_line(outcome if not outcome.out else type(outcome)(2, "", outcome.err), words)
    assert not (tmp_path / "out" / "compare.csv").exists()
