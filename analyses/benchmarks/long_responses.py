"""Measure memory and time of each Jacobian product on one response, against its length.

    python -m analyses.benchmarks.long_responses --out figures/cost/benchmark_long_responses.png

Policy M of `token_gradients` with random weights; one response of n tokens, of which the first 64 are the prompt. The
exact norm is that of the last token. Peak memory is the profiler's maximum above the policy's; time is CPU time of one
thread, from a separate run. `plain`, only for short responses, is vjp with plain attention and a single graph.

The floor is the product's minimum number of FLOPs at the speed of a large matrix product measured just before: one
forward pass with causal attention and no recomputation, three for jvp and vjp, and `gradient_flops` more for `norm`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import torch
import tyro
from matplotlib.figure import Figure

from analyses.benchmarks.peers import allocated_peak
from analyses.benchmarks.token_gradients import SIZES, make_policy, product_speed
from analyses.common.places import save_picture
from gradscope.gradients import (
    ModelShape,
    TokenJacobian,
    Vectors,
    attention,
    forward_flops,
    gradient_flops,
)
from gradscope.gradients.budget import graph_memory
from gradscope.plots import finish, new_panels, paper_style
from gradscope.rollouts import Response, collate

PROMPT = 64
PLAIN = 4096
"""Length from which plain attention is skipped: its memory is quadratic."""
LONG = 16_384
"""Length from which only statistics and norms are measured, because of the others' time."""
EVERYTHING = 1 << 60


@dataclass(frozen=True)
class Options:
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384)
    products: tuple[str, ...] = ("statistics", "norm", "jvp", "vjp", "plain")
    out: Path | None = None
    """Figure to write; its CSV is written to data/ beside it."""


def make_product(name: str, length: int) -> Callable[[], object]:
    """Prepare one product on one response."""
    policy = make_policy("M")
    policy.model.config.max_position_embeddings = length
    ids = torch.randint(0, SIZES["M"]["vocab_size"], (length,), generator=torch.Generator().manual_seed(1)).tolist()
    J = TokenJacobian(policy, collate([Response(ids[:PROMPT], ids[PROMPT:])]))
    if name == "statistics":
        return lambda: J.statistics
    if name == "norm":
        last = torch.arange(J.num_tokens) == J.num_tokens - 1
        return lambda: list(J.row_norms(last))
    if name == "jvp":
        vector = Vectors.zeros(policy.model, 1, None)
        vector.rows.fill_(1e-3)
        return lambda: J.jvp(vector)
    return lambda: J.vjp(torch.ones(1, J.num_tokens))


def floor_flops(name: str, length: int) -> float:
    """Return the minimum number of FLOPs of a product."""
    shape, n = ModelShape.of(make_policy("M").model), length - 1  # the last token has no successor
    pairs = 2 * shape.layers * shape.query_width * n * (n - 1)  # future keys, which causal attention skips
    if name == "norm":
        return forward_flops(shape, [n], 1) - pairs + sum(gradient_flops(shape, [n]).values())
    return (1 if name == "statistics" else 3) * (forward_flops(shape, [n], length - PROMPT) - pairs)


def table(options: Options) -> pd.DataFrame:
    """Return a row per product and length."""
    rows = []
    for length in options.lengths:
        for name in options.products:
            if (name == "plain" and length >= PLAIN) or (name not in ("statistics", "norm") and length >= LONG):
                continue
            everything_fits = name == "plain"
            with (
                patch.object(attention, "PLAIN", EVERYTHING) if everything_fits else nullcontext(),
                patch.dict(graph_memory.GRAPH, cpu=EVERYTHING) if everything_fits else nullcontext(),
            ):
                floor, product = floor_flops(name, length) / product_speed(), make_product(name, length)
                start = time.process_time()
                product()
                seconds = time.process_time() - start
                peak = allocated_peak(make_product(name, length))
            rows.append({"product": name, "length": length, "peak_mb": peak / 2**20, "cpu_s": seconds})
            rows[-1]["floor_s"] = floor
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


@paper_style()
def draw(table: pd.DataFrame) -> Figure:
    """Draw memory and time against length, a line per product; dashed: its floor."""
    figure, axes = new_panels(2, width=3.2, height=2.6)
    for ax, (column, label) in zip(axes, {"peak_mb": "peak memory, MB", "cpu_s": "CPU seconds"}.items(), strict=True):
        for name, rows in table.groupby("product", sort=False):
            (line,) = ax.plot(rows.length, rows[column], "o-", ms=3, label=name)
            if column == "cpu_s" and name != "plain":  # whose floor is vjp's
                ax.plot(rows.length, rows["floor_s"], "--", lw=0.8, color=line.get_color())
        lengths = sorted(table.length.unique())
        ax.set(xscale="log", yscale="log", xlabel="tokens of the response", ylabel=label)
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
        ax.yaxis.set_major_formatter("{x:,g}")
        ax.minorticks_off()
        finish(ax, table)
    axes[1].plot([], [], "--", lw=0.8, color="0.4", label="FLOP floor")
    axes[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)
    return figure


def main(options: Options) -> None:
    torch.set_num_threads(1)
    found = table(options)
    print(found.round({"peak_mb": 0, "cpu_s": 2, "floor_s": 2}).to_string(index=False))
    if options.out:
        save_picture(draw(found), options.out, found)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
