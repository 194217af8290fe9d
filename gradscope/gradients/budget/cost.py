"""The cost of exact token gradients: FLOPs and bytes in closed form from configuration and lengths, seconds by a pilot.

A token with logits at position p has gradients at the n = p + 1 positions of its prefix. At minimum, exact norms
require carrying it back through every block over that prefix and, at each linear layer, turning δ into the norm of the
weight's gradient, ‖Σ_s δ_s a_sᵀ‖. With backward rules the last block is nearly free: up to its attention's values, δ is
nonzero at p only. Blocks are assumed to be Llama's (two norms, attention, a gated MLP, no biases); other blocks count
as Llama blocks with the same number of weights.

For widths of 256 or more, the formula is within a factor of 1.25 of what torch counts in the engine's products
(tests/gradients/test_cost.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch
from jaxtyping import Bool
from torch import nn

from gradscope.errors import InputError
from gradscope.gradients.budget.allot import AFTER, Afterwards, Lengths, allot
from gradscope.gradients.budget.graph_memory import norms_bytes
from gradscope.gradients.budget.stopwatch import describe_seconds
from gradscope.gradients.engine.decoder.body import (
    block_bytes,
    kept_bytes,
    probs_bytes,
    row_bytes,
    seen_bytes,
    strip_bytes,
)
from gradscope.gradients.engine.decoder.parts import PLAIN, SANDWICH
from gradscope.gradients.engine.grouping import ROWS
from gradscope.gradients.engine.head import LOGIT_BYTES, logit_rows
from gradscope.gradients.engine.norms import factor_pays
from gradscope.gradients.operator.gram import SumsPlan
from gradscope.gradients.operator.jacobian import TokenJacobian
from gradscope.gradients.resources import Resources
from gradscope.gradients.settings import (
    MeasureSettings,
    check_settings,
    fast_precision,
    settle_minutes,
    settle_sample,
)
from gradscope.gradients.statistics import find_statistics
from gradscope.intervals import EDGES, assign_intervals
from gradscope.objective import PAPER, LossSettings
from gradscope.policy import Policy, find_blocks, largest_setting
from gradscope.resampling import FEWEST
from gradscope.rollouts import TokenBatch, check_batch
from gradscope.runs import counted

Number = int | float

PILOT_SECONDS = 1.0
"""The pilot measures more and more tokens until a round takes this long."""
FIRST, GROWTH = 1e9, 4
"""FLOPs of the first round, which also warms up, and the factor by which rounds grow."""


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a network that determine its cost."""

    parameters: int
    hidden: int
    """Width of the residual stream."""
    layers: int
    heads: int
    """Query heads."""
    query_width: int
    """Width of the queries, over all heads."""
    kv_width: int
    """Width of the keys, and of the values."""
    vocab: int
    active: int
    """Weights in the blocks' matrices that one token is multiplied by; all of them, unless there are experts."""
    tied: bool
    """Whether the output head is the embedding."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelShape:
        """Read the shape from a transformers causal language model, which may be on the meta device."""
        text, inside = model.config.get_text_config(), list(model.get_submodule(find_blocks(model)).parameters())
        experts = [p for p in inside if p.dim() == 3]  # [experts, rows, columns]
        visited, heads, width, pairs = (
            largest_setting(model, name)
            for name in ("num_experts_per_tok", "num_attention_heads", "head_dim", "num_key_value_heads")
        )
        width = width or text.hidden_size // heads
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            hidden=text.hidden_size,
            layers=text.num_hidden_layers,
            heads=heads,
            query_width=heads * width,
            kv_width=(pairs or heads) * width,
            vocab=text.vocab_size,
            active=sum(p.numel() for p in inside if p.dim() == 2)
            + sum(p[0].numel() * (visited or len(p)) for p in experts),
            tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        )

    @property
    def mlp_width(self) -> float:
        """Width of a gated MLP with all the weights that attention does not have."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return (self.active / self.layers - attention) / (3 * self.hidden)

    @property
    def linear_layers(self) -> tuple[tuple[Number, Number], ...]:
        """Return (outputs, inputs) of a block's linear layers, merging those that share an input."""
        first = self.query_width + 2 * self.kv_width + 2 * self.mlp_width
        return (first, self.hidden), (self.hidden, self.query_width), (self.hidden, self.mlp_width)


def gradient_flops(shape: ModelShape, prefixes: Sequence[int], *, rules: bool = True) -> dict[str, float]:
    """Count the FLOPs, by part, of the exact norms of tokens with prefixes of these lengths.

    The parts are `backward`, the activation gradients including the head's, and `norms`, the contractions with a
    triangular factor [n, min(n, d)] of each linear layer's inputs. Forward passes and factors are not included. With
    `rules` (analytic backward rules for the blocks) this is the minimum; autograd computes the last block's gradients
    densely up to its queries, and all scores.
    """
    n = np.asarray(prefixes, dtype=np.float64)
    block, keys = 2 * shape.active / shape.layers, (n + 1) / 2 if rules else n
    # Per pair of positions: scores, values, queries and keys.
    attention = 8 * shape.query_width
    spread = shape.hidden * (4 * shape.kv_width + (0 if rules else 2 * shape.query_width))
    dense = (shape.layers - 1) * (block * n + attention * n * keys)
    last = spread * n + block - spread + attention * n * (1 if rules else keys)

    def contract(out: Number, inside: Number) -> np.ndarray:
        columns = np.minimum(n, inside)
        return out * columns * (2 * n - columns + 1)

    norms = (shape.layers - 1) * sum(contract(*layer) for layer in shape.linear_layers)
    norms += contract(2 * shape.kv_width + (0 if rules else shape.query_width), shape.hidden)
    # The tied table's cross term: the head's input times the gradient at each position.
    norms += 2 * shape.hidden * n * shape.tied
    head = 2 * shape.hidden * shape.vocab * len(n)
    return {"backward": float(head + (dense + last).sum()), "norms": float(norms.sum())}


def forward_flops(shape: ModelShape, lengths: Sequence[int], logits: int = 0) -> float:
    """Count the FLOPs of forward passes over sequences of these lengths, with logits for `targets` tokens."""
    n = np.asarray(lengths, dtype=np.float64)
    matrices = 2 * shape.active * n.sum() + 2 * shape.hidden * shape.vocab * logits
    return float(matrices + 4 * shape.layers * shape.query_width * (n**2).sum())


@dataclass(frozen=True)
class Responses:
    """The lengths that determine the cost of measuring a batch."""

    lengths: tuple[int, ...]
    """Tokens before the last response token, for each response that keeps one."""
    reaches: tuple[int, ...]
    """Tokens before the last token with a backward pass, for each response that has one."""
    prefixes: tuple[int, ...]
    """Tokens before each token with a backward pass."""
    targets: int
    """Number of response tokens, each of which needs logits."""

    @classmethod
    def of(cls, batch: TokenBatch, chosen: Bool[np.ndarray, " n"]) -> Responses:
        """Read the lengths from a batch. chosen: mask of the kept tokens to measure, in table order."""
        counts = batch.response_mask.sum(1).tolist()
        each = [batch.sequence(row)[1].numpy() for row in range(len(batch))]
        picked = [ends[own] for ends, own in zip(each, np.split(chosen, np.cumsum(counts)[:-1]), strict=True)]
        lengths, reaches = (tuple(int(ends[-1]) for ends in ends_of if len(ends)) for ends_of in (each, picked))
        return cls(lengths, reaches, tuple(np.concatenate(picked).tolist()), sum(counts))


def measure_flops(shape: ModelShape, found: Responses, *, rules: bool, memory: int = 1 << 30) -> dict[str, float]:
    """Count the FLOPs of a measurement, by part.

    The parts are those of `gradient_flops`, and: `statistics`, the pass that assigns intervals; `forward`, another pass
    for the activations, with the logits of the measured tokens, and one per wave or chunk of tokens if activations do
    not fit or autograd is used; `factors`, the QR decompositions of the linear layers' inputs and, with rules, the
    attention probabilities.
    """
    reach = np.asarray(found.reaches, dtype=np.float64)
    tokens = len(found.prefixes) / max(1, len(reach))  # per response
    wave, keeps = np.full_like(reach, tokens), np.ones_like(reach, dtype=bool)
    if rules:
        keeps = np.array([_keeps_blocks(shape, int(n), memory) for n in found.reaches], dtype=bool)
        wave = np.where(keeps, tokens, np.clip(memory / (4 * shape.hidden * reach), 1, max(1, tokens)))
    factors = np.zeros_like(reach)
    for outputs, inside in shape.linear_layers:
        pays = [not rules or factor_pays(n, inside, outputs, w) for n, w in zip(reach, wave, strict=True)]
        factors += np.array(pays, dtype=bool) * 2 * reach * inside * np.minimum(reach, inside)
    factors *= np.maximum(1, tokens / wave)
    if rules:  # Probabilities that do not fit are recomputed for each chunk, in strips that skip half.
        again = probs_bytes(shape.heads, reach) > memory
        factors += shape.query_width * reach**2 * (4 + again * np.maximum(1, tokens * reach / ROWS))
        passes = 1 + ~keeps * np.ceil(tokens / wave)
    else:
        passes = np.full_like(reach, 1 + sum(found.prefixes) / ROWS / max(1, len(reach)))
    each = [forward_flops(shape, [n]) for n in found.reaches]
    return {
        "statistics": forward_flops(shape, found.lengths, found.targets),
        "forward": float(passes @ each) + 2 * shape.hidden * shape.vocab * len(found.prefixes),
        "factors": float(shape.layers * factors.sum()),
        **gradient_flops(shape, found.prefixes, rules=rules),
    }


def _keeps_blocks(shape: ModelShape, length: int, memory: int) -> bool:
    """Return whether `DecoderBody` would keep the activations of all blocks for a response."""
    widths = shape.hidden, shape.query_width, shape.kv_width, shape.mlp_width
    return shape.layers * block_bytes(*widths, length, norms=2) <= memory


def measure_bytes(
    shape: ModelShape, found: Responses, *, memory: int, weights: int, device: str = "cpu"
) -> dict[str, float]:
    """Bound the bytes in memory while the longest response is measured, by part.

    Responses measured together hold at most `memory` bytes of activations between them. If one response's activations
    in all blocks fit, they are kept; else only the blocks' inputs, one block's activations, and the gradients of a wave
    of tokens. This grows linearly with length, plus at most three times `memory`.

    Args:
        memory: the `chunk_memory` of `measure`.
        weights: bytes of the parameters.
        device: type of device.
    """
    longest = max(found.reaches, default=0)
    widths = shape.hidden, shape.query_width, shape.kv_width, shape.mlp_width
    held = shape.layers if _keeps_blocks(shape, longest, memory) else 1
    probs = probs_bytes(held * shape.heads, longest)
    response = held * kept_bytes(*widths, longest, norms=2) + (probs if probs <= memory else 0)
    rows = sum(found.prefixes)
    each = row_bytes(shape.hidden, shape.mlp_width, shape.heads, device=device)
    carried = max(each * min(rows, longest), min(memory, each * min(rows, longest * ROWS)))
    carried += 0 if probs <= memory else strip_bytes(shape.heads, longest, device=device)
    if held < shape.layers:
        delta = 4 * shape.hidden
        response += shape.layers * delta * longest + max(delta * longest, min(memory, delta * rows))
        # A recomputed block while it is recorded, and the inputs of its MLP's slopes.
        carried = max(carried, seen_bytes(*widths, longest, norms=2) + 4 * shape.mlp_width * longest)
    logits = LOGIT_BYTES * shape.vocab * min(longest, logit_rows(shape.vocab, memory))
    return {"weights": weights, "response": response, "logits or tokens": max(logits, carried)}


@dataclass(frozen=True)
class Speed:
    """The speed of a machine."""

    machine: str
    """Description."""
    forward: Number
    """FLOP/s of a forward pass."""
    gradients: Number
    """FLOP/s of everything after it."""
    preparation: float = 0.0
    """Seconds before any token is measured, in which the model's structure is found."""


def time_pilot(policy: Policy, batch: TokenBatch, chosen: Bool[np.ndarray, " n"], settings: MeasureSettings) -> Speed:
    """Measure more and more of the chosen tokens, until a round takes PILOT_SECONDS or all are measured.

    chosen: mask of the kept tokens with a backward pass, in table order. Returns the speed of the last round.
    """
    shape, precision = ModelShape.of(policy.model), "exact"
    if settings.fast:
        precision = fast_precision(policy.dtype, policy.device.type)
    start = perf_counter()
    J = TokenJacobian(policy, batch, Resources(), precision=precision)
    rules, preparation = J.meter.decoder is not None, perf_counter() - start
    whole = sum(gradient_flops(shape, Responses.of(batch, chosen).prefixes).values())
    count = max(1, int(FIRST * chosen.sum() / whole))
    while True:
        rows, picks = _take(batch, chosen, count)
        part, start = J.select(rows), perf_counter()
        find_statistics(part.meter, part.batch, settings.loss, edges=EDGES)
        scoring, start = perf_counter() - start, perf_counter()
        _ = [*part.row_norms(torch.from_numpy(picks))]
        seconds = perf_counter() - start
        if seconds >= PILOT_SECONDS or picks.sum() == chosen.sum():
            break
        count *= GROWTH
    work = measure_flops(shape, Responses.of(part.batch, picks), rules=rules)
    timed = counted(int(picks.sum()), "token")
    where = f"this machine ({policy.device.type}, {torch.get_num_threads()} threads), timed on {timed}"
    forward = work.pop("statistics") / scoring
    return Speed(where, forward, sum(work.values()) / seconds, preparation)


def _take(batch: TokenBatch, chosen: Bool[np.ndarray, " n"], count: int) -> tuple[list[int], Bool[np.ndarray, " k"]]:
    """Draw responses with `count` of the chosen tokens (from the middle of the last one); return rows and the mask."""
    own = np.split(chosen, np.cumsum(batch.response_mask.sum(1).tolist())[:-1])
    rows, picks = [], []
    for row in np.random.default_rng(0).permutation(len(batch)).tolist():
        places = own[row].nonzero()[0]
        taken = min(count, len(places))
        if taken:
            start = (len(places) - taken) // 2
            rows.append(row)
            picks.append(np.isin(np.arange(len(own[row])), places[start : start + taken]))
            count -= taken
    return rows, np.concatenate(picks)


@dataclass(frozen=True)
class Plan:
    """The cost of a measurement; `str` gives a table with its assumptions."""

    policy: Policy
    """Without weights if the plan is for another machine."""
    shape: ModelShape
    responses: Responses
    prompts: int
    draw: str
    """How the measured tokens are drawn, in words."""
    rules: bool
    """Whether the engine uses analytic backward rules."""
    flops: Mapping[str, float]
    """By part."""
    speed: Speed
    memory: Mapping[str, float]
    """Bytes at most, by part."""
    sums: SumsPlan | None
    """How summed gradients are computed; None if the rollouts give no weights."""
    minutes: Number | None = None
    """Time limit; None: no limit."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part."""
        work = {"preparation": self.speed.preparation}
        for part, flops in self.flops.items():
            work[part] = flops / (self.speed.forward if part == "statistics" else self.speed.gradients)
        return work

    @property
    def pass_seconds(self) -> float:
        """Seconds of a forward pass over the batch."""
        return self.seconds["statistics"]

    @property
    def sums_seconds(self) -> float:
        """Seconds of computing summed gradients once; 0 if there are none."""
        if self.sums is None:
            return 0.0
        return self.sums.forward_passes * self.pass_seconds

    @property
    def floor(self) -> float:
        """Minimum FLOPs for the norms."""
        return sum(gradient_flops(self.shape, self.responses.prefixes).values())

    def __str__(self) -> str:
        found, way = self.responses, "the model's own graph"
        if self.rules:
            way = "backward rules"
        each = found.prefixes or (0,)
        lines = [
            f"{self.policy.path}: {self.shape.parameters:,} parameters, {self.shape.layers} layers of width "
            f"{self.shape.hidden:,}, vocabulary {self.shape.vocab:,}; measured by {way}",
            f"{counted(len(found.lengths), 'response')}, {counted(found.targets, 'response token')}. Backward passes "
            f"for {counted(len(found.prefixes), 'token')} ({self.draw}), over prefixes of {np.mean(each):,.0f} tokens "
            "on average.",
            "",
            f"{'':16}{'FLOPs':>12}{'seconds':>12}",
        ]
        for part, seconds in self.seconds.items():
            lines.append(f"{part:16}{self.flops.get(part, 0):12.3g}{seconds:12.3g}")
        whole = sum(self.seconds.values())
        lines += [
            f"{'total':16}{sum(self.flops.values()):12.3g}{whole:12.3g}",
            f"on {self.speed.machine}: {describe_seconds(whole)}, without loading, self-check, figures and summary.",
        ]
        if self.minutes is not None:
            lines.append(f"What fits into {self.minutes:g} min: {counted(self.prompts, 'prompt')}.")
        if self.sums is not None:
            once, most = describe_seconds(self.sums_seconds), f"{self.sums.memory / 2**30:.1f} GiB"
            lines.append(f"{str(self.sums).capitalize()}: {once}; at most {most} beside the weights.")
        whole = sum(self.memory.values())
        unit, name = (2**30, "GiB") if whole >= 2**30 else (2**20, "MiB")
        parts = ", ".join(f"{part} {size / unit:.1f}" for part, size in self.memory.items())
        return "\n".join([*lines, f"Memory at most: {whole / unit:.1f} {name} ({parts})."])


def plan_batch(
    policy: Policy,
    batch: TokenBatch,
    settings: MeasureSettings,
    *,
    speed: Speed | Number | None = None,
    chunk_memory: int = 1 << 30,
    sums: SumsPlan | None = None,
) -> Plan:
    """Predict the cost of measuring this batch.

    speed: FLOP/s of another machine, for which the policy may lack weights; None: a pilot measures a few tokens here.
    sums: how summed gradients will be computed. Raises InputError for anything that `measure` would refuse, as far as
    can be seen without weights.
    """
    check_settings(settings)
    check_batch(policy, batch)
    if isinstance(speed, int | float):
        if not speed > 0:
            raise InputError(f"flops is {speed}; give FLOP/s above 0, such as 1e14")
        speed = Speed(f"a machine of {speed:.3g} FLOP/s", speed, speed)
    ids = batch.group_ids[batch.response_mask.any(1)].unique()
    prompts = len(ids)
    settings = settle_minutes(settings, policy, policy.device.type)
    settings = settle_sample(settings, batch.num_tokens, num_prompts=prompts)
    rules, shape = follows_rules(policy), ModelShape.of(policy.model)
    size = sum(p.nbytes for p in policy.model.parameters())

    def plan(chosen: np.ndarray, draw: str) -> Plan:
        found = Responses.of(batch, chosen)
        flops = measure_flops(shape, found, rules=rules, memory=chunk_memory)
        memory = measure_bytes(shape, found, memory=chunk_memory, weights=size, device=policy.device.type)
        if not rules:
            memory["response"] = norms_bytes(policy.model, policy.blocks, max(found.reaches, default=0))
        return Plan(policy, shape, found, prompts, draw, rules, flops, speed, memory, sums)

    minutes = settings.minutes
    chosen, draw = choose_tokens(batch, settings.tokens_per_interval, settings.seed)
    if speed is None:
        speed = time_pilot(policy, batch, chosen, settings)
    if minutes is None:
        return plan(chosen, draw)

    whole = plan(np.ones(batch.num_tokens, dtype=bool), "every token")
    left = 60 * minutes - speed.preparation - (AFTER if sums is not None else 0.0)
    following = Afterwards() if sums is None else Afterwards((sums.forward_passes,))
    known = {"prompts": prompts, "intervals": len(EDGES) - 1, "wanted": min(prompts, FEWEST)}
    found = allot(left, whole.pass_seconds / prompts, Lengths.of(batch), following, **known)
    order = np.random.default_rng([settings.seed, 1]).permutation(ids.numpy())
    prompts = found.prompts
    batch = batch.of_prompts(order[:prompts])
    chosen, draw = choose_tokens(batch, found.each and found.each * prompts, settings.seed)
    looked = f"{prompts:,} of {len(ids):,} prompts; of theirs {draw}"
    return replace(plan(chosen, looked), minutes=minutes)


def plan_sums(
    policy: Policy, batch: TokenBatch, memory: int, *, loss: LossSettings = PAPER, metric: bool = False
) -> SumsPlan | None:
    """Plan the summed gradients by prompt that follow a table; None without weights.

    Raises InputError if they do not fit into `memory` bytes.
    """
    if batch.advantages is None and batch.rewards is None and not loss.is_whole:
        return None
    return TokenJacobian(policy, batch, Resources(memory)).plan_gram(len(EDGES) - 1, metric=metric)


def follows_rules(policy: Policy) -> bool:
    """Return whether the blocks look like a common decoder's, for which the engine has backward rules.

    Checks names and weights only. The engine also checks what the blocks compute, and falls back to autograd if that
    differs from the rules: Granite with multipliers, SmolLM3 with layers without positions, Helium, Ernie 4.5.
    """
    return all(_is_common(block) for block in policy.blocks)


def _is_common(block: nn.Module) -> bool:
    owners = {name for name, module in block.named_modules() if list(module.parameters(recurse=False))}
    linear = {f"self_attn.{role}_proj" for role in "qkvo"} | {f"mlp.{role}_proj" for role in ("gate", "up", "down")}
    rest = owners - linear - {"self_attn.q_norm", "self_attn.k_norm"}
    return linear <= owners and rest in ({*filter(None, PLAIN)}, {*SANDWICH})


def choose_tokens(batch: TokenBatch, each: int | None, seed: int) -> tuple[Bool[np.ndarray, " n"], str]:
    """Choose `each` tokens per interval; return the mask in table order, and a description.

    Intervals depend on π, which needs the weights. Without them π_old is used if known, else the sample is drawn from
    all tokens, as many as four full intervals would have.
    """
    if each is None:
        return np.ones(batch.num_tokens, dtype=bool), "every token"
    rng, chosen = np.random.default_rng(seed), np.zeros(batch.num_tokens, dtype=bool)
    if batch.old_logprobs is None:
        chosen[rng.permutation(len(chosen))[: each * (len(EDGES) - 1)]] = True
        return chosen, f"at most {each} of each interval; how many tokens each has is not known without old_logprobs"
    intervals = assign_intervals(batch.old_logprobs[batch.response_mask].exp().clamp(max=1.0).numpy(), list(EDGES))
    for interval in range(len(EDGES) - 1):
        chosen[rng.permutation(np.flatnonzero(intervals == interval))[:each]] = True
    return chosen, f"at most {each} of each interval of π_old"
