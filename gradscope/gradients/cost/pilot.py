"""How fast this machine measures: a few real tokens, on a network of the same layers but fewer, with random weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch
from jaxtyping import Bool

from gradscope.errors import InputError
from gradscope.gradients.cost.machine import Rates
from gradscope.gradients.cost.measuring import describe_responses, measure_flops
from gradscope.gradients.cost.shape import ModelShape
from gradscope.gradients.settings import MeasureSettings
from gradscope.gradients.table import TableMeasurement
from gradscope.policy import Policy, find_blocks, free_memory, upcast_on_use
from gradscope.rollouts import TokenBatch

Number = int | float

SMALL = 10**8
"""Parameters up to which a pilot has all blocks."""
BLOCKS = 2
"""Blocks of a larger network that measures: one whose backward pass is dense, and the last."""
SECONDS = 1.0
"""A pilot is tried on more tokens until their own gradients take so long."""
GROWTH = 4
"""Times as many FLOPs in the next try."""
FIRST = 1e9
"""FLOPs of the tokens of the first try, which also warms up."""


def make_pilot(
    policy: Policy,
    *,
    dtype: torch.dtype,
    device: torch.device,
    upcast: bool = False,
    blocks: int = BLOCKS,
    vocab: int | None = None,
    copies: int = 2,
) -> Policy:
    """The policy's network with random weights, and with so few of its blocks and tokens if it is large.

    vocab: None, all tokens. Raises InputError where not even so many copies of its weights fit the device's memory.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(policy.model.config)
    text, shape = config.get_text_config(), ModelShape.from_config(policy.model.config)
    if shape.parameters > SMALL:
        kinds = getattr(text, "layer_types", None)
        if kinds is not None:
            text.layer_types = list(kinds)[:blocks]
        text.num_hidden_layers = min(blocks, shape.layers)
        if vocab is not None:
            text.vocab_size = min(vocab, shape.vocab)
            text.pad_token_id = text.bos_token_id = text.eos_token_id = None
        shape = ModelShape.from_config(config)
    if copies * shape.parameters * dtype.itemsize > free_memory(device):
        raise InputError(
            f"{shape.layers} blocks of {policy.path} with embedding and head, {shape.parameters:,} parameters, do not "
            "fit this machine, so its speed cannot be tried; name a GPU by machine"
        )
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    finally:
        torch.random.set_rng_state(state)
    if upcast:
        upcast_on_use(model)
    return Policy(model, policy.tokenizer, find_blocks(model), policy.path)


def try_measuring(
    pilot: Policy,
    batch: TokenBatch,
    chosen: Bool[np.ndarray, " n"],
    settings: MeasureSettings,
    *,
    rules: bool,
    rows: int | None,
    memory: int,
) -> Rates:
    """Rates of `measure_flops`' parts: on ever more of the chosen tokens, until it takes SECONDS or they are all.

    chosen: which of the batch's kept tokens are measured. rules, rows, memory: as in `measure_flops`.
    """
    shape, device = ModelShape.from_config(pilot.model.config), pilot.device
    settings = replace(settings, tokens_per_interval=None, minutes=None)
    cut = {"rules": rules, "rows": rows, "memory": memory, "device": "cpu" if device.type == "cpu" else "cuda"}
    budget, measured, tried = FIRST, 0.0, 0
    while measured < SECONDS and tried < chosen.sum():
        part, picks = _take(batch, chosen, budget / (6 * shape.active))
        work = measure_flops(shape, describe_responses(part, picks), self_check=settings.self_check, **cut)
        start = perf_counter()
        measurement = TableMeasurement(
            pilot,
            part,
            settings,
            tokens=torch.from_numpy(picks.nonzero()[0]),
            chunk_rows=rows,
            chunk_memory=memory,
        )
        with measurement:
            entered = perf_counter()
            for group in measurement.groups:
                measurement.measure_responses(group)
            measured = perf_counter() - entered
        tried, budget = int(picks.sum()), GROWTH * budget
        seconds = {"preparation": entered - start - measurement.pass_seconds, "forward": measurement.pass_seconds}
    engine = [name for name in work if name not in seconds]
    together = sum(work[name] for name in engine) / measured
    by_part = {name: work[name] / took for name, took in seconds.items()} | dict.fromkeys(engine, together)
    words = f"this machine ({device.type}, {torch.get_num_threads()} threads), by {tried:,} tokens measured on "
    return Rates(f"{words}{shape.layers} of its blocks with random weights", by_part)


def _take(
    batch: TokenBatch, chosen: Bool[np.ndarray, " n"], positions: Number
) -> tuple[TokenBatch, Bool[np.ndarray, " k"]]:
    """Responses drawn at random, and which of their kept tokens are tried: prefixes of so many positions in all."""
    counts = batch.response_mask.sum(1).tolist()
    own = np.split(chosen, np.cumsum(counts)[:-1])
    rows, picks = [], []
    for row in np.random.default_rng(0).permutation(len(batch)).tolist():
        places = own[row].nonzero()[0]
        if not len(places):
            continue
        prefixes = batch.sequence(row)[1].numpy()[places]
        count = int(np.searchsorted(np.cumsum(prefixes), positions, side="right"))
        if not rows:
            count = max(1, count)
        if not count:
            break
        start = (len(places) - count) // 2  # of a response that is too long, the middle
        rows.append(row)
        picks.append(np.isin(np.arange(counts[row]), places[start : start + count]))
        positions -= prefixes[start : start + count].sum()
    return batch.select(rows), np.concatenate(picks)
