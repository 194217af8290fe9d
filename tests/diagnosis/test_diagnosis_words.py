"""The sentences of a diagnosis say what its numbers bear, and its pictures draw them."""

import re
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from gradscope.diagnosis import Diagnosis, DiagnosisSettings, findings, plot_dominance
from gradscope.diagnosis.checkpoint import trend
from gradscope.diagnosis.format import percent
from gradscope.diagnosis.glossary import DEFINITIONS
from gradscope.diagnosis.plots import plot_signal, plot_trend, plot_where
from gradscope.diagnosis.result import BoundMargins, Recommendation, join_rows, make_rows, one_row
from gradscope.errors import InputError
from gradscope.intervals import interval_labels
from gradscope.plots import drawn_numbers, save_figure
from gradscope.updates import SGD, StepSettings

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


def plant(change: dict[str, pd.DataFrame | None] | None = None, **fields) -> Diagnosis:
    """A diagnosis of these rows; a change to None leaves them out."""
    parts = PLANTED | (change or {})
    table = pd.DataFrame({"param_grad_norm": [1.0, 2.0, np.nan], "weight": [1.0, -1.0, 0.0]})
    known = {"statistics": join_rows([part for part in parts.values() if part is not None]), "notes": ("a note",)}
    known |= {"influence": INFLUENCE, "table": table, "labels": LABELS, "num_prompts": 12, "num_responses": 96}
    return Diagnosis(**(known | {"settings": DiagnosisSettings(), "step": SGD} | fields))


def sentence(diagnosis: Diagnosis, words: str) -> tuple[str, str, str]:
    """The one finding whose statement holds these words."""
    (found,) = [finding for finding in findings(diagnosis) if words in finding[0]]
    return found


def test_dominance_names_both_denominators_with_their_intervals():
    statement, detail, tone = sentence(plant(), "dominate")
    assert statement == (
        f"Low-probability tokens (π in {LOW}) dominate: they are 2.0 % [1.0, 3.0] of the tokens and hold 50 % [45, 55] "
        "of Σ‖w·g‖²."
    )
    assert "+4.6 bits [+4.1, +5.1]" in detail and "24 times" in detail and tone == "warn"


def test_no_verdict_by_fewer_than_six_prompts():
    for prompts, told in ((5, False), (6, True)):
        found = findings(plant(num_prompts=prompts))
        # The noise of a summed gradient has an interval by Student's t, which holds for few prompts too.
        tones = {tone for statement, _, tone in found if "signal that" not in statement}
        assert ("warn" in tones) is told
        assert any("dominate" in statement for statement, _, _ in found) is told
        assert any("5 prompts are too few for a verdict" in statement for statement, _, _ in found) is not told
        assert any("more than half" in statement for statement, _, _ in found) is told
    assert sentence(plant(num_prompts=12, num_served=5), "too few for a verdict")
    statement, _, _ = sentence(plant(num_prompts=2), "too few for a verdict")
    assert "are 2.0 % [1.0, 3.0] of the tokens and hold 50 % [45, 55] of Σ‖w·g‖²" in statement


def one_index(value: float, half: float) -> pd.DataFrame:
    return rows("dominance_index", [value, 0.0, 0.0, 0.0], metric="raw", unit="bits", half=half)


@pytest.mark.parametrize(
    ("index", "half", "words", "tone"),
    [
        (0.4, 0.5, "Cannot tell whether low-probability tokens", "plain"),
        (-0.4, 0.5, "Cannot tell whether low-probability tokens", "plain"),
        (-0.9, 0.5, "do not dominate", "good"),
        (0.9, 0.5, "dominate: they", "warn"),
        (0.9, np.nan, "no interval, so no verdict", "plain"),
    ],
)
def test_dominance_is_said_only_where_the_interval_of_the_index_excludes_zero(index, half, words, tone):
    diagnosis = plant({"dominance_index": one_index(index, half)})
    assert words in findings(diagnosis)[0][0] and findings(diagnosis)[0][2] == tone


def test_more_than_their_number_is_no_dominance_where_another_interval_holds_more():
    shares = rows("squared_share", [0.1, 0.2, 0.3, 0.4], metric="raw")
    statement, _, tone = findings(plant({"squared_share": shares}))[0]
    assert "hold more than their number, but another interval holds the most" in statement and tone == "plain"


def test_without_weights_without_low_tokens_and_without_norms_nothing_is_said_of_dominance():
    statement, detail, _ = findings(plant({"dominance_index": None, "squared_share": None}))[0]
    assert statement == "Dominance is not known: every weight is 0." and detail == "a note"
    nothing = make_rows("token_share", np.full((3, 4), np.nan), [0, 5, 5, 5], unit="share", intervals=LABELS)
    assert findings(plant({"token_share": nothing}))[0][0].startswith(f"No token has π in {LOW}")
    unknown = rows("dominance_index", [np.nan] * 4, metric="raw", unit="bits")
    assert "is not known" in findings(plant({"dominance_index": unknown}))[0][0]


def test_where_no_low_token_has_a_weight_their_share_is_known_to_be_nothing():
    parts = {"dominance_index": rows("dominance_index", [np.nan, 1.0, 1.0, 1.0], metric="raw", unit="bits")}
    parts["squared_share"] = rows("squared_share", [0.0, 0.3, 0.3, 0.4], metric="raw")
    statement, _, tone = findings(plant(parts))[0]
    assert statement.startswith(f"Tokens with π in {LOW} hold nothing of Σ‖w·g‖²") and tone == "plain"


@pytest.mark.parametrize(
    ("added", "words"),
    [(0.6, "the network adds to it"), (-0.6, "the network takes from it"), (0.1, "cannot be told from what")],
)
def test_what_the_network_adds_is_said_only_where_its_interval_excludes_zero(added, words):
    change = rows("added_index", [added, 0, 0, 0], metric="raw", unit="bits", half=0.3)
    assert any(words in statement for statement, _, _ in findings(plant({"added_index": change})))


@pytest.mark.parametrize(("share", "tells"), [(0.6, True), (0.1, False), (-0.5, True)])
def test_a_share_of_the_summed_gradient_that_overlaps_that_of_the_tokens_tells_nothing(share, tells):
    change = rows("gradient_share", [share, 0.2, 0.15, 0.05], metric="raw", half=0.2)
    statement, _, tone = sentence(plant({"gradient_share": change}), "summed gradient, ⟨")
    assert ("cannot tell" in statement) != tells
    assert (tone == "warn") == (share == 0.6)


def test_adamws_metric_has_sentences_of_its_own():
    more = {f"{name} adamw": PLANTED[name].assign(metric="adamw") for name in (
        "squared_share", "dominance_index", "gradient_share", "gradient_index", "cosine_with_all",
    )}  # fmt: skip
    said = [statement for statement, _, _ in findings(plant(more)) if "AdamW's metric" in statement]
    assert len(said) == 2 and "hold 50 % [45, 55]" in said[0] and "make 60 % [40, 80]" in said[1]
    assert not [statement for statement, _, _ in findings(plant()) if "AdamW" in statement]


def test_only_intervals_whose_signal_excludes_zero_are_said_to_have_one():
    statement, detail, tone = sentence(plant(), "signal")
    assert statement == (
        f"The summed gradient has a signal that other prompts share for {LABELS[1]}, {TOP}, all tokens together; for π "
        f"in {LOW} it cannot be told from noise."
    )
    assert f"{LOW} 10 % [−15, 35]" in detail and tone == "warn"
    none = rows("signal_fraction", [0.1, 0.2, 0.0, 0.2, 0.2], metric="raw", half=0.25)
    assert sentence(plant({"signal_fraction": none}), "In no interval")[2] == "warn"


def test_who_moves_whom_names_the_moved_tokens_and_the_step():
    statement, detail, tone = sentence(plant(), "cause")
    assert f"SGD step, to first order, tokens with π in {LOW} cause 50 % [40, 60]" in statement
    assert "20 % [10, 30]" in detail and "100 tokens" in detail and tone == "warn"
    assert "AdamW step" in sentence(plant(step=StepSettings("adamw")), "cause")[0]


def test_right_directions_are_compared_with_one_half():
    statement, detail, tone = sentence(plant(), "Â > 0")
    assert "42 % [37, 47] of the 100 tokens" in statement and "less than half." in statement and tone == "warn"
    assert f"{LOW} 60 % [55, 65] of 100" in detail
    # Few with Â > 0 rise and many with Â < 0 fall: most fall, which is no success of the latter.
    assert sentence(plant(), "Â < 0")[0].endswith("Tokens of both signs mostly move the same way.")
    assert sentence(plant(), "Â < 0")[2] == "warn"
    right = rows("right_direction_positive_actual", [0.6] * 5)
    assert [sentence(plant({"right_direction_positive_actual": right}), word)[2] for word in ("Â > 0", "Â < 0")] == [
        "plain",
        "plain",
    ]
    level = rows("right_direction_positive_actual", [0.5] * 5)
    assert "not to be told from one half" in sentence(plant({"right_direction_positive_actual": level}), "Â > 0")[0]
    predicted = {
        "right_direction_positive_actual": None,
        "p": rows("right_direction_positive_predicted", [0.6] * 5),
    }
    assert sentence(plant(predicted), "Â > 0")[0].startswith("In one predicted step")


def make_where() -> pd.DataFrame:
    shares = {"num_tokens": [60, 40], "token_share": [0.6, 0.4], "num_measured": [60, 40], "squared_share": [0.2, 0.8]}
    for name, middle in (("token", [0.6, 0.4]), ("squared", [0.2, 0.8])):
        shares |= {f"{name}_lower": np.subtract(middle, 0.1), f"{name}_upper": np.add(middle, 0.1)}
    kinds = pd.DataFrame({"driver": "token_class", "value": ["word", "digit"]} | shares)
    return pd.concat([kinds, kinds.assign(driver="position_bin", value=["[0, 9)", "[9, 20]"])], ignore_index=True)


def test_kinds_of_tokens_stand_out_only_where_intervals_do_not_overlap():
    statement, detail, _ = sentence(plant(where=make_where()), "by kind of token")
    assert statement.endswith("have digit (80 % [70, 90] against 40 % [30, 50]).")
    assert "word 20 % [10, 30] (60 % [50, 70] of the tokens)" in detail
    wide = make_where().assign(squared_lower=0.0)
    assert "no value's share" in sentence(plant(where=wide), "by kind of token")[0]


@pytest.mark.parametrize(
    ("lower", "upper", "collinear", "words"),
    [
        (0.2, 0.4, False, "follow probability more than entropy"),
        (-0.4, -0.2, False, "follow entropy more than probability"),
        (-0.1, 0.3, False, "cannot be told to follow"),
        (np.nan, np.nan, True, "go together too closely"),
    ],
)
def test_norms_follow_what_the_interval_of_the_difference_says(lower, upper, collinear, words):
    fits = pd.DataFrame({"driver": ["log_one_minus_prob", "entropy", "difference"], "coefficient": [0.8, 0.5, 0.3]})
    fits = fits.assign(quantity="param_grad_norm", lower=lower, upper=upper, r2=0.9, collinear=collinear, tokens=50)
    assert any(words in statement for statement, _, _ in findings(plant(drivers=fits)))


def test_spikes_bounds_and_lag_are_facts_with_their_counts():
    spikes = pd.DataFrame({"token": ["\n<b>", "x"], "position": [3, 4], "response": [1, 0], "prob": [0.1, 0.2]})
    spikes = spikes.assign(weight=[-1.2, 1.0], squared_share=[0.3, 0.1])
    statement, detail, _ = sentence(plant(spikes=spikes), "largest")
    assert statement == "The 2 largest of the 2 measured tokens hold 40 % of their Σ‖w·g‖²."
    assert "token '\\n<b>' at position 3 of response 1" in detail and "30 %" in detail
    good = BoundMargins(70, 0, 0.01, 0.002, 2e-5)
    assert sentence(plant(bounds=good), "Prop. 4.2")[2] == "plain"
    bad = sentence(plant(bounds=replace(good, violations=3)), "Prop. 4.2")
    assert "break on 3 of 70" in bad[0] and bad[2] == "bad"
    lag = {
        name: number(name, 0.05, 0.04, 0.06)
        for name in ("logprob_difference_mean", "clip_low", "clip_high", "clip_dual")
    }
    lag["logprob_difference_max"] = one_row("logprob_difference_max", 2.5, 100, unit="nats")
    statement, detail, _ = sentence(plant(lag), "one that sampled")
    assert "has moved away" in statement and "0.05 [0.04, 0.06] nats, at most 2.5" in statement
    assert "clipped low 5.0 % [4.0, 6.0]" in detail
    lag["logprob_difference_max"] = one_row("logprob_difference_max", 1e-5, 100, unit="nats")
    assert "up to rounding" in sentence(plant(lag), "one that sampled")[0]


@pytest.mark.parametrize(
    ("verdict", "words", "tone"),
    [
        ("better", "worth a run", "good"),
        ("worse", "no reason for a run", "plain"),
        ("no difference", "no difference can be told", "plain"),
        ("undecided", "too few batches", "plain"),
    ],
)
def test_a_setting_is_worth_a_run_only_by_its_verdict(verdict, words, tone):
    best = Recommendation(
        pd.DataFrame(index=range(10)),
        "α=0.3",
        0.3,
        None,
        0.012,
        0.002,
        0.022,
        verdict,
        5,
        (2, 2),
        False,
        "forward mode",
    )
    statement, detail, found = sentence(plant(recommendation=best), "α=0.3")
    assert "+1.20 points [+0.20, +2.20]" in statement and words in statement and found == tone
    assert "10 settings" in detail and "η is not judged" in detail
    unknown = replace(best, verdict="undecided", lower=np.nan, upper=np.nan, prompts_per_batch=(1, 1))
    statement, detail, _ = sentence(plant(recommendation=unknown), "α=0.3")
    assert "+1.20 points against" in statement and "of 1 prompt, 10 settings" in detail
    plain = replace(best, setting="plain", alpha=None, difference=np.nan, verdict="no difference")
    assert "nothing to try" in sentence(plant(recommendation=plain), "plain loss")[0]
    undecided = replace(plain, verdict="undecided")
    assert "too few batches for a verdict" in sentence(plant(recommendation=undecided), "plain loss")[0]


def test_no_sentence_holds_a_nan_and_every_tone_is_known():
    for diagnosis in (plant(), plant(where=make_where()), plant({"added_index": None, "signal_fraction": None})):
        for statement, detail, tone in findings(diagnosis):
            assert not re.search(r"\bnan\b", f"{statement} {detail}")
            assert tone in {"plain", "good", "warn", "bad"}
            assert statement.endswith(".")


def test_definitions_are_sentences():
    assert len(DEFINITIONS) > 10
    assert all(text.endswith(".") and len(text) > 40 for text in DEFINITIONS.values())


def test_percents_keep_two_digits():
    assert [percent(v) for v in (0.999, 0.0994, 0.0996, 1e-7, float("nan"))] == ["100", "9.9", "10", "<0.001", "–"]


def test_shares_and_indices_are_drawn_as_they_are():
    figure = plot_dominance(plant().statistics, LABELS)
    drawn = drawn_numbers(figure)
    for statistic in ("token_share", "squared_share", "gradient_share", "dominance_index", "predicted_index"):
        expected = PLANTED[statistic]
        found = drawn[drawn["statistic"] == statistic]
        assert found["value"].tolist() == expected["value"].tolist()
        assert found["upper"].tolist() == expected["upper"].tolist()
    lines = [line.get_ydata() for line in figure.axes[0].lines]
    assert any(list(line) == pytest.approx([50, 30, 15, 5]) for line in lines)


def test_signal_is_drawn_with_all_tokens_last():
    ax = plot_signal(plant().statistics, LABELS)
    assert drawn_numbers(ax)["interval"].tolist() == [*LABELS, "all"]
    assert [tick.get_text() for tick in ax.get_xticklabels()][-1] == "all"


def test_where_draws_both_shares_of_one_driver(tmp_path):
    ax = plot_where(make_where(), "position_bin")
    assert drawn_numbers(ax)["value"].tolist() == ["[0, 9)", "[9, 20]"]
    assert list(ax.lines[0].get_xdata()) == pytest.approx([60, 40])
    save_figure(ax, tmp_path / "where.svg")
    assert "digit" not in pd.read_csv(tmp_path / "where.csv")["value"].tolist()
    with pytest.raises(InputError, match="does not have"):
        plot_where(make_where(), "entropy_bin")


def test_a_trend_is_drawn_over_steps_in_order(tmp_path):
    later = plant({"squared_share": rows("squared_share", [0.4, 0.3, 0.2, 0.1], metric="raw")})
    figure = plot_trend(trend({20: later, 4: plant()}), LABELS)
    drawn = drawn_numbers(figure)
    squares = drawn[drawn["statistic"] == "squared_share"]
    assert squares["step"].tolist() == [4, 20] and squares["value"].tolist() == [0.5, 0.4]
    assert (squares["interval"] == LOW).all()
    save_figure(figure, tmp_path / "trend.png")


def test_pictures_of_nothing_are_refused():
    empty = plant().statistics.iloc[:0]
    none = plant({"token_share": None}).statistics.assign(statistic="other")
    for statistics in (empty, none):
        with pytest.raises(InputError):
            plot_dominance(statistics, LABELS)
    with pytest.raises(InputError, match="none of the numbers"):
        plot_trend(none.assign(step=1), LABELS)


def test_single_norms_are_compared_between_the_lowest_and_the_highest_interval():
    parts, norms = [], {"logit_grad_norm": 9, "act_grad_norm.0": 4, "act_grad_norm.1": 5, "param_grad_norm": 7}
    for name, scale in norms.items():
        values = np.array([scale, 3.0, 2.0, 1.0])
        bounds = {"value": values, "lower": values - 0.5, "upper": values + 0.5}
        parts.append(pd.DataFrame({"quantity": name, "interval": range(4)} | bounds))
    layers = pd.concat(parts, ignore_index=True)
    statement, detail, _ = sentence(plant(layers=layers), "One by one")
    assert f"π in {LOW} has 7 times" in statement and "7 [6.5, 7.5] against 1 [0.5, 1.5]" in statement
    assert detail == "By layer, from 4 times (input of block 1) to 5 (output of block 1)."
    assert statement.endswith("over all parameters.")
    statement, _, _ = sentence(plant(layers=layers, parameters="the adapter's parameters"), "One by one")
    assert statement.endswith("over the adapter's parameters.")


def test_the_momentum_has_its_share_said():
    table = pd.DataFrame({"source": [0, "momentum", "momentum"], "target": [3, 3, "all"], "share": [0.5, 0.3, 0.9]})
    table = table.assign(share_lower=table["share"] - 0.1, share_upper=table["share"] + 0.1)
    _, detail, _ = sentence(plant(influence=table), "cause")
    assert detail.endswith("the momentum of earlier steps 30 % [20, 40].")
