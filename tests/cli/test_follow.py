"""`gradscope diagnose --follow`: what a run writes is diagnosed once, when it is whole; one fault does not end it.

The clock alone is another: where the command sleeps, a trainer writes.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from support.cli import Outcome, outcome_of, refusal, run
from support.pages import BRIEF, native_rows, read_page, write_rows
from support.policies import save_checkpoint

from gradscope.cli import follow
from gradscope.errors import InputError

pytestmark = pytest.mark.usefixtures("undrawn")


class Clock:
    """Seconds that pass while the command sleeps; in each sleep a trainer takes one of its actions."""

    strftime = staticmethod(time.strftime)

    def __init__(self, actions: Iterable[Callable[[], object]] = ()) -> None:
        self.now, self.actions = 0.0, iter(actions)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        action = next(self.actions, None)
        self.now += seconds if action is not None else max(seconds, 3600.0)
        if action is not None:
            action()


@pytest.fixture
def command(tmp_path, capsys, monkeypatch) -> Iterator[Callable[..., Outcome]]:
    """Follows tmp_path/run with the log run/log while a trainer acts; returns how it ended."""

    def follow_run(*actions: Callable[[], object], flags: tuple[object, ...] = ()) -> Outcome:
        monkeypatch.setattr(follow, "time", Clock(actions))
        log = ("--rollouts", tmp_path / "run" / "log", "--follow", "--out", tmp_path / "out")
        return outcome_of(capsys, "diagnose", tmp_path / "run", *log, *BRIEF, *flags)

    return follow_run


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[int, Path]:
    """Checkpoints of a run of 20 steps, as its trainer leaves them."""
    folder, found = tmp_path_factory.mktemp("saved"), {}
    for step, seed in ((3, 0), (20, 1)):
        found[step] = save_checkpoint(folder / f"checkpoint-{step}", "qwen2", seed=seed)
        state = {"global_step": step, "max_steps": 20}
        (found[step] / "trainer_state.json").write_text(json.dumps(state))
    return found


@pytest.fixture
def writer(tmp_path, saved) -> Writer:
    return Writer(tmp_path / "run", saved)


class Writer:
    """A trainer that writes one file at a time."""

    def __init__(self, run: Path, saved: dict[int, Path]) -> None:
        self.run, self.saved = run, saved

    def checkpoint(self, step: int) -> list[Callable[[], object]]:
        """Actions that write a checkpoint, the weights in two halves."""
        to = self.run / f"checkpoint-{step}"
        files = sorted(self.saved[step].iterdir(), key=lambda file: (file.name == "trainer_state.json", file.name))
        actions: list[Callable[[], object]] = [lambda: to.mkdir(parents=True)]
        for file in files:
            content, half = file.read_bytes(), file.stat().st_size // 2
            parts = (content[:half], content) if file.suffix == ".safetensors" else (content,)
            actions += [lambda name=file.name, part=part: (to / name).write_bytes(part) for part in parts]
        return actions

    def whole(self, step: int) -> Callable[[], object]:
        return lambda: shutil.copytree(self.saved[step], self.run / f"checkpoint-{step}")

    def rollouts(self, step: int) -> Callable[[], object]:
        def write() -> None:
            (self.run / "log").mkdir(parents=True, exist_ok=True)
            write_rows(self.run / "log" / f"step-{step}.jsonl", native_rows(step=step))

        return write


def idle(looks: int) -> list[Callable[[], object]]:
    return [lambda: None] * looks


QUIET = int(follow.QUIET // follow.EVERY) + 2
"""Looks after which what has not changed is taken as written."""


def log_of(out: Path) -> str:
    return (out / follow.LOG).read_text()


def test_a_run_is_followed_from_before_its_first_file_to_its_end(command, writer, saved, tmp_path, capsys):
    out, seen = tmp_path / "out", []

    def nothing_yet() -> None:
        seen.append(log_of(out))
        assert not (out / "checkpoint-3").exists() and not (out / "report.html").exists()

    def watched(actions: list[Callable[[], object]]) -> list[Callable[[], object]]:
        return [lambda action=action: (nothing_yet(), action()) for action in actions]

    def first_is_done() -> None:
        assert (out / "checkpoint-3" / "report.html").is_file() and "1 checkpoint, step 3" in read_page(out).text

    slow = [action for one in writer.checkpoint(3) for action in (one, *idle(QUIET))]  # each pause is long enough
    actions = [*watched([*idle(2), *slow]), *watched([writer.rollouts(4), *idle(1)]), *idle(QUIET), first_is_done]
    ended = command(*actions, writer.whole(20), writer.rollouts(19))
    assert ended.status == 0, ended.err
    # What it waited for, in this order, once each.
    told = ["which is not there yet", "waiting for weights", "the end of model.safetensors", "log is not there yet"]
    places = [log_of(out).index(words) for words in told]
    assert places == sorted(places) and all(log_of(out).count(words) == 1 for words in told)
    # All ends as if it had been one command on all of them, which finds nothing to do.
    trend = (out / "data" / "trend.csv").read_bytes()
    models = [writer.run / f"checkpoint-{step}" for step in (3, 20)]
    run("diagnose", *models, "--rollouts", writer.run / "log", "--out", out, *BRIEF)
    assert capsys.readouterr().out.count("already diagnosed") == 2
    assert (out / "data" / "trend.csv").read_bytes() == trend
    assert {*pd.read_csv(out / "data" / "trend.csv")["step"]} == {3, 20}
    # The last checkpoint's own rollouts were never sampled: the nearest are taken, and it is said.
    manifest = json.loads((out / "checkpoint-20" / "manifest.json").read_text())
    assert manifest["rollouts"]["other_step"] and "drawn hollow" in read_page(out).text


@pytest.mark.all
def test_stopped_and_started_again_it_goes_on_though_the_checkpoint_is_deleted(command, writer, tmp_path):
    out = tmp_path / "out"

    def stop() -> None:
        raise KeyboardInterrupt

    writer.whole(3)(), writer.rollouts(4)()
    stopped = command(*idle(QUIET + 1), stop)
    assert stopped.status == 130 and stopped.err.count("gradscope: ") == 1
    made = (out / "checkpoint-3" / "report.html").stat().st_mtime_ns
    assert not [*out.rglob(".partial"), *out.rglob(".lock"), *out.glob(".following")]
    shutil.rmtree(writer.run / "checkpoint-3")
    (writer.run / "checkpoint-20").mkdir()
    refused = command(flags=("--temperature", "0.5"))
    assert refused.status == 2 and "temperature None, not 0.5" in refused.err
    ended = command(lambda: shutil.rmtree(writer.run / "checkpoint-20"), writer.whole(20), writer.rollouts(21))
    assert ended.status == 0 and (out / "checkpoint-3" / "report.html").stat().st_mtime_ns == made
    assert {*pd.read_csv(out / "data" / "trend.csv")["step"]} == {3, 20}


@pytest.mark.all
def test_checkpoints_that_fail_or_vanish_are_told_once_and_the_following_goes_on(command, writer, tmp_path):
    out, run = tmp_path / "out", writer.run
    writer.rollouts(4)(), writer.whole(3)(), writer.whole(20)()
    shutil.copytree(run / "checkpoint-3", run / "checkpoint-1")
    shutil.copytree(run / "checkpoint-3", run / "checkpoint-2")
    config = json.loads((run / "checkpoint-2" / "config.json").read_text())
    (run / "checkpoint-2" / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    ended = command(*idle(1), lambda: shutil.rmtree(run / "checkpoint-1"))
    assert ended.status == 1  # for checkpoint-2; that trainers delete what is old is no fault
    for name in ("checkpoint-1", "checkpoint-2"):
        assert log_of(out).count(f"{name} was not diagnosed") == 1
        assert f"{name} was not diagnosed" in read_page(out).text and not (out / name / "report.html").exists()
    assert "2 checkpoints diagnosed, 2 not" in log_of(out)
    assert {*pd.read_csv(out / "data" / "trend.csv")["step"]} == {3, 20}


@pytest.mark.all
def test_a_checkpoint_waits_for_its_own_step_until_the_log_has_passed_it(command, writer, tmp_path):
    out, seen = tmp_path / "out", []
    writer.whole(3)(), writer.rollouts(2)()

    def look() -> None:
        seen.append((out / "checkpoint-3").exists())

    ended = command(*idle(QUIET), look, writer.rollouts(6), *idle(1), look)
    assert seen == [False, True] and "the rollouts of step 4 in" in log_of(out)
    assert json.loads((out / "checkpoint-3" / "manifest.json").read_text())["rollouts"]["other_step"]
    assert ended.status == 0 and "nothing new came for 24 h" in log_of(out)  # checkpoint-3 is not the run's last


@pytest.mark.parametrize("torn", [1, 9])
def test_rollouts_that_change_as_they_are_read_are_read_again_a_few_times(torn, writer, tmp_path, monkeypatch):
    """The log gets a line after each reading, and the first `torn` readings met half of one."""
    monkeypatch.setattr(follow, "time", Clock())
    writer.whole(20)(), writer.rollouts(21)()
    log, read = writer.run / "log" / "step-21.jsonl", []

    def diagnose(model: str, folder: Path) -> None:
        read.append(model)
        write_rows(log, native_rows(step=21) * (1 + len(read)))
        if len(read) <= torn:
            raise InputError("half a line")
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps({"model": {"path": model}}))

    known = {"write": lambda *_: None, "asked": {}}
    following = follow.Following(writer.run, writer.run / "log", tmp_path / "out", diagnose, **known)
    if torn < follow.TRIES:
        following.follow()
        assert len(read) == torn + 1 and [*following.done] == [20] and not following.failed
    else:
        with pytest.raises(SystemExit) as stopped:
            following.follow()
        assert stopped.value.code == 1 and len(read) == follow.TRIES and [*following.failed] == [20]


def test_a_checkpoint_that_is_deleted_as_it_is_read_is_no_fault(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "time", Clock())
    writer.whole(3)(), writer.whole(20)()

    def diagnose(model: str, folder: Path) -> None:
        if model.endswith("-3"):
            shutil.rmtree(model)
            raise InputError("it holds no config.json")
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps({"model": {"path": model}}))

    following = follow.Following(writer.run, None, tmp_path / "out", diagnose, write=lambda *_: None, asked={})
    following.follow()  # and so with status 0
    assert [*following.done] == [20] and [*following.failed] == [3]


def test_a_run_that_cannot_be_followed_is_refused_in_one_line(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(follow, "time", Clock())  # what is not refused would wait
    (tmp_path / "run").mkdir()
    log, to = write_rows(tmp_path / "log.jsonl"), ("--follow", "--out", tmp_path / "out")
    given = (tmp_path / "run", "--rollouts", log, *to)
    for arguments in (
        (saved[3], *given),
        (saved[3], "--rollouts", log, *to),
        ("embedded", "--rollouts", log, *to),
        (*given, "--plan"),
        (*given, "--step", "4"),
        (*given, "--optimizer-state", log),
        (*given, "--format", "vlre"),
        (*given, "--temperature", "0"),
        (tmp_path / "run", *to),
    ):
        refusal(capsys, "diagnose", *arguments)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("time.sleep", lambda _: None)
    refusal(capsys, "diagnose", *given)
    assert not (tmp_path / "out").exists()


@pytest.mark.all
def test_ctrl_c_ends_the_waiting_with_status_130_and_two_never_follow_into_one_folder(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "gradscope", "diagnose", tmp_path / "run", "--task", "math", "--follow"]
    command += ["--out", out]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        while running.poll() is None and not ((out / follow.LOG).is_file() and "waiting" in log_of(out)):
            time.sleep(0.05)
        second = subprocess.run(command, capture_output=True, text=True)
        running.send_signal(signal.SIGINT)
        said = [line for line in running.stderr if line.startswith("gradscope: ")]
    assert second.returncode == 2 and "another run is writing" in second.stderr
    assert running.returncode == 130 and len(said) == 1 and log_of(out).endswith("stopped: 0 checkpoints diagnosed\n")


@pytest.mark.all
def test_a_real_training_is_followed_while_it_runs(tmp_path, capsys, monkeypatch):
    """A clock that runs two hundred times as fast, so that files are quiet soon."""
    fast = Clock()
    fast.monotonic, fast.sleep = lambda: 200 * time.monotonic(), lambda seconds: time.sleep(seconds / 200)
    monkeypatch.setattr(follow, "time", fast)
    trained, out = tmp_path / "run", tmp_path / "out"
    train = ["train", "--preset", "kk-embedded", "--out", trained, "--people", 2, "--steps", 3, "--save-every", 1]
    train += ["--questions-per-step", 3, "--group-size", 4, "--mini-batch-size", 12, "--max-new-tokens", 200]
    with subprocess.Popen(
        [sys.executable, "-m", "gradscope", *map(str, train), "--save-rollouts", "--trackers"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as training:  # fmt: skip
        ended = outcome_of(
            capsys, "diagnose", trained, "--rollouts", trained / "rollouts", "--follow", "--out", out, *BRIEF
        )
    assert training.returncode == 0 and ended.status == 0, ended.err
    assert "the run has ended with step 3: 3 checkpoints diagnosed" in log_of(out)
    for step in (1, 2, 3):
        manifest = json.loads((out / f"step-{step:06d}" / "manifest.json").read_text())
        assert manifest["rollouts"]["other_step"] == (step == 3)
