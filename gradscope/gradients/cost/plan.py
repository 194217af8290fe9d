"""What a measurement would take: tokens, FLOPs, seconds, memory and disk, before a weight is loaded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from gradscope.errors import InputError
from gradscope.gradients.cost.machine import GPUS, WITHIN, Rates, describe_seconds, gpu_rates
from gradscope.gradients.cost.measuring import describe_responses, floor_flops, measure_bytes, measure_flops
from gradscope.gradients.cost.pilot import make_pilot, try_measuring
from gradscope.gradients.cost.shape import ModelShape
from gradscope.gradients.engine.decoder.parts import PLAIN, SANDWICH
from gradscope.gradients.settings import (
    AFTERWARDS,
    MeasureSettings,
    check_chunks,
    check_settings,
    fast_precision,
    no_fast_mode,
    settle_sample,
)
from gradscope.gradients.summed.plan import SumsPlan, largest_share, own_rows, plan_batch_sums
from gradscope.intervals import EDGES, assign_intervals
from gradscope.policy import (
    DTYPES,
    GRADIENT_SHARE,
    UPCAST,
    Policy,
    find_device,
    free_memory,
)
from gradscope.rollouts import TokenBatch, check_batch

Number = int | float

TABLE_COLUMNS = 22
"""Columns of tokens.parquet beside a norm for each layer, four bytes each at most."""


@dataclass(frozen=True)
class MeasurePlan:
    """What `plan_batch` found; printed, a table with its assumptions."""

    model: str
    shape: ModelShape
    responses: int
    tokens: int
    """Response tokens, a row of the table each."""
    measured: int
    """Tokens that get a backward pass."""
    mean_prefix: Number
    """Their mean prefix, in tokens."""
    longest: int
    """Sequence, in tokens."""
    rules: bool
    """Whether the engine goes by backward rules."""
    flops: Mapping[str, Number]
    """By part."""
    floor: Number
    """FLOPs that the norms need at least."""
    rates: Rates
    memory: Mapping[str, Mapping[str, Number]]
    """Bytes: moment → part → bytes, at most."""
    products_in: str
    """Precision of the products of what flows back."""
    draw: str
    """How the measured tokens were drawn."""
    sums: SumsPlan | None
    """How the summed gradients of figures, summary or diagnosis are made; None where the rollouts have no weights."""
    sums_flops: Number
    """FLOPs of making them once: `flops` is without them."""
    processes: int
    """How many share the responses, each on a device of its own."""
    prompts: int

    @property
    def seconds(self) -> dict[str, float]:
        """By part, in each process: all prepare alike, and share the rest."""
        shared = min(self.processes, self.responses)
        alone = self.rates.seconds(self.flops)
        return {part: seconds / (1 if part == "preparation" else shared) for part, seconds in alone.items()}

    @property
    def sums_seconds(self) -> float:
        """For summed gradients once, in each process, which share the prompts."""
        once = self.rates.seconds({"forward": self.sums_flops})["forward"]
        return once * largest_share(self.prompts, self.processes)

    @property
    def peak(self) -> Number:
        """Bytes at the moment that takes most."""
        return max(sum(parts.values()) for parts in self.memory.values())

    @property
    def disk_bytes(self) -> Number:
        """Bytes of the table, uncompressed."""
        return 4 * self.tokens * (TABLE_COLUMNS + self.shape.layers)

    def __str__(self) -> str:
        return "\n".join((*_describe_tokens(self), "", *_describe_work(self), "", *_describe_memory(self)))


def plan_batch(
    policy: Policy,
    batch: TokenBatch,
    settings: MeasureSettings,
    *,
    dtype: str | None = None,
    device: str | None = None,
    machine: str | None = None,
    rates: Rates | None = None,
    chunk_rows: int | None = None,
    chunk_memory: int = 1 << 30,
    gradient_memory: int | None = None,
    keeps_prompts: bool = False,
    metric: bool = False,
    processes: int = 1,
) -> MeasurePlan:
    """What measuring this batch takes, and apart from it its summed gradients; the policy may be without weights.

    gradient_memory: bytes for the summed gradients; None: a sixth of what the machine has beside the weights.
    keeps_prompts: whether these are kept of each prompt, as a diagnosis does, or of two halves. metric: whether AdamW's
    is asked for. processes: how many are launched, each on a GPU of its own.

    machine: a name of `machine.GPUS`; None: this machine's device, on which a pilot measures a few tokens for some
    seconds unless its rates are given. Raises InputError for what `measure` would refuse, as far as it can be seen
    without weights.
    """
    check_settings(settings)
    check_chunks(chunk_rows, chunk_memory)
    if processes < 1:
        raise InputError(f"processes is {processes}; give 1 or more")
    check_batch(policy, batch)
    settings = settle_sample(settings, batch.num_tokens, num_prompts=len(batch.group_ids.unique()))
    given = {"dtype": dtype, "device": device, "machine": machine, "chunk_rows": chunk_rows}
    given |= {"gradient_memory": gradient_memory, "keeps_prompts": keeps_prompts, "processes": processes}
    given["metric"] = metric
    if settings.minutes is not None:
        return _plan_minutes(policy, batch, settings, rates=rates, chunk_memory=chunk_memory, **given)
    kind = "cuda" if machine is not None else torch.device(find_device(device)).type
    if processes > 1 and kind == "cpu":
        raise InputError(
            f"processes is {processes}, and a plan has a GPU for each; name one by machine, or leave it out"
        )
    weights, computed = _find_dtypes(policy, dtype, kind)
    shape = ModelShape.from_config(policy.model.config)
    chosen, draw = choose_tokens(batch, settings)
    responses = describe_responses(batch, chosen)
    prefixes = [n for response in responses for n in response.prefixes]
    rules = follows_rules(policy)
    products = _find_products(policy, rules, settings, computed, kind)
    cut = {"rules": rules, "rows": chunk_rows, "memory": chunk_memory}
    sizes = cut | {"device": "cpu" if kind == "cpu" else "cuda"}
    flops = measure_flops(shape, responses, self_check=settings.self_check, **sizes)
    memory = measure_bytes(shape, responses, weight_bytes=weights.itemsize, **sizes)
    if weights != computed:
        for moment, widest in (("head", shape.vocab), ("chunk", shape.mlp_width)):
            memory[moment]["upcast"] = computed.itemsize * shape.hidden * widest
    if machine is not None:
        rates = gpu_rates(machine, products, dict.fromkeys(flops), fast=settings.fast)
    elif rates is None:
        found = {"dtype": weights, "device": torch.device(find_device(device)), "upcast": weights != computed}
        rates = try_measuring(make_pilot(policy, **found), batch, chosen, settings, **cut)
    if gradient_memory is None:
        free = free_memory(torch.device(find_device(device))) if machine is None else GPUS[machine].memory
        gradient_memory = max(1, int(GRADIENT_SHARE * (free - weights.itemsize * shape.parameters)))
    sums = None
    if batch.advantages is not None or batch.rewards is not None:
        kept = {"keeps_prompts": keeps_prompts, "metric": metric, "dtype": computed, "device": kind}
        sums = plan_batch_sums(policy, batch, memory=gradient_memory, **kept)
    return MeasurePlan(
        policy.path,
        shape,
        responses=len(batch),
        tokens=batch.num_tokens,
        measured=len(prefixes),
        mean_prefix=sum(prefixes) / max(1, len(prefixes)),
        longest=max(response.length for response in responses),
        rules=rules,
        flops=flops,
        floor=sum(floor_flops(shape, prefixes).values()),
        rates=rates,
        memory=memory,
        products_in=products,
        draw=draw,
        sums=sums,
        sums_flops=0 if sums is None else _forward_flops(shape, batch) * sums.forward_passes,
        processes=processes,
        prompts=len(own_rows(batch)),
    )


def _forward_flops(shape: ModelShape, batch: TokenBatch) -> Number:
    """One forward pass over the batch, with logits of the response tokens."""
    lengths = batch.attention_mask.sum(1).double()
    products = shape.active * lengths.sum().item() + shape.hidden * shape.vocab * batch.num_tokens
    return 2 * products + 2 * lengths.square().sum().item() * shape.layers * shape.query_width


def _plan_minutes(policy: Policy, batch: TokenBatch, settings: MeasureSettings, **given: Any) -> MeasurePlan:
    """The plan of the largest sample that leaves minutes enough for summed gradients; one token each at least."""
    found: dict[int, MeasurePlan] = {}

    def plan(each: int) -> MeasurePlan:
        if found:  # the machine is tried once
            given["rates"] = next(iter(found.values())).rates
        if each not in found:
            asked = replace(settings, minutes=None, tokens_per_interval=each)
            found[each] = plan_batch(policy, batch, asked, **given)
        return found[each]

    most, time = batch.num_tokens, 60 * settings.minutes
    if plan(1).sums is not None:
        kept = AFTERWARDS * time
        time -= kept if given["keeps_prompts"] else min(kept, plan(1).sums_seconds)
    fitting = bisect_right(range(2, most + 1), time, key=lambda each: sum(plan(each).seconds.values()))
    best = plan(1 + fitting)
    return replace(best, draw=f"{best.draw}; as many as {settings.minutes:g} min allow by the seconds below")


def _find_dtypes(policy: Policy, dtype: str | None, kind: str) -> tuple[torch.dtype, torch.dtype]:
    """(of the weights, of what is computed)."""
    if dtype == UPCAST:
        own = getattr(policy.model.config, "dtype", None) or torch.bfloat16
        return own, torch.promote_types(own, torch.float32)
    # A GPU's default is the checkpoint's own precision, mostly bfloat16.
    weights = DTYPES[dtype or ("float32" if kind == "cpu" else "bfloat16")]
    return weights, weights


def _find_products(policy: Policy, rules: bool, settings: MeasureSettings, weights: torch.dtype, kind: str) -> str:
    """Precision in which what flows back is multiplied: the rules carry float32 at least, the graph what weights are.

    kind: of device.
    """
    if not rules:
        if settings.fast:
            raise no_fast_mode(policy)
        return str(weights).removeprefix("torch.")
    precision = fast_precision(weights, kind) if settings.fast else "exact"
    widened = str(torch.promote_types(weights, torch.float32)).removeprefix("torch.")
    return widened if precision == "exact" else precision


def follows_rules(policy: Policy) -> bool:
    """Whether the blocks have the modules of a common decoder, which the engine has backward rules for.

    Names and weights alone are looked at. The engine also tries whether the blocks compute what the rules say, and
    goes along the graph where they do not: Granite with multipliers, SmolLM3 with layers without positions, Helium,
    Ernie 4.5.
    """
    return all(_is_common(block) for block in policy.blocks)


def _is_common(block: nn.Module) -> bool:
    owners = {name for name, module in block.named_modules() if list(module.parameters(recurse=False))}
    linear = {f"self_attn.{role}_proj" for role in "qkvo"} | {f"mlp.{role}_proj" for role in ("gate", "up", "down")}
    rest = owners - linear - {"self_attn.q_norm", "self_attn.k_norm"}
    return linear <= owners and rest in ({*filter(None, PLAIN)}, {*SANDWICH})


def choose_tokens(batch: TokenBatch, settings: MeasureSettings) -> tuple[np.ndarray, str]:
    """(which kept tokens get a backward pass, in the table's order; how that was found).

    A sample is drawn by π, which takes the weights to know: by π_old if the rollouts tell it, else as many tokens as
    four full intervals have, from all.
    """
    count, wanted = batch.num_tokens, settings.tokens_per_interval
    if wanted is None:
        return np.ones(count, dtype=bool), "every token"
    rng, chosen = np.random.default_rng(settings.seed), np.zeros(count, dtype=bool)
    if batch.old_logprobs is None:
        chosen[rng.permutation(count)[: wanted * (len(EDGES) - 1)]] = True
        return chosen, f"at most {wanted} of each interval; how many tokens each has is not known without old_logprobs"
    prob = batch.old_logprobs[batch.response_mask].exp().clamp(max=1.0).numpy()
    intervals = assign_intervals(prob, list(EDGES))
    for interval in range(len(EDGES) - 1):
        chosen[rng.permutation(np.flatnonzero(intervals == interval))[:wanted]] = True
    return chosen, f"at most {wanted} of each interval of π_old"


def _describe_tokens(plan: MeasurePlan) -> Iterator[str]:
    shape, way = plan.shape, "the model's own graph"
    if plan.rules:
        way = "backward rules, if its blocks compute what their names say (tried when it measures)"
    yield (
        f"{plan.model}: {shape.parameters:,} parameters, {shape.layers} layers of width {shape.hidden:,}, vocabulary "
        f"{shape.vocab:,}; measured by {way}, with products in {plan.products_in}"
    )
    yield (
        f"{plan.responses:,} responses, {plan.tokens:,} response tokens; the longest sequence has {plan.longest + 1:,} "
        f"tokens. Backward passes for {plan.measured:,} tokens ({plan.draw}), over prefixes of {plan.mean_prefix:,.0f} "
        "tokens in the mean."
    )


def _describe_work(plan: MeasurePlan) -> Iterator[str]:
    seconds = plan.seconds
    yield f"{'':16}{'FLOPs':>12}{'seconds':>12}"
    for name, flops in plan.flops.items():
        yield f"{name:16}{flops:12.3g}{seconds[name]:12.3g}"
    yield f"{'total':16}{sum(plan.flops.values()):12.3g}{sum(seconds.values()):12.3g}"
    each = "" if plan.processes == 1 else f", each of {plan.processes} processes"
    yield (
        f"on {plan.rates.machine}{each}: {describe_seconds(sum(seconds.values()))}, without figures and summary; "
        f"on a machine that was tried, within a factor of {WITHIN}."
    )
    if plan.sums is not None:
        once, most = describe_seconds(plan.sums_seconds), f"{plan.sums.memory / 2**30:.1f} GiB"
        yield f"{str(plan.sums).capitalize()}: {once}; at most {most} beside the weights."
    if plan.measured:
        yield (
            f"A measured token: {1e3 * sum(seconds.values()) / plan.measured:,.3g} ms. Its norms need "
            f"{plan.floor / plan.measured:.3g} FLOPs at least."
        )


def _describe_memory(plan: MeasurePlan) -> Iterator[str]:
    unit, name = (2**30, "GiB") if plan.peak >= 2**30 else (2**20, "MiB")
    parts = list(dict.fromkeys(part for moment in plan.memory.values() for part in moment))
    yield f"{name + ' at most':16}" + "".join(f"{moment:>12}" for moment in plan.memory)
    for part in parts:
        sizes = (moment.get(part) for moment in plan.memory.values())
        yield f"{part:16}" + "".join(" " * 12 if size is None else f"{size / unit:12.2f}" for size in sizes)
    yield f"{'total':16}" + "".join(f"{sum(moment.values()) / unit:12.2f}" for moment in plan.memory.values())
    yield f"On disk: the table, {plan.disk_bytes / 2**20:,.1f} MiB at most."
