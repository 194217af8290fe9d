"""verl's own FSDPCheckpointManager: `global_step_2/actor` of a tiny model that was trained for two steps with gloo.

Package: verl 0.9.1 with transformers 5.10.4 and torch 2.13.0. Called: `apply_fsdp2`, or torch's FSDP with
`get_fsdp_wrap_policy` as verl's workers do, and `FSDPCheckpointManager.save_checkpoint`. `whole.pt` beside it holds
what torch's `get_state_dict` gathered. WAY: fsdp2, fsdp (verl's default) or fsdp-orig (use_orig_params).

    PYTHONPATH=tests torchrun --nproc-per-node N tests/support/writers/write_verl_shards.py OUT WAY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from support.writers.tiny import SETTINGS, STEPS, pack, rows, tiny_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy


def main(out: Path, way: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, mesh = tiny_model(), init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    if way == "fsdp2":
        apply_fsdp2(model, {"mesh": mesh}, {})
    else:
        how = {"device_mesh": mesh, "use_orig_params": way == "fsdp-orig", "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(model, auto_wrap_policy=get_fsdp_wrap_policy(model), **how)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    for step in range(STEPS):
        ids = rows(step, rank)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    contents = ["model", "optimizer", "extra"]
    settings = OmegaConf.create({"save_contents": contents, "load_contents": contents, "async_save": False})
    manager = FSDPCheckpointManager(model, optimizer=optimizer, checkpoint_config=settings)
    manager.save_checkpoint(str(out / f"global_step_{STEPS}" / "actor"), global_step=STEPS)
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        kept = {kind: {n: s[kind] for n, s in whole[1]["state"].items()} for kind in ("exp_avg", "exp_avg_sq")}
        torch.save({"weights": whole[0], **kept}, out / "whole.pt")
        pack(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
