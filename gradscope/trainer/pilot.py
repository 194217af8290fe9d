"""How fast this machine trains: one micro-batch, on a network of the same layers but fewer, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter

import torch

from gradscope.gradients import ModelShape, Rates, make_pilot, outline_policy
from gradscope.objective import batch_statistics, can_pack, loss_logprobs, micro_batches
from gradscope.policy import Policy, find_device
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.sampling import HFSampler
from gradscope.trainer.adapters import add_adapters
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.learner import computing
from gradscope.trainer.work import (
    Lengths,
    Number,
    Piece,
    decoded_together,
    decoding_flops,
    kv_bytes,
    pass_flops,
    prompt_flops,
    shared_tokens,
    training_flops,
)

STEPS = 16
"""Tokens that are decoded of each response."""
VOCAB = 8192
"""Tokens of a large network's pilot, at most."""
SECONDS = 0.5
"""A part is repeated, three times at least, until it took so long in all; not at all if once takes longer."""
MOST = {"cpu": 1e10, "cuda": 1e13}
"""FLOPs that a forward pass of the pilot may take: what is larger is tried with fewer responses, then shorter ones."""


def try_step(config: TrainConfig, lengths: Lengths) -> Rates:
    """Rates of `step_work`'s parts, each timed on a micro-batch of random tokens of these lengths, or shorter ones."""
    device = torch.device(find_device(config.device))
    small = {"blocks": 1, "vocab": VOCAB, "copies": 5}  # weights, gradients, AdamW's moments and denominators
    policy = make_pilot(outline_policy(config.model), dtype=torch.float32, device=device, **small)
    shape, model = ModelShape.from_config(policy.model.config), policy.model
    config, lengths = _shorten(config, shape, lengths, MOST["cpu" if device.type == "cpu" else "cuda"])
    if config.lora_rank is not None:
        add_adapters(model, config, None)
    own = partial(computing, device, mixed=config.precision == "bfloat16")
    with own():
        by_part = _try_sampling(policy, shape, config, lengths)
    batch = _random_batch(policy, config, lengths)
    piece, tokens = Piece(len(batch), lengths.prompt + lengths.mean, lengths.mean), shared_tokens(config, lengths)

    def score() -> None:
        with own():
            batch_statistics(model, batch, micro_batch_size=len(batch), device=device)

    def train() -> None:
        for _, part in micro_batches(batch, len(batch), by_group=can_pack(model)):
            with own():
                loss_logprobs(model, part).sum().backward()

    by_part["scoring"] = pass_flops(shape, piece, tokens=tokens) / _time(score, device)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    flops = training_flops(
        shape, piece, lora_rank=config.lora_rank, checkpointing=config.gradient_checkpointing, tokens=tokens
    )
    by_part |= dict.fromkeys(flops, sum(flops.values()) / _time(train, device))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
        optimizer.step()

    by_part["optimizer"] = sum(p.numel() for p in trained) / _time(step, device)
    words = f"this machine ({device.type}, {torch.get_num_threads()} threads), by a micro-batch of {len(batch)} on "
    return Rates(f"{words}{shape.layers} of its blocks with random weights", by_part)


def _shorten(config: TrainConfig, shape: ModelShape, lengths: Lengths, most: Number) -> tuple[TrainConfig, Lengths]:
    """The same with a micro-batch whose forward pass takes so many FLOPs at most."""
    flops = pass_flops(shape, Piece(1, lengths.prompt + lengths.mean, lengths.mean))
    size = max(1, min(config.micro_batch_size, config.mini_batch_size, int(most / flops)))
    part = min(1.0, most / flops)
    shorter = (max(1, int(part * tokens)) for tokens in (lengths.prompt, lengths.longest, lengths.mean))
    return replace(config, micro_batch_size=size, mini_batch_size=size), Lengths(*shorter)


def _try_sampling(policy: Policy, shape: ModelShape, config: TrainConfig, lengths: Lengths) -> dict[str, float]:
    """Rates of reading prompts, of decoding and of copying keys and values, at the mean length of both."""
    rows, length = decoded_together(config, lengths), lengths.prompt + lengths.mean // 2
    each = min(rows, config.group_size)
    count = min(max(1, rows // each), config.micro_batch_size)
    prompts = [_random_ids(policy, length, seed) for seed in range(count)]
    generator = torch.Generator().manual_seed(0)

    def sample(tokens: int) -> None:
        asked = {"n": each, "temperature": 1.0, "max_new_tokens": tokens, "generator": generator}
        HFSampler(policy, batch_size=rows, progress=False).sample(prompts, **asked)

    steps = max(1, min(STEPS, (shape.context or 1 << 30) - length - 1))
    short = _time(lambda: sample(1), policy.device)
    longer = _time(lambda: sample(1 + steps), policy.device)
    cache = torch.zeros(int(kv_bytes(shape, "float32") * rows * length / 4), device=policy.device)
    decoding = decoding_flops(shape, Piece(len(prompts) * each, length + steps, steps))
    return {
        "reading prompts": prompt_flops(shape, len(prompts), length) / short,
        "sampling": decoding / max(longer - short, 0.1 * longer),
        "compacting the cache": 2 * cache.nbytes / _time(cache.clone, policy.device),
    }


def _random_ids(policy: Policy, length: int, seed: int) -> list[int]:
    return torch.randint(policy.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _random_batch(policy: Policy, config: TrainConfig, lengths: Lengths) -> TokenBatch:
    """A micro-batch, whose responses to a question share its prompt; their lengths differ by half of the mean."""
    spread = 0 if lengths.mean == lengths.longest else min(lengths.mean // 2, lengths.longest - lengths.mean)
    rows = []
    for row in range(config.micro_batch_size):
        group = row // config.group_size
        length = max(1, lengths.mean + round(spread * (2 * (row + 0.5) / config.micro_batch_size - 1)))
        rows.append(Response(_random_ids(policy, lengths.prompt, group), _random_ids(policy, length, row), group))
    return collate(rows)


def _time(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call: the median of three or more after one that warms up, or of one that takes long."""
    seconds: list[float] = []
    while len(seconds) < 4 or sum(seconds) < SECONDS:
        start = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - start)
        if seconds[0] > SECONDS:
            return seconds[0]
    return median(seconds[1:])
