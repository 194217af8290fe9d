"""Half-precision weights that are upcast where they are used: a whole float32 model's numbers in half of its memory."""

from __future__ import annotations

import copy
import json
import re
import weakref
from pathlib import Path

import pandas as pd
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from support import handmade
from support.adapters import save_adapter
from support.cli import run
from support.gradients import predict_changes, sum_gradients
from support.oracle import as_policy, measure_all
from support.policies import CAUSAL, VOCAB, make_batch, make_model, make_responses, write_jsonl
from support.refusals import refused
from support.tiers import every
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from gradscope.errors import InputError
from gradscope.gradients import (
    MeasureSettings,
    TableMeasurement,
    measure,
)
from gradscope.gradients.engine.results import TOLERANCES
from gradscope.policy import Policy, arithmetic_dtype, load_policy
from gradscope.policy.upcasting import upcast_on_use
from gradscope.updates import StepSettings, apply_update, influence

ROUNDING = 1e-5
"""Copies are exact, so that the same products are made of the same numbers; only their order could differ."""
FAMILIES = (*CAUSAL, "gemma", "seed_oss", "llama_biases_tied")


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> Path:
    """Checkpoints in bfloat16, and one in float16."""
    folder = tmp_path_factory.mktemp("halves")
    for name in FAMILIES:
        make_model(name, dtype=torch.bfloat16).save_pretrained(folder / name)
    make_model("llama", dtype=torch.float16).save_pretrained(folder / "float16")
    return folder


def both(folder: Path, **settings: object) -> tuple[Policy, Policy]:
    """The same weights as a whole float32 model, and upcast."""
    return tuple(load_policy(folder, dtype=dtype, **settings) for dtype in ("float32", "upcast"))


def assert_equal_numbers(ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(ours, theirs, rtol=ROUNDING, atol=1e-8)


@pytest.mark.parametrize("name", every(4, ["qwen2", "gpt2", "gemma3", "mixtral", "float16"]))
def test_every_number_of_the_table_is_the_whole_float32_models(name, halves):
    whole, upcast = both(halves / name)
    half = torch.float16 if name == "float16" else torch.bfloat16
    assert {p.dtype for p in upcast.model.parameters()} == {half} and upcast.dtype == torch.float32
    batch = make_batch(whole)
    some = {"tokens": torch.arange(0, batch.num_tokens, 5), "per_module": True, "self_check": False}
    tables = [measure(policy, batch, **some) for policy in (upcast, whole)]
    assert_equal_numbers(*tables)


@pytest.mark.parametrize("name", every(4, [*FAMILIES, "float16"]))
def test_summed_gradients_are_float32_and_the_whole_models(name, halves):
    whole, upcast = both(halves / name)
    batch = make_batch(whole)
    seeds = torch.randn(2, *batch.input_ids.shape, generator=torch.Generator().manual_seed(4))
    ours, theirs = (sum_gradients(p.model, batch, seeds, 3) for p in (upcast, whole))
    assert ours.dtype == torch.float32
    assert (ours - theirs).norm() <= ROUNDING * theirs.norm()
    # What is rounded to half precision on its way would be off by 1e-3 to 1e-2.
    assert ((ours - ours.bfloat16().float()).norm() > 1e-3 * ours.norm()).item()


def test_the_self_check_holds_it_to_the_tolerance_of_float32(halves):
    upcast = load_policy(halves / "qwen2", dtype="upcast")
    with TableMeasurement(upcast, make_batch(upcast), MeasureSettings()) as measurement:
        check = measurement.check
    assert check.tokens and check.tolerance == TOLERANCES[torch.float32] and check.largest_difference < 1e-4


@pytest.mark.parametrize(
    "module, x",
    [
        (nn.Linear(6, 5), torch.randn(4, 6)),
        (Conv1D(5, 6), torch.randn(4, 6)),
        (nn.LayerNorm(6), torch.randn(4, 6)),
        (nn.Embedding(9, 6, padding_idx=3), torch.tensor([[1, 3, 1, 8], [1, 1, 3, 0]])),
        (nn.Embedding(9, 6, max_norm=0.1), torch.tensor([[1, 3, 1, 8]])),
    ],
)
def test_a_modules_output_and_gradients_are_those_of_a_float32_copy(module, x):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16().float()
    whole = nn.Sequential(module)
    model = Wrapped(torch.nn.Sequential(torch.nn.Identity(), copy.deepcopy(module).bfloat16()))
    upcast_on_use(model)
    ours, theirs = model.inner(x), whole(x)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    seed = torch.randn(theirs.shape, generator=generator)
    for used, output in ((model, ours), (whole, theirs)):
        for parameter, gradient in zip(
            used.parameters(), torch.autograd.grad(output, list(used.parameters()), seed), strict=True
        ):
            parameter.found = gradient
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        assert a.dtype == torch.bfloat16 and a.found.dtype == torch.float32
        torch.testing.assert_close(a.found, b.found, rtol=1e-6, atol=1e-6)


class Wrapped(nn.Module):
    """What `upcast_on_use` tries with ids, and does not mind."""

    device = torch.device("cpu")

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, use_cache: bool) -> None:
        return None


class Copies(TorchDispatchMode):
    """Float32 copies of matrices of these shapes: how many are alive."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes, self.seen, self.most = shapes, [], 0

    @property
    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.seen)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.bfloat16:
            made = [t for t in tree_leaves(result) if t.shape in self.shapes or t.shape[::-1] in self.shapes]
            self.seen += [StorageWeakRef(t.untyped_storage()) for t in made]
            self.most = max(self.most, self.alive)
        return result


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_one_copy_of_a_matrix_is_alive_at_a_time_and_none_waits_for_the_backward_pass(name, halves):
    model = load_policy(halves / name, dtype="upcast").model
    matrices = {p.shape for p in model.parameters() if p.ndim == 2}
    ids = torch.randint(4, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    with Copies(matrices) as copies:
        logits = model(input_ids=ids, use_cache=False).logits
        assert (copies.most, copies.alive) == (1, 0) and len(copies.seen) >= 12
        made = len(copies.seen)
        torch.autograd.grad(logits.sum(), list(model.parameters()))
        assert len(copies.seen) > made and copies.most <= 2 and not copies.alive


def test_modules_whose_forward_accelerate_wraps_are_upcast_too(halves):
    whole, upcast = both(halves / "llama", device={"model": "cpu", "lm_head": "cpu"})
    add_hook_to_module(upcast.model.lm_head, AlignDevicesHook("cpu"))  # one that comes later keeps upcasting inside
    assert {p.dtype for p in upcast.model.parameters()} == {torch.bfloat16}
    ids = torch.arange(4, 12)[None]
    assert torch.equal(upcast.model(input_ids=ids).logits, whole.model(input_ids=ids).logits)
    wrapped = make_model("llama", dtype=torch.bfloat16)
    for module in (wrapped.lm_head, wrapped.model.embed_tokens, wrapped.model.layers[0].mlp.up_proj):
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    upcast_on_use(wrapped)
    # Another attention's order of sums.
    torch.testing.assert_close(wrapped(input_ids=ids).logits, whole.model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    ours, theirs = (measure_all(as_policy(m), ids[0], torch.arange(4, 8)) for m in (wrapped, whole.model))
    torch.testing.assert_close(ours.param_grad_norm, theirs.param_grad_norm, rtol=ROUNDING, atol=0.0)


def test_a_copy_computes_with_its_own_weights_and_nothing_holds_a_model_that_is_let_go_of(halves):
    model = load_policy(halves / "llama", dtype="upcast").model
    ids, twin = torch.arange(4, 9)[None], copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(input_ids=ids).logits, model(input_ids=ids).logits)
        twin.lm_head.weight.zero_()
        assert not twin(input_ids=ids).logits.any() and model(input_ids=ids).logits.any()
    gone = weakref.ref(model.lm_head.weight)
    del model
    assert gone() is None


def test_an_adapter_kept_apart_is_measured_on_an_upcast_base(tmp_path):
    make_model("qwen2", dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", r=2, target_modules=["q_proj", "down_proj"])
    whole, upcast = both(adapter, params="adapter")
    batch = make_batch(whole)
    assert_equal_numbers(measure(upcast, batch), measure(whole, batch))
    with refused():
        load_policy(adapter, dtype="upcast")


HABITS = (
    "tied_head_with_a_bias",
    "weights_used_without_their_module",
    "vectors_owned_by_the_block",
    "parametrised_linear",
    "low_rank_adapters",
    "scaled_and_padded_embedding",
    "table_used_as_a_head_without_a_module",
    "experts_called_without_rows",
    "activations_changed_in_place",
)


@pytest.mark.parametrize("name", HABITS)
def test_unusual_decoders_have_the_same_norms_or_are_refused(name):
    models = [handmade.make(name).bfloat16() for _ in range(2)]
    whole, upcast = models[0].float(), models[1]
    try:
        upcast_on_use(upcast)
    except InputError as error:
        assert re.fullmatch(r"[^\n]+; give --dtype float32, or the weights' dtype", str(error))
        return
    assert arithmetic_dtype(upcast) == torch.float32
    ids = torch.randint(0, handmade.VOCAB, (12,), generator=torch.Generator().manual_seed(0))
    targets = torch.arange(4, 12)
    ours, theirs = (measure_all(as_policy(model), ids, targets) for model in (upcast, whole))
    torch.testing.assert_close(ours.param_grad_norm, theirs.param_grad_norm, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(ours.act_grad_norm, theirs.act_grad_norm, rtol=1e-4, atol=0.0)


class Rounding(nn.Module):
    """A layer that rounds what passes it, whatever its weights are in."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.bfloat16().float())


def test_a_model_that_rounds_by_itself_is_refused(halves):
    model = make_model("llama", dtype=torch.bfloat16)
    model.model.layers[1].mlp.up_proj = Rounding(model.model.layers[1].mlp.up_proj)
    with refused("_to_copy.default"):
        upcast_on_use(model)
    model = make_model("llama", dtype=torch.bfloat16)
    model.model.layers[1].register_buffer("scale", torch.ones(1, dtype=torch.bfloat16), persistent=False)
    with refused("LlamaDecoderLayer.scale"):
        upcast_on_use(model)


@pytest.mark.parametrize("name", every(2, ["qwen2", "gpt2", "gemma2", "mixtral"]))
def test_predicted_changes_are_the_whole_float32_models(name, halves):
    whole, upcast = both(halves / name)
    batch = make_batch(whole)
    size = sum(p.numel() for p in whole.model.parameters())
    directions = torch.randn(2, size, generator=torch.Generator().manual_seed(5))
    found = [predict_changes(policy.model, batch, directions, 4) for policy in (upcast, whole)]
    assert [method for _, method in found] == ["forward mode"] * 2
    (ours, _), (theirs, _) = found
    assert (ours - theirs).norm() <= ROUNDING * theirs.norm()
    assert not any(hasattr(p, "_gradscope_tangent") for p in upcast.model.parameters())


def test_who_moves_whom_is_the_whole_float32_models_and_a_real_step_is_refused(halves):
    whole, upcast = both(halves / "qwen2")
    batch, step = make_batch(whole), StepSettings("adamw", 1e-3, 0.1)
    ours, theirs = (influence(policy, batch, step=step).contributions for policy in (upcast, whole))
    moved = ["predicted", *(name for name in theirs if name.startswith("by."))]
    scale = theirs["predicted"].abs().mean()
    pd.testing.assert_frame_equal(ours[moved], theirs[moved], rtol=0, atol=1e-3 * scale)
    with refused():
        apply_update(upcast, batch, "all", step=step)


@pytest.fixture(scope="module")
def job(halves, tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint in bfloat16, and rollouts."""
    names = ("prompt_ids", "response_ids", "group", "reward", "old_logprobs", "response_mask")
    policy = load_policy(halves / "qwen2", dtype="float32")
    rows = [{name: getattr(r, name) for name in names} for r in make_responses(policy)]
    return halves / "qwen2", write_jsonl(tmp_path_factory.mktemp("job") / "rollouts.jsonl", rows)


def test_the_command_measures_so_and_the_manifest_says_it(job, tmp_path):
    tables = {}
    for dtype in ("float32", "upcast", "bfloat16"):
        settings = ("--dtype", dtype, "--device", "cpu", "--no-figures", "--no-self-check")
        run("measure", *job, "--out", tmp_path / dtype, *settings)
        tables[dtype] = pd.read_parquet(tmp_path / dtype / "tokens.parquet")
    assert_equal_numbers(tables["upcast"], tables["float32"])
    rounded = (tables["bfloat16"]["param_grad_norm"] / tables["float32"]["param_grad_norm"] - 1).abs()
    assert rounded.max() > 1e-3
    assert json.loads((tmp_path / "upcast" / "manifest.json").read_text())["dtype"] == "bfloat16 upcast to float32"
