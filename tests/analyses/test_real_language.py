"""The shares that analyses/paper/real_language.py draws: by kind of token, by length of response, the embedding's."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analyses.measure.real_language import EMBEDDING
from analyses.paper.real_language import KINDS, by_kind, by_length, by_size, kind_of, share_embedding
from gradscope.intervals import interval_labels

WORDS = (" 12", " +", " therefore", " left", " the", " cookies", ".\n")


@pytest.fixture
def tokens() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    lengths = (14, 9, 14, 14, 3, 14, 14, 11)
    responses = np.repeat(np.arange(len(lengths)), lengths)
    prob = rng.uniform(size=len(responses))
    return pd.DataFrame(
        {
            "response": responses,
            "group": responses,
            "token": rng.choice(WORDS, len(responses)),
            "prob": prob,
            "interval": np.minimum((prob * 4).astype(int), 3),
            "weight": rng.normal(size=len(responses)),
            "param_grad_norm": rng.lognormal(size=len(responses)),
        }
    )


def test_each_word_has_its_kind():
    assert [kind_of(word) for word in WORDS] == list(KINDS)


def test_shares_by_kind_are_those_of_a_loop(tokens):
    found = by_kind(tokens).set_index("kind")
    for kind in KINDS:
        energy = count = low = whole = 0.0
        for row in tokens.itertuples():
            size = (row.weight * row.param_grad_norm) ** 2
            whole += size
            if WORDS.index(row.token) == KINDS.index(kind):
                energy, count, low = energy + size, count + 1, low + (row.prob < 0.25)
        assert found.loc[kind, "energy_share"] == pytest.approx(energy / whole)
        assert found.loc[kind, "token_share"] == pytest.approx(count / len(tokens))
        assert found.loc[kind, "low_share"] == pytest.approx(low / count)
        assert found.loc[kind, "energy_share_lower"] < energy / whole < found.loc[kind, "energy_share_upper"]


def test_responses_of_the_longest_length_are_told_apart(tokens):
    found = by_length(tokens)
    assert found.groupby("cut_off")["responses"].first().tolist() == [3, 5]
    assert found.groupby("cut_off")["tokens"].sum().tolist() == [9 + 3 + 11, 5 * 14]
    assert found.groupby("cut_off")["energy_share"].sum().tolist() == pytest.approx([1.0, 1.0])


def test_the_embeddings_share_is_that_of_a_loop(tokens):
    tokens[EMBEDDING] = tokens["param_grad_norm"] * np.linspace(0.1, 0.9, len(tokens))
    tokens["sampling_probability"] = np.where(tokens["interval"] == 0, 0.5, 0.25)
    tokens.loc[::3, ["param_grad_norm", EMBEDDING]] = np.nan  # not drawn
    found = share_embedding(tokens).set_index("interval")
    for place, label in enumerate([*interval_labels(), "all"]):
        own = whole = 0.0
        for row in tokens.dropna().itertuples():
            if label == "all" or row.interval == place:
                own += getattr(row, EMBEDDING) ** 2 / row.sampling_probability
                whole += row.param_grad_norm**2 / row.sampling_probability
        assert found.loc[label, "share"] == pytest.approx(own / whole)
        assert 0 < found.loc[label, "lower"] < own / whole < found.loc[label, "upper"] < 1


def test_smaller_batches_share_out_the_whole_energy(tokens):
    found = by_size(tokens)
    assert found.groupby("prompts")["batches"].first().to_dict() == {1: 8, 2: 4, 4: 2, 8: 1}
    whole = found[found["prompts"] == 8].set_index("interval")["mean"]
    energy = (tokens["weight"] * tokens["param_grad_norm"]) ** 2
    for place, label in enumerate(interval_labels()):
        assert whole[label] == pytest.approx(energy[tokens["interval"] == place].sum() / energy.sum())
    of_one = found[found["prompts"] == 1].set_index("interval")
    shares = [
        energy[(tokens["group"] == group) & (tokens["interval"] == 0)].sum() / energy[tokens["group"] == group].sum()
        for group in range(8)
    ]
    assert of_one.loc["[0, ¼)", ["mean", "least", "most"]].tolist() == pytest.approx(
        [np.mean(shares), min(shares), max(shares)]
    )
