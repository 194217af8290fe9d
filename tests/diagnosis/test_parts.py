"""A question of the report is one file: without it, all else is as before; with one of one's own, it is on the page."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.policies import make_batch, make_policy
from support.refusals import refused
from support.steps import warm_state
from support.tiers import every

from gradscope.diagnosis import PARTS, Diagnosis, DiagnosisSettings, diagnose, make_report, say, write_report
from gradscope.diagnosis.diagnose import assemble, look_at
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.products import PRODUCTS, make_products
from gradscope.gradients import Resources
from gradscope.objective import LossSettings
from gradscope.policy import Policy

pytestmark = pytest.mark.usefixtures("undrawn")
ROOM = Path(__file__).resolve().parents[2] / "gradscope"
LOOKING = {"dominance": {"summed_raw", "summed_adamw", "holders"}}
"""Part → kinds of others' findings that look at its rows."""


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy("gpt2", tokenizer=True)


@pytest.fixture(scope="module")
def measured(policy) -> Measured:
    """Every product of a batch with KL, old and the sampler's log-probabilities and six prompts."""
    lengths = tuple((6, 4, 5, 3)[row % 4] for row in range(12))
    batch = make_batch(policy, lengths=lengths, prompt_lengths=(3,) * 12, surprise=0.1)
    batch = replace(
        batch,
        group_ids=torch.arange(12) // 2,
        rewards=(torch.arange(12) % 2).float(),
        sampler_logprobs=batch.old_logprobs + 0.01,
    )
    loss = LossSettings(kl_coef=0.2)
    settings = DiagnosisSettings(loss=loss, resamples=50, compare=True)
    given = {"own_loss": True, "table": None, "resources": Resources(), "verdict_minutes": None}
    m = look_at(policy, batch, settings, warm_state(policy), **given)
    make_products(m, PRODUCTS)
    return m


def ask(m: Measured, without: str = "") -> Diagnosis:
    own = replace(m, notes=[*m.notes], left_out={**m.left_out})
    return say(assemble(own, {name: part for name, part in PARTS.items() if name != without}))


def numbers(found: Diagnosis) -> dict[tuple, tuple]:
    keys = ["statistic", "metric", "interval"]
    rows = found.statistics.fillna({"value": 0, "lower": 0, "upper": 0})
    return {tuple(row[keys]): tuple(row.drop(keys)) for _, row in rows.iterrows()}


@pytest.fixture(scope="module")
def whole(measured) -> Diagnosis:
    return ask(measured)


def test_every_product_is_made_and_every_part_answers(measured, whole):
    assert {*measured.made} == {*PRODUCTS} - {"table"}  # of which another is made where the temperature is unknown
    assert {*whole.rows} == {*PARTS}


@pytest.mark.parametrize("name", every(8, PARTS))
def test_without_a_part_every_other_number_and_sentence_is_as_before(measured, whole, name):
    found, before = ask(measured, without=name), whole
    gone = before.rows[name]
    of_part = {tuple(key) for key in gone.rows[["statistic", "metric", "interval"]].to_numpy()}
    assert numbers(found) == {key: row for key, row in numbers(before).items() if key not in of_part}
    for frame in {*before.frames} - {*gone.frames}:
        pd.testing.assert_frame_equal(found.frames[frame], before.frames[frame])
    said = {finding.kind for finding in PARTS[name].say(before)} if hasattr(PARTS[name], "say") else set()
    kept = [finding for finding in before.findings if finding.kind not in said | LOOKING.get(name, set())]
    assert [finding for finding in found.findings if finding.kind not in LOOKING.get(name, set())] == kept


@pytest.mark.all
@pytest.mark.parametrize("name", PARTS)
def test_without_a_part_the_page_lacks_its_section_alone(measured, whole, name):
    both = [make_report(found, measured.policy, measured.batch) for found in (ask(measured, without=name), whole)]
    sections, shown = ([section.id for section in report.page.sections] for report in both)
    assert sections == [own for own in shown if own != name]


@pytest.mark.all
def test_a_figure_of_the_page_is_drawn_by_its_name(whole):
    drawn = whole.plot("update_groups")
    assert drawn.get_axes() if hasattr(drawn, "get_axes") else drawn.figure
    with refused("no figure 'update_group'", "update_groups"):
        whole.plot("update_group")


def test_no_part_imports_another_and_none_outside_names_what_one_counts(whole):
    statistics = {row for own in whole.rows.values() for row in own.rows["statistic"]}
    columns = {*whole.table, *whole.frames["weightings"], *whole.frames["groups"]}
    columns |= OTHERS
    inside = ("parts/", "shares.py", "sums.py", "page/first_screen.py")
    for path in sorted(ROOM.rglob("*.py")):
        name, text = path.relative_to(ROOM).as_posix().removeprefix("diagnosis/"), path.read_text()
        if name.startswith("parts/") and path.name != "__init__.py":
            assert not re.search(r"^\s*(from|import) gradscope\.diagnosis\.parts", text, re.M), name
        if not name.startswith(inside):
            words = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
            assert not words & (statistics - columns), path


def test_the_result_is_small_and_its_files_are_short():
    assert len(fields(Diagnosis)) <= 10
    for path in (ROOM / "diagnosis").rglob("*.py"):
        if "parts" not in path.parts:
            assert len(path.read_text().splitlines()) <= 250, path


OTHERS = {
    *("token_share", "squared_share", "tokens", "prompts"),  # columns of summaries and monitors
    *("cosine_with_all", "signal", "noise"),  # of `IntervalGradients`
    *("clip_low", "clip_high", "clip_dual"),  # of `off_policyness`
    *("mismatch_mean", "largest_share"),  # a record of the trainer; a function
}
"""Names of statistics that are also those of something else."""

OWN = """
from gradscope.diagnosis import Finding, Rows, Verdict, one_row

TITLE = "How many tokens are there?"
ASKS = ("contributions",)

def rows(m):
    return Rows(one_row("signal_of_tokens", float(m.made["contributions"].signal.sum()), len(m.table), unit="squared"))

def say(found):
    return [Finding("mine", Verdict.FACT, f"{found.pick('signal_of_tokens')['value']:.3g} of signal.")]

def show(found, sheets):
    return [sheets.table("mine", found.rows["age"].rows, "Mine.")]
"""


def test_a_question_of_ones_own_has_rows_a_sentence_a_section_and_its_product(policy, tmp_path):
    batch = make_batch(policy)
    (tmp_path / "own.py").write_text(OWN)
    settings = DiagnosisSettings(influence_tokens=None, actual_step=False, compare=False, resamples=20)
    found = diagnose(policy, batch, settings=settings, parts=(f"{tmp_path / 'own.py'}:age",))
    # The signal of all tokens: what diagnose's own sums give, of the mean instead of the sum over the tokens.
    signal = found.pick("signal", "raw", "all")["value"] * len(found.table) ** 2
    assert found.pick("signal_of_tokens")["value"] == pytest.approx(signal, rel=1e-4)
    assert found.findings["mine"].statement.endswith("of signal.")
    write_report(tmp_path / "page", found.report())
    told = json.loads((tmp_path / "page" / "diagnosis.json").read_text())
    assert [f["kind"] for f in told["findings"]] == [f.kind for f in found.findings]
    assert told["statistics"][-1]["statistic"] == "signal_of_tokens" and told["scope"]["tokens"] == len(found.table)
    first = next(f for f in told["findings"] if f["kind"] == "dominance_raw")
    assert first["verdict"] == "undecided" and told["next"] == list(found.advice)
    assert "Mine." in (tmp_path / "page" / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [("TITLE = 'x'", "ASKS"), ("TITLE, ASKS = 'x', ('all',)\ndef rows(m): ...", "'all'"), ("1 / 0", "ZeroDivision")],
)
def test_what_is_no_part_is_refused_before_anything_is_measured(policy, tmp_path, text, words):
    (tmp_path / "own.py").write_text(text)
    with refused(words):
        diagnose(policy, make_batch(policy), parts=(str(tmp_path / "own.py"),))
    with refused("nowhere.py"):
        diagnose(policy, make_batch(policy), parts=("nowhere.py:x",))
