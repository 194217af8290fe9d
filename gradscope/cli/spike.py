"""`gradscope diagnose --spike`: explains a step whose gradient norm was out of line, from the file of its responses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from gradscope.cli.flags import ReadingFlags, command_progress, load_quietly, print_notes
from gradscope.diagnosis import describe_spike, make_spike_report
from gradscope.errors import InputError
from gradscope.gradients import MeasureSettings, Resources, TokenJacobian
from gradscope.objective import batch_weights, resolve_advantages
from gradscope.policy import checkpoint_step
from gradscope.rollouts import TokenBatch, read_checkpoint_dump
from gradscope.runs import write_parquet
from gradscope.updates import SpikedStep, explain_spike, tabulate_step

TIMES = 3
"""A norm is out of line above this many times the usual one."""
FEWEST = 5
"""Fewest norms that make a usual one, as in `Spikes`."""
PAGE, TOKENS = "spike.html", "spike.parquet"


def explain_step_file(model: str, file: Path, out: Path, flags: ReadingFlags, settings: MeasureSettings) -> None:
    """Write OUT/spike.html and every token's share of the step's gradient, OUT/spike.parquet; print the step in a line.

    The usual norm is the median of the steps in the files beside this one, if there are five; a norm that the file does
    not have is computed. Raises InputError if the file does not exist, or its responses have no advantages or rewards.
    """
    if not file.is_file():
        raise InputError(f"{file} is not a file; give the file of a step, such as step_000812.parquet")
    policy, progress = load_quietly(model, flags.loading), command_progress()
    reading = flags.reading | {"step": "all", "temperature": settings.temperature}
    dump = read_checkpoint_dump(file, policy, checkpoint_step(model), **reading)
    print_notes([*map(str, dump.remarks)])
    batch = replace(dump.batch, advantages=resolve_advantages(dump.batch, eps=settings.advantage_eps))
    J = TokenJacobian(policy, batch, Resources(progress=progress))
    with progress.stage("explaining the step"):
        found, loss = J.statistics, flags.own_loss(settings.loss, dump)
        weights = batch_weights(found.logprob, batch, loss, num_tokens=batch.num_tokens)
        table = tabulate_step(batch, weights, found.logprob, found.entropy, batch.rewards)
        step, typical = SpikedStep(J, table, policy.decode), _usual_norm(file)
        norm = _logged_norm(batch)
        norm = step.norm(step.weights) if math.isnan(norm) else norm
        line = norm / TIMES if typical is None else TIMES * typical
        spike = explain_spike(step, norm, line=line)
    out.mkdir(parents=True, exist_ok=True)
    write_parquet(out / TOKENS, table.assign(gradient_share=spike.shares))
    report = make_spike_report(spike, title=f"gradscope: {file.stem}, gradient norm {norm:.4g}", typical=typical)
    print(f"{file.stem}: {describe_spike(spike, typical)}\n{report.to_html(out / PAGE)}")


def _logged_norm(batch: TokenBatch) -> float:
    return math.nan if batch.grad_norms is None else float(batch.grad_norms.double().mean())


def _usual_norm(file: Path) -> float | None:
    """Return the median gradient norm of the steps in the files beside this one; None: fewer than five."""
    import pyarrow.parquet as pq

    norms = []
    for path in sorted(file.parent.glob("step_*.parquet")):
        if path != file and "-rank_" not in path.name and "grad_norm" in pq.read_schema(path).names:
            norms += pq.read_table(path, columns=["grad_norm"]).column(0).to_pylist()[:1]
    known = torch.tensor([norm for norm in norms if norm is not None and math.isfinite(norm)])
    return float(known.median()) if len(known) >= FEWEST else None
