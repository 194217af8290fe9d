"""Plans: sums checked by hand, launches compared, networks known without their weights, and what is printed."""

import math
from dataclasses import replace

import pytest
import torch

from gradscope.gradients import Rates, shape_of
from gradscope.objective import rows_at_once
from gradscope.policy import load_policy
from gradscope.trainer import GIB, PRESETS, TrainConfig, find_lengths, get_preset, pilot, plan_training, step_rates
from gradscope.trainer.memory import loss_bytes
from gradscope.trainer.plan import largest_micro_batch
from gradscope.trainer.work import Lengths, Piece, kv_bytes, step_work

CONFIG = TrainConfig(
    questions_per_step=16, mini_batch_size=64, micro_batch_size=16, max_new_tokens=400, steps=60, sampling_batch_size=64
)


@pytest.fixture(scope="module")
def tiny():
    return shape_of("embedded")


@pytest.fixture(scope="module")
def large():
    return shape_of("Qwen/Qwen2.5-7B")


def test_the_moments_of_a_small_run_are_the_parts_that_lie_there(tiny):
    memory, parameters = plan_training(CONFIG, tiny).memory, 810_624
    always = {"weights", "AdamW's moments", "reference policy"}
    assert {moment: set(parts) - always for moment, parts in memory.items()} == {
        "sampling": {"KV cache", "decoding"},
        "scoring": {"activations"},
        "training": {"gradients", "activations", "logits"},
        "optimizer step": {"gradients", "AdamW's denominators"},
    }
    assert sum(memory["optimizer step"].values()) == 4 * (1 + 1 + 2 + 1 + 1) * parameters
    assert memory["sampling"]["KV cache"] == kv_bytes(tiny, "float32") * 64 * (50 + 400)
    piece = Piece(16, 450, 400)
    expected = loss_bytes(tiny, piece, "float32", checkpointing=False, chunk=rows_at_once(tiny.vocab, "cuda"))
    assert {name: memory["training"][name] for name in expected} == expected


def test_shards_divide_what_is_trained_and_whole_copies_need_buckets(large):
    config = replace(CONFIG, engine="vllm", precision="bfloat16", gradient_checkpointing=True)
    alone, copies, shards = (
        plan_training(config, large, num_processes=n, sharded=sharded).memory["training"]
        for n, sharded in ((1, False), (8, False), (8, True))
    )
    for part in ("weights", "gradients", "AdamW's moments", "reference policy"):
        assert alone[part] == copies[part] == 8 * shards[part]
    assert copies["DDP's buckets"] == copies["gradients"]
    assert "DDP's buckets" not in alone.keys() | shards.keys()
    assert "bfloat16 copies" in copies and "bfloat16 copies" not in shards
    assert alone["activations"] == shards["activations"]
    assert shards["vLLM"] == 0.4 * 80 * GIB


def test_transformers_decodes_with_a_whole_copy_where_weights_lie_in_shards(large):
    memory = plan_training(replace(CONFIG, precision="bfloat16"), large, num_processes=8, sharded=True).memory
    assert all(memory[moment]["sampling copy"] == 2 * large.parameters for moment in memory if moment != "loading")
    assert memory["loading"] == {"weights": 8 * large.parameters}


def test_checkpointing_counts_the_logits_or_a_block_whichever_is_more(tiny, large):
    for shape, name in ((large, "logits"), (tiny, "activations")):
        config = replace(CONFIG, gradient_checkpointing=True)
        parts = plan_training(config, shape).memory["training"]
        assert ("logits" in parts) == (name == "logits")
        assert max(("logits", "activations"), key=lambda part: parts.get(part, 0)) == name


def test_flops_of_a_step_are_so_many_passes_over_its_tokens(large):
    """Counted by hand: 128 responses of 100 tokens to 16 prompts of 100, two mini-batches, blocks recomputed."""
    config = replace(CONFIG, gradient_checkpointing=True)
    flops = plan_training(config, large, prompt_tokens=100, mean_response=100).flops
    token, logits, pair = 2 * large.matrices, 2 * large.head, 4 * 28 * 3584
    matrices, attention = 128 * (200 * token + 100 * logits), 128 * 200 * 200 * pair
    # The reference scores both mini-batches, the policy the second one.
    assert flops["scoring"] == pytest.approx(1.5 * (matrices + attention))
    assert flops["training, forward"] == pytest.approx(2 * (matrices + attention))
    assert flops["training, backward"] == pytest.approx(2 * matrices + 2.5 * attention)
    # Each prompt is read once; a token attends to its prompt and to half of the response.
    assert flops["reading prompts"] == pytest.approx(16 * (100 * token + logits + 100 * 100 * pair))
    assert flops["sampling"] == pytest.approx(128 * 100 * (token + logits + 150 * pair))
    assert "optimizer" not in flops


def test_lopti_doubles_the_flops_of_the_blocks_and_not_those_of_the_head(large):
    plain, lopti = (
        plan_training(replace(CONFIG, lopti_eta=eta), large, prompt_tokens=100, mean_response=100).flops
        for eta in (None, 0.5)
    )
    head = 2 * large.head * 128 * 100
    assert lopti["training, forward"] == 2 * plain["training, forward"] - head
    assert (lopti["sampling"], lopti["scoring"]) == (plain["sampling"], plain["scoring"])


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_a_checkpoint_takes_the_room_that_its_tensors_take(tmp_path, tiny, lora_rank):
    model = load_policy("embedded").model
    adapters = None
    if lora_rank is not None:
        peft = pytest.importorskip("peft")
        adapters = peft.get_peft_model(model, peft.LoraConfig(r=lora_rank, target_modules="all-linear"))
        adapters.save_pretrained(tmp_path / "adapter")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights = {name: p for name, p in model.state_dict().items() if ".lora_" not in name}
    torch.save(weights, tmp_path / "weights.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    # Names and formats: a few hundred bytes a tensor.
    assert plan_training(replace(CONFIG, lora_rank=lora_rank), tiny).checkpoint_bytes == pytest.approx(size, rel=0.05)


def test_vllm_needs_room_for_its_weights_and_one_response(large):
    config = replace(get_preset("kk-qwen2.5-7b"), vllm_memory=0.2)
    plan = plan_training(config, large, num_processes=8, sharded=True)
    # 28 layers of 4 heads of keys and of values, 128 numbers each, in bfloat16, of 512 + 4,096 tokens.
    room = 0.2 * 80 * GIB - 2 * large.parameters
    assert plan.vllm_responses == room // (28 * 2 * 4 * 128 * 2 * 4608) > 0
    assert plan.fits
    scarce = plan_training(replace(config, vllm_memory=0.17), large, num_processes=8, sharded=True)
    assert scarce.peak < plan.peak and scarce.vllm_responses < 1 and not scarce.fits
    assert plan_training(CONFIG, large).vllm_responses == math.inf


def test_the_largest_micro_batch_is_the_last_that_fits(tiny):
    plan = plan_training(CONFIG, tiny, num_processes=2, device_memory=0.5)
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if plan.changed(2, False, micro_batch_size=size).fits]
    assert 1 < len(sizes) < 6
    assert largest_micro_batch(plan) == sizes[-1]
    assert largest_micro_batch(plan_training(CONFIG, tiny, device_memory=0.01)) is None


@pytest.mark.parametrize("name", ["kk-qwen2.5-3b", "kk-qwen2.5-7b", "math-qwen2.5-7b", "orz-qwen2.5-7b"])
def test_the_papers_runs_fit_its_machine_four_gpus_of_80_gib(name):
    preset = get_preset(name)
    plan = plan_training(preset, shape_of(preset.model), num_processes=4, sharded=True)
    assert plan.fits and largest_micro_batch(plan) == preset.micro_batch_size
    assert plan.vllm_responses > 16


@pytest.mark.parametrize("name", PRESETS)
def test_the_printed_table_adds_up_and_names_what_was_assumed(name):
    preset = get_preset(name)
    plan = plan_training(preset, shape_of(preset.model))
    lines = str(plan).splitlines()
    numbers = {line[:24].strip(): line[24:].split() for line in lines if line[24:] and line[24:].strip()[0].isdigit()}
    start = next(i for i, line in enumerate(lines) if line.startswith(" " * 24))
    rows = lines[start + 1 : next(i for i, line in enumerate(lines) if line.startswith("total")) + 1]
    columns = list(zip(*([row[24 + 16 * k : 40 + 16 * k].strip() for k in range(4)] for row in rows), strict=True))
    assert len(columns) == 4 and "total" in numbers
    for column in columns:
        *parts, total = (float(cell or 0) for cell in column)
        assert sum(parts) == pytest.approx(total, abs=0.005 * len(parts) + 0.006)  # two decimals each
    text = str(plan)
    assert f"at most {plan.tokens_at_most:,}" in text and f"{plan.tokens_expected:,} tokens" in text
    assert f"prompts of at most {plan.lengths.prompt} tokens" in text
    assert "one process: " in text and "each of 8 processes (FSDP" in text


def test_seconds_are_those_of_the_parts_at_the_rates_that_are_given(tiny):
    parts = step_work(CONFIG, tiny, find_lengths(CONFIG, tiny), passes=1)
    slow = Rates("a slow one", dict.fromkeys(parts, 1e9))
    assert plan_training(CONFIG, tiny).seconds == {}
    plan = plan_training(CONFIG, tiny, rates=slow)
    assert plan.seconds == {name: part / 1e9 for name, part in parts.items()}
    assert plan.flops == {n: part for n, part in parts.items() if n not in ("optimizer", "compacting the cache")}
    assert f"Seconds of a batch on a slow one, in one process: {sum(plan.seconds.values()):.3g} (" in str(plan)


@pytest.mark.parametrize(
    "changes", [{}, {"lora_rank": 2, "kl_coef": 0.0}, {"gradient_checkpointing": True, "precision": "bfloat16"}]
)
def test_a_pilot_finds_a_rate_for_every_part_of_a_step(tiny, changes, monkeypatch):
    monkeypatch.setattr(pilot, "SECONDS", 0.001)
    config = replace(CONFIG, device="cpu", micro_batch_size=4, **changes)
    lengths = Lengths(prompt=6, longest=12, mean=8)
    rates = step_rates(config, tiny, lengths)
    work = step_work(config, tiny, lengths, passes=1)
    assert all(0 < seconds < 600 for seconds in rates.seconds(work).values())


def test_work_follows_what_a_step_does(tiny):
    def work(passes=1, longest=400, **changes):
        return step_work(replace(CONFIG, **changes), tiny, Lengths(prompt=50, longest=longest, mean=100), passes)

    base = work()
    # All 128 responses by the reference, and the second mini-batch's 64 by the policy.
    second = work(kl_coef=0.0)["scoring"]
    assert base["scoring"] == pytest.approx(3 * second)
    # Who looks at π_old before the first pass has it computed for all.
    assert work(kl_coef=0.0, control="random-split", lopti_eta=0.5)["scoring"] == pytest.approx(2 * second)
    assert work(algorithm="reinforce++")["scoring"] == pytest.approx(4 * second)
    # The sampler's π_old leaves the trainer's own scoring to be held against it: of all.
    assert work(kl_coef=0.0, old_logprobs="sampler")["scoring"] == pytest.approx(2 * second)
    assert work(2, lopti_eta=0.5)["optimizer"] == base["optimizer"] * 2
    # Recomputation runs every block once more, on prompts that are not shared.
    assert work(gradient_checkpointing=True)["training, forward"] > 2 * base["training, forward"]
    # All equally long: no response ends before the others, and nothing is copied.
    assert work(longest=100)["compacting the cache"] == 0 < base["compacting the cache"]
