"""What measuring takes: against counted products, explicit loops, the allocator, and a clock that is counted."""

import itertools

import numpy as np
import pytest
import torch
from support.decoders import COMMON, SANDWICHED
from support.policies import (
    CAUSAL,
    CONTEXT,
    HIDDEN,
    LAYERS,
    RULED,
    UNRULED,
    VOCAB,
    make_batch,
    make_policy,
    save_checkpoint,
)
from support.tiers import every
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from analyses.benchmarks.peers import allocated_peak
from gradscope.errors import InputError
from gradscope.gradients import (
    MeasureSettings,
    ModelShape,
    TokenGradientMeter,
    attention,
    forward_flops,
    gradient_flops,
    measure,
    measuring,
    plan_batch,
)
from gradscope.gradients.budget import cost
from gradscope.gradients.budget.cost import Responses, follows_rules, measure_bytes, measure_flops
from gradscope.policy import Policy, find_blocks, outline_policy

FACTOR = 1.25
"""Within which the formula is what torch counts, of a policy of width 256: triangles are whole squares within a strip,
which of narrower ones is most of the work."""
TARGETS = torch.arange(88, 128)
WHOLE = Responses((127,), (127,), tuple(TARGETS.tolist()), len(TARGETS))


def make_wide(kind: type, layers: int = 4, **settings) -> Policy:
    """A policy of width 256 and random weights."""
    torch.manual_seed(0)
    config = kind(vocab_size=VOCAB, hidden_size=256, num_hidden_layers=layers, num_attention_heads=4, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return Policy(model, None, find_blocks(model))


WIDE = {
    "qwen2": lambda: make_wide(Qwen2Config, num_key_value_heads=2, intermediate_size=768, tie_word_embeddings=True),
    "llama": lambda: make_wide(LlamaConfig, num_key_value_heads=4, intermediate_size=640, tie_word_embeddings=False),
    "gpt2": lambda: make_wide(GPT2Config, bos_token_id=1, eos_token_id=1),
}


@pytest.fixture(scope="module")
def policy():
    return make_policy("llama")


@pytest.fixture(scope="module")
def batch(policy):
    return make_batch(policy)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(4, VOCAB, (128,), generator=torch.Generator().manual_seed(0))


class Products(TorchDispatchMode):
    """FLOPs by torch's own formulas; FlopCounterMode itself follows modules, which autograd.grad does not allow."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        # torch's formulas know no product that adds in place.
        in_place = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
        packet = function._overloadpacket
        if formula := flop_registry.get(in_place.get(packet, packet)):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def test_by_rules_the_formula_is_what_a_loop_over_positions_and_products_adds_up_to():
    """Every product of one token's backward pass, written out: rows, inner and outer width."""
    shape, n = ModelShape.of(make_policy("qwen2").model), 10
    d, q, kv, mlp = HIDDEN, shape.query_width, shape.kv_width, int(shape.mlp_width)
    layers = [(d, q), (d, kv), (d, kv), (q, d), (d, mlp), (d, mlp), (mlp, d)]  # (in, out)
    backward = norms = 0
    for block in range(LAYERS):
        last = block == LAYERS - 1
        for index, (inside, out) in enumerate(layers):
            spread = not last or index in (1, 2)
            backward += 2 * (n if spread else 1) * inside * out
            if spread:  # each column of the triangular factor, from its first row that is not zero
                norms += sum(2 * out * (n - column) for column in range(min(n, inside)))
        for position in range(n):
            # Scores, values, queries and keys, for every key that the position attends to.
            if not last or position == n - 1:
                backward += 4 * sum(2 * q for _ in range(position + 1))
    backward += 2 * d * VOCAB
    norms += 2 * d * n  # the tied table's cross term
    assert gradient_flops(shape, [n]) == {"backward": backward, "norms": norms}


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_a_forward_pass_has_the_flops_that_torch_counts(name, ids):
    model = WIDE[name]().model
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
    assert forward_flops(ModelShape.of(model), [len(ids)], len(ids)) == pytest.approx(counted.get_total_flops())


@pytest.mark.parametrize("name", every(3, WIDE))
@pytest.mark.parametrize("rules", every(2, [True, False]))
def test_products_of_the_engine_are_those_that_torch_counts(name, rules, ids):
    policy = WIDE[name]()
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids, rules=rules)
        ruled = meter.decoder is not None
        with Products() as counted:
            meter.measure(ids, TARGETS, torch.arange(len(TARGETS)), temperature=1.0)
    assert ruled == (rules and name != "gpt2")
    flops = measure_flops(ModelShape.of(policy.model), WHOLE, rules=ruled)
    # The statistics' forward pass is another call; QR is no product.
    expected = sum(flops[part] for part in ("forward", "backward", "norms"))
    assert 1 / FACTOR < expected / counted.flops < FACTOR


@pytest.mark.parametrize(("name", "memory"), [("qwen2", 1 << 30), ("qwen2", 100_000), ("gpt2", 1 << 30)])
def test_predicted_memory_is_what_the_allocator_hands_out_within_a_factor_of_two(name, memory):
    policy, targets = make_policy(name), torch.arange(16, CONTEXT)
    ids = torch.randint(4, VOCAB, (CONTEXT,), generator=torch.Generator().manual_seed(0))
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids, memory=memory)
        peak = allocated_peak(lambda: meter.measure(ids, targets, torch.arange(len(targets)), temperature=1.0))
    reach = int(targets[-1])
    found = Responses((reach,), (reach,), tuple(targets.tolist()), len(targets))
    predicted = measure_bytes(ModelShape.of(policy.model), found, memory=memory, weights=0)
    assert 0.5 < sum(predicted.values()) / peak < 2


@pytest.mark.all
@pytest.mark.parametrize("layers", every(2, [3, 9]))
def test_memory_grows_with_length_as_the_formula_says(layers, monkeypatch):
    """Where neither activations nor attention fit the memory; a bound within a third of what is allocated."""
    monkeypatch.setattr(attention, "PLAIN", 0)
    monkeypatch.setattr(attention, "SCORES", {"cpu": 1 << 14, "cuda": 1})
    policy = make_wide(Qwen2Config, layers=layers, num_key_value_heads=2, intermediate_size=768)
    memory, bounds = 1 << 20, []
    for length in (512, 1024, 1536):
        ids = torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(0))
        targets = torch.arange(length - 4, length)
        with measuring(policy.model, length):
            meter = TokenGradientMeter(policy, ids[:32], memory=memory)
            peak = allocated_peak(lambda: meter.measure(ids, targets, torch.arange(4), temperature=1.0))  # noqa: B023
        found = Responses((length - 1,), (length - 1,), tuple(targets.tolist()), 4)
        bounds.append(sum(measure_bytes(ModelShape.of(policy.model), found, memory=memory, weights=0).values()))
        assert peak < bounds[-1] < 4 / 3 * peak
    assert bounds[2] - bounds[1] == pytest.approx(bounds[1] - bounds[0], rel=0.01)


@pytest.mark.parametrize("each", [None, 2])
def test_a_plan_counts_the_tokens_that_the_table_will_have_measured(policy, batch, each):
    plan = plan_batch(policy, batch, MeasureSettings(tokens_per_interval=each), speed=1e9)
    table = measure(policy, batch, tokens_per_interval=each, self_check=False)
    found = plan.responses
    assert (len(found.lengths), found.targets) == (len(batch), len(table))
    if each is None:
        prompts = (batch.response_start - batch.attention_mask.int().argmax(1)).numpy()
        assert found.prefixes == tuple(table["position"] + prompts[table["response"]])
    else:
        assert len(found.prefixes) <= 4 * each


@pytest.mark.parametrize("minutes", [1e-9, 0.5, 1e9])
def test_a_plan_of_minutes_looks_at_what_fits(policy, batch, minutes):
    whole = plan_batch(policy, batch, MeasureSettings(), speed=1e8)
    speed = 1e8 * sum(whole.seconds.values()) / 60  # everything takes a minute
    whole = plan_batch(policy, batch, MeasureSettings(), speed=speed)
    plan = plan_batch(policy, batch, MeasureSettings(minutes=minutes), speed=speed)
    prompts = len(batch.group_ids.unique())
    if minutes == 1e9:
        assert plan.seconds == whole.seconds and plan.prompts == prompts
    elif minutes == 1e-9:
        assert plan.prompts == 1 < prompts
    else:
        assert plan.prompts < prompts and sum(plan.seconds.values()) <= 1.25 * 60 * minutes


MISTAKEN = {"granite_embedding", "granite_residual", "smollm3_without_angles", "helium", "ernie4_5"}
"""Blocks of a common decoder's modules that compute something else: a plan cannot see it."""


@pytest.mark.parametrize("name", every(4, [*CAUSAL, *RULED, *UNRULED]))
def test_the_blocks_that_the_engine_has_rules_for_are_known_without_weights(name):
    ruled = {*COMMON, *SANDWICHED, *RULED}
    assert follows_rules(make_policy(name)) == (name in ruled | MISTAKEN)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_pilot_gives_every_part_its_seconds_and_leaves_the_policy_as_it_was(name, monkeypatch):
    policy = make_policy(name)
    monkeypatch.setattr(cost, "PILOT_SECONDS", 0.01)
    before, state = torch.random.get_rng_state(), {k: v.clone() for k, v in policy.model.state_dict().items()}
    plan = plan_batch(policy, make_batch(policy), MeasureSettings(tokens_per_interval=2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(value, state[key]) for key, value in policy.model.state_dict().items())
    assert set(plan.seconds) == {"preparation", *plan.flops}
    assert all(0 < seconds < 60 for seconds in plan.seconds.values())


def test_a_pilots_seconds_are_those_of_its_clock(policy, batch, monkeypatch):
    """A clock that counts its looks: 1 s between two, so that a pilot of all tokens predicts its own seconds."""
    looks = itertools.count()
    monkeypatch.setattr(cost, "perf_counter", lambda: float(next(looks)))
    monkeypatch.setattr(cost, "FIRST", 1e15)  # all tokens at once
    seconds = plan_batch(policy, batch, MeasureSettings(self_check=False)).seconds
    assert seconds.pop("preparation") == seconds.pop("statistics") == pytest.approx(1.0)
    assert sum(seconds.values()) == pytest.approx(1.0)


def test_at_a_stated_speed_no_weights_are_needed_and_seconds_are_flops_over_it(tmp_path, batch):
    folder = save_checkpoint(tmp_path / "llama", "llama")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    policy = outline_policy(str(folder), dtype="bfloat16")
    assert {parameter.device.type for parameter in policy.model.parameters()} == {"meta"}
    plan = plan_batch(policy, batch, MeasureSettings(), speed=1e6)
    assert sum(plan.seconds.values()) == pytest.approx(sum(plan.flops.values()) / 1e6)
    assert plan.memory["weights"] == 2 * sum(p.numel() for p in policy.model.parameters())
    rows = {line[:16].strip(): line[16:].split() for line in str(plan).splitlines()}
    assert float(rows["total"][0]) == pytest.approx(sum(plan.flops.values()), rel=0.01)
    assert np.sum([float(rows[part][1]) for part in plan.seconds]) == pytest.approx(float(rows["total"][1]), rel=0.01)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_a_speed_that_is_none_is_refused(policy, batch, speed):
    with pytest.raises(InputError):
        plan_batch(policy, batch, MeasureSettings(), speed=speed)
