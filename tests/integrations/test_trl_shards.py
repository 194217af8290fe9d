"""The callback where training keeps weights or AdamW's state in shards: two processes, measured as one, left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes import launch
from support.sharded_steps import step_by_one
from support.trl_runs import needs_trl, save_policy

pytestmark = needs_trl
SAME = 1e-5
"""Relative, of sums in float32 that are added up in another order."""

TRAINING = """
import hashlib, json, os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from support.trl_runs import make_trainer, train
from gradscope.integrations.trl_callback import GradScopeCallback
out, kind, rank = Path(sys.argv[2]), sys.argv[3], os.environ["RANK"]
sizes = {"per_device_train_batch_size": 4, "max_steps": 10, "ddp_backend": "gloo", "learning_rate": 1e-3, "move": 0.02}

def run(**watched):
    trainer = make_trainer(out / "policy", out / "run", **sizes)
    model, accelerator = trainer.model, trainer.accelerator
    if kind == "fully_shard":
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
        # accelerate has no FSDP on a CPU, and would put DDP around it
        accelerator.prepare_model = lambda model, **_: accelerator._models.append(model) or model
    else:
        accelerator.device_placement = False  # for which it would ask for the state of all processes
        trainer.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    callback = GradScopeCallback(trainer, every=3, micro_batch_size=3, progress=False, **watched) if watched else None
    if watched:
        trainer.add_callback(callback)
    train(trainer)
    whole, digest = [*model.parameters()], hashlib.sha256(torch.get_rng_state().numpy())
    if kind == "fully_shard":
        own = sum(p.to_local().numel() for p in whole)
        whole = [p.full_tensor() for p in whole]
    else:
        own = sum(p.numel() for group in trainer.optimizer.optimizer.optim.param_groups for p in group["params"])
    for parameter in whole:
        digest.update(parameter.detach().numpy())
    share = own / sum(p.numel() for p in whole)
    return {"digest": digest.hexdigest(), "share": share, "rows": callback.rows if watched else []}

found = [run(), run(cosines=True), run(budget=0.99)]
(out / f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.all
@pytest.mark.parametrize("kind", ["fully_shard", "ZeRO-1"])
def test_the_measured_gradient_is_the_trained_one_and_ten_steps_end_bit_equal(tmp_path, kind):
    save_policy(tmp_path / "policy")
    (code := tmp_path / "training.py").write_text(TRAINING)
    for ended in launch(code, Path(__file__).parents[1], tmp_path, kind):
        assert ended.status == 0, ended.stderr
    runs = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for alone, watched, some in runs:
        assert 0 < alone["share"] < 1 and alone["digest"] == watched["digest"] == some["digest"]
        assert [row["step"] for row in watched["rows"]] == [1, 4, 7, 10]
        for row in watched["rows"]:
            assert row["grad_norm_ratio"] == pytest.approx(1, abs=SAME) and row["num_tokens"] > 40  # of both
        for row, other in zip(some["rows"], watched["rows"], strict=True):
            assert row["measured_prompts"] == row["num_prompts"]
            assert row["grad_projection"] == pytest.approx(1, abs=SAME)
            for name in row.keys() & {n for n in other if n.startswith(("grad_share/", "right_direction_"))}:
                assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6, nan_ok=True)
    (_, first, _), (_, second, _) = runs
    assert [numbers(row) for row in first["rows"]] == [numbers(row) for row in second["rows"]]


def numbers(row):
    return {name: value for name, value in row.items() if name != "seconds"}


@pytest.mark.parametrize(("name", "spread"), [("qwen2", "both"), ("llama", "first")])
def test_two_processes_with_shards_measure_a_step_as_one_with_all_responses_does(tmp_path, name, spread):
    script = Path(__file__).parents[1] / "support" / "sharded_steps.py"
    for ended in launch(script, tmp_path, name, spread):
        assert ended.status == 0, ended.stderr
    expected = step_by_one(name)
    assert {f"grad_cosine/p0-25/{other}" for other in ("p25-50", "all")} < expected.keys()
    assert expected["right_direction_positive/p0-25"] > 0.5
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx(expected, rel=SAME, abs=SAME, nan_ok=True)
