"""How well calibrated are the error estimates of sketched gradient sums, on policies of real size?

    python -m analyses.benchmarks.real_size make 30m work/30m
    python -m analyses.benchmarks.summed_gradients work/30m --sketches 200

The intervals' gradients of every prompt are computed whole, then sketched repeatedly with different random numbers. How
often do the exact shares, norms, cosines and signals lie within 1.96 of a sketch's own standard errors?
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import tyro
from torch import Tensor
from tqdm import trange

from analyses.common.batch_gradients import HELD, by_prompt
from analyses.common.script import exit_with
from gradscope.diagnosis.gradients import signal_and_noise
from gradscope.gradients import Gram, Resources, SumsPlan, TokenJacobian, block_products
from gradscope.gradients.operator.sketches import BLOCKS, Sketcher
from gradscope.intervals import EDGES, assign_intervals
from gradscope.objective import resolve_advantages
from gradscope.policy import Policy, flat_slices, load_policy
from gradscope.rollouts import TokenBatch, read_rollouts

TABLE = Path("figures/benchmark_summed_gradients.csv")
INTERVALS = len(EDGES) - 1


@dataclass(frozen=True)
class Coverage:
    """Sketches against exact gradients."""

    folder: Annotated[Path, tyro.conf.Positional]
    """The folder that `real_size make` wrote."""
    sketches: int = 200
    size: int = 4096
    out: Path = TABLE

    def run(self) -> None:
        policy, batch, seeds = _load(self.folder, None)
        J = TokenJacobian(policy, batch, Resources(HELD))
        vectors = by_prompt(J, J.kept(seeds))
        exact = Gram.exact(block_products(vectors))
        truth = _statistics(exact.products, exact.total)
        inside, found, told = [], [], []
        for seed in trange(self.sketches, desc="sketches"):
            gram = _sketch(vectors, flat_slices(policy.model), self.size, seed)
            value, error = _statistics(gram.products, gram.total), gram.error(_statistics)
            inside.append(np.abs(value - truth) <= 1.96 * error)
            found.append(value)
            told.append(error)
        spread, mean_error = np.std(found, axis=0), np.sqrt(np.mean(np.square(told), axis=0))
        row = {"what": f"coverage {self.folder.name}", "tokens": batch.num_tokens, "sketches": self.sketches}
        row |= {"size": self.size, "statistics": truth.size, "coverage": round(float(np.mean(inside)), 4)}
        row |= {"least_coverage": np.mean(inside, axis=0).min(), "told_over_spread": np.median(mean_error / spread)}
        print(row)
        _write(self.out, [row])


def _load(folder: Path, dtype: str | None) -> tuple[Policy, TokenBatch, Tensor]:
    """Return policy, rollouts, and −advantage / num_tokens of each interval's tokens, [A, B, S]."""
    policy = load_policy(folder / "policy", dtype=dtype)
    batch = read_rollouts(folder / "rollouts.jsonl", policy)
    logprobs = TokenJacobian(policy, batch).statistics.logprob
    intervals = torch.from_numpy(assign_intervals(logprobs.double().exp().clamp(max=1.0).numpy(), list(EDGES)))
    advantages = torch.as_tensor(resolve_advantages(batch)).double()
    weights = -(advantages if advantages.dim() == 2 else advantages[:, None]) * batch.response_mask / batch.num_tokens
    return policy, batch, weights * (intervals == torch.arange(INTERVALS)[:, None, None])


def _sketch(vectors: Tensor, slices: dict[str, slice], size: int, seed: int) -> Gram:
    sketcher, out = Sketcher(size, seed=seed), torch.zeros(*vectors.shape[:2], size)
    for own, into in _pairs(vectors, out):
        for number, part in enumerate(slices.values()):
            sketcher.add(own[part], number, into)
    parts = np.stack([block_products(block) for block in out.chunk(BLOCKS, dim=2)])
    plan = SumsPlan("sketches", 4, 1 << 40, size, BLOCKS, 0.0)
    return Gram(parts, parts.sum((1, 3)), plan, tuple(range(len(vectors))))


def _pairs(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.flatten(0, 1) for tensor in tensors), strict=True)


def _statistics(pairs: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Return each interval's share, norm relative to the whole, cosine with the whole, and signal."""
    own = np.einsum("paqa->apq", pairs)
    squares, whole, along = np.diag(products), products.sum(), products.sum(1)
    signals = signal_and_noise(own)["signal"][0]
    parts = [along / whole, np.sqrt(squares / whole), along / np.sqrt(squares * whole), signals / whole]
    return np.concatenate(parts)


def _write(file: Path, rows: list[dict]) -> None:
    table = pd.DataFrame(rows).assign(torch=torch.__version__)
    if file.is_file():
        known = pd.read_csv(file)
        table = pd.concat([known[~known["what"].isin(table["what"])], table], ignore_index=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(file, index=False)


if __name__ == "__main__":
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    exit_with(lambda: tyro.cli(Coverage, description=__doc__, config=config).run())
