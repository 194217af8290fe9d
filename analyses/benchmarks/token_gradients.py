"""Time the exact norm of a token's gradient: gradscope against every alternative and the FLOP floor, interleaved.

    python -m analyses.benchmarks.token_gradients --out figures/cost/data/benchmark_token_gradients.csv

CPU time of one thread per response token; medians over rounds in which the methods take turns in one process: gradscope
measures eight sequences together, the others the first few of these one by one, since batching helps none of them.
Ratios are medians of each round's ratio. Policies have random weights: S = Qwen2, hidden 128, 4 layers, vocabulary 512,
tied; M = hidden 512, 8 layers, vocabulary 8000, tied. The first quarter of each sequence of T tokens is the prompt.
Methods:

    batch loop      one autograd.grad a token on the graph of a batch of eight: what people write first (a few tokens)
    sequence loop   the same on one sequence's graph at a time
    vmap            torch.func.vmap(grad) over 8 tokens of a sequence, parameters as inputs
    opacus          Opacus' ghost norms, a token a sample (refuses tied weights: run on an untied twin)
    graph           TokenGradientMeter along the model's own graph, as it measures any architecture
    gradscope       TokenGradientMeter by backward rules, in the groups that it makes itself; both yield every layer's
                    activation gradient as well

The floor is the minimum number of FLOPs of an exact norm (`gradscope.gradients.gradient_flops`: the activation
gradients' backward pass over each token's prefix, and the contractions to norms) at the speed of a large float32 matrix
product, measured in every round. A meter is built once per policy before the rounds (`setup_s`). Every method's norms
are compared with the sequence loop's. Peak memory is the most a method allocates beyond the policy on one sequence
(gradscope and the batch loop: some tokens of each of eight), according to the profiler.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro
from torch import Tensor
from torch.func import functional_call, grad, vmap

from gradscope.gradients import ModelShape, SequenceTokens, TokenGradientMeter, gradient_flops, measuring
from gradscope.policy import Policy, find_blocks

SIZES = {
    "S": {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 512, "intermediate_size": 384},
    "M": {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 8000, "intermediate_size": 1536},
}
HEADS = {
    "S": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "M": {"num_attention_heads": 8, "num_key_value_heads": 4},
}
DIGITS = {"ms_per_token": 3, "ms_min": 3, "ms_max": 3, "peak_mb": 0, "ratio": 2, "fraction_of_floor": 2, "setup_s": 2}
METHODS = ("batch loop", "sequence loop", "vmap", "opacus", "graph", "gradscope")
OUTSIDE = ("sequence loop", "vmap", "opacus")
"""Methods outside gradscope, of which the best is the alternative."""
LOOP_TOKENS = 4
"""Tokens that the batch loop measures."""


@dataclass(frozen=True)
class Options:
    sizes: tuple[str, ...] = ("S", "M")
    lengths: tuple[int, ...] = (64, 128, 256)
    rounds: int = 3
    sequences: int = 8
    """Sequences that gradscope measures in a round; the others measure half of them, at size M one."""
    methods: tuple[str, ...] = METHODS
    memory: bool = True
    """Also measure peak memory."""
    out: Path | None = None
    """CSV to write."""


def make_policy(size: str, *, tied: bool = True) -> Policy:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**SIZES[size], **HEADS[size], tie_word_embeddings=tied, attn_implementation="eager")
    model = Qwen2ForCausalLM(config).eval()
    return Policy(model, None, find_blocks(model))


def loop_on_batch(policy: Policy, ids: Tensor, targets: Tensor) -> Tensor:
    return _loop(policy, policy.model(input_ids=ids, use_cache=False).logits[0], ids[0], targets)


def loop_on_sequence(policy: Policy, ids: Tensor, targets: Tensor) -> Tensor:
    return torch.cat(
        [_loop(policy, policy.model(input_ids=row[None], use_cache=False).logits[0], row, targets) for row in ids]
    )


def _loop(policy: Policy, logits: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
    logprobs = logits.log_softmax(-1)[targets - 1, ids[targets]]
    parameters = list(policy.model.parameters())
    squares = []
    for logprob in logprobs:
        gradients = torch.autograd.grad(logprob, parameters, retain_graph=True)
        squares.append(sum(g.square().sum() for g in gradients))
    return torch.stack(squares).sqrt()


def vmap_of_grad(policy: Policy, ids: Tensor, targets: Tensor) -> Tensor:
    parameters = {name: p.detach() for name, p in policy.model.named_parameters()}

    def logprob(values: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        logits = functional_call(policy.model, values, (), {"input_ids": row[None], "use_cache": False}).logits[0]
        chosen = torch.arange(len(row)) == target - 1
        return (logits.log_softmax(-1).gather(1, row.roll(-1)[:, None])[:, 0] * chosen).sum()

    def square_norm(row: Tensor, target: Tensor) -> Tensor:
        return sum(g.square().sum() for g in grad(logprob)(parameters, row, target).values())

    return torch.cat([vmap(square_norm, (None, 0), chunk_size=8)(row, targets) for row in ids]).sqrt()


def opacus_ghost(policy: Policy, ids: Tensor, targets: Tensor) -> Tensor:
    """Make each token a sample: a sequence is repeated 8 times, and each copy's loss is one token's."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    policy.model.train()  # Opacus' hooks ignore a model in eval mode; this one has no dropout.
    wrapped = GradSampleModuleFastGradientClipping(
        policy.model, batch_first=True, loss_reduction="sum", use_ghost_clipping=True, max_grad_norm=1.0, strict=False
    )
    try:
        norms = []
        for row in ids:
            for part in targets.split(8):
                logits = wrapped(input_ids=row.repeat(len(part), 1), use_cache=False).logits
                logits[torch.arange(len(part)), part - 1].log_softmax(-1)[
                    torch.arange(len(part)), row[part]
                ].sum().backward()
                norms.append(wrapped.get_norm_sample().clone())
                wrapped.zero_grad(set_to_none=True)
        return torch.cat(norms)
    finally:
        wrapped.remove_hooks()
        policy.model.eval()


def measure_with(meter: TokenGradientMeter, ids: Tensor, targets: Tensor) -> Tensor:
    sequences = [SequenceTokens(row, targets, torch.arange(len(targets))) for row in ids]
    norms: dict[int, Tensor] = {}
    with measuring(meter.model):
        for group in meter.group(sequences):
            found = meter.measure_together([sequences[i] for i in group])
            norms |= {i: gradients.param_grad_norm for i, gradients in zip(group, found, strict=True)}
    return torch.cat([norms[i] for i in range(len(ids))])


@dataclass(frozen=True)
class Method:
    """A way to measure, prepared for a policy."""

    run: Callable[[Tensor, Tensor], Tensor]
    """(sequences [B, T], targets [m]) → norms [B · m]."""
    setup: float
    """CPU seconds of preparation."""


def make_method(name: str, size: str, probe: Tensor) -> Method:
    policy = make_policy(size, tied=name != "opacus")
    start = time.process_time()
    if name in ("graph", "gradscope"):
        with measuring(policy.model):
            meter = TokenGradientMeter(policy, probe, rules=name == "gradscope")
        return Method(partial(measure_with, meter), time.process_time() - start)
    loops = {
        "batch loop": loop_on_batch,
        "sequence loop": loop_on_sequence,
        "vmap": vmap_of_grad,
        "opacus": opacus_ghost,
    }
    return Method(partial(loops[name], policy), 0.0)


def draw_sequences(size: str, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Return (ids [count, length], indices of the response tokens)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SIZES[size]["vocab_size"], (max(count, 8), length), generator=generator)
    return ids[:count], torch.arange(length // 4, length)


def work_of(name: str, size: str, length: int, sequences: int) -> tuple[Tensor, Tensor]:
    """Return the tokens that a method measures in a round."""
    few = 1 if size == "M" else max(1, sequences // 2)
    ids, targets = draw_sequences(size, length, {"batch loop": 8, "gradscope": sequences}.get(name, few))
    return ids, targets[:: len(targets) // LOOP_TOKENS] if name == "batch loop" else targets


def peak_memory(name: str, size: str, length: int) -> float:
    """Return a method's peak MB beyond the policy, from the records of every allocation.

    It measures at most the first and last eight tokens: memory grows with the prefix, not with the number of tokens.
    """
    ids, targets = work_of(name, size, length, 8 if name == "gradscope" else 1)
    if name != "batch loop":
        targets = torch.cat([targets[:8], targets[-8:]])
    method = make_method(name, size, ids[0])
    return allocated_peak(lambda: method.run(ids, targets)) / 2**20


def allocated_peak(call: Callable[[], object]) -> int:
    """Return the peak bytes that the call allocates on the CPU, above those allocated before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    records = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for record in sorted(records, key=lambda e: e.start_ns()):
        held += record.nbytes()
        peak = max(peak, held)
    return peak


def product_speed() -> float:
    """Return the FLOPs per CPU second of a large float32 matrix product."""
    a, b = torch.randn(2, 1024, 1024).unbind()
    seconds = []
    for _ in range(5):
        start = time.process_time()
        a @ b
        seconds.append(time.process_time() - start)
    return 2 * 1024**3 / min(seconds)


def benchmark(size: str, length: int, options: Options) -> pd.DataFrame:
    """Return a row per method: ms per token (median), spread, ratio to gradscope, floor, MB, largest relative error."""
    work = {name: work_of(name, size, length, options.sequences) for name in options.methods}
    methods = {name: make_method(name, size, work[name][0][0]) for name in options.methods}
    times, norms, speeds = {name: [] for name in methods}, {}, []
    for _ in range(options.rounds):
        speeds.append(product_speed())
        for name, method in methods.items():
            start = time.process_time()
            norms[name] = method.run(*work[name])
            times[name].append(1e3 * (time.process_time() - start) / len(norms[name]))
    shape = ModelShape.of(make_policy(size).model)
    targets = work["gradscope"][1]
    floor = 1e3 * sum(gradient_flops(shape, targets.tolist()).values()) / len(targets) / np.array(speeds)
    ours = np.array(times["gradscope"])
    rows = [
        {
            "size": size,
            "length": length,
            "method": name,
            "ms_per_token": np.median(of_method),
            "ms_min": min(of_method),
            "ms_max": max(of_method),
            "ratio": np.median(np.array(of_method) / ours),
            "fraction_of_floor": np.median(floor / np.array(of_method)),
            "peak_mb": peak_memory(name, size, length) if options.memory else np.nan,
            "setup_s": methods[name].setup,
            "max_relative_error": largest_error(name, size, norms[name], work[name]),
            "gflops_of_product": np.median(speeds) / 1e9,
        }
        for name, of_method in times.items()
    ]
    return pd.DataFrame(rows)


def largest_error(name: str, size: str, norms: Tensor, work: tuple[Tensor, Tensor]) -> float:
    """Return the largest error over a few tokens of the first sequence, relative to the sequence loop."""
    ids, targets = work
    some = torch.arange(0, len(targets), max(1, len(targets) // LOOP_TOKENS))
    reference = loop_on_sequence(make_policy(size, tied=name != "opacus"), ids[:1], targets[some])
    return ((norms[some] - reference) / reference).abs().max().item()


def describe(table: pd.DataFrame) -> str:
    """Describe the ratios in words."""
    by = table.set_index("method")
    outside = by.loc[[m for m in OUTSIDE if m in by.index]]
    if outside.empty:
        return ""
    best = outside.ratio.idxmin()
    words = f"gradscope is {outside.ratio[best]:.2f} times as fast as {best}"
    if "graph" in by.index:
        words += f", {by.ratio['graph']:.2f} times as fast as along the graph"
    return f"{words}, and at {by.fraction_of_floor['gradscope']:.2f} of the floor"


def main(options: Options) -> None:
    torch.set_num_threads(1)
    logging.getLogger("opacus").setLevel(logging.ERROR)
    tables = []
    for size in options.sizes:
        for length in options.lengths:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Opacus and torch.func warn about their own internals.
                tables.append(benchmark(size, length, options))
            print(tables[-1].round(DIGITS).to_string(index=False))
            print(describe(tables[-1]), flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                pd.concat(tables).to_csv(options.out, index=False)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
