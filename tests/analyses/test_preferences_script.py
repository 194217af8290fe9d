"""The preference pairs of SmolLM2's DPO run, and the scores of what was predicted of its steps."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analyses.measure.preferences import make_pairs
from analyses.paper.preferences import score, table

FINAL = r"answer(?: is)?:? (-?\d+)"


def test_the_chosen_answer_is_right_and_the_rejected_one_wrong():
    pairs = [*make_pairs(200)]
    assert len({pair["prompt"][0]["content"] for pair in pairs}) > 190
    told = pd.DataFrame({side: [pair[side][0]["content"] for pair in pairs] for side in ("chosen", "rejected")})
    last = told.apply(lambda column: column.str.extract(FINAL, flags=2)[0].astype(int))
    numbers = [
        [int(number) for number in pd.Series(pair["prompt"][0]["content"]).str.findall(r"\d+")[0]] for pair in pairs
    ]
    assert (last["chosen"] != last["rejected"]).all()
    for own, answer in zip(
        numbers, last["chosen"], strict=True
    ):  # a sum, difference or product, then a sum or difference
        partial = {own[0]}
        for by in own[1:]:
            partial = {result for total in partial for result in (total + by, total - by, total * by)}
        assert answer in partial


def test_scores_are_those_of_sums_over_answers():
    draw = np.random.default_rng(0)
    keys = pd.MultiIndex.from_product([(6, 11), range(4), ("chosen", "rejected"), range(5)])
    tokens = keys.to_frame(index=False, name=["step", "pair", "side", "position"])
    parts = draw.normal(size=(3, len(tokens)))
    tokens = tokens.assign(**dict(zip(("chosen", "rejected", "momentum"), parts, strict=True)))
    tokens = tokens.assign(predicted=parts.sum(0), actual=2 * parts.sum(0) + draw.normal(size=len(tokens)) + 0.1)
    answers = table(tokens)
    found = score(tokens, answers).set_index(["of", "step", "side"])
    for of, step, side in [("answers", "all", "all"), ("answers", 11, "all"), ("tokens", "all", "rejected")]:
        own = tokens if step == "all" else tokens[tokens["step"] == step]
        own = own if side == "all" else own[own["side"] == side]
        if of == "answers":
            own = pd.DataFrame(
                [rows[["predicted", "actual"]].sum() for _, rows in own.groupby(["step", "pair", "side"])]
            )
        row = found.loc[(of, step, side)]
        assert row["n"] == len(own)
        assert row["rank_correlation"] == pytest.approx(stats.spearmanr(own["predicted"], own["actual"])[0])
        assert row["slope"] == pytest.approx(stats.linregress(own["predicted"], own["actual"]).slope)
    assert (answers["predicted"] - answers[["chosen", "rejected", "momentum"]].sum(axis=1)).abs().max() < 1e-12
