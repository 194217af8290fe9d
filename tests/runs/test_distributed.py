"""Two processes do what one does: gradients on recorded rollouts, and a whole run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support.distributed_worker import (
    FRUGAL,
    MODEL,
    make_config,
    make_steps,
    measure_frugally,
    measure_gradients,
    take_steps,
)
from support.exact import FLOAT32_GRADIENT, sum_rounding
from support.policies import distance, save_checkpoint
from support.processes import TIMEOUT, launch

from gradscope import load_policy
from gradscope.runs import Processes
from gradscope.tasks import get_task
from gradscope.trainer.learner import build_learner

ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
ACCELERATE += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m")
"""`accelerate launch`: --cpu would start one process (or need MPI), --multi_gpu with --device cpu starts two."""
TRAIN = ("gradscope", "train", "--device", "cpu", "--questions-per-step", "3", "--group-size", "4")
TRAIN += ("--mini-batch-size", "12", "--micro-batch-size", "4", "--max-new-tokens", "100", "--learning-rate", "2e-4")
TRAIN += ("--lopti-eta", "0.5", "--save-every", "1", "--trackers", "tensorboard")
TASK = """
import os
from pathlib import Path
from gradscope.tasks import get_task, register
class Moody:
    name = "moody"
    inner = get_task("knights-knaves-compact")
    graded = 0
    def questions(self, n, *, seed):
        return self.inner.questions(n, seed=seed, people=(2,))
    def reward(self, response, question):
        Moody.graded += 1
        if Path(__file__).with_name("fail").exists() and os.environ["RANK"] == "1" and Moody.graded > 4:
            raise KeyError("no such answer")
        return self.inner.reward(response, question)
register(Moody())
"""
"""Once there is a file `fail`, it raises in the second process from its second step on: that grades four a step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / MODEL, MODEL)


@pytest.fixture(scope="module")
def out(folder, tmp_path_factory) -> Path:
    """Where two processes have written what they found (distributed_worker.py)."""
    out = tmp_path_factory.mktemp("out")
    for ended in launch(Path(__file__).parents[1] / "support" / "distributed_worker.py", folder, out):
        assert ended.status == 0, ended.stderr
    return out


@pytest.fixture(scope="module")
def found(out) -> list[dict[str, Any]]:
    return [torch.load(out / f"{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Any]:
    """The same, found by this one process."""
    accelerator, steps = Accelerator(cpu=True), make_steps()
    learner = build_learner(make_config(folder), accelerator)
    found = {"gradients": measure_gradients(learner, steps), "steps": take_steps(learner, steps)}
    return found | {"frugal": measure_frugally(folder, accelerator, **FRUGAL)}


def test_two_processes_have_the_gradient_of_one_on_recorded_rollouts(found, alone):
    # Alone, a process computes prompts once and pads nothing; several pad: the same sums, rounded in another order.
    assert [process["type"] for process in found] == ["MULTI_CPU"] * 2
    for process in found:
        for two, one in zip(process["whole"]["gradients"], alone["gradients"], strict=True):
            assert (two["size"], two["name"]) == (one["size"], one["name"])
            assert distance(two["gradient"], one["gradient"]) < 2 * FLOAT32_GRADIENT
            assert two["norm"] == pytest.approx(one["norm"], rel=2 * FLOAT32_GRADIENT)
            assert two["totals"] == pytest.approx(one["totals"], rel=1e-5, abs=1e-6)


def test_lopti_passes_add_up_to_the_whole_gradient_across_processes(found):
    by_name = {(g["size"], g["name"]): g["gradient"] for g in found[0]["whole"]["gradients"]}
    low, high, whole = (by_name[2, name] for name in ("low", "high", "all"))
    both = {name: low[name] + high[name] for name in low}
    assert distance(both, whole) < sum_rounding(whole, low, high)  # the two pull against each other


def test_adapters_and_recomputed_activations_have_the_gradient_of_one_process_too(found, alone):
    for process in found:
        for two, one in zip(process["frugal"], alone["frugal"], strict=True):
            assert distance(two["gradient"], one["gradient"]) < 2 * FLOAT32_GRADIENT


def test_steps_of_two_processes_are_those_of_one(found, alone):
    for process in found:
        steps = process["whole"]["steps"]
        for two, one in zip(steps["results"], alone["steps"]["results"], strict=True):
            assert two[:2] == one[:2]
            assert two[2:] == pytest.approx(one[2:], rel=1e-4)
        torch.testing.assert_close(steps["reference"], alone["steps"]["reference"], atol=1e-5, rtol=0)
        # Adam divides each gradient by its own size, so entries near 0 carry their rounding into three steps of 1e-2.
        torch.testing.assert_close(steps["logprobs"], alone["steps"]["logprobs"], atol=2e-3, rtol=0)
        assert distance(steps["weights"], alone["steps"]["weights"]) < 1e-4


def test_both_processes_hold_the_same_weights_after_their_steps(found):
    first, second = (process["whole"]["steps"] for process in found)
    assert first["results"] == second["results"]
    assert all(torch.equal(weight, second["weights"][name]) for name, weight in first["weights"].items())


def test_a_pass_that_scores_its_tokens_gives_each_process_all_of_them(found):
    for process in found:
        torch.testing.assert_close(process["scored"]["by the pass"], process["scored"]["before"], atol=1e-5, rtol=0)


def test_an_error_of_one_process_is_one_of_all(found):
    text = "only the second process saw this"
    assert [process["failures"] for process in found] == [[f"InputError: {text}", f"OSError: {text}"]] * 2


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two steps."""
    root = tmp_path_factory.mktemp("run")
    (root / "task.py").write_text(TASK)
    ended = launch("-m", *steps(2, root), "--out", root / "whole")
    assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    return root


def steps(count: int, root: Path) -> tuple[str, ...]:
    return (*TRAIN, "--task", f"{root}/task.py:moody", "--steps", str(count))


def numbers(out: Path) -> list[dict[str, Any]]:
    """What is logged of each step, but for times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{n: v for n, v in line.items() if "seconds" not in n and "per_second" not in n} for line in lines]


@pytest.mark.all
def test_a_run_of_two_processes_writes_everything_once(run):
    assert [line["step"] for line in numbers(run / "whole")] == [1, 2]
    assert json.loads((run / "whole/manifest.json").read_text())["processes"] == 2
    assert sorted(p.name for p in (run / "whole/checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert len(list((run / "whole/trackers").rglob("events.*"))) == 1
    assert len(torch.load(run / "whole/checkpoints/step-000002/random_states.pt")) == 2
    before, after = load_policy("embedded"), load_policy(run / "whole/checkpoints/step-000002")
    assert not torch.equal(next(before.model.parameters()), next(after.model.parameters()))


@pytest.mark.all
def test_under_accelerates_own_launcher_a_run_has_the_same_numbers(run):
    command = [sys.executable, *ACCELERATE, *steps(2, run), "--out", str(run / "launched")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert numbers(run / "launched") == numbers(run / "whole")


@pytest.mark.all
def test_a_run_of_two_processes_resumes_to_the_same_numbers_and_an_error_of_one_ends_both(run):
    out = run / "again"
    shutil.copytree(run / "whole", out)
    shutil.rmtree(out / "checkpoints/step-000002")
    (run / "fail").touch()
    ended = launch("-m", *steps(3, run), "--out", out, "--resume")
    assert [process.status for process in ended] == [2, 2]
    lines = [line for process in ended for line in process.stderr.splitlines() if line.startswith("gradscope:")]
    assert len(lines) == 1 and "moody" in lines[0] and "KeyError" in lines[0]
    assert not any("Traceback" in process.stderr for process in ended)
    assert numbers(out) == numbers(run / "whole")  # the second step anew; the third has raised
    last = "checkpoints/step-000002/model.safetensors"
    assert (out / last).read_bytes() == (run / "whole" / last).read_bytes()


ENDS = """
import os, sys, torch, torch.distributed.nn
from pathlib import Path
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.learner import make_accelerator
for turn in range(10):
    store = torch.distributed.FileStore(f"{sys.argv[1]}-{turn}", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    accelerator = make_accelerator(TrainConfig(device="cpu", trackers=()), Path("."))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    for _ in range(3):
        torch.distributed.all_gather_object([None, None], "x" * 100)
    accelerator.end_training()
    del model
    accelerator.state._reset_state(True)
os._exit(0)
"""
"""Processes that train nothing, ten times, and let go of the model right after they have exchanged something."""


def test_the_end_of_training_does_not_wait_for_a_thread_that_waits_for_it(tmp_path):
    ended = launch("-c", ENDS, tmp_path / "store", timeout=300)
    assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr


def test_a_process_without_questions_samples_nothing():
    from gradscope.sampling import HFSampler
    from gradscope.trainer import Questions
    from gradscope.trainer.rollout import _sample_rows

    config = make_config("embedded", questions_per_step=1, people=(2,))
    policy, questions = load_policy("embedded"), Questions(get_task(config.task), config).of_step(0)
    sampler = HFSampler(policy, progress=False)
    assert _sample_rows(policy, sampler, questions, config, 0, Processes(1, 2)) == []
