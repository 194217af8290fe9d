"""What a diagnosis's page holds: its tables are the numbers, its sentences bear their intervals, no figure is kept."""

from __future__ import annotations

import json
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from support.pages import Reader
from support.policies import make_batch, make_policy

from gradscope.diagnosis import (
    DiagnosisSettings,
    diagnose,
    make_report,
    make_trend_report,
    write_report,
)
from gradscope.diagnosis.notes import CAVEATS
from gradscope.diagnosis.page.page import Paragraph, Table
from gradscope.diagnosis.page.trend import SAID
from gradscope.diagnosis.page.viewer import viewer_data
from gradscope.diagnosis.parts.prompts import EXTREMES
from gradscope.diagnosis.rows import COLUMNS, Rows

pytestmark = pytest.mark.usefixtures("undrawn")

LOW = "[0, ¼)"


def rows(step: int, statistic: str, value: float, lower: float, upper: float, unit: str = "share") -> dict:
    metric = "none" if statistic == "token_share" else "raw"
    named = dict(zip(COLUMNS, (statistic, metric, LOW, value, lower, upper, 10, unit), strict=True))
    return {"step": step} | named


def test_a_trends_sentences_say_what_its_two_ends_bear():
    frame = pd.DataFrame(
        [
            *(rows(step, "token_share", share, share - 0.05, share + 0.05) for step, share in ((5, 0.2), (9, 0.9))),
            rows(12, "token_share", 0.1, 0.05, 0.14),
            rows(5, "squared_share", 0.5, 0.4, 0.6),
            rows(12, "squared_share", 0.55, 0.45, 0.7),
            rows(5, "dominance_index", 1.0, 0.5, 1.2, "bits"),
            rows(12, "dominance_index", 2.0, 1.3, 2.5, "bits"),
            rows(5, "gradient_share", 0.5, np.nan, np.nan),
            rows(12, "gradient_share", 0.7, np.nan, np.nan),
            rows(5, "added_index", 0.5, 0.1, 0.9, "bits"),
            rows(9, "added_index", 0.5, 0.1, 0.9, "bits"),
        ]
    )
    report = make_trend_report(frame, links=[("step 5", "a/report.html")], notes=["a note"])
    said = {finding.statement.split(":")[0] for finding in report.page.findings}
    assert said == {
        "The share of the tokens with π < ¼ fell",
        "The share of the gradient energy of tokens with π < ¼ shows no detectable change",
        "The energy of a token with π < ¼ over the average rose",
        "The share of the summed gradient of tokens with π < ¼ was not judged",
    }  # of what is unknown at the last step, nothing
    pd.testing.assert_frame_equal(report.tables["data/trend.csv"], frame)
    alone = make_trend_report(frame[frame["step"] == 5])
    said = [finding.statement for finding in alone.page.findings]
    assert len(said) == 4 and all("at step 5." in statement for statement in said)  # of those with an interval
    assert not any(word in statement for word in SAID.values() for statement in said)


@pytest.mark.all
def test_prompt_by_prompt_leaves_out_those_without_a_gradient_and_names_those_that_oppose_the_rest():
    policy = make_policy("qwen2", tokenizer=True)
    batch = make_batch(policy)
    settings = DiagnosisSettings(influence_tokens=None, actual_step=False, resamples=50)
    found = diagnose(policy, batch, settings=settings)
    # Of twelve prompts four have no gradient; the three that oppose the rest have not the smallest shares.
    norms = [3.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.4, 0.3, 0.0, 0.0, 0.0, 0.0]
    shares = [0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01, 0.0, 0.0, 0.0, 0.0]
    cosines = [0.5, 0.3, 0.2, -0.3, -0.1, 0.1, -0.2, 0.05, *[np.nan] * 4]
    prompts = pd.DataFrame({"group": range(12), "gradient_norm": norms, "gradient_share": shares, "share_error": 0.0})
    prompts = prompts.assign(cosine_with_rest=cosines, responses=2, tokens=9, response=0, position=0)
    page = make_report(
        replace(found, rows={**found.rows, "prompts": Rows(frames={"by_prompt": prompts})}), policy, batch
    ).page
    (section,) = [section for section in page.sections if section.id == "prompts"]
    words, table = section.blocks
    assert isinstance(words, Paragraph) and isinstance(table, Table)
    assert "(3, 6, 4)" in words.text and "4 more have none" in words.text
    assert table.frame.iloc[:, 0].tolist() == [0, 1, 2, 4, 6, 3] and len(table.frame) == 2 * EXTREMES


def test_a_checkpoints_page_holds_its_statistics_and_its_notes(tmp_path):
    policy = make_policy("qwen2", tokenizer=True)
    batch = make_batch(policy)
    settings = DiagnosisSettings(influence_tokens=None, actual_step=False, resamples=50)
    found = diagnose(policy, batch, settings=settings)
    before = plt.get_fignums()
    report = make_report(found, policy, batch, notes=["Of <mine>."])
    # No sentence comes twice.
    told = [*report.page.decision, *(finding.statement for finding in report.page.findings)]
    assert len(told) == len(set(told)) > 1
    assert report.page.next == found.advice and report.page.next
    # Every linked token can be read, however few responses fit.
    linked = {token[0] for s in report.page.sections for b in s.blocks if isinstance(b, Table) for token in b.tokens}
    shown = json.loads(viewer_data(replace(report.page.viewer, budget=0)).json)["responses"]
    assert linked and linked <= {response["response"] for response in shown}
    assert plt.get_fignums() == before
    titles = [section.title for section in report.page.sections]
    assert titles[0] == "What this update is made of, and what other prompts want" and titles[-1] == "All numbers"
    # No step, no influence: no empty sections of them.
    assert not {"What one step does", "Influence between intervals"} & {*titles}
    assert sorted(report.page.notes) == sorted(("Of <mine>.", *found.notes))
    places = [CAVEATS.index(note.kind) for note in found.notes]
    assert [note for note in report.page.notes if note != "Of <mine>."] == [
        note for _, note in sorted(zip(places, found.notes, strict=True), key=lambda pair: pair[0])
    ]
    page = Reader(write_report(tmp_path, report).read_text(encoding="utf-8"))
    assert "Of <mine>." in page.text
    for name, frame in report.tables.items():
        assert len(pd.read_csv(tmp_path / name)) == len(frame)
    pd.testing.assert_frame_equal(report.tables["data/statistics.csv"], found.statistics)
