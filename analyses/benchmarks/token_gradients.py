"""Time of an exact token gradient's norm: gradscope against every alternative, interleaved in one process.

    python -m analyses.benchmarks.token_gradients --out figures/benchmark_token_gradients.csv

CPU time (of one thread) per response token, and what each method's peak memory adds to the process's. Policies come
from a configuration with random weights: S = Qwen2, hidden 128, 4 layers, vocabulary 512, tied; M = hidden 512,
8 layers, vocabulary 8000, tied. Eight sequences of T tokens, the first quarter of each the prompt. Methods:

    batch loop      one autograd.grad a token on the whole batch's graph: what people write first
    sequence loop   the same on one sequence's graph at a time
    vmap            torch.func.vmap(grad) over 8 tokens of a sequence, parameters as inputs
    opacus          Opacus' ghost norms, a token a sample (refuses tied weights: run on an untied twin)
    gradscope       TokenGradientMeter, which also yields every layer's activation gradient

All but the batch loop run the whole of a few sequences; the batch loop, a few tokens. Every method's norms are held
against the sequence loop's (float32) before its time counts.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gc
import logging
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import torch
import tyro
from torch import Tensor
from torch.func import functional_call, grad, vmap

from gradscope.capture import TokenGradientMeter, measuring
from gradscope.models import Policy, find_blocks

SIZES = {
    "S": {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 512, "intermediate_size": 384},
    "M": {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 8000, "intermediate_size": 1536},
}
HEADS = {
    "S": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "M": {"num_attention_heads": 8, "num_key_value_heads": 4},
}
DIGITS = {"ms_per_token": 2, "ms_min": 2, "ms_max": 2, "peak_mb": 0, "speed_up_of_gradscope": 2}
METHODS = ("batch loop", "sequence loop", "vmap", "opacus", "gradscope")


@dataclass(frozen=True)
class Options:
    """Settings of the benchmark."""

    sizes: tuple[str, ...] = ("S", "M")
    lengths: tuple[int, ...] = (64, 128)
    repeats: int = 3
    """Interleaved rounds; the median is reported."""
    sequences: int = 8
    measured_sequences: int = 8
    """Sequences that each method measures in a round; at size M a quarter of them."""
    methods: tuple[str, ...] = METHODS
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
    """One token a sample: a sequence is repeated 8 times, each copy's loss is another token's."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    policy.model.train()  # Opacus' hooks look away otherwise; there is no dropout in this model.
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


def gradscope_meter(policy: Policy, ids: Tensor, targets: Tensor) -> Tensor:
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids[0])
        everything = torch.arange(len(targets))
        return torch.cat([meter.measure(row, targets, everything, temperature=1.0).param_grad_norm for row in ids])


RUN: dict[str, Callable[[Policy, Tensor, Tensor], Tensor]] = dict(
    zip(METHODS, (loop_on_batch, loop_on_sequence, vmap_of_grad, opacus_ghost, gradscope_meter), strict=True)
)


class PeakMemory:
    """Watches the resident memory of this process from a thread; `.added` is what a block's peak added, in MB."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self.process, self.stop = psutil.Process(), threading.Event()
        self.start = self.peak = self.process.memory_info().rss
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.stop.wait(0.02):
            self.peak = max(self.peak, self.process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        self.added = (self.peak - self.start) / 2**20


def benchmark(size: str, length: int, options: Options) -> pd.DataFrame:
    """One row per method: ms per token (median), spread, ratio to the best other method, MB, largest relative error."""
    ids = torch.randint(
        0, SIZES[size]["vocab_size"], (options.sequences, length), generator=torch.Generator().manual_seed(1)
    )
    targets = torch.arange(length // 4, length)
    few = targets[:: max(1, len(targets) // 4)]
    tied, untied = make_policy(size), make_policy(size, tied=False)
    times: dict[str, list[float]] = {name: [] for name in options.methods}
    memory, norms = {}, {}
    for _ in range(options.repeats):
        for name in options.methods:
            policy = untied if name == "opacus" else tied
            rows = (
                ids if name == "batch loop" else ids[: max(1, options.measured_sequences // (4 if size == "M" else 1))]
            )
            chosen = few if name == "batch loop" else targets
            with PeakMemory() as watch:
                start = time.process_time()
                norms[name] = RUN[name](policy, rows, chosen)
                seconds = time.process_time() - start
            times[name].append(1e3 * seconds / len(norms[name]))
            memory[name] = max(memory.get(name, 0.0), watch.added)
    rows = []
    for name in options.methods:
        reference = loop_on_sequence(untied if name == "opacus" else tied, ids[:1], few)
        measured = norms[name] if name == "batch loop" else norms[name][: len(targets)][few - targets[0]]
        rows.append(
            {
                "size": size,
                "length": length,
                "method": name,
                "ms_per_token": pd.Series(times[name]).median(),
                "ms_min": min(times[name]),
                "ms_max": max(times[name]),
                "peak_mb": memory[name],
                "max_relative_error": ((measured - reference) / reference).abs().max().item(),
            }
        )
    table = pd.DataFrame(rows)
    table["speed_up_of_gradscope"] = table.ms_per_token / table.ms_per_token[table.method == "gradscope"].item()
    return table


def main(options: Options) -> None:
    torch.set_num_threads(1)
    logging.getLogger("opacus").setLevel(logging.ERROR)
    tables = []
    for size in options.sizes:
        for length in options.lengths:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Opacus and torch.func warn about their own internals.
                tables.append(benchmark(size, length, options))
            print(tables[-1].round(DIGITS).to_string(index=False), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        pd.concat(tables).to_csv(options.out, index=False)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
