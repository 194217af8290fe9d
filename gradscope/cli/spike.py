"""`gradscope diagnose --spike`: explains a step whose gradient norm was out of line, from the file of its responses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gradscope.cli.flags import command_progress, load_quietly, print_notes
from gradscope.errors import InputError
from gradscope.gradients import Resources, TokenJacobian
from gradscope.integrations.row_writer import FEW
from gradscope.objective import LossSettings, batch_weights, resolve_advantages
from gradscope.policy import checkpoint_step
from gradscope.rollouts import Dump, read_checkpoint_dump
from gradscope.runs import write_parquet

TIMES = 3
"""A norm is out of line above this many times the usual one."""
PAGE, TOKENS = "spike.html", "spike.parquet"


def explain_step_file(
    model: str,
    file: Path,
    out: Path,
    *,
    loading: Mapping[str, Any],
    reading: Mapping[str, Any],
    loss: LossSettings,
) -> None:
    """Write OUT/spike.html and every token's share of the step's gradient, OUT/spike.parquet; print the step in a line.

    The usual norm is the median of the steps in the files beside this one, if there are five. Raises InputError if the
    file does not exist or has no advantages.
    """
    from gradscope.diagnosis import describe_spike, make_spike_report
    from gradscope.updates import SpikedStep, explain_spike, tabulate_step

    if not file.is_file():
        raise InputError(f"{file} is not a file; give the file of a step, such as step_000812.parquet")
    policy, progress = load_quietly(model, loading), command_progress()
    dump = read_checkpoint_dump(file, policy, checkpoint_step(model), **reading)
    print_notes([*map(str, dump.remarks)])
    batch = dump.batch
    batch = batch if batch.advantages is not None else _with_advantages(batch)
    J = TokenJacobian(policy, batch, Resources(progress=progress))
    with progress.stage("explaining the step"):
        found = J.statistics
        weights = batch_weights(found.logprob, batch, loss, num_tokens=batch.num_tokens)
        table = tabulate_step(batch, weights, found.logprob, found.entropy, batch.rewards)
        step, typical = SpikedStep(J, table, policy.decode), _usual_norm(file)
        norm = _logged_norm(dump)
        norm = step.norm(step.weights) if norm is None else norm
        line = norm / TIMES if typical is None else TIMES * typical
        spike = explain_spike(step, norm, line=line if math.isfinite(line) else math.inf)
    out.mkdir(parents=True, exist_ok=True)
    write_parquet(out / TOKENS, table.assign(gradient_share=spike.shares))
    report = make_spike_report(spike, title=f"gradscope: {file.stem}, gradient norm {norm:.4g}", typical=typical)
    print(f"{file.stem}: {describe_spike(spike, typical)}\n{report.to_html(out / PAGE)}")


def _with_advantages(batch: Any) -> Any:
    from dataclasses import replace

    return replace(batch, advantages=resolve_advantages(batch))


def _logged_norm(dump: Dump) -> float | None:
    norms = dump.batch.grad_norms
    return None if norms is None else float(norms.double().mean())


def _usual_norm(file: Path) -> float | None:
    """Return the median gradient norm of the steps in the files beside this one; None: fewer than five."""
    import pyarrow.parquet as pq

    norms = []
    for path in sorted(file.parent.glob("step_*.parquet")):
        if path != file and "-rank_" not in path.name and "grad_norm" in pq.read_schema(path).names:
            norms += pq.read_table(path, columns=["grad_norm"]).column(0).to_pylist()[:1]
    known = torch.tensor([norm for norm in norms if norm is not None and math.isfinite(norm)])
    return float(known.median()) if len(known) >= FEW else None
