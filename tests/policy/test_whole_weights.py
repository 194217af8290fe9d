"""Weights in shards are whole while they are measured, and what training holds is what it held."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from support.policies import make_batch, make_model, make_policy
from support.processes import launch
from support.refusals import refused
from support.tiers import every

from gradscope import measure, whole_weights
from gradscope.gradients import TokenJacobian

SHARDED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from support.policies import make_batch, make_policy
from gradscope import InputError, measure, whole_weights
from gradscope.gradients import Resources, TokenJacobian
from gradscope.runs import Processes
out, name = Path(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank, policy = dist.get_rank(), make_policy(name)
batch, model = make_batch(policy), policy.model
model.model.norm.requires_grad_(False)
for unit in (*model.model.layers, model):
    fully_shard(unit, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
model.train()

def pass_back(seed):
    ids = torch.randint(4, 90, (2, 8), generator=torch.Generator().manual_seed(2 * seed + rank))
    model(input_ids=ids, labels=ids).loss.backward()

def held():
    own = {n: (p, p.grad, p.requires_grad) for n, p in model.named_parameters()}
    bits = [t.to_local().clone() for p, g, _ in own.values() for t in (p, g) if t is not None]
    hooks = [[*m._forward_pre_hooks.items(), *m._forward_hooks.items()] for m in model.modules()]
    return own, bits, hooks, [m.training for m in model.modules()], torch.get_rng_state()

def same(before, after):
    (own, bits, *rest, random), (now, then, *others, drawn) = before, after
    objects = all(a is b for n in own for a, b in zip(own[n], now[n], strict=True))
    return objects and all(map(torch.equal, bits, then)) and rest == others and torch.equal(random, drawn)

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
pass_back(0)
optimizer.step()
optimizer.zero_grad()
pass_back(1)
before, refusals = held(), 0
with torch.no_grad():
    model(input_ids=batch.input_ids)  # leaves the outermost unit gathered, in bfloat16
try:
    measure(policy, batch)
except InputError:
    refusals += 1
with whole_weights(model, gradients=True):
    table = measure(policy, batch, resources=Resources(processes=Processes(rank, 2)))
    mine = TokenJacobian(policy, batch.select([rank]))  # by itself: the processes have other responses
    sums = mine.vjp(torch.ones(1, mine.num_tokens)).rows
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    model.lm_head.weight.data.zero_()  # a copy's
try:
    with whole_weights(model):
        raise InputError("it ends badly")
except InputError:
    refusals += 1
undisturbed = same(before, held())
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
expected = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
flags = flags == {n: p.requires_grad for n, p in model.named_parameters()}
pass_back(2)  # and training goes on
flat = FullyShardedDataParallel(make_policy(name).model, device_id=torch.device("cpu"))
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
split = parallelize_module(make_policy(name).model, mesh["tensor"], {"lm_head": ColwiseParallel()})
both = parallelize_module(make_policy("llama").model, mesh["tensor"], {"lm_head": ColwiseParallel()})
fully_shard(both, mesh=mesh["data"])
for other in (flat, split, both):
    try:
        with whole_weights(other):
            pass
    except InputError:
        refusals += 1
table.to_parquet(out / f"{rank}.parquet")
checks = {"refusals": refusals, "undisturbed": undisturbed, "flags": flags}
torch.save([checks, whole, sums, gradients, expected], out / f"{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.all
@pytest.mark.parametrize("name", every(2, ["qwen2", "llama"]))
def test_two_processes_measure_shards_as_one_measures_the_whole_and_hold_what_they_held(tmp_path, name):
    (code := tmp_path / "sharded.py").write_text(SHARDED)
    for ended in launch(code, Path(__file__).parents[1], tmp_path, name):
        assert ended.status == 0, ended.stderr
    policy = make_policy(name)
    batch = make_batch(policy)
    for rank in (0, 1):
        checks, whole, sums, gradients, expected = torch.load(tmp_path / f"{rank}.pt")
        assert checks == {"refusals": 5, "undisturbed": True, "flags": True}
        policy.model.load_state_dict(whole)
        # A response is measured by one process, from the same bits.
        table = measure(policy, batch)
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / f"{rank}.parquet"), table, check_exact=True)
        mine = TokenJacobian(policy, batch.select([rank]))
        assert torch.equal(sums, mine.vjp(torch.ones(1, mine.num_tokens)).rows)
        assert gradients.keys() == expected.keys() and "model.norm.weight" not in gradients
        assert all(torch.equal(gradients[n], expected[n]) for n in expected)


def test_weights_that_are_whole_are_left_alone():
    model = make_model("gpt2")
    held = [{name: vars(m)[name] for name in ("_parameters", "_forward_hooks")} for m in model.modules()]
    with whole_weights(model):
        inside = [{name: vars(m)[name] for name in ("_parameters", "_forward_hooks")} for m in model.modules()]
    assert all(a[n] is b[n] for a, b in zip(held, inside, strict=True) for n in a)


def test_a_parameter_that_deepspeed_has_cut_up_is_refused():
    policy = make_policy("gpt2")
    next(policy.model.parameters()).ds_id = 0  # its mark under ZeRO-3
    with refused("whole_weights"):
        TokenJacobian(policy, make_batch(policy))
