"""The command line: `gradscope demo`, `sample`, `measure`, …; each command is a dataclass, its fields are the flags."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from gradscope.cli_diagnose import Diagnose
from gradscope.cli_evaluate import Evaluate
from gradscope.cli_measure import Measure
from gradscope.cli_sample import Sample
from gradscope.cli_train import Train, train_with_preset
from gradscope.cli_tune import Tune
from gradscope.errors import DivergedError, InputError, SelfCheckError, SyncError, stop_printing
from gradscope.measure_settings import MeasureSettings
from gradscope.processes import end_at_once
from gradscope.run_folder import RunFolder


@dataclass(frozen=True)
class Demo:
    """The main job on the embedded policy: sample Knights & Knaves responses, measure them, draw, print a summary."""

    out: Path = Path("demo-out")
    """Folder for rollouts_seed0.jsonl, tokens.parquet, manifest.json and figures/."""
    seed: int = 0
    """Draws the questions, the responses and the tokens that are measured."""
    overwrite: bool = False
    """Start anew if the folder holds something else."""

    def run(self) -> None:
        earlier = RunFolder(self.out, {}).manifest or {"seed": self.seed}
        if earlier.get("seed") != self.seed and not self.overwrite:
            raise InputError(
                f"{self.out} holds a run with seed {earlier.get('seed')}, not {self.seed}; give another --out, or "
                "--overwrite"
            )
        rollouts = self.out / f"rollouts_seed{self.seed}.jsonl"
        if self.overwrite or not rollouts.is_file():
            Sample(
                model="embedded",
                out=rollouts,
                task="knights-knaves-compact",
                questions=10,
                temperature=0.7,
                seed=self.seed,
                overwrite=True,
            ).run()
        settings = MeasureSettings(seed=self.seed)
        Measure("embedded", rollouts, self.out, settings, constants=3, overwrite=self.overwrite).run()


REGISTRY = tyro.constructors.ConstructorRegistry()


def _parse_path(given: str) -> Path:
    if not given:
        raise ValueError("it is empty; give a path")  # Path("") is the current folder
    return Path(given)


@REGISTRY.primitive_rule
def _name_value(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """One word for the value of a flag in the help, also where it may be "none"."""
    words = {str: ("NAME", str), int: ("N", int), float: ("X", float), int | float: ("X", float)}
    words[Path] = "PATH", _parse_path
    kind = next((kind for kind in words if info.type in (kind, kind | None)), None)
    if kind is None:
        return None
    word, make = words[kind]
    optional = info.type != kind
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=word,
        instance_from_str=lambda given: None if optional and given[0].lower() == "none" else make(given[0]),
        is_instance=lambda value: isinstance(value, info.type),
        str_from_instance=lambda value: [str(value).lower() if value is None else str(value)],
    )


@REGISTRY.primitive_rule
def _count_or_auto(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """A number, auto or none."""
    if info.type != int | Literal["auto"] | None:
        return None
    words = {"auto": "auto", "none": None}
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N|auto|none",
        instance_from_str=lambda given: words[w] if (w := given[0].lower()) in words else int(w),
        is_instance=lambda value: value in (None, "auto") or isinstance(value, int),
        str_from_instance=lambda value: [str(value).lower()],
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run one command.

    Status 0: done, 2: the input or a flag is at fault, 1: no numbers to trust, or the system's word, 130: interrupted.
    """
    args, command = sys.argv[1:] if args is None else list(args), None
    try:
        command = tyro.cli(
            Demo | Sample | Measure | Diagnose | Tune | train_with_preset(args) | Evaluate,
            args=args,
            prog="gradscope",
            description="Which tokens does an RL update of a language model serve?",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            registry=REGISTRY,
        )
        command.run()
        if sys.stdout is not None:  # closed by the shell
            sys.stdout.flush()
    except BrokenPipeError:
        raise SystemExit(stop_printing()) from None
    except InputError as error:
        _stop(error, 2)
    except (SelfCheckError, SyncError, DivergedError, OSError) as error:
        _stop(error, 1)
    except KeyboardInterrupt:
        again = {Train: "the same command with --resume goes on where it was", Sample: "nothing of it is kept"}
        advice = again.get(type(command), "the same command goes on where it was")
        _stop(RuntimeError(f"interrupted; {advice}"), 130)
    except torch.OutOfMemoryError as error:
        advice = "try a smaller --chunk-memory, --micro-batch-size, --batch-size or --dtype, or --no-figures"
        _stop(RuntimeError(f"out of memory on the device ({str(error).splitlines()[0]}); {advice}"), 1)


def _stop(error: Exception, status: int) -> None:
    if status != 2 or os.environ.get("RANK", "0") == "0":  # all processes see a mistake of the user: one tells it
        # A file's text may hold what steers a terminal.
        words = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(error).split()))
        print(f"gradscope: {words}", file=sys.stderr)
    elif status == 2:
        time.sleep(3)  # the launcher ends all processes with the first: the one that tells it needs its moment
    raise SystemExit(status)


def run_script() -> None:
    """The console script."""
    end_at_once(main)


if __name__ == "__main__":
    run_script()
