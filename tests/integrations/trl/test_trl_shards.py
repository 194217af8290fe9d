"""Callback and monitor where weights or AdamW's state lie in shards: two processes, measured as one, left alone."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.processes import launch
from support.refusals import refused
from support.sharded_steps import step_by_one
from support.tiers import every
from support.trl_runs import make_trainer, needs_trl, save_policy, train
from transformers import TrainerCallback

from gradscope.integrations.trl.callback import GradScopeCallback

pytestmark = needs_trl
SAME = 1e-5
"""Of sums in float32 that are added up in another order, against the sum's size."""

TRAINING = """
import hashlib, json, os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.optim import ZeroRedundancyOptimizer
from support.trl_runs import make_trainer, train
from gradscope.integrations.trl import GradScopeCallback, RolloutWriter, SpikeRecorder, TokenMonitor
import pandas as pd
out, kind, rank = Path(sys.argv[2]), sys.argv[3], os.environ["RANK"]
sizes = {"per_device_train_batch_size": 4, "max_steps": 10, "ddp_backend": "gloo", "learning_rate": 1e-3, "move": 0.02}
sizes |= {"max_completion_length": 7}  # every token of every block is an exchange

stage = int(kind[-1]) if kind.startswith("DeepSpeed") else 0
if stage:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm.torch
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # gloo does without, and compiling takes minutes
    zero = {"stage": stage, "stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 20000}
    # Of a second model under ZeRO-3 there is nothing to move before it is gathered.
    sizes |= {"move": 0.0, "max_completion_length": 10}
    sizes |= {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}}
    sizes["deepspeed"] |= {"zero_optimization": zero, "zero_allow_untested_optimizer": True}

def run(**watched):
    trainer = make_trainer(out / "policy", out / "run", **sizes)
    model, accelerator = trainer.model, trainer.accelerator
    if kind == "FSDP":
        # accelerate has none on a CPU, where its own preparation works nevertheless
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen2DecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        accelerator.state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        trainer.is_fsdp_enabled = True
    elif not stage:
        accelerator.device_placement = False  # for which it would ask for the state of all processes
        trainer.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    callback = GradScopeCallback(trainer, every=3, micro_batch_size=3, progress=False, **watched) if watched else None
    monitor = TokenMonitor(trainer)
    if watched:
        writer = RolloutWriter(trainer)
        recorder = None if stage else SpikeRecorder(trainer, times=1.0001)  # above the median: no spike, but explained
        for each in (callback, monitor, writer, *([recorder] if recorder else [])):
            trainer.add_callback(each)
    train(trainer)
    whole, digest = [*trainer.model.parameters()], hashlib.sha256(torch.get_rng_state().numpy())
    if kind == "FSDP":
        own = sum(p.to_local().numel() for p in whole)
        whole = [p.full_tensor() for p in whole]
    elif stage:
        parts = trainer.model_wrapped.optimizer.single_partition_of_fp32_groups if stage < 3 else ()
        own = sum(p.numel() for p in parts or [p.ds_tensor for p in whole])
        with deepspeed.zero.GatheredParameters(whole, enabled=stage == 3):
            whole = [p.detach().clone() for p in whole]
    else:
        own = sum(p.numel() for group in trainer.optimizer.optimizer.optim.param_groups for p in group["params"])
    for parameter in whole:
        digest.update(parameter.detach().numpy())
    share = own / sum(p.numel() for p in whole)
    rows = {"rows": callback.rows if watched else [], "live": monitor.rows, "written": writer.steps if watched else []}
    files = sorted((out / "run" / "gradscope" / "spikes").glob("*.parquet")) if watched and rank == "0" else []
    rows["explained"] = [float(pd.read_parquet(file)["gradient_share"].sum()) for file in files]
    return {"digest": digest.hexdigest(), "share": share} | rows

found = [run(), run(cosines=True), run(budget=0.99) if not stage else None]
(out / f"{rank}.json").write_text(json.dumps(found))
"""


needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.mark.all
@pytest.mark.parametrize(
    "kind", ["FSDP", "ZeRO-1", *(pytest.param(f"DeepSpeed {stage}", marks=needs_deepspeed) for stage in (1, 2, 3))]
)
def test_the_measured_gradient_is_the_trained_one_and_ten_steps_end_bit_equal(tmp_path, kind):
    save_policy(tmp_path / "policy")
    (code := tmp_path / "training.py").write_text(TRAINING)
    for ended in launch(code, Path(__file__).parents[2], tmp_path, kind):
        assert ended.status == 0, ended.stderr
    runs = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for alone, watched, some in runs:
        assert 0 < alone["share"] < 1 and alone["digest"] == watched["digest"]
        assert [row["step"] for row in watched["rows"]] == [1, 4, 7, 10] and watched["written"] == [*range(1, 11)]
        for row in watched["rows"]:
            assert row["grad_norm_ratio"] == pytest.approx(1, abs=SAME) and row["num_tokens"] > 28  # of both
        if kind.startswith("DeepSpeed"):
            continue
        assert alone["digest"] == some["digest"]
        assert watched["explained"] == pytest.approx([1.0] * len(watched["explained"]), abs=SAME)
        for row, other in zip(some["rows"], watched["rows"], strict=True):
            assert row["measured_prompts"] == row["num_prompts"]
            assert row["grad_projection"] == pytest.approx(1, abs=SAME)
            for name in row.keys() & {n for n in other if n.startswith(("grad_share/", "right_direction_"))}:
                assert row[name] == pytest.approx(other[name], abs=SAME, nan_ok=True)
        assert [row["step"] for row in watched["live"]] == [*range(1, 11)]
        for row in watched["rows"]:
            live = watched["live"][row["step"] - 1]
            shares = [name for name in live if name.startswith("token_share/")]
            assert [live[name] for name in shares] == pytest.approx([row[name] for name in shares])
            assert sum(v for name, v in live.items() if name.startswith("logit_grad_share/")) == pytest.approx(1)
    (_, first, _), (_, second, _) = runs
    assert [numbers(row) for row in first["rows"]] == [numbers(row) for row in second["rows"]]
    assert first["explained"] or kind.startswith("DeepSpeed")


def numbers(row):
    return {name: value for name, value in row.items() if name != "seconds"}


@pytest.mark.parametrize(("name", "spread"), [("qwen2", "both"), ("llama", "first")])
def test_two_processes_with_shards_measure_a_step_as_one_with_all_responses_does(tmp_path, name, spread):
    script = Path(__file__).parents[2] / "support" / "sharded_steps.py"
    for ended in launch(script, tmp_path, name, spread):
        assert ended.status == 0, ended.stderr
    expected = step_by_one(name)
    assert {f"grad_cosine/p0-25/{other}" for other in ("p25-50", "all")} < expected.keys()
    assert expected["right_direction_positive/p0-25"] > 0.5
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx(expected, rel=SAME, abs=SAME, nan_ok=True)


# ---- without DeepSpeed: what accelerate makes of a trainer under it, as far as the callback can tell


class AsUnderDeepSpeed(TrainerCallback):
    """accelerate's backward() steps, and only it does; a hook takes each forward pass for one of training's."""

    def __init__(self, trainer):
        self.trainer, self.training, self.norms = trainer, [], []
        trainer.add_callback(self)

    def on_train_begin(self, args, state, control, **_):
        trainer, accelerator = self.trainer, self.trainer.accelerator
        optimizer, backward = trainer.optimizer.optimizer, accelerator.backward

        class Engine:
            @staticmethod
            def step():
                gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
                self.norms.append(torch.nn.utils.get_total_norm(gradients))
                optimizer.step()
                optimizer.zero_grad()  # and the step that TRL asks for afterwards finds no gradient

        engine = Engine()

        def backward_and_step(loss, **keywords):
            backward(loss, **keywords)
            if accelerator.sync_gradients:
                engine.step()

        def prologue(module, inputs):
            self.training.append(module.training)

        prologue.__module__ = "deepspeed.runtime.engine"
        trainer.model.register_forward_pre_hook(prologue)
        accelerator.backward, accelerator.clip_grad_norm_ = backward_and_step, lambda *_, **__: self.norms[-1]
        accelerator.deepspeed_engine_wrapped = SimpleNamespace(engine=engine)
        trainer.is_deepspeed_enabled = True


@pytest.mark.parametrize(("loss_type", "accumulated"), every(3, product(["dapo", "cispo"], [1, 2])))
def test_a_step_that_is_taken_in_the_backward_pass_is_measured_before_it(tmp_path, accumulated, loss_type):
    policy, rows = save_policy(tmp_path / "policy"), []
    sizes = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 8 // accumulated, "move": 0.02}
    sizes["loss_type"] = loss_type
    for early in (False, True):
        trainer = make_trainer(policy, tmp_path / "run", **sizes)
        stepping = AsUnderDeepSpeed(trainer) if early else None
        callback = GradScopeCallback(trainer, every=2, micro_batch_size=3, progress=False)
        trainer.add_callback(callback)
        train(trainer)
        rows.append([numbers(row) for row in callback.rows])
    assert rows[0] == rows[1] and [row["step"] for row in rows[1]] == [1, 3]
    assert all(row["grad_norm_ratio"] == pytest.approx(1, abs=SAME) for row in rows[1])
    assert stepping.training and all(stepping.training)  # the measured passes are in eval mode


def test_a_budget_under_deepspeed_is_refused(tmp_path):
    trainer = make_trainer(save_policy(tmp_path / "policy"), tmp_path / "run")
    trainer.is_deepspeed_enabled = True
    with refused("budget"):
        GradScopeCallback(trainer, budget=0.2)
    GradScopeCallback(trainer)
