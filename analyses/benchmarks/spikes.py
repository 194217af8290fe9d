"""Plant culprits in a step and look for them with `explain_spike` and with a bisection by norms of sums.

    python -m analyses.benchmarks.spikes
    python -m analyses.benchmarks.spikes --steps 300          # and 300 quiet steps of a TRL run, watched

The bisection is what GradLoc (a patch of verl's, February 2026) describes: the norm of a part's summed gradient; a part
above the line is halved, first by responses, then by tokens, until single tokens remain or 128 backward passes are
made. A row per fault and tool: the step's norm over the line, tokens planted, found, and named beside them, backward
passes, what they amount to in passes over the whole batch, seconds. An explanation also gives each token's share, the
norm without the culprits, and the weightings that remove them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro

from analyses.common.script import exit_with
from analyses.common.tables import write_csv
from gradscope import load_policy, read_rollouts
from gradscope.cli.sample import Sample
from gradscope.gradients import TokenJacobian
from gradscope.objective import TokenWeights, resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.updates import SpikedStep, explain_spike, tabulate_step

TIMES = 3.0
BUDGET = 128
"""Most backward passes of the bisection."""


@dataclass(frozen=True)
class Options:
    model: str = "embedded"
    task: str = "knights-knaves-compact"
    questions: int = 10
    n: int = 8
    threads: int = 1
    steps: int = 0
    """Steps of a quiet TRL run to watch."""
    seed: int = 0
    work: Path = Path("work/spikes")
    out: Path = Path("figures/cost/data/spikes.csv")


class Counted(SpikedStep):
    """A step that counts its backward passes, and the tokens of the responses they go through."""

    calls, tokens = 0, 0.0

    def gradient(self, weights: np.ndarray) -> object:
        rows = self.table["response"][weights != 0].unique()
        type(self).calls += 1
        type(self).tokens += self.table["response"].isin(rows).sum()
        return super().gradient(weights)

    def terms(self, tokens: np.ndarray, direction: object) -> np.ndarray:
        type(self).calls += len(tokens)
        type(self).tokens += sum((self.table["response"] == self.table["response"].iloc[t]).sum() for t in tokens)
        return super().terms(tokens, direction)

    def along(self, direction: object) -> np.ndarray:
        type(self).calls += 1
        type(self).tokens += len(self.table)
        return super().along(direction)


def bisect(step: SpikedStep, line: float) -> np.ndarray:
    """Return the tokens at which a bisection by norms of sums ends."""
    found, budget = np.zeros(len(step.table), dtype=bool), BUDGET
    parts = [np.arange(len(step.table))]
    while parts and budget > 0:
        part = parts.pop(0)
        budget -= 1
        weights = np.zeros(len(step.table))
        weights[part] = step.weights[part]
        if step.norm(weights) <= line:
            continue
        if len(part) == 1:
            found[part] = True
            continue
        parts += halves(part, step.table["response"].to_numpy()[part])
    return found


def halves(part: np.ndarray, responses: np.ndarray) -> list[np.ndarray]:
    """Cut a part by responses if it has several, otherwise by tokens."""
    own = np.unique(responses)
    if len(own) > 1:
        first = np.isin(responses, own[: len(own) // 2])
        return [part[first], part[~first]]
    return [part[: len(part) // 2], part[len(part) // 2 :]]


Fault = tuple[str, TokenBatch, list[int], list[float]]
"""Its name, the batch, the tokens it is in, and what their weights are multiplied by."""


def faults(batch: TokenBatch, table: pd.DataFrame, policy: Policy, rng: np.random.Generator) -> Iterator[Fault]:
    """Yield the faults, each in a copy of the batch."""
    live = np.flatnonzero((table["weight"] != 0) & (table["logprob"] < np.log(0.25)))
    one, ratio, owner = (int(token) for token in rng.choice(live, 3, replace=False))
    yield "one token's advantage × 100", batch, [one], [100.0]
    yield "an overflowing ratio (1e6)", batch, [ratio], [1e6]
    last = (table["response"] != table["response"].shift(-1)) & (table["weight"] != 0)
    end = int(rng.choice(table.index[last]))
    row, place = batch.response_mask.nonzero()[end].tolist()
    with torch.no_grad():
        logits = policy.model(batch.input_ids[row : row + 1, :place]).logits[0, -1]
    fabricated = replace(batch, input_ids=batch.input_ids.clone())
    fabricated.input_ids[row, place] = int(logits.argmin())
    yield "a fabricated end token, × 30", fabricated, [end], [30.0]
    first = table[table["weight"] != 0].groupby("response").head(1)  # equal tokens after equal texts
    pair = first[first.duplicated(["group", "token_id"], keep=False)].iloc[0]
    pair = first.index[(first["group"] == pair["group"]) & (first["token_id"] == pair["token_id"])][:2].tolist()
    yield "two that cancel to 5 %", batch, pair, [4e4 / table["weight"][pair[0]], -3.8e4 / table["weight"][pair[1]]]
    own = table.index[table["response"] == table["response"][owner]].tolist()
    yield "a whole response × 100", batch, own, [100.0] * len(own)


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    policy, file = load_policy(options.model), options.work / "rollouts.jsonl"
    if not file.is_file():
        sizes = {"task": options.task, "questions": options.questions, "n": options.n, "temperature": 0.7}
        Sample(options.model, file, **sizes).sample()
    batch = read_rollouts(file, policy)
    batch = replace(batch, advantages=resolve_advantages(batch))
    _, plain = make_step(policy, batch)
    quiet, rows = SpikedStep(TokenJacobian(policy, batch), plain, policy.decode), []
    line = TIMES * quiet.norm(quiet.weights)
    for name, own, tokens, factors in faults(batch, plain, policy, np.random.default_rng(options.seed)):
        J, table = make_step(policy, own)
        table.loc[tokens, "weight"] = np.multiply(factors, plain["weight"].to_numpy()[tokens])
        table["policy_weight"] = table["weight"]
        planted = np.isin(np.arange(len(table)), tokens)
        norm = SpikedStep(J, table, policy.decode).norm(table["weight"].to_numpy(np.float64))
        for tool in ("gradscope", "bisection"):
            Counted.calls, Counted.tokens, start = 0, 0.0, time.perf_counter()
            step = Counted(J, table, policy.decode)
            found = explain_spike(step, norm, line=line).culprits if tool == "gradscope" else bisect(step, line)
            told = {"fault": name, "tool": tool, "norm_over_line": norm / line, "planted": int(planted.sum())}
            told |= {"found": int((found & planted).sum()), "besides": int((found & ~planted).sum())}
            told |= {"backward_passes": Counted.calls, "batch_passes": Counted.tokens / len(table)}
            rows.append(told | {"seconds": time.perf_counter() - start})
            print(rows[-1], flush=True)
    write_csv(pd.DataFrame(rows), options.out, float_format="%.4g")
    if options.steps:
        watch_quiet_steps(options)


def make_step(policy: Policy, batch: TokenBatch) -> tuple[TokenJacobian, pd.DataFrame]:
    """Return the Jacobian and the columns of an on-policy step."""
    J = TokenJacobian(policy, batch)
    logprob, zero = J.statistics.logprob, torch.zeros_like(batch.advantages)
    weights = TokenWeights(batch.advantages, zero, zero.bool())
    return J, tabulate_step(replace(batch, old_logprobs=logprob), weights, logprob).astype({"weight": "float64"})


def watch_quiet_steps(options: Options) -> None:
    """Train twice with TRL, without and with the recorder; print its alarms, and whether the weights are equal."""
    from analyses.benchmarks.rollout_writer import Options as Training, train
    from gradscope.integrations.trl import GradScopeCallback

    settings = Training(options.model, options.task, options.steps, prompts=2, tokens=200)
    ends = []
    for name, make in (
        ("without", None),
        ("with", lambda trainer: GradScopeCallback(trainer, every=None, spike=TIMES)),
    ):
        ends.append(train(settings, options.work / name, make))
    same = all(torch.equal(ends[0].weights[name], weight) for name, weight in ends[1].weights.items())
    alarms, seconds = ends[1].callback.recorder.steps, ends[1].callback.recorder.seconds
    print(
        f"{options.steps} steps: {len(alarms)} alarms ({alarms}), weights {'equal' if same else 'differ'} bit for bit, "
        f"{seconds:.2f} s in the recorder of {ends[1].wall:.0f} s"
    )


if __name__ == "__main__":
    exit_with(main)
