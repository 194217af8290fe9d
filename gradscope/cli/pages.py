"""Pages of `gradscope diagnose` for several checkpoints, and the facts at the end of a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from gradscope import __version__
from gradscope.diagnosis import Diagnosis, decide, make_trend_report, write_report
from gradscope.policy import checkpoint_name, checkpoint_step
from gradscope.resampling import Supply
from gradscope.runs import MANIFEST, RunFolder, counted, digits, file_hash, provenance, read_json
from gradscope.updates import StepSettings

if TYPE_CHECKING:
    from gradscope.cli.measuring import MeasuredRun

PAGE = "report.html"
RESULTS = ("tokens.parquet", "figures", PAGE, "data", "diagnosis.json")
STATISTICS = "data/statistics.csv"


def name_folders(models: Sequence[str], out: Path) -> list[Path]:
    """Return the folder itself for one checkpoint, or a subfolder per checkpoint, named after it.

    >>> [folder.name for folder in name_folders([f"global_step_{n}/actor/huggingface" for n in (20, 40)], Path("out"))]
    ['global_step_20', 'global_step_40']
    """
    if len(models) == 1:
        return [out]
    names = [checkpoint_name(model) for model in models]
    if len(set(names)) < len(names) or {*names} & {*RESULTS}:
        names = [f"{place:02d}-{name}" for place, name in enumerate(names)]
    return [out / name for name in names]


def make_facts(model: str, measured: MeasuredRun, found: Diagnosis, *, saved: bool) -> dict[str, str]:
    """Describe how the numbers were computed, for the end of the page. saved: whether there is an optimizer state."""
    manifest = measured.folder.manifest
    rollouts, check = manifest["rollouts"], manifest["self_check"]
    sums, _, way = ("summed gradients: none" if found.sums_plan is None else str(found.sums_plan)).partition(": ")
    return {
        "checkpoint": f"{model} ({manifest['model']['class']}), weights sha256 {manifest['model']['sha256'][:16]}",
        "training step": str(checkpoint_step(model) if checkpoint_step(model) is not None else "unknown"),
        "parameters": manifest["params"],
        "rollouts": f"{rollouts['path']} ({rollouts['format']}, reader {rollouts['reader']}), sha256 "
        f"{rollouts['sha256'][:16]}",
        "temperature": ", ".join(f"{value:g}" for value in measured.batch.temperature.unique().tolist()),
        "loss": describe_loss(manifest["settings"]["loss"]),
        "tokens measured": _describe_sample(manifest["sample"]),
        "precision, device": f"{manifest['dtype']}, {manifest['device']}",
        "self-check": check
        if isinstance(check, str)
        else ", ".join(f"{name.replace('_', ' ')} {digits(value)}" for name, value in check.items()),
        "gradscope": manifest["gradscope"],
        "libraries": ", ".join(f"{name} {version}" for name, version in manifest["versions"].items()),
        "optimizer state": "AdamW's, saved" if saved else "none",
        "step that is shown": _describe_step(found.scope.step),
        sums: way,
    }


def _describe_sample(sample: dict[str, Any] | str) -> str:
    """Describe which tokens were measured."""
    if isinstance(sample, str):
        return sample
    if (each := sample["tokens_per_interval"]) is None:
        return "every token of these prompts"
    return f"{each:,} of each interval {'of ' + sample['of'] if 'of' in sample else 'at most'}"


def describe_loss(loss: dict[str, Any]) -> str:
    """Describe the loss settings behind the weights.

    >>> describe_loss({"clip_ratio_c": None, "kl_coef": 0.001, "kl_corrected": False, "kl_estimator": "k3"})
    'clip_ratio_c off, kl_coef 0.001, kl_corrected no, kl_estimator k3'
    """
    return ", ".join(f"{name} {_in_a_word(value)}" for name, value in loss.items())


def _in_a_word(value: bool | int | float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "off"
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:g}"


def _describe_step(step: StepSettings) -> str:
    """Describe the optimizer step of the page."""
    clip = "not clipped" if step.max_grad_norm is None else f"gradient clipped to {step.max_grad_norm:g}"
    name = {"adamw": "AdamW", "sgd": "SGD"}[step.optimizer]
    rate, decay = ("as saved by group" if n is None else f"{n:g}" for n in (step.learning_rate, step.weight_decay))
    return f"{name}, learning rate {rate}, weight decay {decay}, {clip}"


def in_words(diagnosis: Diagnosis) -> str:
    """Return the sentences of the page's first screen, caveats first."""
    warnings = [f"warning: {note}" for note in diagnosis.warnings]
    inexact = [f"note: {note}" for note in diagnosis.notes if getattr(note, "kind", "") == "inexact"]
    return "\n".join([*warnings, *(f"- {sentence}" for sentence in decide(diagnosis)), *inexact])


def trend_folder(out: Path, folders: Sequence[Path], *, overwrite: bool) -> RunFolder:
    """Return the folder for the trend's page. Raises InputError if it holds other results.

    An earlier trend's page is replaced, since it costs nothing to make.
    """
    key = {"gradscope": __version__, "pages": [file_hash(folder / PAGE) for folder in folders]}
    run = RunFolder(out, key, results=RESULTS)
    earlier = (run.manifest or {}).get("key")
    run.status(overwrite=overwrite or (isinstance(earlier, dict) and "pages" in earlier))
    return run


def write_trend(
    models: Sequence[str], folders: Sequence[Path], notes: Sequence[str] = (), *, out: Path, overwrite: bool
) -> None:
    """Write the trend's page from each checkpoint's statistics; notes: on checkpoints that are missing."""
    for folder in folders:
        RunFolder(folder, {}).check(STATISTICS)
    manifests = [read_json(folder / MANIFEST) for folder in folders]
    steps, unknown = name_steps(models)
    notes = [*notes, *unknown]
    frames = []
    for folder, step, manifest in zip(folders, steps, manifests, strict=True):
        own, supply = manifest.get("own_responses"), Supply(**manifest["supply"]) if "supply" in manifest else None
        told = {"other_step": manifest["rollouts"].get("other_step", False) or own == 0}
        told["too_few"] = "" if supply is None else supply.too_few
        frames.append(pd.read_csv(folder / STATISTICS).assign(step=step, **told))
        if own and supply is not None and own < supply.responses:
            notes.append(f"at step {step}, {own:,} of the {supply.responses:,} responses are the checkpoint's own")
    trend = pd.concat(frames, ignore_index=True).sort_values("step", kind="stable", ignore_index=True)
    run = trend_folder(out, folders, overwrite=overwrite)
    links = [
        (f"{folder.name}: step {step}", f"{folder.name}/{PAGE}") for folder, step in zip(folders, steps, strict=True)
    ]
    if len({manifest["diagnosis"]["optimizer_state"] is None for manifest in manifests}) > 1:
        notes = [*notes, "only some checkpoints have an optimizer state; the others' steps are SGD's"]
    summed = Counter(filter(None, (manifest.get("summed_prompts") for manifest in manifests)))
    if len(summed) > 1:
        each = ", ".join(f"{prompts:,} at {count} of the checkpoints" for prompts, count in sorted(summed.items()))
        notes = [*notes, f"summed gradients differ in their number of prompts, {each}: a signal fraction grows with it"]
    rollouts = [manifest["rollouts"] for manifest in manifests]
    told = (note for dump in rollouts for note in dump["notes"] if note not in (dump.get("step_note") or ""))
    notes = [*notes, *dict.fromkeys(told)]
    facts = {f"step {step}": describe_rollouts(manifest) for step, manifest in zip(steps, manifests, strict=True)}
    report = make_trend_report(trend, links=links, notes=notes, facts=facts | {"gradscope": __version__})
    with run.writing():
        run.begin(overwrite=True)
        write_report(run.staged, report)
        run.publish({**provenance(), "checkpoints": list(models)})
    print(f"the trend over {counted(len(folders), 'checkpoint')}: {out / PAGE}")


def describe_rollouts(manifest: dict[str, Any]) -> str:
    """Describe the rollouts of a checkpoint's page, and their step."""
    rollouts = manifest["rollouts"]
    taken = f"{counted(manifest['tokens'], 'token')} of {rollouts['path']}"
    return "; ".join(filter(None, (taken, rollouts.get("step_note"))))


def name_steps(models: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return each checkpoint's training step, or its index (and a note) if the steps are unknown."""
    steps = [checkpoint_step(model) for model in models]
    if None in steps or len(set(steps)) < len(steps):
        return list(range(len(models))), ["the checkpoints' steps are unknown, so they are numbered 0, 1, 2, …"]
    return steps, []
