"""DeepSpeed's own save_checkpoint: `global_step2` of a tiny model that was trained for two steps with gloo.

Package: deepspeed 0.19.8, built from its sdist with DS_BUILD_OPS=0 and --no-build-isolation, torch 2.13.0; its
shared-memory kernel is left out, for gloo does without. At stages 1 and 3 the model is bfloat16 and one parameter is
frozen; stage 3 has several sub-groups. `whole.pt` beside it holds what DeepSpeed's `safe_get_full_…` gathered.

    PYTHONPATH=tests torchrun --nproc-per-node N tests/support/writers/write_deepspeed.py OUT STAGE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from support.writers.tiny import SETTINGS, STEPS, pack, rows, tiny_model

FROZEN = "model.layers.1.mlp.up_proj.weight"


def main(out: Path, stage: int) -> None:
    deepspeed.comm.torch.build_shm_op = lambda: None
    model, half = tiny_model(), stage != 2
    if half:
        model.get_parameter(FROZEN).requires_grad_(False)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": half},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 300},
        "optimizer": {"type": "AdamW", "params": {**SETTINGS, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
    for step in range(STEPS):
        ids = rows(step, dist.get_rank())
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(out), tag=f"global_step{STEPS}")
    if stage < 3 and hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False  # they were linked before there were any
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    whole = {"weights": {name: safe_get_full_fp32_param(p).clone() for name, p in named.items()}}
    for kind in ("exp_avg", "exp_avg_sq"):
        whole[kind] = {name: safe_get_full_optimizer_state(p, kind).clone() for name, p in named.items()}
    if half:
        frozen = model.get_parameter(FROZEN)
        with deepspeed.zero.GatheredParameters(frozen, enabled=stage == 3):
            whole["weights"][FROZEN] = frozen.detach().float().clone()
    if dist.get_rank() == 0:
        model.config.save_pretrained(out)
        torch.save(whole, out / "whole.pt")
        pack(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
