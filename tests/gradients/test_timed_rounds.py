"""A table within minutes, by a clock that the test turns: time is kept, samples grow, and a stopped run goes on."""

import json
from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan

import numpy as np
import pandas as pd
import pytest
import torch
from support.policies import make_batch, make_policy, make_responses, save_checkpoint, write_jsonl
from support.refusals import refused

from gradscope import measure
from gradscope.cli import commands as cli
from gradscope.gradients import (
    DEFAULT_MINUTES,
    MeasureSettings,
    Stopwatch,
    TableMeasurement,
    TokenJacobian,
    plan_sums,
    settle_minutes,
    table as tables,
)
from gradscope.gradients.budget.pilot import run_pilot
from gradscope.gradients.budget.shared_minutes import AFTER, APART, ENOUGH, Prices, Shares, share_seconds
from gradscope.gradients.budget.timed_rounds import PILOT, Round, join_rounds, measure_rounds
from gradscope.gradients.sample import SAMPLING_PROBABILITY, TokenSample
from gradscope.gradients.settings import LARGE, MINUTES, check_settings
from gradscope.gradients.table import join_responses
from gradscope.intervals import EDGES
from gradscope.objective import PAPER
from gradscope.resampling import FEWEST
from gradscope.rollouts import collate
from gradscope.runs import ALONE, RunFolder


class Clock:
    """A clock that goes when it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Pretended:
    """A measurement of 4,000 tokens, each of which costs its own prefix: seconds pass on the clock alone."""

    def __init__(
        self,
        clock: Clock,
        minutes: float,
        *,
        rate: float = 0.01,
        believed: float = 3.0,
        true: float = 3.0,
        reserve: float = 0.0,
    ):
        """rate: seconds of a position. believed, true: positions that a token's sequence counts for, by the estimate
        and on the clock.
        """
        rng = np.random.default_rng(0)
        self.settings, self.processes, self.clock = MeasureSettings(minutes=minutes), ALONE, clock
        self.sample = TokenSample(np.arange(4000) % 4, 4, np.ones(4000), rng)
        self.reserve, self.at_once = reserve, False
        self.prefix, self.rate, self.believed, self.true = rng.integers(50, 200, 4000), rate, believed, true

    def _positions(self, previous: int, each: int, shared: float) -> float:
        new = self.sample.take(each) & ~self.sample.take(previous)
        rows = np.unique(np.flatnonzero(new) // 40)  # responses of 40 tokens
        return float(self.prefix[new].sum() + shared * 200 * len(rows))

    def cost_of_more(self, previous: int, each: int) -> float:
        return self._positions(previous, each, self.believed)

    def measure_more(self, previous: int, each: int) -> pd.DataFrame:
        self.clock.now += self.rate * self._positions(previous, each, self.true)
        new = self.sample.take(each) & ~self.sample.take(previous)
        return pd.DataFrame({"param_grad_norm": 1.0}, index=np.flatnonzero(new))

    def tabulate(self, norms: pd.DataFrame, each: int) -> Iterator[pd.DataFrame]:
        yield norms.assign(each=each)


def run_pretended(minutes: float, *, preparing: float = 30.0, finished=(), **speed: float) -> tuple[list[Round], float]:
    """(rounds, seconds in all)."""
    clock = Clock()
    watch, job = Stopwatch(clock), Pretended(clock, minutes, **speed)
    watch.earlier = finished[-1].spent if finished else 0.0
    clock.now += preparing
    rounds = [*finished, *measure_rounds(job, watch, tuple(finished))]
    return rounds, watch.seconds()


@pytest.mark.parametrize("minutes", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("true", [0.5, 3.0, 10.0])
@pytest.mark.parametrize("rate", [0.001, 0.003])
def test_minutes_are_kept_within_a_quarter_however_wrong_the_estimate_of_cost(minutes, true, rate):
    rounds, seconds = run_pretended(minutes, rate=rate, true=true)
    sizes = [done.each for done in rounds]
    assert sizes[0] == PILOT and sizes == sorted(set(sizes))
    if sizes[-1] == 1000:  # everything
        assert seconds <= 1.25 * 60 * minutes
    elif len(sizes) > 1:  # else the first round alone took what there was
        assert 0.75 * 60 * minutes <= seconds <= 1.25 * 60 * minutes
    # Nothing twice, and the sample of the last round in all.
    places = np.concatenate([done.norms.index for done in rounds])
    assert len(places) == len(set(places)) == 4 * sizes[-1]


def test_a_small_part_of_the_minutes_is_measured_in_whole():
    """Of 10 minutes 3 went into scoring and 6 are for sums."""
    rounds, seconds = run_pretended(10.0, preparing=180.0, reserve=360.0, rate=0.001)
    assert 0.75 * 60 <= seconds - 180.0 <= 1.25 * 60 and rounds[-1].each > PILOT


def test_a_stopped_run_goes_on_with_the_time_that_its_rounds_left(tmp_path):
    whole, seconds = run_pretended(3.0)
    finished = whole[:2]
    rounds, together = run_pretended(3.0, finished=finished)
    assert rounds[:2] == finished and together == pytest.approx(180, rel=0.25)
    places = np.concatenate([done.norms.index for done in rounds])
    assert len(places) == len(set(places)) == 4 * rounds[-1].each
    again, _ = run_pretended(3.0, finished=whole)
    assert again == whole and seconds < 1.25 * 180
    part = whole[1].to_part()
    part.to_parquet(tmp_path / "part.parquet", index=False)
    read = Round.of_part(pd.read_parquet(tmp_path / "part.parquet"))
    assert (read.each, read.seconds, read.spent) == (whole[1].each, whole[1].seconds, whole[1].spent)
    pd.testing.assert_frame_equal(read.norms, whole[1].norms, check_names=False)


# How seconds are shared.


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("seconds", [60.0, 540.0, 5000.0, 1e6])
@pytest.mark.parametrize("prices", [Prices(2.0, 1.5, 20.0), Prices(0.05, 0.01, 0.5), Prices(5.0, 3.0, 0.0)])
def test_no_other_division_of_the_seconds_makes_the_variances_smaller(seconds, prices, least):
    prompts, tokens = 64, 400
    found = share_seconds(seconds, prices, prompts=prompts, tokens=tokens, least=least)

    def cost(m, k, s):
        return m * prices.scoring + k * prices.measuring + s * prices.summing

    def variance(m, k, s):
        return 1 / m + APART / k + 1 / s

    m, k, s = (np.array(list(range(1, n + 1))) for n in (prompts, tokens, prompts))
    m, k, s = m[:, None, None], k[None, :, None], s[None, None]
    fits = (cost(m, k, s) <= seconds) & (s <= m) & (s >= least)
    wide = fits & (m >= FEWEST)
    enough = k >= ENOUGH
    # In this order; with least = 2, sums come before tokens.
    some = [wide & enough & (s >= FEWEST), wide & enough & (s == 1), fits & (s == 1)]
    tried = some if least == 1 else [wide & (s >= FEWEST), fits]
    best = np.where(next(which for which in tried if which.any()), variance(m, k, s), np.inf).min()
    own = variance(found.scored, found.measured, found.summed)
    assert cost(found.scored, found.measured, found.summed) <= seconds or own == variance(least, 1, least)
    # Whole numbers: each may be one below the best, and summed prompts are among the scored ones.
    more = variance(found.scored + 1, found.measured + 1, found.summed + 1)
    assert more <= best * (1 + 1e-9) or own == pytest.approx(best)


def test_prompts_that_something_needs_are_summed_however_long_they_take():
    assert share_seconds(300.0, Prices(3.5, 1.2, 165.0), prompts=16, tokens=4000).summed == 1
    assert share_seconds(300.0, Prices(3.5, 1.2, 165.0), prompts=16, tokens=4000, least=2) == Shares(2, 1, 2)


def test_tokens_for_an_interval_come_before_sums_without_one():
    """Ten minutes on a slow core: six sums leave time for seven tokens of each interval, too few for a bound."""
    prices = Prices(1.0, 7.5, 66.0)
    found = share_seconds(470.0, prices, prompts=16, tokens=1945)
    assert found.measured >= ENOUGH and found.scored == 16 and found.summed == 1
    assert share_seconds(570.0, prices, prompts=16, tokens=1945).summed == FEWEST


def test_a_pilot_prices_all_that_follows(policy):
    batch = make_batch(policy)
    order = batch.group_ids.unique()
    J = TokenJacobian(policy, batch)
    found = run_pilot(J, order, PAPER, EDGES, J.plan_gram(4))
    assert min(vars(found.prices).values()) > 0 and found.J.prompts.tolist() == [int(order[0])]
    assert run_pilot(J, order, PAPER, EDGES, None).prices.summing == 0


# A real policy.


@pytest.fixture(scope="module")
def policy():
    return make_policy("qwen2")


def test_the_table_of_rounds_is_that_of_a_sample_of_as_many(policy):
    batch = make_batch(policy)
    batch.response_mask[1] = False  # a response of which nothing is kept
    settings = MeasureSettings(minutes=5.0, seed=1, self_check=False, per_module=True)
    with TableMeasurement(policy, batch, settings) as measurement:
        rounds = []
        for previous, each in ((0, 1), (1, 3)):
            norms = measurement.measure_more(previous, each)
            rounds.append(Round(each, 1.0, 1.0, norms))
        table = join_responses(join_rounds(measurement, rounds))
        assert measurement.cost_of_more(0, 3) > measurement.cost_of_more(1, 3) > 0
    expected = measure(policy, batch, tokens_per_interval=3, seed=1, self_check=False, per_module=True)
    pd.testing.assert_frame_equal(table, expected, rtol=1e-5)
    assert (table[SAMPLING_PROBABILITY] < 1).any()


def test_minutes_enough_for_all_give_the_table_of_all_and_none_those_of_the_first_round(policy):
    batch = make_batch(policy)
    full = measure(policy, batch, self_check=False)
    pd.testing.assert_frame_equal(measure(policy, batch, minutes=60, self_check=False), full, rtol=1e-5)
    few = measure(policy, batch, minutes=1e-6, self_check=False)
    assert few["group"].nunique() == 1
    of_one = measure(policy, batch.of_prompts(few["group"].unique()), tokens_per_interval=PILOT, self_check=False)
    pd.testing.assert_frame_equal(few, of_one, rtol=1e-5)


def test_a_batch_of_which_every_token_fits_is_measured_in_one_round_without_a_pilot(policy, monkeypatch):
    batch = make_batch(policy)

    def piloted(*_, **__):
        raise AssertionError("a pilot takes longer than the batch")

    monkeypatch.setattr(tables, "run_pilot", piloted)
    measurement = TableMeasurement(policy, batch, MeasureSettings(minutes=60, self_check=False))
    with measurement:
        rounds = [*measure_rounds(measurement, measurement.watch)]
    assert measurement.at_once and len(rounds) == 1 and len(rounds[0].norms) == batch.num_tokens
    assert measurement.verdict_minutes is None


@pytest.mark.parametrize("idle", [0, 3, 4])
def test_too_few_minutes_are_said_before_the_pilot_and_those_advised_are_of_six_prompts_with_a_gradient(
    policy, monkeypatch, idle
):
    """Of nine prompts, whose sums take long; `idle` of them have no gradient."""
    responses = [*make_responses(policy), *make_responses(policy, seed=1)[:3]]
    batch = collate([replace(own, group=n) for n, own in enumerate(responses)])
    advantages = torch.where(batch.group_ids < idle, 0.0, 1.0)[:, None].expand(batch.input_ids.shape)
    batch = replace(batch, advantages=advantages, rewards=None, ref_logprobs=None)
    events, own = [], tables.run_pilot

    def pilot(*args, **keywords):
        events.append("pilot")
        found = own(*args, **keywords)
        return replace(found, prices=Prices(60.0, 1.0, 600.0, 90.0))

    monkeypatch.setattr(tables, "run_pilot", pilot)
    measurement = TableMeasurement(policy, batch, MeasureSettings(minutes=1e-6, self_check=False))
    measurement.when_short = lambda minutes, prompts: events.append(prompts)
    with measurement:
        pass
    order = np.random.default_rng([0, 1]).permutation(9)
    served = np.cumsum(order >= idle)
    wanted = int((served < FEWEST).sum()) + 1 if 9 - idle >= FEWEST else None
    assert events == [wanted or 1, "pilot"]
    if wanted is None:
        assert measurement.verdict_minutes is None
    else:  # with a fifth more
        seconds = wanted * 660 + min(ENOUGH * 1.0, wanted * 90)
        assert measurement.verdict_minutes == pytest.approx(1.2 * seconds / 60, rel=0.05)


def test_the_prompts_that_a_verdict_needs_come_before_more_tokens():
    prices = Prices(2.0, 1.0, 10.0)
    assert share_seconds(150.0, prices, prompts=16, tokens=400, fewest=10).scored >= 10
    assert share_seconds(150.0, prices, prompts=16, tokens=400).scored < 10


@pytest.mark.parametrize(("advantage", "referred"), [(0.0, False), (1.0, False), (0.0, True)])
def test_minutes_are_reserved_for_sums_where_a_token_can_have_a_weight(policy, advantage, referred):
    batch = make_batch(policy)
    known = {"advantages": torch.full(batch.input_ids.shape, advantage)}
    known |= {"old_logprobs": None, "ref_logprobs": torch.full(batch.input_ids.shape, -1.0) if referred else None}
    batch = replace(batch, **known)
    measurement = TableMeasurement(policy, batch, MeasureSettings(minutes=5.0, self_check=False))
    measurement.follows = plan_sums(policy, batch, 1 << 34, keeps_prompts=True)
    with measurement:
        assert (measurement.reserve > AFTER) == (advantage != 0 or referred)


@pytest.mark.parametrize(
    "settings", [*({"minutes": n} for n in (0, -2.0, nan, inf)), {"minutes": 2, "tokens_per_interval": 30}]
)
def test_minutes_that_mean_nothing_are_refused(settings):
    with refused("minutes"):
        check_settings(MeasureSettings(**settings))


def test_a_large_policy_gets_minutes_where_nothing_was_asked_for(policy, monkeypatch):
    auto = MeasureSettings(tokens_per_interval="auto", minutes=DEFAULT_MINUTES)
    assert settle_minutes(auto, policy, "cpu").minutes is None
    monkeypatch.setitem(LARGE, "cpu", 1000)
    assert settle_minutes(auto, policy, "cpu").minutes == MINUTES == 10
    assert settle_minutes(auto, policy, "cuda").minutes is None
    for given in (None, 5):  # --tokens-per-interval
        assert settle_minutes(replace(auto, tokens_per_interval=given), policy, "cpu").minutes is None
    for given in (
        MeasureSettings(tokens_per_interval="auto"),  # --minutes none
        MeasureSettings(tokens_per_interval=5),
        MeasureSettings(minutes=2, tokens_per_interval="auto"),
    ):
        assert settle_minutes(given, policy, "cpu") == given


# The command.


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A checkpoint and rollouts of it."""
    folder = tmp_path_factory.mktemp("job")
    names = ("prompt_ids", "response_ids", "group", "reward", "old_logprobs", "response_mask")
    rows = [{name: getattr(r, name) for name in names} for r in make_responses(make_policy("llama", sharpness=5.0))]
    return save_checkpoint(folder / "llama", "llama", sharpness=5.0), write_jsonl(folder / "rollouts.jsonl", rows)


def test_no_limit_is_none_whatever_the_size_of_the_policy(job, tmp_path, monkeypatch, undrawn):
    monkeypatch.setitem(LARGE, "cpu", 1000)
    model, rollouts = map(str, job)
    flags = ("--device", "cpu", "--no-self-check", "--no-compare", "--no-actual-step", "--influence-tokens", "none")
    minutes = []
    for given in ((), ("--minutes", "none"), ("--minutes", "7")):
        out = tmp_path / str(len(minutes))
        cli.main(["diagnose", model, "--rollouts", rollouts, *flags, *given, "--out", str(out)])
        minutes.append(json.loads((out / "manifest.json").read_text())["settings"]["minutes"])
    assert minutes == [MINUTES, None, 7]


def test_the_command_goes_on_where_it_was_stopped_and_tells_what_it_measured(job, tmp_path, capsys):
    model, rollouts = map(str, job)
    flags = ["--device", "cpu", "--no-figures", "--no-self-check", "--minutes"]
    cli.main(["measure", model, rollouts, *flags, "0.000001", "--out", str(tmp_path / "short")])
    said, manifest = capsys.readouterr().out, json.loads((tmp_path / "short" / "manifest.json").read_text())
    assert "minutes are too few" in said
    assert manifest["prompts"]["looked_at"] == 1 < manifest["prompts"]["of"]
    sample = manifest["sample"]
    assert (sample["tokens_per_interval"], sample["why"], sample["drawn"]) == (PILOT, "minutes", "proportional")
    assert [done["tokens_per_interval"] for done in sample["rounds"]] == [PILOT] and sample["seconds"]["measuring"] > 0
    table = pd.read_parquet(tmp_path / "short" / "tokens.parquet")
    assert manifest["tokens_measured"] == table["param_grad_norm"].notna().sum() <= 4 * PILOT
    assert manifest["key"]["settings"]["minutes"] == 1e-6 and manifest["key"]["settings"]["tokens_per_interval"] is None

    # Stopped after its first round, which is marked.
    folder = RunFolder(tmp_path / "stopped", manifest["key"])
    folder.partial.mkdir(parents=True)
    (folder.partial / "key.json").write_text(json.dumps({"key": manifest["key"]}))
    measured = table.index[table["param_grad_norm"].notna()]
    names = [name for name in table if name.startswith(("act_grad_norm", "param_grad_norm"))]
    norms = table.loc[measured, names].assign(param_grad_norm=np.float32(7.0))
    folder.write_part(0, pd.DataFrame({"prompts": [1], "spent": [2.0]}))
    folder.write_part(1, Round(PILOT, 5.0, 9.0, norms).to_part())
    cli.main(["measure", model, rollouts, *flags, "0.000001", "--out", str(tmp_path / "stopped")])
    assert "resuming the unfinished run" in capsys.readouterr().out
    found = pd.read_parquet(tmp_path / "stopped" / "tokens.parquet")
    assert (found.loc[measured, "param_grad_norm"] == 7).all() and found["param_grad_norm"].count() == len(measured)
    pd.testing.assert_frame_equal(found.drop(columns="param_grad_norm"), table.drop(columns="param_grad_norm"))
    seconds = json.loads((tmp_path / "stopped" / "manifest.json").read_text())["sample"]["seconds"]
    assert seconds["measuring"] == 5.0 and seconds["preparing"] > 4.0
    assert not folder.partial.exists()
    # Finished.
    cli.main(["measure", model, rollouts, *flags, "0.000001", "--out", str(tmp_path / "stopped")])
    assert "already measured" in capsys.readouterr().out
