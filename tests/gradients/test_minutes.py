"""A table within minutes: how they are divided, on a clock that the model's own passes turn, and as a stopped run."""

import json
from dataclasses import replace
from itertools import product
from math import inf, nan

import numpy as np
import pandas as pd
import pytest
import torch
from support.policies import make_batch, make_policy, make_responses, save_checkpoint, write_jsonl
from support.refusals import refused
from support.tiers import every

from gradscope import measure
from gradscope.cli import commands as cli
from gradscope.gradients import (
    DEFAULT_MINUTES,
    Afterwards,
    MeasureSettings,
    Stopwatch,
    ThresholdSample,
    fill_table,
    plan_sums,
    prepare_measurement,
    settle_minutes,
)
from gradscope.gradients.budget.allot import APART, ENOUGH, ROOM, Allotment, Lengths, allot
from gradscope.gradients.sample import SAMPLING_PROBABILITY
from gradscope.gradients.settings import LARGE, MINUTES, check_settings
from gradscope.policy import AdamWSettings, AdamWState, float_parameters
from gradscope.resampling import FEWEST
from gradscope.rollouts import collate
from gradscope.runs import RunFolder

LENGTHS = Lengths(positions=1200.0, responses=8.0, reach=150.0, prefix=110.0, tokens=340.0)

# How the minutes are divided.


def price(each: float, reserved: float, *, again: bool = False) -> float:
    """Passes over a prompt, by hand: its own, what follows, and backward passes for 4·each of its 340 tokens."""
    tokens = min(340, 4 * each)
    return 1 + reserved + (1 + again) * (110 * tokens + 3 * 150 * min(8, tokens)) / 1200


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("reserved", [0.0, 10.0, 40.0])
@pytest.mark.parametrize("prompts", [40, 4000])
def test_no_other_number_of_tokens_makes_the_variance_smaller(prompts, reserved, again):
    """(1 + APART/k)/m, in the time for m prompts of k tokens of each interval."""
    seconds, known = 20.0 * prompts, {"intervals": 4, "wanted": 7, "again": again}
    found = allot(seconds, 1.0, LENGTHS, Afterwards((reserved,)), prompts=prompts, **known)
    each = np.arange(2, 86)  # fewer share no passes of a response
    variances = (1 + APART / each) * np.array([price(k, reserved, again=again) for k in each])
    own = (1 + APART / found.each) * price(found.each, reserved, again=again)
    assert own <= 1.01 * variances.min()
    assert found.prompts == int(min(prompts, seconds / price(found.each, reserved, again=again)))


def test_everything_is_measured_if_it_fits_with_a_fifth_to_spare():
    known = {"prompts": 16, "intervals": 4, "wanted": 7}
    whole = 16 * price(inf, 38.0)
    following = Afterwards((10.0, 28.0))
    assert allot(1.21 * whole, 1.0, LENGTHS, following, **known) == Allotment(16, None, 38.0, None, 7)
    assert allot(1.19 * whole, 1.0, LENGTHS, following, **known).each is not None
    fewer = replace(following, prompts=15)  # memory suffices for the sums of 15
    assert allot(2 * whole, 1.0, LENGTHS, fewer, **known).each is not None


@pytest.mark.parametrize("prompts", [16, 100])
def test_time_is_kept_for_what_fits_beside_the_prompts_of_a_verdict(prompts):
    known = {"prompts": prompts, "intervals": 4, "wanted": 7}
    least = -(-ENOUGH // 7)

    def reserved(seconds: float) -> float:
        return allot(seconds, 1.0, LENGTHS, Afterwards((10.0, 28.0, 5.0)), **known).reserved

    assert reserved(7 * price(least, 10.0) - 1) == 0.0
    assert reserved(7 * price(least, 10.0) + 1) == 10.0
    assert reserved(ROOM * price(least, 38.0) - 1) == 10.0
    assert reserved(ROOM * price(least, 38.0) + 1) == 38.0
    assert reserved(ROOM * price(least, 43.0) + 1) == 43.0


def test_short_minutes_give_fewer_tokens_before_fewer_prompts_and_say_what_a_verdict_takes():
    known = {"prompts": 100, "intervals": 4, "wanted": 7}
    least = -(-ENOUGH // 7)
    enough = allot(7 * price(least, 10.0) + 1, 1.0, LENGTHS, Afterwards((10.0,)), **known)
    assert (enough.each, enough.prompts, enough.verdict) == (least, 7, None)
    short = allot(7 * price(least, 10.0) - 1, 1.0, LENGTHS, Afterwards((10.0,)), **known)
    assert short.verdict == pytest.approx(1.2 * 7 * price(least, 10.0)) and short.needed == 7
    none = allot(1.0, 1.0, LENGTHS, Afterwards((10.0,), least=2), **known | {"wanted": None})
    assert (none.verdict, none.needed, none.prompts) == (None, 2, 2)


# The sample.


def plant_tokens(count: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    known = {"interval": rng.choice(4, size=count, p=[0.1, 0.1, 0.2, 0.6]), "weight": rng.normal(size=count)}
    return pd.DataFrame(known | {"logit_grad_norm": rng.gamma(2.0, size=count)})


@pytest.mark.parametrize("design", ["proportional", "stratified"])
def test_a_token_is_measured_as_often_as_its_probability_says(design):
    scouts, tokens, seeds = plant_tokens(600, 0), plant_tokens(80, 1), 2000
    sample = ThresholdSample(scouts, 3, 4, design, 0)
    chances = sample.probabilities(tokens, 9)
    assert 0 < chances.min() < 1
    drawn = np.array([ThresholdSample(scouts, 3, 4, design, seed).take(tokens, 5, 9) for seed in range(seeds)])
    error = np.sqrt(chances * (1 - chances) / seeds)
    assert (abs(drawn.mean(0) - chances) <= 4.5 * error + 1e-12).all()  # of 80 tokens
    # A prompt like the first ones gives nine tokens of each interval on average, where as many are there.
    whole = sample.probabilities(scouts, 9)
    unbounded = whole < 1
    if design == "stratified":
        assert np.bincount(scouts["interval"], whole) / 3 == pytest.approx(9.0)
    assert unbounded.any()
    # A larger sample contains a smaller one, and no sample is everything.
    assert not (sample.take(tokens, 5, 9) & ~sample.take(tokens, 5, 20)).any()
    assert sample.take(tokens, 5, None).all() and (sample.probabilities(tokens, None) == 1).all()


def test_sizes_are_those_of_the_first_prompts_whatever_other_tokens_there_are():
    scouts = plant_tokens(600, 0)
    sample, tokens = ThresholdSample(scouts, 3, 4, "proportional", 0), plant_tokens(10, 1)
    found = sample.probabilities(tokens, 1)
    for place, token in tokens.iterrows():
        own = scouts[scouts["interval"] == token["interval"]]
        norm, weighted = token["logit_grad_norm"], abs(token["weight"]) * token["logit_grad_norm"]
        both = norm / own["logit_grad_norm"].mean(), weighted / (abs(own["weight"]) * own["logit_grad_norm"]).mean()
        size = 0.25 + 0.75 * sum(both) / 2
        assert found[place] == pytest.approx(min(1.0, size / (len(own) / 3)))
    unknown = scouts.assign(weight=nan)  # no advantages
    without = ThresholdSample(unknown, 3, 4, "proportional", 0).probabilities(tokens.assign(weight=nan), 1)
    assert np.isfinite(without).all() and (without > 0).all()


# A real policy.


@pytest.fixture(scope="module")
def policy():
    return make_policy("qwen2")


def many_prompts(policy, count: int, idle: int = 0):
    """A batch of so many prompts of one response each, the first `idle` of them without a gradient."""
    responses = [own for seed in range(-(-count // 6)) for own in make_responses(policy, seed=seed)][:count]
    batch = collate([replace(own, group=n) for n, own in enumerate(responses)])
    advantages = torch.where(batch.group_ids < idle, 0.0, 1.0)[:, None].expand(batch.input_ids.shape)
    return replace(batch, advantages=advantages, rewards=None, ref_logprobs=None)


def test_minutes_enough_for_all_give_the_table_of_all_and_none_those_of_one_prompt(policy):
    batch = make_batch(policy)
    batch.response_mask[1] = False  # a response of which nothing is kept
    settings = {"self_check": False, "per_module": True}
    full = measure(policy, batch, **settings)
    pd.testing.assert_frame_equal(measure(policy, batch, minutes=60, **settings), full, rtol=1e-5)
    few = measure(policy, batch, minutes=1e-6, **settings)
    assert few["group"].nunique() == 1 and few["param_grad_norm"].notna().any()
    own = full[full["response"].isin(few["response"])].reset_index(drop=True)
    known = few["param_grad_norm"].notna()
    names = [name for name in full if name in few]
    pd.testing.assert_frame_equal(few.loc[known, names], own.loc[known, names], rtol=1e-5)


def test_norms_in_adamws_metric_come_after_the_whole_gradient(policy):
    batch = make_batch(policy)
    names = [name for name, _ in float_parameters(policy.model)]
    state = AdamWState(
        {name: torch.full_like(p, 1e-4) for name, p in float_parameters(policy.model)},
        dict.fromkeys(names, 3),
        dict.fromkeys(names, AdamWSettings()),
    )
    known = {"metric": "adamw", "optimizer_state": state}
    full = measure(policy, batch, **known)
    pd.testing.assert_frame_equal(measure(policy, batch, minutes=60, **known), full, rtol=1e-4)


class Clock:
    """A clock that the first block's passes turn: so many seconds a position."""

    def __init__(self, policy, rate: float, monkeypatch) -> None:
        self.now, self.rate, self.slower_at, self.slower = 100.0, rate, inf, 1.0
        self.hook = policy.blocks[0].register_forward_pre_hook(self._turn)
        for room in ("timed", "budget.allot"):
            monkeypatch.setattr(f"gradscope.gradients.{room}.perf_counter", self)

    def _turn(self, _block, args: tuple) -> None:
        self.now += self.rate * args[0].shape[:2].numel() * (self.slower if self.now > self.slower_at else 1.0)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run_by_clock(policy, monkeypatch):
    """Measure by such a clock; return the table, the measurement, and the minutes of it and what follows."""
    hooks = []

    def run(batch, minutes: float, *, rate: float, passes: tuple[float, ...] = (), slower=(inf, 1.0), **settings):
        clock = Clock(policy, rate, monkeypatch)
        hooks.append(clock.hook)
        clock.slower_at, clock.slower = clock.now + 60 * slower[0], slower[1]
        settings = MeasureSettings(minutes=minutes, self_check=False, **settings)
        told = []
        known = {"watch": Stopwatch(clock), "following": Afterwards(passes), "tell": told.append}
        measurement = prepare_measurement(policy, batch, settings, **known)
        table = fill_table(measurement)
        following = measurement.allotment.reserved * measurement.pass_seconds
        return table, measurement, (measurement.watch.seconds() + following) / 60, told

    yield run
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("rate", "passes"), every(4, product([0.001, 0.01, 0.05], [(), (9.0,), (9.0, 28.0)])))
def test_minutes_are_kept_with_what_follows(policy, run_by_clock, rate, passes):
    batch = many_prompts(policy, 30)
    table, measurement, taken, told = run_by_clock(batch, 1.0, rate=rate, passes=passes)
    assert taken <= 1.25
    booked = table["group"].nunique()
    assert booked == 30 or table["param_grad_norm"].notna().all() or taken >= 0.7
    assert len(told) == 1
    order = measurement.order[:booked].tolist()
    assert {*table["group"]} == {*order}  # the first ones of the random order, whole
    assert len(table) == batch.of_prompts(order).num_tokens


@pytest.mark.all
def test_a_machine_that_gets_slower_gives_fewer_prompts_in_the_same_minutes(policy, run_by_clock):
    batch = many_prompts(policy, 60)
    steady, _, _, _ = run_by_clock(batch, 1.0, rate=0.006, passes=(9.0,))
    table, _, taken, _ = run_by_clock(batch, 1.0, rate=0.006, passes=(9.0,), slower=(0.05, 4.0))
    assert taken <= 1.25 and table["group"].nunique() < steady["group"].nunique()


def test_time_for_what_follows_is_kept_once_a_busy_machine_is_idle(policy, run_by_clock):
    batch = many_prompts(policy, 30)
    _, busy, _, _ = run_by_clock(batch, 1.0, rate=0.05, passes=(9.0,))
    table, idle, taken, _ = run_by_clock(batch, 1.0, rate=0.05, passes=(9.0,), slower=(0.15, 0.1))
    assert busy.allotment.reserved == 0.0 and idle.allotment.reserved == 9.0
    assert taken <= 1.25 and table["group"].nunique() >= FEWEST


def test_a_sample_grows_once_every_prompt_is_booked(policy, run_by_clock):
    batch = many_prompts(policy, 12)
    table, measurement, taken, _ = run_by_clock(batch, 1.0, rate=0.008)
    assert table["group"].nunique() == 12 and taken <= 1.25
    first = measurement._allot(0.008)[0].each
    assert first is None or measurement.allotment.each >= first
    chances = table.get(SAMPLING_PROBABILITY, pd.Series(np.ones(len(table))))
    measured = table["param_grad_norm"].notna()
    assert measured[chances == 1].all()
    # Norms are those of plain measuring.
    own = measure(policy, batch, self_check=False)["param_grad_norm"]
    assert np.allclose(table["param_grad_norm"][measured], own[measured], rtol=1e-5)


@pytest.mark.parametrize("idle", every(2, [0, 3, 4]))
def test_too_few_minutes_are_said_with_those_of_six_prompts_with_a_gradient(policy, run_by_clock, idle):
    """Of nine prompts, `idle` of which have no gradient."""
    batch = many_prompts(policy, 9, idle)
    table, measurement, _, (told,) = run_by_clock(batch, 0.15, rate=0.05, passes=(9.0,))
    served = np.cumsum(measurement.order.numpy() >= idle)
    wanted = int((served < FEWEST).sum()) + 1 if 9 - idle >= FEWEST else None
    assert table["group"].nunique() < FEWEST
    if wanted is None:
        assert measurement.verdict_minutes is None and "verdict" not in told
        return
    assert f"for which {wanted} prompts" in told
    # Those advised are enough.
    minutes = measurement.verdict_minutes
    table, measurement, taken, _ = run_by_clock(batch, minutes, rate=0.05, passes=(9.0,))
    assert table["group"].nunique() >= wanted and measurement.verdict_minutes is None and taken <= 1.25 * minutes


@pytest.mark.parametrize(("advantage", "referred"), [(0.0, False), (1.0, False), (0.0, True)])
def test_time_is_kept_for_sums_where_a_token_can_have_a_weight(policy, advantage, referred):
    batch = make_batch(policy)
    known = {"advantages": torch.full(batch.input_ids.shape, advantage)}
    known |= {"old_logprobs": None, "ref_logprobs": torch.full(batch.input_ids.shape, -1.0) if referred else None}
    batch = replace(batch, **known)
    following = Afterwards((plan_sums(policy, batch, 1 << 34).forward_passes,))
    with prepare_measurement(policy, batch, MeasureSettings(minutes=5.0), following=following) as measurement:
        assert (measurement.allotment.reserved > 0) == (advantage != 0 or referred)


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


@pytest.mark.all
def test_no_limit_is_none_whatever_the_size_of_the_policy(job, tmp_path, monkeypatch, undrawn):
    monkeypatch.setitem(LARGE, "cpu", 1000)
    model, rollouts = map(str, job)
    flags = ("--device", "cpu", "--no-self-check", "--no-compare", "--no-actual-step", "--influence-tokens", "none")
    minutes = []
    for given in ((), ("--minutes", "none")):
        out = tmp_path / str(len(minutes))
        cli.main(["diagnose", model, "--rollouts", rollouts, *flags, *given, "--out", str(out)])
        minutes.append(json.loads((out / "manifest.json").read_text())["settings"]["minutes"])
    assert minutes == [MINUTES, None]


def test_a_stopped_run_goes_on_with_the_prompts_that_it_booked(job, tmp_path, monkeypatch, capsys):
    model, rollouts = map(str, job)
    flags = [model, rollouts, "--device", "cpu", "--no-figures", "--no-self-check", "--minutes"]
    cli.main(["measure", *flags, "0.000001", "--out", str(tmp_path / "short")])
    said, manifest = capsys.readouterr().out, json.loads((tmp_path / "short" / "manifest.json").read_text())
    assert "minutes, loading included, should do for about 1 of" in said
    assert manifest["prompts"]["looked_at"] == 1 < manifest["prompts"]["of"]
    sample = manifest["sample"]
    assert (sample["why"], sample["drawn"]) == ("minutes", "proportional") and sample["seconds"]["measuring"] > 0
    assert manifest["key"]["settings"]["minutes"] == 1e-6 and manifest["key"]["settings"]["tokens_per_interval"] is None

    # Stopped after its first prompt, which is marked.
    right = RunFolder.write_part

    def write(folder: RunFolder, index: int, frame: pd.DataFrame) -> None:
        if index == 2:
            raise KeyboardInterrupt
        right(folder, index, frame.assign(param_grad_norm=7.0) if index == 1 else frame)

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, SystemExit)):
        patch.setattr(RunFolder, "write_part", write)
        cli.main(["measure", *flags, "60", "--out", str(tmp_path / "stopped")])
    folder = RunFolder(tmp_path / "stopped", {})
    spent = folder.read_part(0)
    assert spent["spent"].item() > 0 and folder.has_part(1) and not folder.has_part(2)
    folder.write_part(0, spent.assign(spent=1000.0))
    capsys.readouterr()
    cli.main(["measure", *flags, "60", "--out", str(tmp_path / "stopped")])
    assert "resuming the unfinished run" in capsys.readouterr().out
    found = pd.read_parquet(tmp_path / "stopped" / "tokens.parquet")
    first = int(folder.manifest["seed"])
    order = np.random.default_rng([first, 1]).permutation(np.unique(found["group"]))
    assert (found["param_grad_norm"][found["group"] == order[0]] == 7).all()
    assert (found["param_grad_norm"][found["group"] != order[0]] != 7).all()
    whole = measure(model, rollouts, self_check=False)
    names = [name for name in whole if name != "param_grad_norm"]
    pd.testing.assert_frame_equal(found[names], whole[names], rtol=1e-5)
    assert sum(folder.manifest["sample"]["seconds"].values()) > 1000
    assert not folder.partial.exists()
    # Finished.
    cli.main(["measure", *flags, "60", "--out", str(tmp_path / "stopped")])
    assert "already measured" in capsys.readouterr().out
