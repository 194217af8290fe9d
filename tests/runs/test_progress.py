"""Progress: what a log or a terminal is told while stages run, by a clock that the test turns."""

from __future__ import annotations

import io
import re
import sys
import threading
from dataclasses import dataclass

import pytest
from support.policies import make_batch, make_policy
from support.progress import Listener

from gradscope import compare, diagnose, interval_gradients, measure
from gradscope.gradients import Resources
from gradscope.runs import SILENT, Progress, Reporter, settle_progress, track


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Told:
    """A reporter whose clock and looks at it are the test's."""

    def __init__(self) -> None:
        self.clock, self.lines = Clock(), []
        self.reporter = Reporter(write=self.lines.append, clock=self.clock, watched=False)

    def pass_time(self, seconds: float) -> list[str]:
        """The lines that a second's ticks over that time write."""
        before = len(self.lines)
        for _ in range(round(seconds)):
            self.clock.now += 1
            self.reporter.tick()
        return self.lines[before:]


def numbers(line: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"[\d,.]*\d", line.split("] ")[1])]


def test_a_stage_is_told_at_its_begin_and_every_30_seconds_with_share_and_time_left():
    told = Told()
    with told.reporter.stage("measuring", 4000, "tokens") as advance:
        (begin,) = told.pass_time(10)
        assert "measuring" in begin and "[0:05]" in begin and numbers(begin) == [0, 4000, 0]
        for part in range(1, 4):
            advance(500)
            (line,) = told.pass_time(30)
            seconds, done = 5 + 30 * part, 500 * part  # it was told at second 5, 35, 65, …
            *counted, left = numbers(line)
            assert counted == [done, 4000, round(100 * done / 4000)]
            assert left == pytest.approx((4000 - done) * seconds / done / (60 if "min" in line else 1), abs=1)
    assert told.pass_time(100) == []


def test_short_stages_are_silent_and_a_begin_is_told_once():
    told = Told()
    for _ in range(20):
        with told.reporter.stage("scoring"):
            assert told.pass_time(1) == []
    told = Told()
    for _ in range(4):
        with told.reporter.stage("scoring"):
            told.pass_time(6)
    assert len(told.lines) == 1


def test_many_short_stages_are_told_of_every_30_seconds():
    told = Told()
    for _ in range(95):
        with told.reporter.stage("gradients"):
            told.pass_time(1)
    assert len(told.lines) == 3


def test_a_long_stage_within_short_ones_around_it_is_told_with_where_it_is():
    told = Told()
    with told.reporter.stage("dealing", 10, "batches", done=4) as advance:
        told.pass_time(6)
        advance(1)
        with told.reporter.stage("predicting", 30, "weightings") as inner:
            inner(12)
            (line,) = told.pass_time(6)
    assert numbers(line)[:5] == [5, 10, 12, 30, 50]
    assert numbers(line)[5] == pytest.approx(5 * 11, abs=1)  # one batch in eleven seconds, four were done before


def test_with_a_plan_share_and_time_left_are_of_everything():
    told = Told()
    told.reporter.plan({"tokens": 10.0, "sums": 30.0, "steps": 60.0})
    with told.reporter.stage("tokens"):
        told.pass_time(10)
    with told.reporter.stage("sums"), told.reporter.stage("gradients", 10, "slices") as advance:
        advance(5)
        told.pass_time(20)
        (line,) = told.pass_time(20)
    done = (10 + 15) / 100
    *_, share, left = numbers(line)
    assert share == 100 * done
    elapsed = float(re.search(r"\[0:(\d+)\]", line)[1])
    assert 60 * left == pytest.approx(elapsed * (1 - done) / done, abs=30)
    with told.reporter.stage("steps"):
        (begin,) = told.pass_time(6)
    assert numbers(begin)[0] == 40


def test_the_share_of_a_plan_never_falls():
    told, shares = Told(), []
    told.reporter.plan({"sums": 1.0, "steps": 1.0})
    for part in ("sums", "steps"):
        with told.reporter.stage(part):
            for _ in range(3):  # each goes through the batch three times
                with told.reporter.stage("gradients", 4, "prompts") as advance:
                    for _ in range(4):
                        shares += [re.search(r"(\d+) %", line)[1] for line in told.pass_time(35)]
                        advance(1)
    shares = [int(share) for share in shares]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] >= 85


def test_a_stage_that_fails_is_over():
    told = Told()
    with pytest.raises(KeyError), told.reporter.stage("measuring"):
        raise KeyError("no")
    with told.reporter.stage("drawing"):
        (line,) = told.pass_time(6)
    assert "measuring" not in line


def test_items_are_tracked_and_handed_on():
    told = Told()
    assert list(track([3, 4], "items", told.reporter)) == [3, 4]
    assert list(track(iter("ab"), "letters", False, total=2)) == ["a", "b"]


def test_nobody_is_told_where_nobody_asked():
    assert settle_progress(False) is SILENT and isinstance(SILENT, Progress)
    with SILENT.stage("measuring", 10) as advance:
        advance(3)
    told = Told().reporter
    assert settle_progress(told) is told and isinstance(settle_progress(True), Reporter)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_bar_that_goes_away(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    clock = Clock()
    reporter = Reporter(clock=clock, watched=False)
    with reporter.stage("measuring", 10, "tokens") as advance:
        reporter.tick()
        assert screen.getvalue() == ""
        for _ in range(5):
            clock.now += 6
            advance(1)
            reporter.tick()
        assert "\n" not in screen.getvalue() and screen.getvalue().count("\r") == 5
        assert "50 %" in screen.getvalue().split("\r")[-1]
    assert screen.getvalue().endswith("\r\x1b[K")


def test_a_pipe_is_told_by_itself_while_the_work_is_busy(monkeypatch, capsys):
    monkeypatch.setattr("gradscope.runs.progress.DELAY", 0.0)
    monkeypatch.setattr("gradscope.runs.progress.TICK", 0.01)
    monkeypatch.delenv("GRADSCOPE_PROGRESS")
    before = threading.active_count()
    reporter = Reporter()
    with reporter.stage("measuring", 10, "tokens"):
        waiting = threading.Event()
        for _ in range(500):
            if (said := capsys.readouterr()).err:
                break
            waiting.wait(0.02)
    assert said.out == "" and re.fullmatch(r"gradscope \[\d+:\d\d\] measuring 0 of 10 tokens, 0 %\n", said.err)
    waiting.wait(0.2)
    assert threading.active_count() <= before


def test_a_stream_that_is_closed_stops_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", closed := io.StringIO())
    closed.close()
    clock = Clock()
    reporter = Reporter(clock=clock, watched=False)
    with reporter.stage("measuring"):
        clock.now = 50
        reporter.tick()
        clock.now = 100
        monkeypatch.setattr(sys, "stderr", None)
        reporter.tick()
    assert capsys.readouterr().out == ""


# ---- who reports


@pytest.fixture(scope="module")
def small():
    policy = make_policy("qwen2")
    return policy, make_batch(policy)


def test_measuring_reports_all_that_takes_long(small):
    measure(*small, resources=Resources(progress=(told := Listener())))
    outer = [stage for stage in told.stages if not stage.within]
    assert [stage.name for stage in outer] == ["scoring", "self-check", "measuring"] and not told.unfinished
    assert outer[-1].total == small[1].num_tokens
    measure(*small, tokens_per_interval=2, self_check=False, resources=Resources(progress=(told := Listener())))
    (whole,) = (stage for stage in told.stages if stage.name == "measuring")
    parts = [stage.total for stage in told.stages if stage.within == ("measuring",)]
    # Of the tokens that are measured, and within a response of its own.
    assert whole.total == sum(parts) < small[1].num_tokens and not told.unfinished
    rounds = Listener()
    told_of = {"self_check": False, "resources": Resources(progress=rounds)}
    measure(*small, minutes=1e-6, tokens_per_interval=None, **told_of)
    assert {"timing a few responses", "measuring prompt by prompt"} <= rounds.names and not rounds.unfinished


@pytest.mark.all
def test_summing_comparing_and_diagnosing_report_to_whom_they_are_given(small):
    interval_gradients(*small, resources=Resources(progress=(told := Listener())))
    assert told.names == {"scoring", "gradients"} and not told.unfinished
    assert max(stage.total or 0 for stage in told.stages) >= 3  # of prompts
    compare(*small, ["grpo", "reweight"], resources=Resources(progress=(told := Listener())))
    assert {"measuring", "gradients"} <= told.names and not told.unfinished
    diagnose(*small, progress=(told := Listener()))
    outermost = [stage.name for stage in told.stages if not stage.within]
    assert set(told.costs) <= set(outermost) and outermost.count("measuring") == 1 and not told.unfinished
    for part in ("summed gradients", "one predicted step", "comparing token weightings"):
        assert any(stage.within[:1] == (part,) for stage in told.stages), part


def test_more_than_was_estimated_leaves_no_time_below_none():
    told = Told()
    with told.reporter.stage("prompts", 2, "prompts") as done:
        for _ in range(4):
            told.pass_time(100)
            done(1)
        told.pass_time(100)
    assert any("4 of 4" in line for line in told.lines) and not any("-" in line for line in told.lines)
