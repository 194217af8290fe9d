"""Who is in the sum, and what other prompts want, on tokens whose gradients are planted."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from support.planted import LABELS, numbers, plant_table

from gradscope.diagnosis import Diagnosis, Scope
from gradscope.diagnosis.findings import Verdict
from gradscope.diagnosis.parts import wanted
from gradscope.diagnosis.products.contributions import add_columns
from gradscope.gradients import Contributions
from gradscope.resampling import Supply

FOLDS = 8


def plant(
    signal: float, seed: int = 0, *, prompts: int = 24, each: int = 40, dimensions: int = 60
) -> tuple[SimpleNamespace, np.ndarray]:
    """Return what a part sees, and the terms w·g [K, d]: noise, and a common direction in the lowest interval."""
    table, rng = plant_table(seed, prompts=prompts, each=each), np.random.default_rng([seed, 1])
    terms = rng.normal(size=(len(table), dimensions)) / np.sqrt(dimensions) * (1 - table["prob"].to_numpy())[:, None]
    terms[:, 0] += signal * (table["interval"] == 0)
    group, folds = table["group"].to_numpy(), rng.permutation(prompts) % FOLDS
    by_prompt = np.stack([terms[group == prompt].sum(0) for prompt in range(prompts)])
    by_fold = np.stack([terms @ by_prompt[folds == fold].sum(0) for fold in range(FOLDS)])
    own = (terms * by_prompt[group]).sum(1)
    found = Contributions(
        torch.tensor(by_fold.sum(0)),
        torch.tensor(own),
        torch.tensor(group),
        prompts,
        0.0,
        torch.tensor(by_fold),
        torch.tensor(folds),
    )
    policy, settings = (
        SimpleNamespace(tokenizer=SimpleNamespace(all_special_tokens=["</s>"])),
        SimpleNamespace(classes=4),
    )
    rewards = pd.DataFrame({"reward": np.arange(prompts) % 2, "reward.form": rng.normal(size=prompts)})
    known = {"table": table, "labels": LABELS, "made": {"contributions": found}, "policy": policy, "settings": settings}
    return SimpleNamespace(**known, rewards=rewards), terms


def diagnose(m: SimpleNamespace) -> Diagnosis:
    rows = wanted.rows(m)
    prompts = m.made["contributions"].num_prompts
    return Diagnosis({"wanted": rows}, Scope(LABELS, Supply(prompts, prompts), m.table))


def test_shares_of_groups_are_those_of_a_double_loop_over_prompts():
    m, terms = plant(0.1, prompts=7, each=12)
    rows, group = wanted.rows(m), m.table["group"].to_numpy()
    whole = terms.sum(0)
    sums = np.stack([terms[group == prompt].sum(0) for prompt in range(7)])
    for place, own in enumerate(numbers(rows.rows, "own_share")[:4]):
        inside = (m.table["interval"] == place).to_numpy()
        mine = sum(terms[t] @ sums[group[t]] for t in np.flatnonzero(inside))
        theirs = sum(terms[t] @ sums[p] for t in np.flatnonzero(inside) for p in range(7) if p != group[t])
        assert own == pytest.approx(mine / (whole @ whole))
        assert numbers(rows.rows, "others_share")[place] == pytest.approx(theirs / (whole @ whole))
    assert numbers(rows.rows, "own_share")[4] + numbers(rows.rows, "others_share")[4] == pytest.approx(1.0)
    for driver, part in rows.frames["groups"].groupby("driver"):
        assert part["gradient_share"].sum() == pytest.approx(1.0), driver
        assert part["num_tokens"].sum() == len(m.table)
        assert part["gradient_share"].to_numpy() == pytest.approx((part["own_share"] + part["others_share"]).to_numpy())
    strings = rows.frames["groups"].query("driver == 'token'").set_index("value")
    # A prompt, a response and a part of the reward are groups as any other; each row names its largest token.
    groups, shares = rows.frames["groups"], terms @ whole / (whole @ whole)
    for driver, codes in (("prompt", group), ("response", m.table["response"]), ("reward", m.rewards["reward"][group])):
        for row in groups[groups["driver"] == driver].itertuples():
            inside = np.asarray(codes).astype(str) == row.value
            assert row.gradient_share == pytest.approx(shares[inside].sum())
            place = np.flatnonzero(inside)[abs(shares[inside]).argmax()]
            assert (row.response, row.position) == tuple(m.table.loc[place, ["response", "position"]])
    ranked = groups[groups["driver"] == "prompt"]
    assert ranked["gradient_share"].abs().is_monotonic_decreasing and ranked["others_lower"].isna().all()
    assert ranked["reward.form"].tolist() == m.rewards["reward.form"][ranked["value"].astype(int)].tolist()
    classes = groups[groups["driver"] == "reward.form"]
    assert len(classes) == 4 and classes["num_tokens"].sum() == len(m.table)
    commas = (m.table["token"] == ",").to_numpy()
    assert strings.loc[",", "gradient_share"] == pytest.approx((terms[commas] @ whole).sum() / (whole @ whole))
    squares = (sums**2).sum(1)
    assert numbers(rows.rows, "effective_prompts") == [pytest.approx(squares.sum() ** 2 / (squares**2).sum())]
    shares = np.sort(terms @ whole / (whole @ whole))[::-1]
    count = round(numbers(rows.rows, "largest_half")[0] * len(m.table))
    assert shares[:count].sum() >= 0.5 > shares[: count - 1].sum()


def test_columns_of_the_table_are_the_tokens_shares():
    m, terms = plant(0.1)
    whole, table = terms.sum(0), add_columns(m.table, m.made["contributions"])
    assert table["gradient_share"].to_numpy() == pytest.approx(terms @ whole / (whole @ whole), rel=1e-5, abs=1e-7)
    own = table.groupby("group")["own_share"].sum() * (whole @ whole)
    sums = np.stack([terms[m.table["group"] == prompt].sum(0) for prompt in own.index])
    assert own.to_numpy() == pytest.approx((sums**2).sum(1), rel=1e-4)
    others = whole @ whole - (sums**2).sum()
    assert table["signal"].sum() == pytest.approx(24 / 23 * others, rel=1e-3)
    assert add_columns(m.table, None) is m.table


@pytest.mark.all
def test_without_signal_no_share_of_it_is_printed_and_with_much_it_is():
    """By three standard errors with seven degrees of freedom, 1 % of batches without signal have one."""
    said = [diagnose(plant(0.0, seed)[0]) for seed in range(200)]
    silent = sum(found.pick("signal_share", "raw", LABELS[0]) is None for found in said)
    assert silent >= 190
    assert all("do not tell whether other prompts want any" in wanted._others(found).statement for found in said[:3])
    loud = [diagnose(plant(0.3, seed)[0]) for seed in range(40)]
    shares = [found.pick("signal_share", "raw", LABELS[0]) for found in loud]
    assert all(share is not None for share in shares)
    # All of the signal is in the lowest interval: its share is 1.
    held = sum(share["lower"] <= 1.0 <= share["upper"] for share in shares)
    assert held >= 34  # of 40 at .95: 34 or more with probability .9995
    first = next(iter(wanted.say(loud[0])))
    assert first.verdict is Verdict.MORE and "other prompts want part" in first.statement


def test_few_effective_prompts_have_no_bounds():
    m, _ = plant(0.3, prompts=8)
    found = m.made["contributions"]
    scale = torch.where(found.prompts < 2, 100.0, 0.01).double()  # two prompts have all of the gradient
    own, by_fold = found.own * scale**2, found.by_fold * scale
    m.made["contributions"] = Contributions(by_fold.sum(0), own, found.prompts, 8, 0.0, by_fold, found.folds)
    few = diagnose(m)
    assert few.pick("effective_prompts", "raw")["value"] < 6
    others = few.pick("others_share", "raw", "all")
    assert np.isnan(others["lower"]) and others["lacks"] == "prompts"
    assert few.frames["groups"]["others_lower"].isna().all()
    assert "too few to say what others want" in wanted._others(few).statement


def test_sentences_name_the_strings_and_the_tokens_that_hold_half():
    m, terms = plant(0.0)
    found = diagnose(m)
    _, holders = wanted.say(found)
    half = found.pick("largest_half", "raw")
    assert f"held by {round(half['value'] * half['n'])} tokens" in holders.statement
    whole, group = terms.sum(0), m.table["group"].to_numpy()
    prompts = np.sort(np.bincount(group, terms @ whole / (whole @ whole)))[::-1]
    assert f"by {np.searchsorted(prompts.cumsum(), 0.5) + 1} of 24 prompts" in holders.statement
    top = found.frames["groups"].query("driver == 'token'")["value"].tolist()
    assert all(repr(value) in holders.statement for value in top[:3])
    assert isinstance(found.statistics, pd.DataFrame) and wanted.rows(SimpleNamespace(made={})).rows.empty


def test_without_folds_the_whole_has_the_bounds_of_leaving_out_each_prompt():
    m, terms = plant(0.3, prompts=9, each=20)
    found, group = m.made["contributions"], m.table["group"].to_numpy()
    m.made["contributions"] = Contributions(found.along, found.own, found.prompts, 9, 0.0)
    rows = wanted.rows(m)
    sums = np.stack([terms[group == prompt].sum(0) for prompt in range(9)])

    def signal(kept: np.ndarray) -> float:
        return (np.square(kept.sum(0)).sum() - np.square(kept).sum()) / (len(kept) * (len(kept) - 1))

    left = np.array([signal(np.delete(sums, prompt, axis=0)) for prompt in range(9)])
    squares, value = np.square(sums).sum(1), signal(sums)
    student = stats.t.ppf(0.975, min(8, (squares.sum() ** 2 / np.square(squares).sum() - 1) / 2))
    reach = student * np.sqrt(8 / 9 * np.square(left - left.mean()).sum())
    bent = np.arcsinh(left / reach)
    bent = student * np.sqrt(8 / 9 * np.square(bent - bent.mean()).sum())
    lower, upper = (reach * np.sinh(np.arcsinh(value / reach) + side * bent) for side in (-1, 1))
    whole = np.square(terms.sum(0)).sum()
    expected = np.array([value, min(value - reach, lower), max(value + reach, upper)]) * 9 * 8 / whole
    all_of_them = rows.rows[(rows.rows["statistic"] == "others_share") & (rows.rows["interval"] == "all")]
    assert all_of_them[["value", "lower", "upper"]].to_numpy()[0] == pytest.approx(expected)
    assert rows.rows.query("statistic == 'others_share' and interval != 'all'")["lower"].isna().all()
    assert "signal_share" not in {*rows.rows["statistic"]}


@pytest.mark.parametrize(("prompts", "against"), [(6, 1), (11, 3), (11, 7), (24, 8)])
def test_odds_are_those_of_gradients_that_have_nothing_in_common(prompts, against):
    """Counted over random gradients [draws, n, P]; P is large enough for products to be Gaussian."""
    generator, draws = torch.Generator().manual_seed(prompts), 4000
    rows = torch.nn.functional.normalize(torch.randn(draws, prompts, 300, generator=generator), dim=2)
    products = (rows @ rows.sum(1)[:, :, None]).squeeze(2) - 1.0
    share = ((products < 0).sum(1) <= against).double().mean().item()
    expected = wanted.noise_odds(against, prompts)
    assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / draws) ** 0.5 + 0.01)
