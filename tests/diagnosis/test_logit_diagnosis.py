"""The cheap mode: every column against a loop over the log, every range against all corners of the bounds."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from support import dumps
from support.dumps import SAMPLES
from support.policies import VOCAB, make_batch, make_policy, write_jsonl

from gradscope.diagnosis import logit_notes, logit_shares, logit_table
from gradscope.errors import InputError
from gradscope.gradients import measure
from gradscope.intervals import interval_shares
from gradscope.rollouts import Dump, read_dump


def tokens_by_loop(numerator: str, denominator: str, *, masked: bool) -> list[dict[str, float]]:
    """A row per kept token, in float64 from the lists that the log was written from."""
    rows = []
    for row, sample in enumerate(SAMPLES):
        for position, keep in enumerate(sample.mask):
            if not keep:
                continue
            logprob, old = getattr(sample, numerator)[position], getattr(sample, denominator)[position]
            ratio, a = math.exp(logprob - old), sample.advantage
            if masked:  # what dumps.write_prime_rl marks
                clipped = row == 1 and position == len(sample.response) - 1
            else:
                clipped = (a > 0 and ratio > 1.24) or (a < 0 and (ratio < 0.8 or ratio > 10))
            rows.append(
                {
                    "response": row,
                    "group": sample.group,
                    "position": position,
                    "token_id": sample.response[position],
                    "logprob": logprob,
                    "prob": math.exp(logprob),
                    "log_one_minus_prob": math.log(-math.expm1(logprob)) if logprob else -math.inf,
                    "old_logprob": old,
                    "advantage": a,
                    "weight": 0.0 if clipped else ratio * a,
                    "clipped": clipped,
                    "interval": min(int(4 * math.exp(logprob)), 3),
                    "logit_grad_lower": -math.expm1(logprob),
                    "logit_grad_upper": math.sqrt(2) * -math.expm1(logprob),
                }
            )
    return rows


CASES = {
    "prime_rl": (dumps.write_prime_rl, "trainer", "sampler", True),
    "nemo_rl": (dumps.write_nemo_rl, "trainer", "trainer", False),
    "open_instruct": (dumps.write_open_instruct, "sampler", "sampler", False),
}


@pytest.mark.parametrize(("write", "numerator", "denominator", "masked"), CASES.values(), ids=CASES)
def test_the_table_is_the_loop_over_the_dump(tmp_path, write, numerator, denominator, masked):
    table = logit_table(read_dump(write(tmp_path)))
    wanted = pd.DataFrame(tokens_by_loop(numerator, denominator, masked=masked))
    if write is dumps.write_open_instruct:  # it has no mask: one token more
        table = table[~((table["response"] == 3) & (table["position"] == 1))].reset_index(drop=True)
    # float32 holds a number of this size to 6e-8 of itself; exp of a difference adds a rounding or two
    pd.testing.assert_frame_equal(
        table[wanted.columns], wanted, check_dtype=False, rtol=1e-6, atol=0, check_exact=False
    )


@pytest.fixture(scope="module")
def measured() -> tuple[pd.DataFrame, pd.DataFrame]:
    """The token table of a policy, and that of a log with this policy's log-probabilities."""
    policy = make_policy("llama")
    batch = make_batch(policy)
    table = measure(policy, batch, self_check=False)
    own = torch.full(batch.input_ids.shape, float("nan"))
    own[batch.response_mask] = torch.tensor(table["logprob"].to_numpy())
    return table, logit_table(Dump(batch, "native", logprobs=own), vocab_size=VOCAB)


def test_what_both_tables_have_is_what_measuring_gives(measured):
    table, cheap = measured
    shared = [name for name in cheap.columns if name in table.columns and name != "entropy"]
    assert {"weight", "policy_weight", "kl_weight", "clipped", "interval", "log_one_minus_prob"} <= set(shared)
    # log(1−π) was taken of logits there and of a float32 log π here: relative error 6e-8 / (1−π) at π near 1
    pd.testing.assert_frame_equal(cheap[shared], table[shared], check_dtype=False, rtol=1e-5, atol=1e-6)


def test_measured_norms_lie_within_the_bounds_and_a_vocabulary_sharpens_the_lower_one(measured):
    table, cheap = measured
    norms, rounding = table["logit_grad_norm"].to_numpy(np.float64), 1e-5
    assert (cheap["logit_grad_lower"] <= norms * (1 + rounding)).all()
    assert (norms <= cheap["logit_grad_upper"] * (1 + rounding)).all()
    lower = math.sqrt(VOCAB / (VOCAB - 1)) * -np.expm1(cheap["logprob"].astype(float))
    np.testing.assert_allclose(cheap["logit_grad_lower"], lower, rtol=1e-12)


def test_shares_of_measured_norms_lie_within_the_ranges(measured):
    table, cheap = measured
    shares = logit_shares(cheap, seed=None).query("sign == 'all'")
    amounts = (table["weight"] * table["logit_grad_norm"]).abs().astype(float)
    for quantity, values in (("weighted_norm", amounts), ("squared_weighted_norm", amounts**2)):
        rows = shares[shares["quantity"] == quantity]
        true = values.groupby(table["interval"]).sum().reindex(range(4), fill_value=0.0) / values.sum()
        assert (rows["least"].to_numpy() - 1e-6 <= true).all() and (true <= rows["most"].to_numpy() + 1e-6).all()
        assert (rows["least"] < rows["most"]).any()


def handmade_table() -> pd.DataFrame:
    """Seven tokens of three prompts in three of the intervals, both signs and one advantage of 0."""
    logprob = np.log([0.1, 0.2, 0.3, 0.6, 0.8, 0.7, 0.15])
    weight = np.array([0.5, -1.0, 2.0, 0.25, 0.0, -0.5, 1.5])
    return pd.DataFrame(
        {
            "group": [0, 0, 0, 1, 1, 2, 2],
            "prob": np.exp(logprob),
            "advantage": weight,
            "weight": weight,
            "log_one_minus_prob": np.log1p(-np.exp(logprob)),
            "clipped": False,
            "logit_grad_lower": 1 - np.exp(logprob),
            "logit_grad_upper": math.sqrt(2) * (1 - np.exp(logprob)),
        }
    )


def shares_by_corners(table: pd.DataFrame, interval: int, power: int) -> tuple[float, float]:
    """Least and most share of an interval over every choice of a bound for each token."""
    intervals = np.minimum((4 * table["prob"]).astype(int), 3)
    weight, ends = table["weight"].abs().to_numpy(), table[["logit_grad_lower", "logit_grad_upper"]].to_numpy()
    shares = []
    for choice in product([0, 1], repeat=len(table)):
        amounts = (weight * ends[np.arange(len(table)), choice]) ** power
        shares.append(amounts[intervals == interval].sum() / amounts.sum())
    return min(shares), max(shares)


@pytest.mark.parametrize("sign", ["all", "positive", "negative"])
def test_ranges_are_the_extremes_over_every_corner_of_the_bounds(sign):
    table = handmade_table()
    chosen = {"all": table, "positive": table[table["advantage"] > 0], "negative": table[table["advantage"] < 0]}[sign]
    shares = logit_shares(table, seed=None).query("sign == @sign").set_index(["quantity", "interval"])
    for interval in range(4):
        for quantity, power in (("weighted_norm", 1), ("squared_weighted_norm", 2)):
            row = shares.loc[(quantity, interval)]
            assert (row["least"], row["most"]) == pytest.approx(shares_by_corners(chosen, interval, power), rel=1e-12)
        mine = np.minimum((4 * chosen["prob"]).astype(int), 3) == interval
        for quantity, power in (("tokens", 0), ("weight", 1), ("squared_weight", 2)):
            amounts = chosen["weight"].abs() ** power
            row = shares.loc[(quantity, interval)]
            assert row["least"] == row["most"] == pytest.approx(amounts[mine].sum() / amounts.sum(), rel=1e-12)
            assert row["num_tokens"] == mine.sum()


def test_shares_without_bounds_and_their_intervals_are_those_of_interval_shares():
    table = handmade_table()
    intervals = np.minimum((4 * table["prob"]).astype(int), 3)
    shares = logit_shares(table, seed=np.random.default_rng(5)).query("sign == 'all'")
    for quantity, values in (("tokens", None), ("weight", table["weight"].abs())):
        known = interval_shares(intervals, table["group"], seed=np.random.default_rng(5), values=values)
        found = shares[shares["quantity"] == quantity]
        for name, wanted in (("least", "value"), ("most", "value"), ("lower", "lower"), ("upper", "upper")):
            np.testing.assert_allclose(found[name], known[wanted], rtol=1e-12)


@pytest.mark.usefixtures("few_prompts_are_many")
def test_sampling_intervals_hold_the_ranges_and_need_two_prompts():
    table = handmade_table()
    shares = logit_shares(table, seed=np.random.default_rng(0)).query("sign == 'all'")
    shares = shares[shares["lower"].notna()]  # of some, nothing varies
    assert len(shares) > 10
    # Percentiles of three redrawn prompts need not hold the sample itself, but here they do.
    assert (shares["lower"] <= shares["least"]).all() and (shares["most"] <= shares["upper"]).all()
    one = logit_shares(table.assign(group=0), seed=np.random.default_rng(0))
    assert one[["lower", "upper"]].isna().all(axis=None) and one.query("sign == 'all'")["least"].notna().all()


def test_what_a_dump_lacks_is_named_with_the_formats_that_have_it(tmp_path):
    row = {"prompt_ids": [4], "response_ids": [5], "advantage": 1.0}
    with pytest.raises(InputError, match=r"native without log-probabilities.*prime_rl, nemo_rl"):
        logit_table(read_dump(write_jsonl(tmp_path / "a.jsonl", [row])))
    row = {"prompt_ids": [4], "response_ids": [5], "old_logprobs": [-1.0]}
    with pytest.raises(InputError, match=r"native has neither advantages nor rewards.*trl, prime_rl"):
        logit_table(read_dump(write_jsonl(tmp_path / "b.jsonl", [row])))


def test_tokens_of_which_the_log_does_not_know_the_probability_are_left_out_and_counted(tmp_path):
    logged = [[-0.5, -1.0, -2.0], [-0.25, -1.5, -0.75]]
    rows = [
        {"prompt_ids": [4], "response_ids": [7, 8, 9], "advantage": a, "old_logprobs": logs}
        for a, logs in zip((1.0, -1.0), logged, strict=True)
    ]
    whole = logit_table(read_dump(write_jsonl(tmp_path / "whole.jsonl", rows)))
    rows[0]["old_logprobs"], rows[1]["old_logprobs"] = [-0.5, None, -2.0], [math.nan, -1.5, -math.inf]
    dump = read_dump(write_jsonl(tmp_path / "holes.jsonl", rows))
    table = logit_table(dump)
    pd.testing.assert_frame_equal(table, whole.iloc[[0, 2, 4]].reset_index(drop=True))
    assert any("3 of 6 tokens left out" in note for note in logit_notes(table, dump))
    assert len(logit_notes(whole)) == len(logit_notes(table))
