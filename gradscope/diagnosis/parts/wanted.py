"""Every token's exact part of the summed gradient: a product with its own prompt, and with the other prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, isnan

import numpy as np
import pandas as pd
from scipy import stats

from gradscope.diagnosis.findings import Finding, Verdict
from gradscope.diagnosis.format import percent, share_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block
from gradscope.diagnosis.page.sheets import Sheets, define, series_of
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows, make_rows, one_row
from gradscope.gradients import Contributions, GroupSignals
from gradscope.intervals import name_interval
from gradscope.plots import make_series
from gradscope.resampling import bound_by_folds, in_brackets, short_of
from gradscope.runs import counted
from gradscope.theory import add_drivers

TITLE = "What this update is made of, and what other prompts want"
ASKS = ("contributions",)
LABELS = {
    "own_share": "of the gradient: with its own prompt",
    "others_share": "of the gradient: with other prompts",
    "signal_share": "of what other prompts want",
    "largest_half": "share of the tokens that hold half of the gradient",
    "effective_prompts": "effective number of prompts",
}
DEFINITIONS = {
    "share of the gradient": (
        "c_t = w_t⟨g_t, G⟩/‖G‖², a token's product with the whole summed gradient G over G's squared norm. Shares of "
        "all tokens add up to 100 %; a negative one works against the update."
    ),
    "own and other prompts": (
        "A token's share is its product with the sum of its own prompt's tokens (among them its product with itself) "
        "and with the sums of the others. The first is there in every batch; only the second says whether other "
        "prompts want the same. On average over batches, its sum over a group of tokens is that group's part of the "
        "signal."
    ),
    "effective number of prompts": "(Σ‖G_p‖²)²/Σ‖G_p‖⁴, with G_p the gradient of prompt p.",
}
DRIVERS = {
    "token_class": "kind of token",
    "position_class": "position",
    "entropy_class": "entropy",
    "sign": "sign of the weight",
    "reward_class": "reward",
}
"""Groupings, in order: column, and words."""
DRAWN = (
    ("token_share", "none", "of the tokens", 0),
    ("squared_share", "raw", "of the gradient energy", 2),
    ("own_share", "raw", "of the gradient, with own prompt", 3),
    ("others_share", "raw", "of the gradient, with other prompts", 4),
)
"""Series of the figure: statistic, metric, words and look."""
TOLD = 3.0
"""Standard errors from which on what other prompts want is told from 0, and divided among tokens."""
MOST = 20
"""Token strings in the table."""
SURE = 5
"""Fewest tokens of a token string that is named in a sentence."""


def rows(m: Measured) -> Rows:
    """own_share and others_share, Σ own and Σ (along − own) over ‖G‖², by interval and of all; signal_share, s_a/s,
    where the whole signal is TOLD standard errors from 0; signal_errors, how many it is; largest_half, the smallest
    share of the tokens that holds half of the gradient; effective_prompts.

    groups: the same shares by value of each driver, and by token string ("token").
    """
    found: Contributions | None = m.made.get("contributions")
    if found is None or not found.square_norm > 0:
        return Rows()
    parts = _rows_of(found, m, "raw")
    if found.scaled is not None and found.scaled.square_norm > 0:
        parts += _rows_of(found.scaled, m, "adamw")
    special = frozenset(getattr(m.policy.tokenizer, "all_special_tokens", ()))
    groups = group_table(found, describe(m.table, m.settings.classes, special))
    if short_of(int(_effective_prompts(found))) is not None:
        groups = groups.assign(others_lower=np.nan, others_upper=np.nan)
    return Rows(join_rows(parts), {"groups": groups})


def _rows_of(found: Contributions, m: Measured, metric: str) -> list[pd.DataFrame]:
    """Return the rows of one metric."""
    table, names, prompts = m.table, [*m.labels, "all"], _effective_prompts(found)
    short = short_of(int(prompts))
    signals = found.grouped(table["interval"].to_numpy(), len(m.labels))
    own, others, error = _parts(found, signals)
    counts = np.append(np.bincount(table["interval"], minlength=len(m.labels)), len(table))
    known = {"unit": "share", "metric": metric, "intervals": names, "short": [short] * len(names)}
    parts = [make_rows("own_share", _bare(own), counts, **known), make_rows("others_share", others, counts, **known)]
    if found.folds is not None and short is None and others[0, -1] >= TOLD * error:
        known |= {"intervals": m.labels, "short": ()}
        parts.append(make_rows("signal_share", signals.share_bounds(), counts[:-1], **known))
    sizes = np.sort(found.gradient_share.numpy())[::-1]
    half = (np.cumsum(sizes) < 0.5).sum() + 1
    single = {
        "signal_errors": (others[0, -1] / error if error > 0 else np.nan, "ratio"),
        "largest_half": (half / len(table), "share"),
        "effective_prompts": (prompts, "prompts"),
    }
    singles = [one_row(name, value, len(table), unit=unit) for name, (value, unit) in single.items()]
    return [*parts, *(row.assign(metric=metric) for row in singles)]


def describe(table: pd.DataFrame, classes: int, special: frozenset[str]) -> pd.DataFrame:
    """Return the groupings of the tokens, a column each."""
    driven = add_drivers(table, classes=classes, special=special)
    signs = pd.Series(np.sign(table["weight"].to_numpy()), table.index).map({-1: "negative", 0: "zero", 1: "positive"})
    columns = {name: driven[name] for name in DRIVERS if name in driven} | {"sign": signs, "token": table["token"]}
    return pd.DataFrame(columns)


def group_table(found: Contributions, groups: pd.DataFrame) -> pd.DataFrame:
    """Return a row per value of each grouping: driver, value, num_tokens, gradient_share, own_share, others_share with
    others_lower and others_upper (NaN without folds); token strings by size, the largest share first.
    """
    parts = []
    for driver in groups:
        column = groups[driver].astype("category").cat.remove_unused_categories()
        codes, values = column.cat.codes.to_numpy(np.int64), [*column.cat.categories]
        if (codes < 0).any():
            codes, values = np.where(codes < 0, len(values), codes), [*values, "unknown"]
        own, others, _ = _parts(found, found.grouped(codes, len(values)))
        columns = {"driver": driver, "value": [*map(str, values)]}
        columns |= {"num_tokens": np.bincount(codes, minlength=len(values))}
        columns |= {"gradient_share": (own + others[0])[:-1], "own_share": own[:-1], "others_share": others[0, :-1]}
        columns |= {"others_lower": others[1, :-1], "others_upper": others[2, :-1]}
        part = pd.DataFrame(columns)
        if driver == "token":
            part = part.sort_values("gradient_share", key=abs, ascending=False, kind="stable")
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def _parts(found: Contributions, signals: GroupSignals) -> tuple[np.ndarray, np.ndarray, float]:
    """Return own parts [A + 1] and other prompts' parts with bounds [3, A + 1] over ‖G‖², and the last one's error."""
    n, square = found.num_prompts, found.square_norm
    own = signals.own * n / square
    if found.folds is None:
        others, count = _bare(np.nan_to_num(signals.signal)), n
        others[:, -1:] = _bound_by_prompts(found)
    else:
        others, count = signals.signal_bounds(), len(found.by_fold)
    others = others * n * (n - 1) / square
    reach = stats.t.ppf(0.975, count - 1) if count > 1 else np.nan
    return own, others, float((others[2, -1] - others[1, -1]) / (2 * reach))


def _bound_by_prompts(found: Contributions) -> np.ndarray:
    """Return the whole signal [3, 1] with bounds that leave out each prompt; NaN for fewer than three.

    With A_p and O_p the sums of `along` and `own` over prompt p, U without p is ‖G − G_p‖² − Σ_{q≠p}‖G_q‖², which is
    U − 2(A_p − O_p).
    """
    n, prompts = found.num_prompts, found.prompts.numpy()
    parts = np.bincount(prompts, (found.along - found.own).numpy(), minlength=n)
    if n < 3:
        return np.array([[parts.sum() / (n * (n - 1)) if n > 1 else 0.0], [np.nan], [np.nan]])
    left = (parts.sum() - 2 * parts)[:, None] / ((n - 1) * (n - 2))
    return bound_by_folds(np.array([parts.sum() / (n * (n - 1))]), left)


def _bare(values: np.ndarray) -> np.ndarray:
    """Return values without bounds [3, n]."""
    return np.stack([values, *[np.full_like(values, np.nan)] * 2])


def _effective_prompts(found: Contributions) -> float:
    """Return (Σ‖G_p‖²)²/Σ‖G_p‖⁴."""
    squares = np.bincount(found.prompts.numpy(), found.own.numpy(), minlength=found.num_prompts)
    return float(squares.sum() ** 2 / (squares**2).sum())


def say(found: Diagnosis) -> list[Finding]:
    """Say what other prompts want of this update, whose gradient it is, and which token strings move it most."""
    if found.pick("own_share", "raw", "all") is None:
        return []
    said = [_others(found), _holders(found)]
    return [*said, *_words(found)]


def _others(d: Diagnosis) -> Finding:
    own, others = d.pick("own_share", "raw", "all"), d.pick("others_share", "raw", "all")
    each = f"products of prompts with themselves are {_exactly(own)}, with each other {_exactly(others)}"
    each = f"Of the squared norm of this gradient, {each}"
    about = (("own_share", "raw", "all"), ("others_share", "raw", "all"))

    def tell(verdict: Verdict, words: str, detail: str = "") -> Finding:
        """Return the finding; on the page, its numbers are on the first screen."""
        brief = words[:1].upper() + words[1:]
        return Finding("wanted", verdict, f"{each}: {words}", detail, brief=brief, about=about)

    errors = d.pick("signal_errors", "raw")["value"]
    if isnan(others["lower"]):
        prompts = d.pick("effective_prompts", "raw")["value"]
        return tell(Verdict.UNDECIDED, f"{prompts:.1f} effective prompts are too few to say what other prompts want.")
    if errors >= TOLD:
        shares = [d.pick("signal_share", "raw", label) for label in d.labels]
        told = [f"{name_interval(n)} {share_words(r)}" for n, r in zip(d.labels, shares, strict=True) if r is not None]
        detail = f"Their part by interval: {'; '.join(told)}." if told else ""
        return tell(Verdict.MORE, "other prompts want part of this update.", detail)
    detail = ""
    if errors > 0:
        prompts = ceil(d.scope.supply.prompts * TOLD / errors)
        detail = f"At this strength it would take about {counted(prompts, 'prompt')} to tell it."
    return tell(Verdict.UNDECIDED, "what other prompts want is not told from 0.", detail)


def _exactly(row: pd.Series) -> str:
    """Write a share with its bounds, however wide."""
    return f"{percent(row['value'])} %{in_brackets(row['lower'], row['upper'], percent)}"


def _holders(d: Diagnosis) -> Finding:
    half, low = d.pick("largest_half", "raw"), d.scope.low
    count, detail = round(half["value"] * half["n"]), ""
    tokens, energy = d.pick("token_share", "none", low), d.pick("squared_share", "raw", low)
    own, others = (d.pick(name, "raw", low)["value"] for name in ("own_share", "others_share"))
    if tokens is not None and energy is not None:
        detail = (
            f"Tokens with {name_interval(low)} are {percent(tokens['value'])} % of the tokens. They have "
            f"{percent(energy['value'])} % of the energy (how large), {percent(own + others)} % of the gradient (what "
            f"is left in the sum), of which {percent(others)} with other prompts."
        )
    statement = f"{counted(count, 'token')}, {percent(half['value'])} % of all, hold half of this gradient."
    return Finding("holders", Verdict.FACT, statement, detail, about=(("largest_half", "raw", ""),))


def _words(d: Diagnosis) -> Iterator[Finding]:
    groups = d.frames["groups"]
    words = groups[(groups["driver"] == "token") & (groups["num_tokens"] >= SURE)].head(3)
    if len(words) < 3:
        return
    each = "; ".join(
        f"{row.value!r}, {row.num_tokens:,} times, {percent(row.gradient_share)} % (own prompts "
        f"{percent(row.own_share)}, others {percent(row.others_share)})"
        for row in words.itertuples()
    )
    yield Finding("words", Verdict.FACT, f"The token strings with the largest part of this gradient: {each}.")


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    """The figure by interval, tables by kind and by token string."""
    if (groups := found.frames.get("groups")) is None:
        return []
    series = series_of(found.statistics, [*found.labels], DRAWN, factor=100.0)
    bars = "95 % over folds of prompts" if groups["others_lower"].notna().any() else ""
    caption = (
        "Each probability interval's share of the tokens, of the gradient energy (how large its terms are), and of the "
        "summed gradient: its products with its own prompts' sums, and with the other prompts'."
    )
    look = {"ylabel": "share (%)", "size": (4.8, 2.6)}
    blocks = [sheets.series("update_shares", series, caption, bars=bars, **look)]
    kinds = groups[groups["driver"] != "token"]
    blocks += [_draw_kinds(kinds, sheets)]
    shown = groups[groups["driver"] == "token"].head(MOST).drop(columns="driver").rename(columns={"value": "token"})
    shown = shown.assign(token=[repr(token) for token in shown["token"]])
    told = "Token strings by their part of this gradient, positive or negative; all of them are in groups.csv."
    columns = ["token", "num_tokens", "gradient_share", "own_share", "others_share"]
    blocks.append(sheets.table("token_strings", shown, told, columns))
    sheets.keep("groups", groups)
    return [*blocks, *define(DEFINITIONS)]


def _draw_kinds(kinds: pd.DataFrame, sheets: Sheets) -> Block:
    """Draw own and other prompts' shares by every grouping but token strings."""
    kinds = kinds.assign(at=[f"{DRIVERS[r.driver]}: {r.value} ({r.num_tokens:,})" for r in kinds.itertuples()])
    own = kinds.rename(columns={"own_share": "own"})[["at", "own"]].rename(columns={"own": "value"})
    own = own.assign(lower=np.nan, upper=np.nan)
    names = {"others_share": "value", "others_lower": "lower", "others_upper": "upper"}
    others = kinds.drop(columns="value").rename(columns=names)[["at", *names.values()]]
    places: Sequence[str] = kinds["at"].tolist()
    series = [
        make_series(frame, places, words, look, factor=100.0)
        for frame, words, look in ((own, "with own prompt", 3), (others, "with other prompts", 4))
    ]
    caption = "Shares of the summed gradient by kind of token, position, entropy and sign of the weight."
    look = {"ylabel": "share (%)", "lying": True, "size": (4.6, 0.9 + 0.2 * len(places))}
    return sheets.series("update_groups", pd.concat(series), caption, bars="95 % over folds of prompts", **look)
