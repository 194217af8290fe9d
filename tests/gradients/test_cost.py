"""FLOPs and bytes: held against counters, real optimizers, real caches and measured peaks of small policies."""

from dataclasses import replace

import pytest
import torch
from support.policies import CAUSAL, HIDDEN, LAYERS, VOCAB, make_config, make_model
from torch.utils.flop_counter import FlopCounterMode

from analyses.benchmarks.plan_memory import Case, allocated_peak, compare, make_batch, make_policy
from gradscope.gradients import ModelShape, Piece
from gradscope.gradients.cost import model as cost
from gradscope.objective.logprobs import trained_logprobs

SMALL = Case(hidden=128, layers=4, vocab=1024, responses=2, length=64)


@pytest.mark.parametrize("name", CAUSAL)
def test_every_parameter_of_every_architecture_is_in_exactly_one_part(name):
    shape = ModelShape.from_config(make_config(name))
    assert shape.parameters == sum(p.numel() for p in make_model(name).parameters())
    assert shape.matrices <= shape.blocks
    assert min(shape.embedding, shape.rest) > 0 <= shape.head


def test_a_tied_head_has_no_parameters_of_its_own():
    tied, untied = (ModelShape.from_config(make_config(name)) for name in ("qwen2", "llama"))
    assert (tied.head, untied.head) == (0, HIDDEN * VOCAB)


def test_a_gated_mlp_has_the_width_that_the_configuration_says():
    assert ModelShape.from_config(make_config("qwen2")).mlp_width == 48


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
    assert cost.forward_flops(shape, piece) + above == pytest.approx(forward.get_total_flops(), rel=1e-3)
    assert cost.backward_flops(shape, piece) + 2 * above == pytest.approx(backward.get_total_flops(), rel=1e-3)


def test_the_head_costs_only_what_the_needed_tokens_take():
    shape = ModelShape.from_config(make_config("qwen2"))
    saved = cost.forward_flops(shape, Piece(2, 20, 20)) - cost.forward_flops(shape, Piece(2, 20, 5))
    assert saved == 2 * HIDDEN * VOCAB * 2 * 15


def test_adapters_have_the_parameters_and_save_the_flops_that_peft_shows():
    peft = pytest.importorskip("peft")
    model, shape = make_model("qwen2"), ModelShape.from_config(make_config("qwen2"))
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert cost.trained_parameters(shape, 4) == trained
    ids, piece = torch.arange(60).reshape(3, 20) % VOCAB, Piece(3, 20, 20)
    with FlopCounterMode(display=False) as both:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    above = 3 * 4 * LAYERS * shape.query_width * 3 * (20 * 19 / 2)
    predicted = cost.forward_flops(shape, piece) + cost.backward_flops(shape, piece, lora_rank=4) + above
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
    assert cost.state_bytes(ModelShape.from_config(case.config), lora_rank=lora_rank) == {
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in trained),
        "AdamW's moments": sum(value.nbytes for value in moments),
    }


def test_a_share_of_the_state_is_a_part_of_the_whole():
    shape = ModelShape.from_config(SMALL.config)
    whole, part = cost.state_bytes(shape), cost.state_bytes(shape, shards=4)
    assert part == {name: size / 4 for name, size in whole.items()}


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma3"])
def test_keys_and_values_of_a_token_are_those_of_transformers_cache(name):
    model = make_model(name)
    # Shorter than Gemma's window, beyond which its sliding layers forget.
    layers = model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values.layers
    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert cost.kv_bytes(ModelShape.from_config(make_config(name)), "float32") * 3 == cached
    assert cost.kv_bytes(ModelShape.from_config(make_config(name)), "bfloat16") * 6 == cached


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
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


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral", "qwen3", "phi", "opt"])
def test_other_blocks_keep_about_what_a_gated_one_with_their_weights_would(name):
    config = make_config(name, attention="eager" if name == "gemma2" else "sdpa")
    kept = saved_bytes(make_model(name, attention=config._attn_implementation), torch.arange(64).reshape(2, 32) + 4)
    shape, piece = ModelShape.from_config(config), Piece(2, 32, 32)
    predicted = cost.loss_bytes(shape, piece, "float32", checkpointing=False, chunk=8)["activations"]
    assert 0.5 < predicted / kept < 1.5  # 0.53 (gemma2) to 1.44 (opt)


def test_activations_grow_with_tokens_and_with_blocks_and_shrink_with_checkpointing():
    shape = ModelShape.from_config(SMALL.config)

    def activations(piece, checkpointing=False, shape=shape):
        return cost.loss_bytes(shape, piece, "float32", checkpointing=checkpointing, chunk=8)["activations"]

    assert activations(Piece(4, 64, 32)) == 2 * activations(Piece(2, 64, 32)) == 2 * activations(Piece(1, 128, 64))
    assert activations(Piece(2, 64, 32), checkpointing=True) < activations(Piece(2, 64, 32)) / 3


def saved_bytes(model, ids):
    """Bytes that autograd keeps of a forward pass for the backward pass, each storage once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=ids, use_cache=False).logits
    del output
    return sum(storages.values())


def test_a_batch_of_the_benchmark_is_as_long_as_its_case_says():
    batch = make_batch(SMALL)
    assert batch.input_ids.shape == (2, 64)
    assert batch.num_tokens == 2 * SMALL.response_length == 96


def test_logits_that_are_capped_take_three_arrays_and_others_one():
    """Beside them: the head's gradient [vocab, 8], and parts of 2**18 logits."""
    head, states = torch.nn.Linear(8, 2**15, bias=False), torch.randn(64, 8)
    ids, ones = torch.zeros(64, dtype=torch.long), torch.ones(64)

    def train(cap):
        trained_logprobs(cap(head(states)), ids, ones).sum().backward()

    train(lambda logits: logits)  # makes the gradient
    sizes = [allocated_peak(lambda cap=cap: train(cap)) for cap in (lambda z: z, lambda z: 30 * (z / 30).tanh())]
    assert [size / (4 * 64 * 2**15) for size in sizes] == pytest.approx([1, cost.CAPPED_LOGITS], abs=0.5)
    assert [ModelShape.from_config(make_config(name)).capped for name in ("qwen2", "gemma2")] == [False, True]
