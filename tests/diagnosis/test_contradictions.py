"""No word of a page contradicts another, or the interval beside it: many settings, read number by number."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.pages import Reader
from support.policies import make_batch, make_policy
from support.steps import warm_state
from support.tiers import every

from gradscope.diagnosis import (
    PARTS,
    Diagnosis,
    DiagnosisSettings,
    Verdict,
    decide,
    diagnose,
    make_report,
    write_report,
)
from gradscope.diagnosis.page.contents import Report
from gradscope.diagnosis.page.page import Figure, Paragraph
from gradscope.diagnosis.page.render import render
from gradscope.diagnosis.products import PRODUCTS
from gradscope.diagnosis.products.sums import ADAMW_TITLE
from gradscope.gradients import measure
from gradscope.plots import drawn_numbers
from gradscope.policy import AdamWState, Policy
from gradscope.resampling import FEWEST, MANY
from gradscope.rollouts import TokenBatch

pytestmark = pytest.mark.usefixtures("undrawn")

NUMBER = r"[−<]?[\d,]*\.?\d+"
BRACKET = re.compile(rf"({NUMBER})( %|×|) \[({NUMBER}), ({NUMBER})\]")
MORE = (Verdict.MORE, Verdict.DOMINATES)


@dataclass(frozen=True)
class Setting:
    """How one page came about."""

    prompts: int
    idle: int = 0
    """Prompts whose responses have equal rewards."""
    responses: int = 2
    sampled: int | None = None
    """Tokens of each interval that are measured; None: all."""
    state: str | None = None
    """whole: what AdamW's state_dict saved; moments: the second moments alone; norms: none, but norms in its metric."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Fields of DiagnosisSettings."""


def setting(prompts: int, idle: int = 0, responses: int = 2, sampled=None, state=None, **changes: Any) -> Setting:
    return Setting(prompts, idle, responses, sampled, state, tuple(changes.items()))


NO_TIME = {"minutes": 1e-9}
SETTINGS = {
    "nine prompts": setting(9),
    "three prompts": setting(3, state="whole"),
    "one prompt": setting(1),
    "a sample": setting(9, sampled=4),
    "most prompts idle": setting(12, 9),
    "no time": setting(9, state="whole", **NO_TIME),
    "sketches": setting(9, state="whole", gradient_way="sketches", sampled=12),
    "every part": setting(7, 1, compare=True),
    "many prompts": setting(24, 4, responses=4, sampled=24),
    "one prompt, sampled": setting(1, sampled=2, state="whole"),
    "one prompt of two": setting(2, 1),
    "one prompt with time for little": setting(1, state="moments", **NO_TIME),
    "two prompts": setting(2),
    "five prompts": setting(5, state="moments"),
    "five of six": setting(6, 1, compare=True),
    "six prompts": setting(6, sampled=2),
    "six of seven": setting(7, 1, state="whole", compare=True),
    "nine prompts, one token of each interval": setting(9, sampled=1),
    "nine prompts, sixteen of each interval": setting(9, sampled=16),
    "all idle": setting(6, 6),
    "all but one idle": setting(12, 11, state="whole"),
    "half idle": setting(14, 7, sampled=8),
    "moments alone": setting(9, state="moments"),
    "norms in a metric alone": setting(9, state="norms"),
    "norms in a metric, no time": setting(9, state="norms", **NO_TIME),
    "no time, sampled": setting(9, sampled=4, state="whole", **NO_TIME),
    "no time, few prompts": setting(3, state="moments", **NO_TIME),
    "sketches of few prompts": setting(4, gradient_way="sketches"),
    "influence of few tokens": setting(9, influence_tokens=20),
    "no steps": setting(9, influence_tokens=None, actual_step=False),
    "another seed": setting(10, 2, sampled=8, seed=3),
    "many responses": setting(8, responses=8),
}  # fmt: skip


@cache
def policy() -> Policy:
    return make_policy("qwen2", tokenizer=True)


def make_rollouts(prompts: int, idle: int, responses: int) -> TokenBatch:
    lengths = tuple((7, 4, 6, 5)[row % 4] for row in range(prompts * responses))
    batch = make_batch(policy(), lengths=lengths, prompt_lengths=(3,) * len(lengths), surprise=0.1)
    groups = torch.arange(len(lengths)) // responses
    rewards = (torch.arange(len(lengths)) % responses == 0).float()
    return replace(batch, group_ids=groups, rewards=torch.where(groups < idle, 0.0, rewards))


@cache
def made(name: str) -> tuple[Diagnosis, Report]:
    """The diagnosis and its report."""
    case = SETTINGS[name]
    batch, state, table = make_rollouts(case.prompts, case.idle, case.responses), None, None
    if case.state is not None:
        state = warm_state(policy())
        if case.state != "whole":
            state = AdamWState.from_state_dict(policy().model, state)
    if case.sampled is not None:
        table = measure(policy(), batch, tokens_per_interval=case.sampled)
    if case.state == "norms":
        table, state = measure(policy(), batch, metric="adamw", optimizer_state=state), None
    settings = DiagnosisSettings(**({"resamples": 200, "compare": False} | dict(case.changes)))
    diagnosis = diagnose(policy(), batch, table, settings=settings, optimizer_state=state)
    return diagnosis, make_report(diagnosis, policy(), batch)


@cache
def found(name: str) -> tuple[Diagnosis, str]:
    """The diagnosis and the text of its page, verdict, evidence, tables and notes."""
    diagnosis, report = made(name)
    return diagnosis, Reader(render(report.page)).text


OFTEN = 2
"""So many settings, the first ones, are in `make test`."""
NAMES = [*[*SETTINGS][:OFTEN], *(pytest.param(name, marks=pytest.mark.all) for name in [*SETTINGS][OFTEN:])]
by_setting = pytest.mark.parametrize("name", NAMES)


def read(number: str) -> float:
    return float(number.replace("−", "-").replace(",", "").replace("<", ""))


def printed(text: str, unit: str) -> list[tuple[float, float]]:
    """The intervals that stand behind a number in this unit."""
    return [(read(low), read(high)) for _, own, low, high in BRACKET.findall(text) if own == unit]


AGAINST = {"dominance": ("×", 1.0), "added": ("×", 1.0), "direction": (" %", 50.0), "driver": ("", 0.0)}
"""Kinds of findings whose verdict is about one number: its unit, and what it is compared with."""


@by_setting
def test_verdicts_are_those_of_the_intervals_that_are_printed_in_their_sentence(name):
    d, _ = found(name)
    for finding in d.findings:
        words, verdict, kind = finding.statement, finding.verdict, finding.kind.split("_")[0]
        if kind in AGAINST:
            unit, level = AGAINST[kind]
            ends = printed(words, unit)[-1:]
            above, below = (any(low > level for low, _ in ends), any(high < level for _, high in ends))
        elif kind == "summed":
            ends = printed(words, " %")
            apart = len(ends) == 2  # of the tokens, then of the gradient
            above, below = apart and ends[1][0] > ends[0][1], apart and ends[1][1] < ends[0][0]
        else:
            continue
        assert (verdict in MORE, verdict is Verdict.LESS) == (above, below), finding
        if not ends:
            assert not re.search("undecided|detectabl|in proportion|dominate", words, re.IGNORECASE), finding


@by_setting
def test_signal_influence_and_kinds_of_tokens_are_named_where_their_printed_intervals_lie_apart(name):
    d, text = found(name)
    kinds = {finding.kind: finding for finding in d.findings}
    for driver in ("token_class", "position_class"):
        if (said := kinds.get(f"where_{driver}")) is None:
            continue
        parts = re.findall(rf"([^:;]+): ({NUMBER} %[^(]*)\(({NUMBER} %[^)]*) of the tokens\)", said.detail)
        assert len(parts) == (d.frames["where"]["driver"] == driver).sum()
        over = [own for own, energy, tokens in parts if (e := printed(energy, " %")) and (t := printed(tokens, " %"))
                and e[0][0] > t[0][1]]  # fmt: skip
        assert (said.verdict is Verdict.MORE) == bool(over)
        assert all(own.strip() in said.statement for own in over)
    signal = d.pick("signal_fraction", "raw", "all")
    if signal is not None and np.isnan(signal["lower"]):
        assert "signal fraction not told from 0" not in text
    if "influence" in kinds:
        share, own = printed(kinds["influence"].statement, " %"), printed(kinds["influence"].detail, " %")
        above = bool(share and own) and share[0][0] > own[0][1]
        assert (kinds["influence"].verdict is Verdict.MORE) == above


@by_setting
def test_an_interval_is_printed_only_where_the_result_has_it_and_never_of_what_does_not_vary(name):
    d, text = found(name)
    bounds = all_bounds(d)
    assert (bounds[:, 0] <= bounds[:, 1]).all()
    bounds = bounds[bounds[:, 0] < bounds[:, 1]]  # a number compared with itself
    assert not [
        found[0]
        for found in BRACKET.finditer(text)
        if not near(found[2], read(found[3]), read(found[4]), bounds)
    ]


def all_bounds(d: Diagnosis) -> np.ndarray:
    """All bounds of the result, [n, 2]."""
    pairs = [
        table[[lower, lower.replace("lower", "upper")]].dropna().to_numpy(float)
        for table in (d.statistics, *d.frames.values()) for lower in map(str, table) if lower.endswith("lower")
    ]  # fmt: skip
    return np.concatenate([np.empty((0, 2)), *pairs])


def near(unit: str, low: float, high: float, bounds: np.ndarray) -> bool:
    """Whether bounds as printed, to two digits, are among these: as they are, in percent, or as ratios, from bits."""
    scaled = {" %": 100 * bounds, "×": 2.0 ** np.clip(bounds, -99, 99), "": bounds}[unit]
    off = np.abs(scaled - [low, high])
    return bool((off <= 0.06 * np.abs(scaled) + 0.006).all(1).any())


@pytest.mark.parametrize("name", every(2, ["nine prompts", "every part"]))
def test_two_lines_of_python_draw_each_figure_again_from_the_files_beside_the_page(name, tmp_path, monkeypatch):
    d, report = made(name)
    write_report(tmp_path, report)
    d.table.to_parquet(tmp_path / "tokens.parquet")
    monkeypatch.chdir(tmp_path)
    blocks = [report.page.lead, *(block for section in report.page.sections for block in section.blocks)]
    figures = [block for block in blocks if isinstance(block, Figure)]
    assert len(figures) > 8
    for figure in figures:
        first, last = figure.code.split("\n")
        names: dict[str, Any] = {}
        exec(first, names)
        again, before = drawn_numbers(eval(last, names)), drawn_numbers(figure.drawing)
        both = [pd.read_csv(StringIO(frame.to_csv(index=False))) for frame in (again, before)]
        pd.testing.assert_frame_equal(*both, check_dtype=False, rtol=1e-5, atol=1e-9)


ENDS = re.compile(rf"{NUMBER}(?: %|×)? \[{NUMBER}, {NUMBER}\]")


@pytest.mark.parametrize("name", NAMES[:10])
def test_no_number_with_an_interval_is_said_twice(name):
    page = made(name)[1].page
    said = [*page.decision, *(f"{tile.value} {tile.note}" for tile in page.tiles), *page.notes, *page.warnings]
    said += [f"{finding.statement} {finding.detail}" for finding in page.findings]
    blocks = [block for section in page.sections for block in section.blocks]
    said += [block.text for block in blocks if isinstance(block, Paragraph)]
    said += [block.caption for block in (page.lead, *blocks) if isinstance(block, Figure)]
    places = Counter(ends for text in said for ends in {*ENDS.findall(text)})
    assert [ends for ends, count in places.items() if count > 1] == []
    statements = [finding.statement for finding in page.findings]
    assert len({*statements, *page.decision}) == len(statements) + len(page.decision)


@by_setting
def test_what_is_left_out_is_not_there_and_a_note_names_each(name):
    d, text = found(name)
    told = [note for note in d.notes if note.kind in ("minutes", "impossible", "large")]
    titles = {name: own.TITLE for name, own in {**PRODUCTS, **PARTS}.items()}
    titles |= {"adamw_sums": ADAMW_TITLE, "adamw_energy": "the AdamW-preconditioned gradient energy"}
    assert len(told) == len(d.left_out)
    assert all(any(titles[name] in note and why in note for note in told) for name, why in d.left_out.items())
    names = set(zip(d.statistics["statistic"], d.statistics["metric"], strict=True))
    shown = {
        "adamw_energy": ("squared_share", "adamw") in names,
        "sums": ("gradient_share", "raw") in names or "cosines" in d.frames,
        "adamw_sums": ("gradient_share", "adamw") in names or "adamw_cosines" in d.frames,
        "real_step": ("right_direction_positive_actual", "none") in names or "movement" in d.frames,
        "predicted_step": ("low_to_high_share", "none") in names or "influence" in d.frames,
        "comparison": "weightings" in d.frames,
    }
    assert not any(shown.get(name, name in d.rows) for name in d.left_out)
    assert ("sketches of" in text) == (d.sums_plan is not None and d.sums_plan.way == "sketches")


def served_prompts(case: Setting) -> int:
    """Prompts with a weight in the policy's part of the loss or, if none has, in KL's."""
    return case.prompts - case.idle or case.prompts


@by_setting
def test_prompts_are_counted_by_each_of_their_names_with_one_number(name):
    d, text = found(name)
    case = SETTINGS[name]
    served = served_prompts(case)
    supply = d.scope.supply
    if supply.prompts < d.scope.of_prompts:  # minutes for one
        assert (supply.prompts, d.scope.of_prompts) == (1, case.prompts)
        return
    assert (supply.prompts, supply.informative) == (case.prompts, served)
    own = text.partition("All numbers All headline numbers")[0]
    if "weightings" in d.rows:  # which counts what it would take
        own = " ".join([*decide(d), *d.notes, *(f"{f.statement} {f.detail}" for f in d.findings)])
    for number in re.findall(r"(\d+) prompts? with an advantage", own):
        assert int(number) == served
    for number in re.findall(r"(\d+) of them with an advantage", own):
        assert int(number) == served
    wanted = {int(number) for number in re.findall(r"about (\d+) prompts (?:would decide|to be told)", own)}
    for number in re.findall(r"(?<![\d.,])(\d+) prompts?\b(?! with)", own):
        assert int(number) in {case.prompts, FEWEST, MANY} | wanted  # MANY: what an interval is


@by_setting
def test_of_few_prompts_nothing_weighted_has_an_interval_and_the_page_says_how_many_are_wanted(name):
    d, _ = found(name)
    case = SETTINGS[name]
    if served_prompts(case) >= FEWEST:
        return
    weighted = d.statistics[d.statistics["metric"] != "none"]
    assert len(weighted) and weighted["lower"].isna().all()
    first, *_ = decide(d)
    assert not BRACKET.search(first) and re.search(rf"\b{FEWEST}\b", first)
    assert {note.kind for note in d.notes} & {"few-prompts", "one-prompt"}


@by_setting
def test_what_is_wanted_is_more_than_there_is_and_bars_are_named_where_they_are(name):
    d, text = found(name)
    short = d.statistics[d.statistics["lacks"] == "tokens"]
    assert (short["wanted"] > short["n"]).all()
    drawn = (d.statistics, *(d.frames[name] for name in ("directions", "drivers") if name in d.frames))
    if all(table["lower"].isna().all() for table in drawn):
        assert "Bars:" not in text


@by_setting
def test_rows_of_a_few_tokens_are_folded_or_carry_no_share(name):
    d, _ = found(name)
    if (where := d.frames.get("where")) is not None:
        rows = where[where["driver"] == "token_class"]
        assert ((rows["num_measured"] >= 10) | (rows["value"] == "other")).all()
