"""The command line: `gradscope demo`, `sample`, `measure`; each command is a dataclass, its fields are the flags."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tqdm import tqdm

from gradscope import __version__
from gradscope.errors import InputError, SelfCheckError
from gradscope.run_folder import RunFolder, file_hash
from gradscope.token_table import MeasureSettings, TableMeasurement, check_batch, join_responses

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
LIBRARIES = ("torch", "transformers", "numpy", "pandas", "matplotlib", "seaborn", "scipy")


@dataclass(frozen=True)
class Sample:
    """Sample responses from a policy, as rollouts that `measure` reads: JSONL or parquet, a row per response."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder of transformers, or "embedded"."""
    out: Path
    """File to write: .jsonl or .parquet."""
    task: str | None = None
    """A registered task (knights-knaves, knights-knaves-compact) or path/to/file.py:NAME; it gives prompts and reward."""
    prompts: Path | None = None
    """Instead of a task: a text file with a prompt per line, or JSONL with a field "prompt" (a string or a chat)."""
    questions: int = 16
    """How many questions of the task."""
    n: int = 8
    """Responses per question."""
    temperature: float = 1.0
    max_new_tokens: int = 512
    batch_size: int = 64
    """Responses decoded together; changes speed and memory only."""
    seed: int = 0
    dtype: Dtype | None = None
    """Default: float32 on a CPU, the checkpoint's own on a GPU."""
    device: str | None = None
    overwrite: bool = False
    """Replace the file if it exists."""

    def run(self) -> None:
        from gradscope.models import load_policy
        from gradscope.readers import write_rollouts
        from gradscope.sampling.hf import HFSampler, rollout_rows
        from gradscope.tasks import get_task

        if (self.task is None) == (self.prompts is None):
            raise InputError("give either --task NAME or --prompts FILE: one of the two says what to answer")
        if self.out.suffix not in (".jsonl", ".parquet"):
            raise InputError(f"--out is {self.out}; rollouts are written as .jsonl or .parquet")
        if self.out.exists() and not self.overwrite:
            raise InputError(f"{self.out} exists; give another --out, or --overwrite")
        task = None if self.task is None else get_task(self.task)
        questions = read_prompts(self.prompts) if task is None else task.questions(self.questions, seed=self.seed)
        policy = load_policy(self.model, dtype=self.dtype, device=self.device)
        settings = {name: getattr(self, name) for name in ("n", "temperature", "max_new_tokens", "seed")}
        rows = rollout_rows(policy, questions, task=task, sampler=HFSampler(policy, self.batch_size), **settings)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        write_rollouts(self.out, rows)
        tokens = sum(len(row["response_ids"]) for row in rows)
        rewards = [row["reward"] for row in rows if "reward" in row]
        mean = f", mean reward {sum(rewards) / len(rewards):.2f}" if rewards else ""
        print(f"{len(rows)} responses to {len(questions)} prompts, {tokens:,} tokens{mean}: {self.out}")


@dataclass(frozen=True)
class Measure:
    """Measure every response token's own gradient: a token table, figures and a summary, in one folder."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder of transformers (any decoder-only causal LM), or "embedded"."""
    rollouts: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROLLOUTS")]
    """JSONL or parquet, a row per response (see the README)."""
    out: Path
    """Folder for tokens.parquet, manifest.json and figures/. A run that was interrupted is taken up again."""
    settings: Annotated[MeasureSettings, tyro.conf.arg(name="")] = field(default_factory=MeasureSettings)
    blocks: str | None = None
    """Name of the ModuleList of blocks, where it is not found by itself."""
    dtype: Dtype | None = None
    """Default: float32 on a CPU, the checkpoint's own on a GPU."""
    device: str | None = None
    chunk_rows: int = 1024
    """Positions × tokens of one batched backward; changes speed and memory only."""
    chunk_memory: int = 1 << 30
    """Bytes that one batched backward may take; changes speed and memory only."""
    figures: bool = True
    """Also draw figures/ and write summary.txt, which asks the network for the intervals' summed gradients."""
    overwrite: bool = False
    """Replace a run with other arguments in the same folder."""

    def run(self) -> None:
        from gradscope.models import load_policy, weights_hash
        from gradscope.readers import read_rollouts

        policy = load_policy(self.model, dtype=self.dtype, device=self.device, blocks=self.blocks)
        batch = read_rollouts(self.rollouts, policy)
        check_batch(policy, batch)
        key = {
            "gradscope": __version__,
            "model": weights_hash(policy.path),
            "rollouts": file_hash(self.rollouts),
            "settings": asdict(self.settings),
            "blocks": policy.blocks_name,
            "dtype": str(policy.dtype).removeprefix("torch."),
            "device": policy.device.type,
        }
        folder = RunFolder(self.out, key)
        if folder.finished and not self.overwrite:
            print(f"already measured with these arguments: {self.out / 'tokens.parquet'}")
        else:
            self._measure(policy, batch, folder)
        summary = self.out / "figures" / "summary.txt"
        if self.figures and summary.is_file():
            print(summary.read_text().rstrip())

    def _measure(self, policy: Any, batch: Any, folder: RunFolder) -> None:
        measurement = TableMeasurement(
            policy, batch, self.settings, chunk_rows=self.chunk_rows, chunk_memory=self.chunk_memory
        )
        resumed = folder.open(overwrite=self.overwrite)
        with measurement, tqdm(total=batch.num_tokens, desc="measuring", unit="token") as bar:
            if resumed:
                bar.write(f"taking up the unfinished run in {folder.partial}", file=sys.stderr)
            counts = batch.response_mask.sum(1).tolist()
            for row, count in enumerate(counts):
                if not folder.part(row).is_file():
                    folder.write_part(row, measurement.measure_response(row))
                bar.update(count)
        table = join_responses(folder.read_parts(len(batch)))
        if self.figures:
            self._draw(policy, measurement.batch, table)
        folder.close(table, self._manifest(policy, measurement, table))
        print(f"{len(table):,} tokens of {len(batch)} responses: {folder.folder / 'tokens.parquet'}")

    def _draw(self, policy: Any, batch: Any, table: Any) -> None:
        from gradscope.summary import summarize_measurement, write_figures

        summary = summarize_measurement(policy, batch, table, self.settings, progress=True)
        write_figures(self.out / "figures", policy, table, summary, progress=True)

    def _manifest(self, policy: Any, measurement: TableMeasurement, table: Any) -> dict[str, Any]:
        from gradscope.models import weights_hash

        meter, check = measurement.meter, measurement.check
        return {
            "gradscope": __version__,
            "versions": {name: version(name) for name in LIBRARIES} | {"python": platform.python_version()},
            "model": {"path": self.model, "class": type(policy.model).__name__, "sha256": weights_hash(policy.path)},
            "rollouts": {"path": str(self.rollouts), "sha256": file_hash(self.rollouts)},
            "settings": asdict(self.settings),
            "seed": self.settings.seed,
            "dtype": str(policy.dtype).removeprefix("torch."),
            "device": str(policy.device),
            "self_check": "off" if check is None else asdict(check),
            "engine": {
                "blocks": policy.blocks_name,
                "joint": meter.joint,
                "batched": meter.batched,
                "modules_by_rule": len(meter.claims.rules),
                "parameters_on_the_general_path": list(meter.claims.general),
            },
            "tokens": len(table),
            "tokens_measured": int(table["param_grad_norm"].notna().sum()),
        }


@dataclass(frozen=True)
class Demo:
    """The main job on the embedded policy: sample Knights & Knaves responses, measure them, draw, print a summary."""

    out: Path = Path("demo-out")
    """Folder for rollouts.jsonl, tokens.parquet, manifest.json and figures/."""
    seed: int = 0
    overwrite: bool = False
    """Start anew if the folder holds something else."""

    def run(self) -> None:
        rollouts = self.out / "rollouts.jsonl"
        if self.overwrite or not rollouts.is_file():
            Sample(
                model="embedded",
                out=rollouts,
                task="knights-knaves-compact",
                questions=32,
                temperature=0.7,
                seed=self.seed,
                overwrite=True,
            ).run()
        settings = MeasureSettings(tokens_per_interval=300, seed=self.seed)
        Measure("embedded", rollouts, self.out, settings, overwrite=self.overwrite).run()


def read_prompts(path: Path) -> list[Any]:
    """Questions without an answer, from a text file (a prompt per line) or JSONL with a field "prompt"."""
    import json

    from gradscope.tasks import Question

    if not path.is_file():
        raise InputError(f"{path} does not exist; give a file with a prompt per line, or JSONL with a field 'prompt'")
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise InputError(f"{path} is empty; give a prompt per line")
    if path.suffix != ".jsonl":
        return [Question(line, None) for line in lines]
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(Question(json.loads(line)["prompt"], None))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number}: not a JSON object with a field 'prompt'") from error
    return prompts


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; 2: the input or a flag is at fault, 1: a failed self-check or the system's word, 0: done."""
    command = tyro.cli(
        Demo | Sample | Measure, args=args, prog="gradscope", config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        description="Which tokens does an RL update of a language model serve?",
    )  # fmt: skip
    try:
        command.run()
    except InputError as error:
        _stop(error, 2)
    except (SelfCheckError, OSError) as error:
        _stop(error, 1)


def _stop(error: Exception, status: int) -> None:
    print(f"gradscope: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
