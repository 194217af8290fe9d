"""What estimated norms cost and how far they scatter, beside exact ones: the numbers behind `--norms estimate`'s rule.

    python -m analyses.benchmarks.estimates --out figures/benchmark_estimates.csv

price    CPU time of one thread in forward passes over one response, medians of interleaved rounds: a draw of forward
         mode, a random-sign pass over one sum, and exact norms, these in units of Σ_t (prefix of t) / positions forward
         passes, by backward rules (eight responses, in the groups that these make) and along the graph. S and M of
         benchmarks.token_gradients, random weights.
scatter  Relative standard deviation of one sample of an interval's Σ‖g‖² over the responses of a batch: random signs
         and forward mode, on the policy embedded-certain and its own responses, from independent samples; the sums' own
         standard errors come from the same samples.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import tyro

from analyses.benchmarks.plan_time import make_sequences
from analyses.benchmarks.token_gradients import make_policy
from gradscope.gradients import SequenceTokens, TokenGradientMeter, measuring
from gradscope.gradients.estimates import signed_square_norms, squared_changes
from gradscope.intervals import EDGES, assign_intervals
from gradscope.policy import Policy, load_policy
from gradscope.rollouts import TokenBatch
from gradscope.sampling import HFSampler, batch_rows, rollout_rows
from gradscope.tasks import draw_questions, get_task

SEQUENCES = 8
"""Responses whose exact norms are measured by backward rules."""


@dataclass(frozen=True)
class Options:
    """Settings of the benchmark."""

    cases: tuple[str, ...] = ("S 128", "S 256", "M 128", "M 256")
    """Size and length of the prices."""
    rounds: int = 5
    samples: int = 64
    """Independent samples behind a relative deviation: it is known to about 1/√(2 · samples) of itself."""
    out: Path | None = None
    """CSV to write."""


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def prices(case: str, rounds: int) -> pd.DataFrame:
    """A row per way to measure."""
    size, length = case.split()
    policy = make_policy(size)
    responses = make_sequences(policy.vocab_size, SEQUENCES, int(length))
    response, (ids, targets) = responses.select([0]), responses.sequence(0)
    everything = torch.arange(len(targets))
    sequences = [SequenceTokens(responses.sequence(row)[0], targets, everything) for row in range(SEQUENCES)]
    ones = torch.ones(1, len(targets), dtype=torch.float64)
    prefixes = float(targets.sum()) / (int(length) - 1)
    with measuring(policy.model):
        by_rules, by_graph = (TokenGradientMeter(policy, ids, rules=rules) for rules in (True, False))
        groups = by_rules.group(sequences)

        def forward() -> None:
            with torch.no_grad():
                policy.model(input_ids=ids[None, :-1], use_cache=False)

        def exact_by_rules() -> None:
            for group in groups:
                by_rules.measure_together([sequences[index] for index in group])

        def exact_by_graph() -> None:
            by_graph.measure(ids, targets, everything, temperature=1.0)

        def signs(passes: int) -> None:
            signed_square_norms(policy.model, response, ones, passes, torch.Generator().manual_seed(0))

        def draws(count: int) -> None:
            squared_changes(policy.model, response, count, torch.Generator().manual_seed(0))

        work = {
            "forward pass": (forward, 1.0),
            "random signs, one pass more": (lambda: signs(3), 2.0),
            "forward mode, a draw": (lambda: draws(3), 3.0),
            "exact, backward rules": (exact_by_rules, SEQUENCES * prefixes),
            "exact, the graph": (exact_by_graph, prefixes),
        }
        for call, _ in work.values():
            call()
        times = [{name: cpu_seconds(call) for name, (call, _) in work.items()} for _ in range(rounds)]
        once = [cpu_seconds(lambda: signs(1)) for _ in range(rounds)]
    table = pd.DataFrame(times)
    table["random signs, one pass more"] -= once  # the difference of three passes and one
    units = table.div(table["forward pass"], axis=0).median() / pd.Series(
        {name: unit for name, (_, unit) in work.items()}
    )
    return pd.DataFrame({"what": "price", "case": case, "of": units.index, "value": units.to_numpy()})


def scatter(samples: int) -> pd.DataFrame:
    """A row per interval and estimator."""
    policy = load_policy("embedded-certain", device="cpu")
    batch = sample_responses(policy)
    rows = range(len(batch))
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, batch.sequence(0)[0])
        signs = forward = exact = 0.0
        for row in rows:
            ids, targets = batch.sequence(row)
            found = meter.measure(ids, targets, torch.arange(len(targets)), temperature=float(batch.temperature[row]))
            interval = torch.from_numpy(assign_intervals(found.statistics.logprob.exp().numpy(), list(EDGES)))
            members = (interval.long() == torch.arange(len(EDGES) - 1)[:, None]).double()
            response, generator = batch.select([row]), torch.Generator().manual_seed(row)
            exact = exact + members @ found.param_grad_norm.double().square()
            signs = signs + signed_square_norms(policy.model, response, members, samples, generator)
            forward = forward + squared_changes(policy.model, response, samples, generator) @ members.T
    table = []
    for name, values in (("random signs", signs), ("forward mode", forward)):
        for interval, (deviation, truth) in enumerate(zip(values.std(0).tolist(), exact.tolist(), strict=True)):
            table.append({"what": "scatter", "case": f"interval {interval}", "of": name, "value": deviation / truth})
    return pd.DataFrame(table)


def sample_responses(policy: Policy, questions: int = 8) -> TokenBatch:
    """A response to each of some puzzles."""
    task = get_task("knights-knaves-compact")
    rows = rollout_rows(
        policy,
        draw_questions(task, questions, seed=0),
        sampler=HFSampler(policy, progress=False),
        n=1,
        temperature=0.7,
        max_new_tokens=256,
        seed=0,
        task=task,
    )
    return batch_rows(rows, on_policy=True)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    table = pd.concat([*(prices(case, options.rounds) for case in options.cases), scatter(options.samples)]).round(3)
    print(table.to_string(index=False))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(options.out, index=False)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
