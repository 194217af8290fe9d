"""What is printed after a measurement: a view of the report's parts, with the numbers of a whole diagnosis."""

from __future__ import annotations

import pandas as pd
import pytest
from support.policies import make_batch, make_policy, make_responses

from gradscope import diagnose
from gradscope.diagnosis import Diagnosis, describe_summary, summarize, theory_words
from gradscope.diagnosis.format import share_words
from gradscope.diagnosis.summarize import VIEWED, write_figures
from gradscope.gradients import MeasureSettings, measure
from gradscope.intervals import name_interval
from gradscope.policy import Policy
from gradscope.resampling import TOO_FEW
from gradscope.rollouts import TokenBatch, collate
from gradscope.theory import theory_report

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy("qwen2", sharpness=6.0)


@pytest.fixture(scope="module")
def batch(policy) -> TokenBatch:
    """Twelve prompts of two responses."""
    rows = []
    for seed in range(4):
        own = make_responses(policy, lengths=(14, 9, 12, 7, 10, 6), seed=seed)
        rows += [vars(row) | {"group": 3 * seed + place // 2} for place, row in enumerate(own)]
    kind = type(make_responses(policy)[0])
    return collate([kind(**row) for row in rows])


@pytest.fixture(scope="module")
def table(policy, batch) -> pd.DataFrame:
    return measure(policy, batch)


@pytest.fixture(scope="module")
def found(policy, batch, table) -> Diagnosis:
    return summarize(policy, batch, table, MeasureSettings())


def test_the_parts_numbers_are_those_of_a_whole_diagnosis(policy, batch, table, found):
    whole = diagnose(policy, batch, table, compare=False, actual_step=False, influence_tokens=None)
    assert set(found.rows) == {*VIEWED} and found.statistics.notna().any(axis=None)
    for name in VIEWED:
        pd.testing.assert_frame_equal(found.rows[name].rows, whole.rows[name].rows)


def test_the_sentences_are_the_parts_and_the_table_has_every_interval(found):
    text = describe_summary(found)
    assert all(finding.statement in text for finding in found.findings) and len(found.findings) >= 4
    for label in found.labels:
        line = next(line for line in text.splitlines() if line.lstrip().startswith(name_interval(label)))
        for statistic, metric in (("token_share", "none"), ("squared_share", "raw"), ("gradient_share", "raw")):
            assert share_words(found.pick(statistic, metric, label)) in line
    assert "nan" not in text


def test_few_prompts_are_the_headline_and_what_else_is_said_is_unweighted(policy):
    batch = make_batch(policy, lengths=(14, 9, 12, 7, 10, 6))
    few = summarize(policy, batch, measure(policy, batch), MeasureSettings())
    text = describe_summary(few)
    assert text.startswith(f"{TOO_FEW}: 3 prompts") or f"\n{TOO_FEW}: 3 prompts" in text
    assert "of the summed gradient" not in text


def test_powers_of_one_minus_prob_are_the_smallest_and_the_largest_by_layer(policy, table):
    theory = theory_report(table, vocab_size=policy.vocab_size)
    below = theory.powers.query("quantity != 'logit_grad_norm' and tokens >= 30").sort_values("slope")
    ends = [f"{row.slope:.2f}" for row in below.iloc[[0, -1]].itertuples()]
    words = theory_words(theory)
    assert f"(1−π)^s with s from {ends[0]}" in words and f"to {ends[1]}" in words and "Prop. 4.2" in words


@pytest.mark.all
def test_figures_are_the_parts_with_their_numbers(policy, batch, found, tmp_path):
    write_figures(tmp_path, found)
    assert (tmp_path / "summary.txt").read_text(encoding="utf-8") == f"{describe_summary(found)}\n"
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert pictures == {path.stem for path in tmp_path.glob("*.csv")}
    assert pictures >= {"figure_1", "figure_2", "cosines", "layers_by_interval", "norm_against_one_minus_prob"}
    each = measure(policy, batch, per_module=True)
    write_figures(tmp_path / "modules", summarize(policy, batch, each, MeasureSettings()))
    assert (tmp_path / "modules" / "modules.png").is_file()
