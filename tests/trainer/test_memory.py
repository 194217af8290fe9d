"""FLOPs and bytes: held against counters, real optimizers, real caches and measured peaks of small policies."""

from dataclasses import replace

import pytest
import torch
from support.policies import CAUSAL, HIDDEN, LAYERS, VOCAB, make_config, make_model
from support.tiers import every
from torch.utils.flop_counter import FlopCounterMode

from analyses.benchmarks.plan_memory import Case, compare, make_policy
from gradscope.gradients import ModelShape
from gradscope.trainer import memory, work
from gradscope.trainer.work import Piece

SMALL = Case(hidden=128, layers=4, vocab=1024, responses=2, length=64)


@pytest.mark.parametrize("name", CAUSAL)
def test_every_parameter_of_every_architecture_is_in_exactly_one_part(name):
    shape = ModelShape.from_config(make_config(name))
    assert shape.parameters == sum(p.numel() for p in make_model(name).parameters())
    assert shape.matrices <= shape.blocks
    assert min(shape.embedding, shape.rest) > 0 <= shape.head


def test_a_token_visits_only_as_many_experts_as_are_chosen_for_it():
    shape = ModelShape.from_config(make_config("mixtral"))
    expert = 3 * HIDDEN * 48
    assert shape.matrices - shape.active == LAYERS * (4 - 2) * expert
    assert ModelShape.from_config(make_config("qwen2")).matrices == ModelShape.from_config(make_config("qwen2")).active


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_flops_of_both_passes_are_those_that_torch_counts(name):
    model, piece = make_model(name), Piece(3, 20, 20)
    shape, ids = ModelShape.from_config(make_config(name)), torch.arange(60).reshape(3, 20) % VOCAB
    # Eager attention computes all pairs; a causal kernel need not compute those above the diagonal.
    above = 4 * LAYERS * shape.query_width * 3 * (20 * 19 / 2)
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    # The rotary angles are a small matrix product, too.
    assert work.forward_flops(shape, piece) + above == pytest.approx(forward.get_total_flops(), rel=1e-3)
    assert work.backward_flops(shape, piece) + 2 * above == pytest.approx(backward.get_total_flops(), rel=1e-3)


def test_the_head_costs_only_what_the_needed_tokens_take():
    shape = ModelShape.from_config(make_config("qwen2"))
    saved = work.forward_flops(shape, Piece(2, 20, 20)) - work.forward_flops(shape, Piece(2, 20, 5))
    assert saved == 2 * HIDDEN * VOCAB * 2 * 15


def test_adapters_have_the_parameters_and_save_the_flops_that_peft_shows():
    peft = pytest.importorskip("peft")
    model, shape = make_model("qwen2"), ModelShape.from_config(make_config("qwen2"))
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert work.trained_parameters(shape, 4) == trained
    ids, piece = torch.arange(60).reshape(3, 20) % VOCAB, Piece(3, 20, 20)
    with FlopCounterMode(display=False) as both:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    above = 3 * 4 * LAYERS * shape.query_width * 3 * (20 * 19 / 2)
    predicted = work.forward_flops(shape, piece) + work.backward_flops(shape, piece, lora_rank=4) + above
    # The first block's inputs need no gradient: nothing that is trained lies below.
    assert predicted == pytest.approx(both.get_total_flops(), rel=0.1)


@pytest.mark.parametrize("lora_rank", [None, 8])
def test_state_is_what_the_tensors_of_a_training_policy_take(lora_rank):
    if lora_rank is not None:
        pytest.importorskip("peft")
    case = replace(SMALL, lora_rank=lora_rank)
    model = make_policy(case).model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert memory.state_bytes(ModelShape.from_config(case.config), lora_rank=lora_rank) == {
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in trained),
        "AdamW's moments": sum(value.nbytes for value in moments),
    }


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", every(2, [True, False]))
@pytest.mark.parametrize(("vocab", "lora_rank"), [(256, None), (4096, None), (4096, 4)])
def test_predicted_peaks_are_the_measured_ones(precision, checkpointing, vocab, lora_rank):
    if lora_rank is not None:
        pytest.importorskip("peft")
    case = replace(SMALL, precision=precision, checkpointing=checkpointing, vocab=vocab, lora_rank=lora_rank)
    table = compare(case, moments=("training", "scoring", "optimizer step")).set_index("moment")
    # In a policy this small, what is computed beside the blocks, rotary angles and the loss itself, weighs more than in
    # those of the benchmark (figures/benchmark_plan_memory.csv).
    ratio = table.predicted_over_measured
    assert ratio.loc["training"] == pytest.approx(1, abs=0.15)
    assert ratio.loc["scoring"] == pytest.approx(1, abs=0.25)
    assert ratio.loc["optimizer step"] == pytest.approx(1, abs=0.01)
