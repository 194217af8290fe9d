"""Every token's exact part of the summed gradient: a product with its own prompt, and with the other prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, isnan

import numpy as np
import pandas as pd

from gradscope.diagnosis.findings import Finding, Verdict
from gradscope.diagnosis.format import drop_vacuous, percent, says_nothing, share_words
from gradscope.diagnosis.measured import REWARD_PART, Measured
from gradscope.diagnosis.page.page import KEYS, Block, Paragraph
from gradscope.diagnosis.page.sheets import Sheets, define, readable
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows, make_rows, one_row
from gradscope.gradients import Contributions, GroupSignals
from gradscope.intervals import name_interval
from gradscope.plots import make_series
from gradscope.resampling import bound_products_by_folds, effective_number, fold_errors, short_of
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
    "teacher_class": "log ν − log π",
    "sign": "sign of the weight",
    "reward": "reward",
}
"""Groupings that are drawn, in order: column, and words; then the parts of the reward."""
RANKED = {
    "prompt": ("prompts", 8, ("reward", "num_tokens", "gradient_share", "own_share", "others_share")),
    "response": ("responses", 8, ("prompt", "reward", "num_tokens", "gradient_share")),
    "token": ("token strings", 12, ("num_tokens", "gradient_share", "own_share", "others_share")),
}
"""Groupings of which the largest are listed: their name, how many, and columns."""
TOLD = 3.0
"""Standard errors from which on what other prompts want is told from 0, and divided among tokens."""
SAMPLE_MORE = "Sample more prompts from this checkpoint"
SURE = 5
"""Fewest tokens of a token string that is named in a sentence."""


def rows(m: Measured) -> Rows:
    """own_share and others_share, Σ own and Σ (along − own) over ‖G‖², by interval and of all; signal_share, s_a/s,
    where the whole signal is TOLD standard errors from 0; signal_errors, how many it is; largest_half, the smallest
    share of the tokens that holds half of the gradient; effective_prompts.

    groups: `group_table` of the groupings of `describe`; prompts and responses with their mean reward and its parts,
    responses with their prompt.
    """
    found: Contributions | None = m.made.get("contributions")
    if found is None or not found.square_norm > 0:
        return Rows()
    parts = _rows_of(found, m, "raw")
    if found.scaled is not None and found.scaled.square_norm > 0:
        parts += _rows_of(found.scaled, m, "adamw")
    special = frozenset(getattr(m.policy.tokenizer, "all_special_tokens", ()))
    groups = group_table(found, describe(m.table, m.rewards, m.settings.classes, special), m.table)
    return Rows(join_rows(parts), {"groups": _with_rewards(groups, m.table, m.rewards)})


def _rows_of(found: Contributions, m: Measured, metric: str) -> list[pd.DataFrame]:
    """Return the rows of one metric."""
    table, names, prompts = m.table, [*m.labels, "all"], effective_number(found.squares)
    short = short_of(int(prompts))
    signals = found.grouped(table["interval"].to_numpy(), len(m.labels))
    own, others, error = group_parts(found, signals)
    counts = np.append(np.bincount(table["interval"], minlength=len(m.labels)), len(table))
    known = {"unit": "share", "metric": metric, "intervals": names, "short": [short] * len(names)}
    parts = [make_rows("own_share", _bare(own), counts, **known), make_rows("others_share", others, counts, **known)]
    if found.folds is not None and short is None and others[0, -1] >= TOLD * error:
        known |= {"intervals": m.labels, "short": ()}
        parts.append(make_rows("signal_share", signals.share_bounds(), counts[:-1], **known))
    half = carriers(found.gradient_share.numpy())
    single = {
        "signal_errors": (others[0, -1] / error if error > 0 else np.nan, "ratio"),
        "largest_half": (half / len(table), "share"),
        "effective_prompts": (prompts, "prompts"),
    }
    singles = [one_row(name, value, len(table), unit=unit) for name, (value, unit) in single.items()]
    return [*parts, *(row.assign(metric=metric) for row in singles)]


def carriers(shares: np.ndarray) -> int:
    """Return the least number of shares, which sum to 1, that sum to at least a half.

    >>> carriers(np.array([0.4, 0.3, 0.3, 0.2, -0.2]))
    2
    """
    return int((np.cumsum(np.sort(shares)[::-1]) < 0.5).sum()) + 1


def describe(table: pd.DataFrame, rewards: pd.DataFrame, classes: int, special: frozenset[str]) -> pd.DataFrame:
    """Return the groupings of the tokens, a column each. rewards: as in `Measured`."""
    driven = add_drivers(table, classes=classes, special=special)
    columns = {name: driven[name] for name in DRIVERS if name in driven}
    columns["sign"] = np.sign(table["weight"]).map({-1: "negative", 0: "zero", 1: "positive"})
    for name, values in rewards.items():
        # As many responses in each class, where a class for each value would be too many.
        values = values if values.nunique() <= classes else pd.qcut(values, classes, duplicates="drop")
        named = values.cat.rename_categories(str) if values.dtype == "category" else values
        columns[name] = table["response"].map(named)
    return pd.DataFrame(columns | {"prompt": table["group"], "response": table["response"], "token": table["token"]})


def group_table(found: Contributions, groups: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per value of each grouping: driver, value, num_tokens, gradient_share, own_share, others_share with
    others_lower and others_upper (NaN without folds, or with fewer than six prompts); and response and position of the
    token with the largest share, positive or negative. Values of RANKED groupings are in the order of their shares.
    """
    parts, sizes = [], found.gradient_share.abs().numpy()
    for driver in groups:
        column = groups[driver].astype("category").cat.remove_unused_categories()
        codes, values = column.cat.codes.to_numpy(np.int64), [*column.cat.categories]
        if (codes < 0).any():
            codes, values = np.where(codes < 0, len(values), codes), [*values, "unknown"]
        own, others, _ = group_parts(found, found.grouped(codes, len(values)))
        named = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        columns = {"driver": driver, "value": named, "num_tokens": np.bincount(codes, minlength=len(values))}
        columns |= {"gradient_share": (own + others[0])[:-1], "own_share": own[:-1], "others_share": others[0, :-1]}
        columns |= {"others_lower": others[1, :-1], "others_upper": others[2, :-1]}
        largest = table[KEYS].iloc[pd.Series(sizes).groupby(codes).idxmax()]
        part = pd.DataFrame(columns).assign(**{key: largest[key].to_numpy() for key in KEYS})
        if driver in RANKED:
            part = part.sort_values("gradient_share", key=abs, ascending=False, kind="stable")
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def _with_rewards(groups: pd.DataFrame, table: pd.DataFrame, rewards: pd.DataFrame) -> pd.DataFrame:
    """Add what responses and, on average, prompts were rewarded with, and each response's prompt."""
    prompts = table.groupby("response")["group"].first()
    known = rewards.reindex(prompts.index)
    each = {"response": known.assign(prompt=prompts), "prompt": known.groupby(prompts).mean()}
    told = [own.rename_axis("value").rename(index=str).assign(driver=name).reset_index() for name, own in each.items()]
    return groups.merge(pd.concat(told), on=["driver", "value"], how="left").astype({"prompt": "Int64"})


def group_parts(found: Contributions, signals: GroupSignals) -> tuple[np.ndarray, np.ndarray, float]:
    """Return own parts [A + 1] and other prompts' parts with bounds [3, A + 1] over ‖G‖², and the last one's error.

    Bounds and error are NaN where fewer than six effective prompts have the gradient.
    """
    n, scale = found.num_prompts, (found.num_prompts - 1) * found.num_prompts / found.square_norm
    own = signals.own * n / found.square_norm
    if short_of(int(effective_number(found.squares))) is not None:
        return own, _bare(np.nan_to_num(signals.signal) * scale), np.nan
    if found.folds is not None:
        return own, signals.signal_bounds() * scale, signals.signal_errors()[-1] * scale
    left, others = _leave_prompts_out(found), _bare(signals.signal)
    others[:, -1:] = bound_products_by_folds(signals.signal[-1:], left, found.squares)
    return own, others * scale, float(fold_errors(left)[0]) * scale


def _leave_prompts_out(found: Contributions) -> np.ndarray:
    """Return the whole signal without each prompt, [n, 1].

    With A_p and O_p the sums of `along` and `own` over prompt p, U without p is ‖G − G_p‖² − Σ_{q≠p}‖G_q‖², which is
    U − 2(A_p − O_p).
    """
    n = found.num_prompts
    parts = np.bincount(found.prompts.numpy(), (found.along - found.own).numpy(), minlength=n)
    return (parts.sum() - 2 * parts)[:, None] / ((n - 1) * (n - 2))


def _bare(values: np.ndarray) -> np.ndarray:
    """Return values without bounds [3, n]."""
    return np.stack([values, *[np.full_like(values, np.nan)] * 2])


def say(found: Diagnosis) -> list[Finding]:
    """Say what other prompts want of this update, and which tokens, token strings and prompts hold it."""
    if found.pick("own_share", "raw", "all") is None:
        return []
    others = _others(found)
    return [*_keep_apart(found, others.verdict), others, _holders(found)]


def _keep_apart(d: Diagnosis, verdict: Verdict) -> list[Finding]:
    """Say of the lowest interval what is large, what is left in the sum, and what other prompts want.

    verdict: whether they want any of the update. Nothing if the interval has no token, or all of them.
    """
    low, errors = d.scope.low, d.pick("signal_errors", "raw")["value"]
    tokens, energy = d.pick("token_share", "none", low), d.pick("squared_share", "raw", low)
    if tokens is None or energy is None or not 0 < tokens["value"] < 1:
        return []
    own, others = (d.pick(name, "raw", low)["value"] for name in ("own_share", "others_share"))
    share = d.pick("signal_share", "raw", low)

    def tell(write: Callable[[pd.Series], str]) -> str:
        wanted = f"{counted(d.scope.supply.prompts, 'prompt')} cannot tell"
        if isnan(errors):
            wanted = "too few effective prompts to say"
        elif verdict is Verdict.MORE:
            wanted = "yes" if share is None or says_nothing(share) else f"yes, {write(share)} of it in these tokens"
        large = write(energy)
        if isnan(energy["value"]) or says_nothing(energy):
            large = "an unknown part"
        elif isnan(energy["lower"]) and energy["lacks"] == "tokens":
            large = "too few were measured to say what part"
        return (
            f"Tokens with {name_interval(low)} are {percent(tokens['value'])} % of the tokens. Large: {large} of the "
            f"gradient energy. Left in the sum: {percent(own + others)} % of this gradient. Wanted by other prompts: "
            f"{wanted}."
        )

    about = [("token_share", "none", low), ("squared_share", "raw", low), ("others_share", "raw", low)]
    brief = tell(lambda row: f"{percent(row['value'])} %")
    return [Finding("update", verdict, tell(share_words), brief=brief, about=tuple(about))]


def _others(d: Diagnosis) -> Finding:
    own, others = d.pick("own_share", "raw", "all"), d.pick("others_share", "raw", "all")
    each = f"products of prompts with themselves are {share_words(own)}, with each other {share_words(others)}"
    each = f"Of the squared norm of this gradient, {each}"
    about = (("own_share", "raw", "all"), ("others_share", "raw", "all"))

    def tell(verdict: Verdict, words: str, detail: str = "", todo: str = "") -> Finding:
        return Finding("wanted", verdict, f"{each}: {words}", detail, next=todo, about=about)

    errors, prompts = d.pick("signal_errors", "raw")["value"], counted(d.scope.supply.prompts, "prompt")
    left_out = d.scope.supply.prompts < d.scope.of_prompts
    more = "Give more minutes" if left_out else SAMPLE_MORE
    if isnan(others["lower"]):
        few = f"{d.pick('effective_prompts', 'raw')['value']:.1f} effective prompts are too few to say what others want"
        return tell(Verdict.UNDECIDED, f"{few}.", todo=f"{more}: {few}.")
    if errors >= TOLD:
        shares = [d.pick("signal_share", "raw", label) for label in d.labels]
        told = [f"{name_interval(n)} {share_words(r)}" for n, r in zip(d.labels, shares, strict=True) if r is not None]
        detail = f"Their part by interval: {'; '.join(told)}." if told else ""
        return tell(Verdict.MORE, "other prompts want part of this update.", detail)
    enough = "with four times as many, a signal four times as weak would show"
    if errors > 0:
        needed = ceil(d.scope.supply.prompts * TOLD / errors)
        enough = f"a signal as large as this would take about {needed:,} prompts to be told from 0"
        more = more if needed <= d.scope.of_prompts else SAMPLE_MORE
    few = f"{prompts} do not tell whether other prompts want any of this update"
    return tell(Verdict.UNDECIDED, f"{few}.", todo=f"{more} before comparing weightings; {enough}.")


def _holders(d: Diagnosis) -> Finding:
    half, groups = d.pick("largest_half", "raw"), d.frames["groups"]
    count = round(half["value"] * half["n"])
    prompts, kinds = groups[groups["driver"] == "prompt"], groups[_drawn(groups)]
    most = kinds.loc[(kinds["gradient_share"] - kinds["num_tokens"] / half["n"]).idxmax()]
    few = f"{carriers(prompts['gradient_share'].to_numpy()):,} of {counted(len(prompts), 'prompt')}"
    statement = (
        f"Half of this gradient is held by {counted(count, 'token')}, {percent(half['value'])} % of all, and by {few}; "
        f"{percent(most['gradient_share'])} % of it by the {percent(most['num_tokens'] / half['n'])} % of the tokens "
        f"with {_name(most['driver'])} {most['value']}."
    )
    (response, *_) = groups[groups["driver"] == "response"].itertuples()
    statement += f" Response {response.value} alone holds {percent(response.gradient_share)} %."
    words = groups[(groups["driver"] == "token") & (groups["num_tokens"] >= SURE)].head(3)
    if len(words):
        each = ", ".join(f"{row.value!r} ({percent(row.gradient_share)} %)" for row in words.itertuples())
        statement += f" The token strings with the largest parts are {each}."
    shares = d.table["gradient_share"] if "gradient_share" in d.table else pd.Series(dtype=float)
    against = float(shares.clip(upper=0.0).sum())
    detail = f"Shares of single tokens are signed: those for this gradient add up to {percent(1 - against)} %, those "
    detail = f"{detail}against it to {percent(against)} %." if against else ""
    return Finding("holders", Verdict.FACT, statement, detail, about=(("largest_half", "raw", ""),))


def _drawn(groups: pd.DataFrame) -> pd.Series:
    return ~groups["driver"].isin([*RANKED])


def _name(driver: str) -> str:
    return DRIVERS.get(driver) or driver.replace(REWARD_PART, "reward ")


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    """The figure of all groupings by few values, and the largest prompts, responses and token strings."""
    if (groups := found.frames.get("groups")) is None:
        return []
    answer = _others(found).statement.rpartition(": ")[2]
    blocks = [Paragraph(answer[:1].upper() + answer[1:]), _draw_kinds(groups[_drawn(groups)], sheets)]
    for driver, (what, count, columns) in RANKED.items():
        ranked = groups[groups["driver"] == driver].drop(columns=driver, errors="ignore").dropna(axis=1, how="all")
        ends = {f"others_{end}": f"others_share_{end}" for end in ("lower", "upper")}  # as `Sheets.table` merges them
        ranked = ranked.rename(columns=ends | {"value": driver})
        columns = [driver, *(name for stem in columns for name in ranked if name.startswith(stem))]
        few = f"the {count} largest of {len(ranked):,}" if count < len(ranked) else f"all {len(ranked):,}"
        told = f"By their part of this gradient, positive or negative, {few} {what}, linked to their largest token."
        if driver == "prompt":
            live, against = int((ranked["own_share"] > 0).sum()), int((ranked["others_share"] < 0).sum())
            few, side = min(against, live - against), "few" if 2 * against <= live else "many"
            told += f" {against:,} of {live:,} with a gradient go against the others; if all were noise, as {side} or "
            told += f"{'fewer' if side == 'few' else 'more'} would in {percent(noise_odds(few, live))} % of batches."
        table = sheets.table(what.replace(" ", "_"), readable(ranked.head(count)), told, columns, links=True)
        sheets.tables[table.csv] = ranked
        blocks.append(table)
    sheets.keep("groups", groups)
    return [*blocks, *define(DEFINITIONS)]


def noise_odds(against: int, prompts: int) -> float:
    """Return the probability that at most so many of n prompts go against the sum of the others if all are noise.

    Products of two prompts are then symmetric around 0, and prompts' products with their others correlate by
    1/(n − 1), since each two have one in common: P = E Bin(against; n, Φ(z/√(n − 2))), with z standard normal. Exact
    for Gaussian products of equal size.

    >>> [round(noise_odds(count, 11), 2) for count in (3, 5, 11)]
    [0.18, 0.5, 1.0]
    """
    from scipy.special import ndtr
    from scipy.stats import binom

    points, weights = np.polynomial.hermite_e.hermegauss(64)
    return float(binom.cdf(against, prompts, ndtr(points / np.sqrt(max(prompts - 2, 1)))) @ weights / weights.sum())


def _draw_kinds(kinds: pd.DataFrame, sheets: Sheets) -> Block:
    """Draw own and other prompts' shares by every grouping but those that are ranked."""
    kinds = kinds.assign(at=[f"{_name(r.driver)}: {r.value} ({r.num_tokens:,})" for r in kinds.itertuples()])
    kinds = kinds.drop(columns="value")
    own = kinds.rename(columns={"own_share": "value"}).assign(lower=np.nan, upper=np.nan)
    names = {"others_share": "value", "others_lower": "lower", "others_upper": "upper"}
    places: Sequence[str] = kinds["at"].tolist()
    series = [
        make_series(drop_vacuous(frame), places, words, look, factor=100.0)
        for frame, words, look in ((own, "with own prompt", 3), (kinds.rename(columns=names), "with other prompts", 8))
    ]
    *names, last = (_name(driver) for driver in kinds["driver"].unique())
    caption = f"Shares of the summed gradient by {', '.join(names)} and {last}."
    look = {"ylabel": "share (%)", "lying": True, "size": (4.6, 0.9 + 0.2 * len(places))}
    bars = "95 % over folds of prompts" if kinds["others_lower"].notna().any() else ""
    return sheets.series("update_groups", pd.concat(series), caption, bars=bars, **look)
