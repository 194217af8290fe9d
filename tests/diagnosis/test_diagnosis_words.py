"""The sentences of a diagnosis say what its numbers bear, and its pictures draw them."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from gradscope.diagnosis import (
    PARTS,
    Diagnosis,
    Finding,
    Rows,
    Scope,
    Verdict,
    decide,
    join_rows,
    make_rows,
    one_row,
    say,
)
from gradscope.diagnosis.format import percent
from gradscope.diagnosis.page.first_screen import make_lead, make_tiles
from gradscope.diagnosis.page.page import Figure
from gradscope.diagnosis.page.sheets import Sheets
from gradscope.diagnosis.parts import dominance, kl, signal
from gradscope.diagnosis.parts.theory import BoundMargins
from gradscope.intervals import interval_labels
from gradscope.objective import PAPER
from gradscope.plots import drawn_numbers
from gradscope.resampling import FEWEST, TOO_FEW, Supply
from gradscope.updates import StepSettings

LABELS = tuple(interval_labels())
LOW, TOP = LABELS[0], LABELS[3]


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def rows(statistic: str, values: list, *, metric: str = "none", unit: str = "share", half: float = 0.05, n: int = 100):
    """Rows by interval (a fifth value is "all") with bounds `half` to both sides."""
    value = np.array(values, dtype=float)
    names = [*LABELS, "all"][: len(values)]
    found = np.stack([value, value - half, value + half])
    return make_rows(statistic, found, n, unit=unit, metric=metric, intervals=names)


def number(statistic: str, value: float, lower: float, upper: float, interval: str = "", n: int = 100) -> pd.DataFrame:
    return make_rows(statistic, np.array([[value], [lower], [upper]]), n, unit="share", intervals=[interval])


PLANTED = {
    "token_share": rows("token_share", [0.02, 0.04, 0.06, 0.88], half=0.01),
    "squared_share": rows("squared_share", [0.5, 0.3, 0.15, 0.05], metric="raw"),
    "dominance_index": rows("dominance_index", [4.6, 2.9, 1.3, -4.1], metric="raw", unit="bits", half=0.5),
    "largest_share": rows("largest_share", [0.98, 0.02, 0.0, 0.0], metric="raw", half=np.nan),
    "predicted_index": rows("predicted_index", [4.0, 3.0, 1.5, -4.0], unit="bits", half=0.1),
    "added_index": rows("added_index", [0.6, -0.1, -0.2, -0.1], metric="raw", unit="bits", half=0.3),
    "gradient_share": rows("gradient_share", [0.6, 0.2, 0.15, 0.05], metric="raw", half=0.2),
    "gradient_index": rows("gradient_index", [4.8, 2.0, 1.0, -3.0], metric="raw", unit="bits"),
    "cosine_with_all": rows("cosine_with_all", [0.7, 0.4, 0.3, 0.2], metric="raw", unit="cosine"),
    "signal_fraction": rows("signal_fraction", [0.1, 0.6, 0.0, 0.3, 0.7], metric="raw", half=0.25),
    "low_to_high_share": number("low_to_high_share", 0.5, 0.4, 0.6, TOP),
    "high_to_high_share": number("high_to_high_share", 0.2, 0.1, 0.3, TOP),
    "right_direction_positive_actual": rows("right_direction_positive_actual", [0.6, 0.5, 0.5, 0.4, 0.42]),
    "right_direction_negative_actual": rows("right_direction_negative_actual", [0.6, 0.5, 0.5, 0.6, 0.58]),
}


INFLUENCE = pd.DataFrame({"source": [0, 1], "target": [3, 3], "share": [0.5, 0.2]})


FRAMES = {"layers": "layers", "drivers": "drivers"}
"""Frames without which their part was not made."""


def plant(
    change: dict[str, pd.DataFrame | None] | None = None,
    *,
    prompts: int = 12,
    informative: int | None = None,
    bounds: BoundMargins | None = None,
    table: pd.DataFrame | None = None,
    supply: dict | None = None,
    scope: dict | None = None,
    **frames: pd.DataFrame,
) -> Diagnosis:
    """A diagnosis of these rows and frames; a change to None leaves rows out."""
    if table is None:
        table = pd.DataFrame({"param_grad_norm": [1.0, 2.0, np.nan], "weight": [1.0, -1.0, 0.0], "group": [0, 1, 2]})
        table = table.assign(interval=0, logit_grad_norm=1.0)
    informative = prompts if informative is None else informative
    own = join_rows([part for part in (PLANTED | (change or {})).values() if part is not None])
    own = Rows(own, {"influence": INFLUENCE} | frames, unweighted=("token_share", *FRAMES))
    absent = {part for frame, part in FRAMES.items() if frame not in frames} | ({"theory"} if bounds is None else set())
    rows = {name: Rows() for name in PARTS if name not in absent}
    rows["dominance"] = own.without_bounds() if informative < FEWEST else own
    if bounds is not None:
        rows["theory"] = Rows(kept={"bounds": bounds})
    if "kl_weight" in table:
        settings = SimpleNamespace(loss=PAPER)
        rows["kl"] = kl.rows(SimpleNamespace(table=table, weighted=True, settings=settings, note=lambda *_: None))
    counts = Supply(informative, prompts, 8 * prompts, **(supply or {}))
    whole = Scope(LABELS, counts, table, **(scope or {}))
    return say(Diagnosis(rows, whole, ("a note",), parts=PARTS))


def later(*given: object, **frames: object) -> Callable[[], Diagnosis]:
    """The arguments of a diagnosis that is planted when it is first asked for."""
    return cache(partial(plant, *given, **frames))


def make_where() -> pd.DataFrame:
    shares = {"num_tokens": [60, 40], "token_share": [0.6, 0.4], "num_measured": [60, 40], "squared_share": [0.2, 0.8]}
    for name, middle in (("token", [0.6, 0.4]), ("squared", [0.2, 0.8])):
        shares |= {f"{name}_lower": np.subtract(middle, 0.1), f"{name}_upper": np.add(middle, 0.1)}
    kinds = pd.DataFrame({"driver": "token_class", "value": ["word", "digit"]} | shares)
    return pd.concat([kinds, kinds.assign(driver="position_class", value=["[0, 9)", "[9, 20]"])], ignore_index=True)


def make_layers() -> pd.DataFrame:
    """Mean norms by place and interval: nine, four, five and seven times as large in the lowest interval."""
    parts = []
    for name, scale in {"logit_grad_norm": 9, "act_grad_norm.0": 4, "act_grad_norm.1": 5, "param_grad_norm": 7}.items():
        values = np.array([scale, 3.0, 2.0, 1.0])
        bounds = {"value": values, "lower": values - 0.5, "upper": values + 0.5}
        parts.append(pd.DataFrame({"quantity": name, "interval": range(4)} | bounds))
    return pd.concat(parts, ignore_index=True)


def make_drivers(lower: float, upper: float, *, collinear: bool = False) -> pd.DataFrame:
    fits = pd.DataFrame({"driver": ["log_one_minus_prob", "entropy", "difference"], "coefficient": [0.8, 0.5, 0.3]})
    return fits.assign(quantity="param_grad_norm", lower=lower, upper=upper, r2=0.9, collinear=collinear, tokens=50)


def make_lag(worst: float) -> dict[str, pd.DataFrame]:
    names = ("logprob_difference_mean", "clip_low", "clip_high", "clip_dual")
    lag = {name: number(name, 0.05, 0.04, 0.06) for name in names}
    return lag | {"logprob_difference_max": one_row("logprob_difference_max", worst, 100, unit="nats")}


def one_index(value: float, half: float) -> dict[str, pd.DataFrame]:
    values = [value, 0.0, 0.0, 0.0]
    return {"dominance_index": rows("dominance_index", values, metric="raw", unit="bits", half=half)}


def one_change(statistic: str, values: list, *, half: float, unit: str = "share") -> dict[str, pd.DataFrame]:
    metric = "none" if statistic.startswith("right") else "raw"
    return {statistic: rows(statistic, values, metric=metric, unit=unit, half=half)}


SPIKES = pd.DataFrame({"token": ["\n<b>", "x"], "position": [3, 4], "response": [1, 0], "prob": [0.1, 0.2]})
SPIKES = SPIKES.assign(weight=[-1.2, 1.0], squared_share=[0.3, 0.1])
HOLD = BoundMargins(70, 0, 0.01, 0.002, 2e-5)
ADAMW = ("squared_share", "dominance_index", "largest_share", "gradient_share", "gradient_index", "cosine_with_all")
MOMENTUM = pd.DataFrame({"source": [0, "momentum", "momentum"], "target": [3, 3, "all"], "share": [0.5, 0.3, 0.9]})
MOMENTUM = MOMENTUM.assign(share_lower=MOMENTUM["share"] - 0.1, share_upper=MOMENTUM["share"] + 0.1)
NOTHING = make_rows("token_share", np.full((3, 4), np.nan), [0, 5, 5, 5], unit="share", intervals=LABELS)
FEW_TOKENS = rows("dominance_index", [0.9, 0.0, 0.0, 0.0], metric="raw", unit="bits", half=np.nan, n=16)
FEW_TOKENS = FEW_TOKENS.assign(lacks="tokens", wanted=32)
FEW_SUMMED = rows("gradient_share", [0.6, 0.2, 0.15, 0.05], metric="raw", half=np.nan)
FEW_SUMMED = FEW_SUMMED.assign(lacks="prompts", wanted=6)
CONTRIBUTIONS = {
    "own_share": rows("own_share", [0.4, 0.1, 0.05, 0.02, 0.57], metric="raw", half=np.nan),
    "others_share": rows("others_share", [0.3, 0.1, 0.03, 0.0, 0.43], metric="raw", half=0.1),
    "signal_share": rows("signal_share", [0.7, 0.2, 0.1, 0.0], metric="raw", half=0.15),
    "signal_errors": one_row("signal_errors", 8.0, 100, unit="ratio").assign(metric="raw"),
    "largest_half": one_row("largest_half", 0.02, 100, unit="share").assign(metric="raw"),
    "effective_prompts": one_row("effective_prompts", 9.5, 100, unit="prompts").assign(metric="raw"),
}
"""Tokens with π < ¼ hold 70 % of the gradient, 30 % with other prompts."""
GROUPS = pd.DataFrame({"driver": ["prompt", "response", "token_class"], "value": ["3", "1", "word"]})
GROUPS = GROUPS.assign(num_tokens=100, gradient_share=1.0, own_share=0.57, others_share=0.43)


def contributed(change: dict[str, pd.DataFrame | None] | None = None, **known: object) -> Callable[[], Diagnosis]:
    """A diagnosis with every token's share of the gradient."""
    return later(CONTRIBUTIONS | (change or {}), groups=GROUPS, **known)


UNTOLD = {
    "signal_errors": one_row("signal_errors", 0.9, 100, unit="ratio").assign(metric="raw"),
    "others_share": rows("others_share", [0.3, 0.1, 0.03, 0.0, 0.43], metric="raw", half=0.6),
    "signal_share": None,
}
NO_WEIGHT = {
    "dominance_index": rows("dominance_index", [np.nan, 1.0, 1.0, 1.0], metric="raw", unit="bits"),
    "squared_share": rows("squared_share", [0.0, 0.3, 0.3, 0.4], metric="raw"),
}
PREDICTED = {
    "right_direction_positive_actual": None,
    "p": rows("right_direction_positive_predicted", [0.6] * 5),
}
V = Verdict
CASES: dict[str, tuple[Callable[[], Diagnosis], dict[str, Verdict]]] = {
    # Everything planted: the rare tokens hold half of the squares, and both signs move alike.
    "planted": (
        later(),
        {"dominance_raw": V.DOMINATES, "added": V.MORE, "summed_raw": V.MORE, "signal": V.UNDECIDED,
         "influence": V.MORE, "direction_positive": V.LESS, "direction_negative": V.MORE},
    ),
    "index from below 0 to above": (later(one_index(0.4, 0.5)), {"dominance_raw": V.UNDECIDED}),
    "index below 0": (later(one_index(-0.9, 0.5)), {"dominance_raw": V.LESS}),
    "index above 0": (later(one_index(0.9, 0.5)), {"dominance_raw": V.DOMINATES}),
    "above 0 by less than is printed": (later(one_index(0.51, 0.5)), {"dominance_raw": V.UNDECIDED}),
    "few tokens": (later({"dominance_index": FEW_TOKENS}), {"dominance_raw": V.UNDECIDED}),
    "an influence whose interval says nothing": (
        later({"low_to_high_share": number("low_to_high_share", 0.62, -10.33, 11.58, TOP)}),
        {"influence": V.UNDECIDED},
    ),
    "a summed gradient of few of the prompts": (
        later({"gradient_share": FEW_SUMMED}, scope={"summed": 5}),
        {"dominance_raw": V.DOMINATES, "summed_raw": V.UNDECIDED},
    ),
    "one prompt": (later(one_index(0.9, np.nan), prompts=1), {"dominance_raw": V.UNDECIDED}),
    "five prompts": (
        later(prompts=5), {"dominance_raw": V.UNDECIDED},
    ),
    "five prompts with an advantage": (later(informative=5), {"dominance_raw": V.UNDECIDED}),
    "another interval holds the most": (
        later(
            one_change("squared_share", [0.1, 0.2, 0.3, 0.4], half=0.05)
            | one_change("largest_share", [0.0, 0.0, 0.03, 0.97], half=np.nan)
        ),
        {"dominance_raw": V.MORE},
    ),
    "the ranking is undecided": (
        later(one_change("largest_share", [0.8, 0.2, 0.0, 0.0], half=np.nan)), {"dominance_raw": V.MORE}
    ),
    "the ranking is open": (
        later(one_change("largest_share", [0.49, 0.501, 0.009, 0.0], half=np.nan)), {"dominance_raw": V.MORE}
    ),
    "no weights": (later({"dominance_index": None, "squared_share": None}), {"dominance_raw": V.UNKNOWN}),
    "no rare token": (later({"token_share": NOTHING}), {"dominance_raw": V.UNKNOWN}),
    "norms unknown": (later(one_index(np.nan, 0.5)), {"dominance_raw": V.UNKNOWN}),
    "no rare token has a weight": (later(NO_WEIGHT), {"dominance_raw": V.UNKNOWN}),
    "the network takes": (later(one_change("added_index", [-0.6, 0, 0, 0], half=0.3, unit="bits")), {"added": V.LESS}),
    "as predicted": (later(one_change("added_index", [0.1, 0, 0, 0], half=0.3, unit="bits")), {"added": V.UNDECIDED}),
    "summed share as the tokens'": (
        later(one_change("gradient_share", [0.1, 0.2, 0.15, 0.05], half=0.2)), {"summed_raw": V.UNDECIDED}
    ),
    "summed share below": (
        later(one_change("gradient_share", [-0.5, 0.2, 0.15, 0.05], half=0.2)), {"summed_raw": V.LESS}
    ),
    "AdamW's metric": (
        later(
            {f"{name} adamw": PLANTED[name].assign(metric="adamw") for name in ADAMW},
            scope={"step": StepSettings("adamw")},
        ),
        {"dominance_adamw": V.DOMINATES, "summed_adamw": V.MORE},
    ),
    "no signal": (
        later(one_change("signal_fraction", [0.1, 0.2, 0.0, 0.2, 0.2], half=0.25)), {"signal": V.UNDECIDED}
    ),
    "momentum": (later(influence=MOMENTUM), {"influence": V.MORE}),
    "both signs move right": (
        later(one_change("right_direction_positive_actual", [0.6] * 5, half=0.05)),
        {"direction_positive": V.MORE, "direction_negative": V.MORE},
    ),
    "half of them": (
        later(one_change("right_direction_positive_actual", [0.5] * 5, half=0.05)), {"direction_positive": V.UNDECIDED}
    ),
    "a predicted step": (later(PREDICTED), {"direction_positive": V.MORE}),
    "other prompts want it": (contributed(), {"update": V.MORE, "wanted": V.MORE, "holders": V.FACT}),
    "other prompts do not tell": (contributed(UNTOLD), {"update": V.UNDECIDED, "wanted": V.UNDECIDED}),
    "an energy that is not told": (
        contributed(one_change("squared_share", [0.5, 0.3, 0.15, 0.05], half=0.5)), {"update": V.MORE}
    ),
    "kinds of tokens": (later(where=make_where()), {"where_token_class": V.MORE, "where_position_class": V.MORE}),
    "kinds of tokens, wide": (
        later(where=make_where().assign(squared_lower=[0.0, 0.45, 0.0, 0.45])), {"where_token_class": V.UNDECIDED}
    ),
    "probability": (later(drivers=make_drivers(0.2, 0.4)), {"driver": V.MORE}),
    "entropy": (later(drivers=make_drivers(-0.4, -0.2)), {"driver": V.LESS}),
    "either": (later(drivers=make_drivers(-0.1, 0.3)), {"driver": V.UNDECIDED}),
    "collinear": (later(drivers=make_drivers(np.nan, np.nan, collinear=True)), {"driver": V.UNDECIDED}),
    "norms one by one": (later(layers=make_layers()), {"norms": V.FACT}),
    "an adapter's": (later(layers=make_layers(), scope={"parameters": "the adapter's parameters"}), {"norms": V.FACT}),
    "spikes": (later(spikes=SPIKES), {"spikes": V.FACT}),
    "bounds hold": (later(bounds=HOLD), {"bounds": V.FACT}),
    "bounds break": (later(bounds=replace(HOLD, violations=3)), {"bounds": V.BROKEN}),
    "moved away": (later(make_lag(2.5)), {"lag": V.FACT}),
    "on-policy": (later(make_lag(1e-5)), {"lag": V.FACT}),
}  # fmt: skip
"""Name → a diagnosis whose truth was planted, and the verdicts that it must have."""


@pytest.mark.parametrize("name", CASES)
def test_verdicts_are_those_that_were_planted(name):
    planted, wanted = CASES[name]
    found = {finding.kind: finding.verdict for finding in planted().findings}
    assert {kind: found[kind] for kind in wanted} == wanted


@pytest.mark.parametrize("name", CASES)
def test_sentences_are_the_golden_ones(name, regenerate):
    """In tests/diagnosis/golden, a file per case: `pytest --regenerate` rewrites them, to be read before they are kept.

    A case's file has what differs from the first case's.
    """
    said = [words_of(finding) for finding in CASES[name][0]().findings]
    if name != "planted":
        first = {words_of(finding) for finding in CASES["planted"][0]().findings}
        said = [words for words in said if words not in first]
    file = Path(__file__).parent / "golden" / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.txt"
    if regenerate:
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(said), encoding="utf-8")
    assert "\n".join(said) == file.read_text(encoding="utf-8")


def words_of(finding: Finding) -> str:
    return f"[{finding.kind}: {finding.verdict}, {finding.tone}]\n{finding.statement}\n{finding.detail}\n"


def test_a_finding_unpacks_as_sentence_numbers_and_tone_and_none_holds_a_nan():
    for planted, _ in CASES.values():
        for statement, detail, tone in planted().findings:
            assert not re.search(r"\bnan\b", f"{statement} {detail}") and statement.endswith(".")
            assert tone in {"plain", "good", "warn", "bad"}


def test_shares_and_indices_are_drawn_as_they_are():
    figure = dominance.draw(plant())
    drawn = drawn_numbers(figure)
    for statistic, _, series, _ in (*dominance.SHARES, *dominance.INDICES):
        if (expected := PLANTED.get(statistic)) is None:
            continue
        factor = 100 if statistic.endswith("share") else 1
        rows = drawn[(drawn["series"] == series) & (drawn["panel"].str.startswith("share") == (factor == 100))]
        if len(rows):
            assert rows["value"].tolist() == pytest.approx((factor * expected["value"]).tolist())
            assert rows["upper"].tolist() == pytest.approx((factor * expected["upper"]).tolist())
    lines = [line.get_ydata() for line in figure.axes[0].lines]
    assert any(list(line) == pytest.approx([50, 30, 15, 5]) for line in lines)


@pytest.mark.parametrize("prompts", [1, 3, 5])
def test_of_too_few_prompts_nothing_is_said_of_shares_but_what_a_verdict_takes(prompts):
    planted = {"prompts": 16, "informative": prompts, "spikes": SPIKES, "where": make_where()}
    found = plant(**planted, supply={"of_informative": prompts})
    few = found.scope.supply.too_few
    assert found.findings[0].statement == few and TOO_FEW in few
    assert {finding.kind for finding in found.findings} == {"dominance_raw", "spikes"}
    assert decide(found) == (few,)
    assert not any("%" in tile.value for tile in make_tiles(found))
    # At the same share of prompts with a gradient, six take this many more.
    more = -(-16 * 6 // prompts) - 16
    assert f"about {more} more prompts ({more * 8} responses)" in found.scope.supply.wanted
    assert found.advice[0].endswith(found.scope.supply.wanted[1:])
    # Where a time limit left the others out, minutes do.
    limited = plant(**planted, supply={"of_informative": 9, "of_prompts": 40, "minutes": 24.2})
    assert "25 minutes" in decide(limited)[0] and "25 minutes" in limited.advice[0]
    assert not plant(informative=6).scope.supply.too_few


@pytest.mark.parametrize(("value", "said"), [(0.1, True), (1.0, False), (-1.0, False)])
def test_where_1_minus_pi_squared_explains_every_share_that_is_said_outright(value, said):
    added = rows("added_index", [0.1, value, -0.1, 0.0], metric="raw", unit="bits", half=0.3)
    found = plant({"added_index": added})
    assert any("(1−π)² alone predicts" in words for words in found.advice) is said
    wide = plant({"added_index": rows("added_index", [0.1] * 4, metric="raw", unit="bits", half=4.0)})
    assert not any("(1−π)² alone predicts" in words for words in wide.advice)


def test_tokens_with_a_reward_conflict_are_what_is_read_next():
    parts = {"reward.right": [0.0, 1.0], "reward.form": [0.2, 0.2]}
    found = plant(spikes=SPIKES.assign(weight=[1.0, 1.0], reward=1.0, **parts))
    assert any("1 token with a reward conflict" in words and "right" in words for words in found.advice)
    assert not any("conflict" in words for words in plant(spikes=SPIKES).advice)


@pytest.mark.parametrize(("half", "value"), [(0.25, "not told from 0"), (0.8, "not known")])
def test_a_bound_that_excludes_no_signal_is_not_printed(half, value):
    found = plant(one_change("signal_fraction", [0.1, 0.2, 0.0, 0.2, 0.2], half=half))
    assert [tile.value for tile in make_tiles(found) if tile.label == "signal fraction"] == [value]


def test_the_headline_keeps_what_is_large_in_the_sum_and_wanted_apart():
    headline, summed, *_ = decide(contributed()())
    for number in ("2.0 %", "50 % [45, 55]", "70 %", "yes, 70 % [55, 85]"):  # tokens, energy, gradient, wanted
        assert number in headline
    assert "43 % [33, 53]" in summed and "dominate" not in headline
    assert "12 prompts cannot tell" in decide(contributed(UNTOLD)())[0]
    few = contributed(informative=5)()
    assert decide(few) == (few.scope.supply.too_few,)
    # Without tokens there, what other prompts want of all of it is first.
    none = contributed({"token_share": NOTHING})()
    assert decide(none)[0] == none.findings["wanted"].statement and "update" not in {f.kind for f in none.findings}


@pytest.mark.parametrize(("half", "drawn"), [(0.1, True), (0.7, False)])
def test_bounds_that_say_nothing_are_neither_printed_nor_drawn(half, drawn):
    shares = rows("others_share", [0.3, 0.1, 0.03, 0.0, 0.43], metric="raw", half=half)
    found = contributed({"others_share": shares})()
    with_others = drawn_numbers(make_lead(found, Sheets()).drawing).query("series.str.contains('other prompts')")
    assert with_others["lower"].notna()[:1].tolist() == [drawn]
    assert ("[no usable bounds]" in found.findings["wanted"].statement) is not drawn


def test_a_single_series_has_no_legend():
    (figure,) = [block for block in signal.show(plant(), Sheets()) if isinstance(block, Figure)]
    (axes,) = figure.drawing.axes
    assert axes.get_legend() is None and len(drawn_numbers(figure.drawing)) == 5
    (figure,) = [
        block
        for block in signal.show(plant({"a": PLANTED["signal_fraction"].assign(metric="adamw")}), Sheets())
        if isinstance(block, Figure)
    ]
    assert len(figure.drawing.axes[0].get_legend().texts) == 2


@pytest.mark.parametrize(("large", "said"), [(1.0, False), (4.0, True)])
@pytest.mark.parametrize("chance", [1.0, 0.25])
def test_a_prompt_that_holds_much_of_the_energy_is_named(large, said, chance):
    # The first of ten prompts has ‖w·g‖² = large², every other one 1 in all its two tokens, each drawn by a chance.
    table = pd.DataFrame({"group": [3, *np.repeat(range(10, 19), 2)], "weight": 1.0, "sampling_probability": chance})
    table["param_grad_norm"] = [large, *[0.5**0.5] * 18]
    found = [finding for finding in plant(table=table).findings if finding.kind == "concentration"]
    assert bool(found) is said
    if said:
        share = large**2 / (large**2 + 9)
        assert f"{100 * share:.0f} %" in found[0].statement and "10 prompts" in found[0].statement


def test_the_tokens_that_push_hardest_are_named_with_what_they_were_rewarded_for():
    found = plant(spikes=SPIKES.assign(reward=[-0.5, 2.0])).findings["spikes"]
    assert "'\\n<b>' in response 1 (π 0.1, lowered, reward −0.5; 30 %)" in found.detail
    assert "'x' in response 0 (π 0.2, raised, reward 2; 10 %)" in found.detail
    assert "reward" not in plant(spikes=SPIKES).findings["spikes"].detail


@pytest.mark.parametrize(
    ("right", "form", "weights", "count"),
    [([0, 0], [0.2, 0.2], [1, 1], 2), ([0, 0], [0.2, 0.2], [1, -1], 1), ([0, 0], [0, 0.2], [1, -1], 0),
     ([1, 1], [0.2, 0.2], [1, 1], 0), ([1, 0], [0.2, 0.2], [1, 1], 1), ([np.nan, -1], [0.2, 0.2], [1, 1], 1)],
)  # fmt: skip
def test_tokens_that_are_raised_for_another_part_of_the_reward_are_counted(right, form, weights, count):
    spikes = SPIKES.assign(weight=weights, reward=1.0, **{"reward.right": right, "reward.form": form})
    said = plant(spikes=spikes).findings["spikes"]
    raised = r"Of the 2 largest, (\d) (?:is|are) raised.* whose right is 0 or less but whose form is positive"
    assert re.findall(raised, said.statement) == ([str(count)] if count else [])
    assert "form 0.2" in said.detail


@pytest.mark.parametrize("chance", [1.0, 0.25])
@pytest.mark.parametrize(("pull", "said"), [(0.5, True), (30.0, True), (0.01, False), (0.0, False)])
def test_the_tokens_that_hold_the_gradient_of_kl_are_named_where_it_has_a_share_of_the_energy(pull, said, chance):
    # Ten tokens with ‖g‖ = 1 and a policy weight of 1; KL pulls at the last one alone.
    kl = np.array([0.0] * 9 + [pull])
    table = pd.DataFrame({"response": range(10), "group": range(10), "position": 0, "token": "w", "prob": 0.5})
    table = table.assign(kl_weight=kl, weight=1.0 + kl, param_grad_norm=1.0, ref_logprob=np.log(0.25), entropy=0.0)
    table = table.assign(advantage=1.0, interval=2, sampling_probability=chance)
    found = [finding for finding in plant(table=table).findings if finding.kind == "kl"]
    assert bool(found) is said
    if said:
        share = pull**2 / (9 + (1 + pull) ** 2)
        assert f"has {percent(share)} % of" in found[0].statement and "1 token holds 100 %" in found[0].statement
        assert "response 9 (π 0.5, π_ref 0.25; 100 %)" in found[0].detail
        assert (found[0].tone == "warn") is (share > 1)


@pytest.mark.parametrize("masked", [0.0, 0.2])
@pytest.mark.parametrize(("power", "verdict"), [(0.5, Verdict.LESS), (1.5, Verdict.MORE), (1.02, Verdict.UNDECIDED)])
def test_a_mismatch_is_told_with_its_power_and_what_is_masked_for_it(power, verdict, masked):
    bounds = {"lower": power - 0.1, "upper": power + 0.1}
    told = {"mean": rows("mismatch_mean", [0.1] * 5, unit="nats")}
    told["power"] = one_row("mismatch_power", power, 9, unit="ratio").assign(**bounds)
    found = plant(told, mismatch=pd.DataFrame({"masked_share": [masked], "removed_share": [0.5 * (masked > 0)]}))
    said = found.findings["mismatch"]
    assert said.verdict is verdict and (said.tone == "warn") is (masked > 0)
    assert ("20 % of the tokens are masked" in said.statement and "50 % of" in said.statement) is (masked > 0)


@pytest.mark.parametrize(("largest", "said"), [(40.0, True), (1.0, False)])
def test_where_an_interval_says_nothing_no_share_stands_in_the_headline_and_why_is_said(largest, said):
    half = {"half": 0.0}
    share = rows("squared_share", [0.7, 0.1, 0.1, 0.1], metric="raw", **half)
    index = rows("dominance_index", [0.4, 0.0, 0.0, 0.0], metric="raw", unit="bits", half=6.0)
    share.loc[0, ["lower", "upper"]] = 1e-5, 0.9999
    table = pd.DataFrame({"token": "w", "response": range(20), "group": range(20), "interval": 0, "weight": 1.0})
    table["param_grad_norm"] = [largest, *[1.0] * 19]
    found = plant({"squared_share": share, "dominance_index": index}, table=table, prompts=20)
    finding = found.findings["dominance_raw"]
    assert finding.verdict is Verdict.UNDECIDED and "70 %" not in finding.statement
    assert ("one token holds" in finding.statement) is said
    [tile] = [tile for tile in make_tiles(found) if "energy" in tile.label]
    assert tile.value == "not known"
    assert decide(found)[0] == finding.statement
