"""On a GPU that is not there, which refuses what CUDA refuses, numbers are a CPU's, and decoding waits once a step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORK = """
import sys
import torch
torch.set_num_threads(1)
device, out = sys.argv[1:]
if device == "cuda":
    from support import pretend_gpu
    gpu = pretend_gpu.install()
from torch.nn.attention import SDPBackend, sdpa_kernel
from support.policies import make_batch, make_policy
from gradscope import Resources, TokenJacobian, apply_updates, interval_gradients, measure, movement_table
from gradscope.sampling import HFSampler
from gradscope.updates import influence

policy = make_policy("llama")
policy.model.to(device)
batch = make_batch(policy, temperature=0.7)
generator = torch.Generator().manual_seed(0)
weights = torch.linspace(-1.0, 1.0, batch.num_tokens)

def contributions(memory):
    found = TokenJacobian(policy, batch, Resources(memory)).contributions(weights, folds=3)
    return found.by_fold / found.square_norm

with sdpa_kernel(SDPBackend.MATH):
    found = {
        "measure": measure(policy, batch).select_dtypes("number").to_numpy(),
        "intervals": interval_gradients(policy, batch).table.select_dtypes("number").to_numpy(),
        "updates": movement_table(apply_updates(policy, batch, ["all", "lopti"])).select_dtypes("number").to_numpy(),
        "contributions": contributions(1 << 34),
        "contributions by scratch files": contributions(0),
        "influence": influence(policy, batch).contributions.to_numpy(float),
        "sample": [
            sample.response_ids
            for group in HFSampler(policy, progress=False).sample(
                [[4, 5], [6]], n=2, temperature=0.7, max_new_tokens=6, generator=generator
            )
            for sample in group
        ],
    }
if device == "cuda":
    assert gpu.operations > 1000
    counts = []
    for length in (5, 25):
        with gpu.counting() as waits:
            generator.manual_seed(0)
            HFSampler(policy, progress=False).sample(
                [[4, 5], [6]], n=2, temperature=0.7, max_new_tokens=length, generator=generator
            )
        counts.append(sum(n for kind, n in waits.total().items() if not kind.startswith("h2d")))
    assert counts[1] - counts[0] == 20  # the host waits once a step of decoding
torch.save(found, out)
"""


@pytest.mark.all
def test_numbers_of_a_gpu_that_is_not_there_are_the_cpus(repository, tmp_path):
    if torch.version.cuda is not None or not torch.__version__.startswith("2.13"):
        pytest.skip("the stand-in knows the CPU build of torch 2.13")
    for device in ("cpu", "cuda"):
        command = [sys.executable, "-c", WORK, device, tmp_path / device]
        path = os.pathsep.join([str(repository), str(repository / "tests")])
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    host, there = (torch.load(Path(tmp_path / device), weights_only=False) for device in ("cpu", "cuda"))
    assert host.keys() == there.keys()
    for name, value in host.items():  # float32 sums in other orders
        torch.testing.assert_close(there[name], value, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
