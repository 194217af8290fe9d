"""`gradscope audit`: compares the gradient that a trainer used with the gradient of its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import tyro
from torch import Tensor

from gradscope.cli.flags import Model, ReadingFlags, command_progress, load_quietly, print_notes, quiet_transformers
from gradscope.errors import InputError
from gradscope.gradients import Resources
from gradscope.objective import LossSettings
from gradscope.policy import Policy, checkpoint_step, find_policy_state, float_parameters
from gradscope.rollouts import Dump, read_checkpoint_dump
from gradscope.runs import check_is_folder, write_text
from gradscope.updates import (
    SUITE,
    Audit as Audited,
    Average,
    StepAudit,
    TrainedLoss,
    audit,
    audit_step,
    audit_suite,
    check_kl,
    gradient_of_moments,
    is_suite,
    undo_clip,
    write_suite,
)

SHOWN = 12
"""Most rows to print of modules that differ."""
ROUNDED = (
    "neither log nor gradient tells the precision of the trainer's passes; --precision bfloat16 allows for rounding"
)


@dataclass(frozen=True, kw_only=True)
class Audit(ReadingFlags):
    """Check a trainer's gradient against the gradient of its loss: compute the exact gradient of a step's batch, under
    several readings of the loss, and compare it with the trainer's norm, its saved `.grad`, or AdamW's moments. With
    the next checkpoint, also check the step that was taken."""

    model: Model
    """Checkpoint that the step started from."""
    rollouts: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="ROLLOUTS")] = None
    """All responses of the step, in the trainer's order, best as ids with advantages per token. Required unless
    --suite."""
    suite: Path | None = None
    """Instead, write to this folder a small model of MODEL's architecture and a step for each of several cases, for
    your own trainer to compute; then, again, audit the gradients that it saved as CASE/gradient.safetensors. Written
    with --kl-corrected and --kl-estimator, such is the KL of its cases."""
    expect: Average | None = None
    """With --suite: what your trainer means to average over, so that another average is wrong."""
    gradient: Path | None = None
    """safetensors of the trainer's gradient by parameter name."""
    grad_norm: float | None = None
    """The norm that the trainer logged, a weaker check. Default without any of the three: the norm in the rollouts."""
    after: Path | None = None
    """The next step's checkpoint: the change of AdamW's first moments since MODEL gives the clipped gradient, and that
    of the weights is compared with AdamW's step."""
    micro_batch: int | None = None
    """Responses in the trainer's micro-batch; none: as recorded in the rollouts, if at all."""
    processes: int | None = None
    """The trainer's processes, with equally many consecutive responses each; none: as recorded in the rollouts, if at
    all."""
    max_grad_norm: float | None = None
    """The trainer's clipping threshold, if the given gradient is clipped and the rollouts do not record its norm."""
    advantage_eps: float | None = None
    """Added to a group's standard deviation where advantages are computed from rewards, also by the faults that are
    tried; TRL's is 1e-4; none: 1e-6 or 1e-4, whichever the rollouts' advantages show, else 1e-6."""
    entropy_coef: float = 0.0
    """Coefficient of an entropy bonus in the loss."""
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the trainer's passes; none: as recorded in the rollouts, or as the gradient's numbers show."""
    temperature: float | None = None
    """Sampling temperature; none: each response's own, from the rollouts (1.0 if they have none)."""
    loss: Annotated[LossSettings, tyro.conf.arg(name="")] = field(default_factory=LossSettings)
    out: Path | None = None
    """Folder for readings.csv, groups.csv, parameters.csv, explained.csv, step.csv and verdict.txt. With --suite, for
    suite.csv and each CASE/verdict.txt and CASE/explained.csv."""

    def run(self) -> None:
        if self.suite is not None:
            return self._run_suite(self.suite)
        if self.expect is not None:
            raise InputError("--expect is given without --suite; give the cases with --suite DIR")
        if self.rollouts is None:
            raise InputError("no ROLLOUTS are given; give the log of the step, or --suite DIR for steps to compute")
        given = {"--gradient": self.gradient, "--grad-norm": self.grad_norm, "--after": self.after}
        if len(named := [flag for flag, value in given.items() if value is not None]) > 1:
            raise InputError(f"{' and '.join(named)} are given; give the trainer's gradient in only one way")
        for path in filter(None, (self.gradient, self.after)):
            if not path.exists():
                raise InputError(f"{path} does not exist; give a file that the trainer saved")
        policy, progress = load_quietly(self.model, self.loading), command_progress()
        how = {"temperature": self.temperature, **self.reading}
        dump = read_checkpoint_dump(self.rollouts, policy, checkpoint_step(self.model), **how)
        notes, logged, clip = [*map(str, dump.remarks)], _logged_norm(dump), 1.0
        gradient = logged if self.grad_norm is None else self.grad_norm
        if self.gradient is not None:
            gradient = _read_gradient(self.gradient)
            trained = [name for name, _ in float_parameters(policy.model) if dump.batch.run.trains(name)]
            if logged is not None and len(gradient) >= len(trained):  # of a part of it, the norm says nothing
                gradient, clip = undo_clip(gradient, logged)
                clipped = f"the gradient was saved after clipping, which multiplied it by {clip:.4g}; this is undone"
                notes += [clipped] if clip < 1 else []
        elif self.after is not None:
            gradient = gradient_of_moments(policy, find_policy_state(policy), self.after)
            if logged is not None:
                gradient, clip = undo_clip(gradient, logged)
            notes.append(_of_moments(logged, clip))
        print_notes(notes)
        if gradient is None:
            told = ", ".join(given)
            raise InputError(f"the rollouts record no gradient norm; give the trainer's gradient by one of {told}")
        settings = {"micro_batch": self.micro_batch, "processes": self.processes, "max_grad_norm": self.max_grad_norm}
        loss = replace(TrainedLoss.of(self.own_loss(self.loss, dump)), entropy_coef=self.entropy_coef)
        loss = replace(loss, advantage_eps=self.advantage_eps)
        run = replace(dump.batch.run, precision=self.precision or dump.batch.run.precision)
        batch = replace(dump.batch, run=run)
        with progress.stage("the exact gradient"):
            found = audit(policy, batch, gradient, loss=loss, **settings, resources=Resources(progress=progress))
        if found.precision is None and found.kind in ("factor", "other"):
            notes.append(ROUNDED)
            print_notes([ROUNDED])
        step = None if self.after is None else self._check_step(policy, found, gradient, clip, notes)
        said = [*filter(None, (found.verdict, *_to_do(found.remedies), found.blind))]
        said += [step.verdict, *_to_do(step.remedies)] if step else []
        print("\n".join(said), end="\n\n")
        print(_table(_telling(found).dropna(axis="columns", how="all")))
        if where := _where_they_part(found):
            print(where)
        for title, rows in (("What explains the rest:", found.explained), ("The step:", step.groups if step else None)):
            print(f"\n{title}\n{_table(rows[:SHOWN])}" if rows is not None and len(rows) else "", end="")
        if self.out is not None:
            check_is_folder(self.out)
            self.out.mkdir(parents=True, exist_ok=True)
            lines = (*(f"note: {note}" for note in notes), *said)
            write_text(self.out / "verdict.txt", "".join(f"{line}\n" for line in lines))
            write_text(self.out / "readings.csv", found.readings.to_csv(index=False))
            write_text(self.out / "groups.csv", found.groups.to_csv(index=False))
            write_text(self.out / "parameters.csv", found.parameters.to_csv(index=False))
            if len(found.explained):
                write_text(self.out / "explained.csv", found.explained.to_csv(index=False))
            if step is not None:
                write_text(self.out / "step.csv", step.groups.to_csv(index=False))
            print(f"\n{self.out / 'parameters.csv'}")

    def _run_suite(self, folder: Path) -> None:
        """Write the suite or, where it is, audit it."""
        quiet_transformers()
        pull = {"kl_corrected": self.loss.kl_corrected, "kl_estimator": self.loss.kl_estimator}
        if not is_suite(folder):
            write_suite(self.model, folder, **pull, trust_remote_code=self.trust_remote_code)
            told = (
                f"{len(SUITE)} cases are in {folder}: compute the gradient of each CASE/rollouts.parquet at the weights"
            )
            print(f"{told} of {folder / 'model'}, save it as CASE/gradient.safetensors, and run this command again.")
            print(_table(pd.DataFrame([{"case": name, "tries": case.words} for name, case in SUITE.items()])))
            return
        check_kl(folder, **pull)
        audited = audit_suite(folder, expect=self.expect)
        found = audited.cases.assign(average=audited.cases["average"].map(", ".join))
        if (found["kind"] == "missing").all():
            raise InputError(f"{folder} has no CASE/gradient.safetensors; save your trainer's gradients there")
        shown = found[["case", "found", "average", "factor", "distance"]]
        print(shown.to_string(index=False, float_format="{:.4g}".format, na_rep="–"))
        print("\n".join(("", audited.verdict, *audited.wrong)))
        if self.out is not None:
            check_is_folder(self.out)
            self.out.mkdir(parents=True, exist_ok=True)
            write_text(self.out / "suite.csv", found.assign(to_do=found["to_do"].map("; ".join)).to_csv(index=False))
            for row in found[found["kind"] != "missing"].to_dict("records"):
                own, case = self.out / row["case"], audited.audits.get(row["case"])
                own.mkdir(exist_ok=True)
                lines = [row["found"], row["verdict"], *_to_do(row["to_do"]), *([case.blind] if case else [])]
                write_text(own / "verdict.txt", "".join(f"{line}\n" for line in lines))
                if case is not None and len(case.explained):
                    write_text(own / "explained.csv", case.explained.to_csv(index=False))
        if invalid := [*found["case"][found["kind"] == "invalid"]]:
            raise InputError(f"{', '.join(invalid)} cannot be audited, as told above; save their gradients again")

    def _check_step(
        self, policy: Policy, found: Audited, gradient: Mapping[str, Tensor], clip: float, notes: list[str]
    ) -> StepAudit | None:
        """Compare the weights after the step with AdamW's of the exact gradient or, where that is not the trainer's, of
        its own; None without weights after the step.
        """
        try:
            moved = load_quietly(str(self.after), self.loading)
        except InputError as error:
            notes.append(f"the step was not checked: {error}")
            print_notes(notes[-1:])
            return None
        own = found.exact() if found.kind in ("same", "factor", "rounding") else gradient
        fed = {name: clip * own[name].reshape(gradient[name].shape) for name in gradient}
        return audit_step(policy, moved, fed, before=find_policy_state(policy), after=self.after)


def _telling(found: Audited) -> pd.DataFrame:
    """Return the readings without a fault, the verdict's, and at most SHOWN that are less than half as far off."""
    rows = found.readings
    if "distance" not in rows:
        return rows
    sound = rows["fault"].isna()
    nearer = rows[~sound & (rows["distance"] < rows["distance"][sound].min() / 2)].sort_values("distance")
    own = rows[(rows["reading"] == found.reading) & ~sound].sort_values("distance").index[:1]
    return rows.loc[[*rows.index[sound], *dict.fromkeys([*own, *nearer.index[:SHOWN]])]]


def _to_do(remedies: Sequence[str]) -> list[str]:
    return [f"To do: {remedy}." for remedy in remedies]


def _where_they_part(found: Audited) -> str:
    """Format the groups that differ, and count the others; nothing if only a norm is known, or no reading fits."""
    if found.groups.empty:
        return ""
    parting, cells = found.parting.drop(columns="parts"), found.groups.query("layer != 'all' and group != 'all'")
    others = cells[~cells["parts"]]
    lines = ["", "Where they part:", _table(parting[:SHOWN])] if len(parting) else []
    lines += [f"and {len(parting) - SHOWN} more"] if len(parting) > SHOWN else []
    if len(others) and found.kind not in ("tokens", "other"):
        told = f"all {len(cells)}" if not len(parting) else f"{len(others)} of {len(cells)}"
        told = f"They agree in {told} module groups of layers, to within {others['distance'].max():.2g}."
        lines += ["", told]
    return "\n".join(lines)


def _table(rows: pd.DataFrame) -> str:
    return rows.to_string(index=False, float_format="{:.4g}".format)


def _logged_norm(dump: Dump) -> float | None:
    """Return the norm of the step's gradient before clipping; None if not logged."""
    norms = dump.batch.grad_norms
    return None if norms is None or not norms.isfinite().all() else float(norms.double().mean())


def _of_moments(logged: float | None, clip: float) -> str:
    """Describe the gradient reconstructed from the moments."""
    told = "the moments give the gradient of the step from this checkpoint to the next, after clipping; "
    if logged is None:
        return told + "the log has no norm before clipping, so clipping cannot be undone"
    return told + (f"it was multiplied by {clip:.4g}, which is undone" if clip < 1 else "it was not clipped")


def _read_gradient(path: Path) -> dict[str, Tensor]:
    """Read tensors by name. Raises InputError unless the file is safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read ({error}); save the gradient with safetensors", path=path) from error
