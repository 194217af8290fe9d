"""What one step does to the entropy of the tokens' distributions, and whose gradients do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from gradscope.diagnosis.format import number_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block, Paragraph
from gradscope.diagnosis.page.sheets import OVER_PROMPTS, Sheets
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows, one_row
from gradscope.diagnosis.update import SIGNS
from gradscope.plots import make_series
from gradscope.resampling import Seed, bootstrap, prompt_clusters, short_of

TITLE = "What the step does to entropy"
ASKS = ("predicted_step", "real_step")
LABELS = {
    "entropy_change_predicted": "predicted change of the mean entropy",
    "entropy_change_actual": "change of the mean entropy",
    "entropy_proxy_rank": "rank correlation of Clip-Cov's covariance with the exact part",
}
LOOKS = {"positive": 2, "negative": 6, "zero": 7}


def rows(m: Measured) -> Rows:
    """The rows of `entropy_rows` and entropy_change_actual, that of the real step, in nats; entropy, the table."""
    parts, frames = [], {}
    if "predicted_step" in m.made:
        step = m.made["predicted_step"].influence
        told, frames["entropy"] = entropy_rows(step.contributions, step.entropy, m.labels, **m.draws("entropy"))
        parts.append(told)
    if "real_step" in m.made:
        moved = m.made["real_step"]
        parts.append(one_row("entropy_change_actual", moved["delta_entropy.all"].mean(), len(moved), unit="nats"))
    return Rows(join_rows(parts), frames)


def entropy_rows(
    contributions: pd.DataFrame,
    whole: Mapping[str, float],
    labels: Sequence[str],
    *,
    seed: Seed = 0,
    resamples: int = 1000,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compute the step's first-order effect on the mean entropy, and a table of the contributions.

    contributions, whole: from an `Influence`. entropy_change_predicted: the change from all sources, in nats.
    entropy_proxy_rank: rank correlation, over tokens with an advantage, of their contributions with the proxy
    −(log π − mean)·(Â − mean) that Clip-Cov and similar methods use. The table has a row per interval of π_old and
    sign of Â: interval, sign (positive, negative, zero), num_tokens, change, lower, upper (95 % over prompts). These
    changes and those of momentum and decay add up to the total.
    """
    from scipy.stats import spearmanr

    advantage, part = (contributions[name].to_numpy(np.float64) for name in ("advantage", "entropy_part"))
    sign = np.sign(advantage).astype(int)
    prompts = prompt_clusters(contributions)
    cell = 3 * contributions["interval"].to_numpy(np.int64) + np.array([2, 0, 1])[sign]
    size = 3 * len(labels)
    sums = np.bincount(prompts * size + cell, part, minlength=size * (prompts.max() + 1)).reshape(-1, size)
    tokens = np.bincount(prompts)

    def evaluate(draws: np.ndarray) -> np.ndarray:  # per token of the drawn prompts
        return draws @ sums * (len(part) / (draws @ tokens))[:, None]

    found = bootstrap(evaluate, len(sums), seed=seed, resamples=resamples)
    counts = np.bincount(cell, minlength=size)
    if short_of(len(sums)):
        found[1:] = np.nan
    table = pd.DataFrame(
        {"interval": np.repeat(labels, 3), "sign": [*SIGNS] * len(labels), "num_tokens": counts}
    )
    table = table.assign(**dict(zip(("change", "lower", "upper"), found, strict=True)))[counts > 0]
    served = sign != 0
    logprob = np.log(contributions["prob"].to_numpy(np.float64).clip(np.finfo(np.float64).tiny))
    proxy = -(logprob - logprob.mean()) * (advantage - advantage.mean())
    varies = served.any() and np.ptp(proxy[served]) > 0 and np.ptp(part[served]) > 0
    rank = spearmanr(proxy[served], part[served]).statistic if varies else np.nan
    told = [
        one_row("entropy_change_predicted", sum(whole.values()), len(part), unit="nats"),
        one_row("entropy_proxy_rank", rank, int(served.sum()), unit="correlation"),
    ]
    return join_rows(told), table.reset_index(drop=True)


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    if (entropy := found.frames.get("entropy")) is None:
        return []
    predicted, actual, rank = (
        found.pick(name) for name in ("entropy_change_predicted", "entropy_change_actual", "entropy_proxy_rank")
    )
    told = f"To first order one step changes the mean entropy of {predicted['n']:,} tokens by "
    told += f"{number_words(predicted, 2)} nats"
    if actual is not None:
        of = "" if actual["n"] == predicted["n"] else f" of all {actual['n']:,} tokens"
        told += f"; the real step changed that{of} by {number_words(actual, 2)}"
    told += "."
    if np.isfinite(rank["value"]):
        told += (
            " The covariance of log π and Â, Clip-Cov's proxy for a token's contribution, has a rank correlation of "
            f"{rank['value']:.2f} with the exact contribution."
        )
    caption = (
        "Contributions of the tokens' gradients to the change of the mean entropy, by interval of π and sign of Â; "
        "together with those of momentum and weight decay, they add up to the predicted change."
    )
    series = [
        make_series(own.rename(columns={"interval": "at", "change": "value"}), found.labels, SIGNS[sign], LOOKS[sign])
        for sign, own in entropy.groupby("sign", sort=False)
    ]
    look = {"ylabel": "change of mean entropy (nats)", "xlabel": "π before the step", "size": (4.6, 2.5)}
    return [Paragraph(told), sheets.series("entropy", pd.concat(series), caption, bars=OVER_PROMPTS, **look)]
