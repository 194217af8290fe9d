"""Sampler against trainer, on planted differences."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom
from support.planted import LABELS, numbers, plant_table

from gradscope.diagnosis.parts.mismatch import mismatch_rows


def test_what_sampler_and_trainer_differ_by_is_told_by_interval_with_its_power():
    table, rng = plant_table(prompts=40), np.random.default_rng(1)
    table["logprob"] = table["old_logprob"] = np.log(table["prob"])
    noise = np.exp(0.3 * rng.normal(size=len(table))) * rng.choice([-1, 1], len(table))
    gap = 0.01 * (1 - table["prob"]) ** 0.7 * noise
    table["sampler_logprob"] = table["old_logprob"] - gap
    table.loc[:4, "sampler_logprob"] = np.nan  # unknown
    table.loc[10:13, "advantage"] = 0.0  # masked, in a response where others have an advantage
    rows, found = mismatch_rows(table, LABELS, seed=0)
    known = table["sampler_logprob"].notna()
    for place, label in enumerate([*LABELS, "all"]):
        own, row = known if label == "all" else known & (table["interval"] == place), found.iloc[place]
        assert (row["label"], row["num_tokens"]) == (label, own.sum())
        assert row["value"] == pytest.approx(gap[own].abs().mean())
        assert row["largest"] == pytest.approx(gap[own].abs().max())
        assert row["ratio"] == pytest.approx(np.exp(gap[own]).mean())
        assert row["masked_share"] == pytest.approx((table.loc[own, "advantage"] == 0).mean())
    assert numbers(rows, "mismatch_mean") == pytest.approx(found["value"].tolist())
    power = rows[rows["statistic"] == "mismatch_power"].iloc[0]
    assert power["lower"] < 0.7 < power["upper"] and power["value"] == pytest.approx(0.7, abs=0.1)
    for nothing in (table.drop(columns="sampler_logprob"), table.assign(sampler_logprob=table["old_logprob"])):
        assert mismatch_rows(nothing, LABELS)[1] is None


@pytest.mark.all
def test_an_error_of_the_logits_is_seldom_told_from_the_power_1():
    wrong, draws = 0, 80
    for seed in range(draws):
        table, rng = plant_table(seed, prompts=24), np.random.default_rng([seed, 1])
        table["logprob"] = table["old_logprob"] = np.log(table["prob"])
        noise = np.exp(0.5 * rng.normal(size=len(table)) + 0.3 * rng.normal(size=24)[table["group"]])
        gap = 0.01 * (1 - table["prob"]) * noise * rng.choice([-1, 1], len(table))
        table["sampler_logprob"] = table["old_logprob"] - gap
        rows, _ = mismatch_rows(table, LABELS, seed=0, resamples=200)
        power = rows[rows["statistic"] == "mismatch_power"].iloc[0]
        wrong += not power["lower"] <= 1 <= power["upper"]
    assert wrong <= binom.ppf(0.99, draws, 0.05)  # false verdicts of at most 5 %


def test_the_energy_that_a_mask_removes_is_what_the_tokens_had_without_it():
    table = plant_table(prompts=40)
    table["advantage"] = table["weight"] = np.random.default_rng(2).choice([-1.5, 0.5], 40)[table["response"]]
    table["logprob"] = table["old_logprob"] = np.log(table["prob"])
    table["sampler_logprob"] = table["old_logprob"] - np.random.default_rng(3).normal(0, 0.1, len(table))
    apart = (table["old_logprob"] - table["sampler_logprob"]).abs() > 0.15
    scales = np.random.default_rng(4).uniform(0.5, 2.0, 40)[table["response"]]

    def energy_of(chosen):
        energy = (scales * table["advantage"] * table["param_grad_norm"]) ** 2
        return [energy[chosen & (table["interval"] == place)].sum() / energy.sum() for place in range(4)]

    def mask(tokens):
        weight = (scales * table["advantage"]).mask(tokens, 0.0)
        return table.assign(advantage=table["advantage"].mask(tokens, 0.0), weight=weight, policy_weight=weight)

    masked, wanted = mask(apart), energy_of(apart)
    _, found = mismatch_rows(masked, LABELS, seed=None)
    assert found["removed_share"].tolist() == pytest.approx([*wanted, sum(wanted)])
    # Responses that are masked as a whole count where the log has their advantages.
    whole = apart | (table["response"] % 4 == 0)
    _, found = mismatch_rows(mask(whole), LABELS, uncorrected=(scales * table["advantage"]).to_numpy(), seed=None)
    assert found["removed_share"].tolist() == pytest.approx([*energy_of(whole), sum(energy_of(whole))])
    assert found["masked_share"].iat[-1] == pytest.approx(whole.mean())
    _, found = mismatch_rows(mask(whole), LABELS, seed=None)
    assert found["masked_share"].iat[-1] < 0.7 * whole.mean()
    # Where a sample was measured, the others' norms are estimated by those at the logits, up to the planted gain.
    some = masked.assign(param_grad_norm=masked["param_grad_norm"].where(masked.index % 3 == 0))
    _, found = mismatch_rows(some, LABELS, seed=None)
    assert found["removed_share"].iat[-1] == pytest.approx(sum(wanted), rel=0.2)
