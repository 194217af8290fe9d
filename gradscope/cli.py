"""The command line: `gradscope demo`, `sample`, `measure`, …; each command is a dataclass, its fields are the flags."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import torch
import tyro
from tqdm import tqdm

from gradscope import __version__
from gradscope.cli_evaluate import Evaluate
from gradscope.cli_shared import (
    DeviceFlag,
    DtypeFlag,
    FormatFlag,
    check_no_machine,
    check_prompts,
    load_quietly,
    print_notes,
    quiet_transformers,
)
from gradscope.cli_train import train_with_preset
from gradscope.cli_tune import Tune
from gradscope.errors import DivergedError, InputError, SelfCheckError, SyncError
from gradscope.launched import join_launch
from gradscope.measure_settings import BUDGET, MeasureSettings
from gradscope.models import Policy, check_prompt
from gradscope.norm_estimates import interval_norms
from gradscope.readers import Dump
from gradscope.run_folder import (
    RunFolder,
    check_is_folder,
    check_writable,
    library_versions,
    write_parquet,
    write_text,
)
from gradscope.token_table import TableMeasurement, join_responses

SUMMARY = "figures/summary.txt"
"""Where in its folder a run keeps the summary that it prints."""


@dataclass(frozen=True)
class Sample:
    """Sample responses from a policy, as rollouts that `measure` reads: JSONL or parquet, a row per response."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder of transformers, or "embedded"."""
    out: Path
    """File to write: .jsonl or .parquet."""
    task: str | None = None
    """A registered task (knights-knaves-compact, math, …) or path/to/file.py:NAME: prompts and a reward."""
    prompts: Path | None = None
    """Instead of a task: a text file with a prompt per line, or JSONL with a field "prompt" (a string or a chat)."""
    data: tuple[str, ...] = ()
    """Files of the task's questions, wildcards allowed, as given or below $GRADSCOPE_DATA; none: it makes them up."""
    people: tuple[int, ...] = ()
    """For Knights & Knaves: only puzzles with these numbers of people; none: all that the task has."""
    questions: int = 16
    """How many questions of the task."""
    n: int = 8
    """Responses per question."""
    temperature: float = 1.0
    """Sampling temperature; every token is drawn from the whole vocabulary."""
    max_new_tokens: int = 512
    """Longest response; the policy's context ends one too."""
    engine: Literal["hf", "vllm"] = "hf"
    """What samples: transformers or vLLM."""
    batch_size: int = 64
    """hf: responses decoded together; changes speed and memory only."""
    seed: int = 0
    """Draws the questions and the responses."""
    dtype: DtypeFlag = None
    """Precision of the weights and of all that is computed."""
    device: DeviceFlag = None
    """A device of torch: cpu, cuda, cuda:1, …"""
    overwrite: bool = False
    """Replace the file if it exists."""

    def run(self) -> None:
        from gradscope.readers import write_rollouts
        from gradscope.sampling.engines import make_sampler
        from gradscope.sampling.rollouts import check_count, rollout_rows
        from gradscope.tasks import draw_questions, get_task

        if (self.task is None) == (self.prompts is None):
            raise InputError("give either --task NAME or --prompts FILE: one of the two says what to answer")
        if self.out.suffix not in (".jsonl", ".parquet"):
            raise InputError(f"--out is {self.out}; rollouts are written as .jsonl or .parquet")
        check_is_folder(self.out.parent)
        check_writable(self.out)
        if self.out.is_dir() or (self.out.exists() and not self.overwrite):
            raise InputError(f"{self.out} exists; give another --out, or --overwrite if it is a file")
        if self.questions < 1 or self.seed < 0:
            raise InputError(f"--questions is {self.questions} and --seed {self.seed}; give 1 or more, and 0 or more")
        task = None if self.task is None else get_task(self.task)
        if task is None:
            questions = read_prompts(self.prompts)
        else:
            check_count(self.questions, self.n)
            options = {"files": self.data, "people": self.people}
            questions = draw_questions(task, self.questions, seed=self.seed, **options)
        check_prompts(questions, parquet=self.out.suffix == ".parquet")
        policy = load_quietly(self.model, dtype=self.dtype, device=self.device)
        settings = {name: getattr(self, name) for name in ("n", "temperature", "max_new_tokens", "seed")}
        with closing(make_sampler(self.engine, policy, batch_size=self.batch_size)) as sampler:
            rows = rollout_rows(policy, questions, task=task, sampler=sampler, **settings)
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
    """Checkpoint folder of transformers (any decoder-only causal LM) or of a LoRA adapter, or "embedded"."""
    rollouts: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROLLOUTS")]
    """JSONL or parquet, a row per response, or a trainer's dump: a file, or a folder of them (see the README)."""
    out: Path | None = None
    """Folder for tokens.parquet, manifest.json, figures/ and, with estimates, interval_norms.csv; needed unless --plan.
    A run that was interrupted is taken up again."""
    settings: Annotated[MeasureSettings, tyro.conf.arg(name="")] = field(
        default_factory=lambda: MeasureSettings(tokens_per_interval="auto")
    )
    params: Literal["all", "adapter"] = "all"
    """Parameters whose gradients are measured: all, an adapter merged into its base; or those of the adapter alone."""
    base: str | None = None
    """An adapter's base model, where its adapter_config.json does not name a folder that is here."""
    trust_remote_code: bool = False
    """Run the Python files of a checkpoint that brings its own."""
    device_map: str | None = None
    """Spread one policy over several devices, in place of --device: auto, balanced, or what else transformers knows."""
    blocks: str | None = None
    """Name of the ModuleList of blocks, where it is not found by itself."""
    dtype: DtypeFlag = None
    """Precision of the weights and of all that is computed."""
    device: DeviceFlag = None
    """A device of torch: cpu, cuda, cuda:1, …"""
    chunk_rows: int = 1536
    """Positions × tokens of one batched backward; changes speed and memory only."""
    chunk_memory: int = 1 << 30
    """Bytes that one batched backward may take; changes speed and memory only."""
    constants: int = 0
    """For the summary, compute the constants of Eq. 3 at the contexts of this many measured tokens, the shortest ones:
    certified by an exact SVD up to 1,024 activations in a context, estimated by Lanczos beyond."""
    figures: bool = True
    """Also draw figures/ and write summary.txt, which asks the network for the intervals' summed gradients."""
    overwrite: bool = False
    """Replace a run with other arguments in the same folder."""
    plan: bool = False
    """Only print what this would take: FLOPs, seconds, memory; no weights are loaded, nothing is written."""
    machine: str | None = None
    """With --plan: seconds on a GPU that is not here, h200, h100 or a100; none: on this machine, tried for a second."""
    format: FormatFlag = None
    """Format of the rollouts: native, trl, verl, prime_rl, … (see the README)."""

    def run(self) -> None:
        from gradscope.readers import read_dump

        if self.plan:
            self._plan()
            return
        check_no_machine(self.machine)
        if self.out is None:
            raise InputError("--out is missing; give the folder of the run")
        if self.constants < 0:
            raise InputError(f"--constants is {self.constants}; give 0 or more contexts")
        if self.constants and self.settings.norms == "estimate":
            raise InputError(
                f"--constants is {self.constants}, which needs exact norms by layer; leave it out, or --norms"
            )
        if self.device_map is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError("--device-map spreads one process's policy, and several were launched; leave it out")
        processes, device = join_launch(self.device)
        names = ("dtype", "blocks", "params", "base", "trust_remote_code", "device_map")
        with processes.together():
            policy = load_quietly(self.model, device=device, **{name: getattr(self, name) for name in names})
            dump = read_dump(self.rollouts, policy, format=self.format)
            cut = {"chunk_rows": self.chunk_rows, "chunk_memory": self.chunk_memory}
            measurement = TableMeasurement(policy, dump.batch, self.settings, processes=processes, **cut)
            folder = RunFolder(self.out, self._key(policy, measurement.settings))
            found = folder.look(overwrite=self.overwrite) if processes.is_main else None
        if processes.is_main:
            print_notes(dump.notes)
        if processes.gather([found])[0] == "finished":
            if processes.is_main:
                print(f"already measured with these arguments: {self.out / 'tokens.parquet'}")
        else:
            self._measure(policy, measurement, folder, dump)
        if self.figures and processes.is_main:
            self._draw(policy, measurement, folder)
            print(f"figures: {self.out / 'figures'}\n\n{(self.out / SUMMARY).read_text(encoding='utf-8').rstrip()}")

    def _plan(self) -> None:
        from gradscope.measure_plan import plan_measurement
        from gradscope.peft_adapters import find_whole

        quiet_transformers()
        if self.params == "adapter":
            raise InputError("a plan is of all parameters; leave out --params adapter, or --plan")
        names = ("dtype", "device", "machine", "blocks", "chunk_rows", "chunk_memory", "format")
        given = {name: getattr(self, name) for name in names}
        print(plan_measurement(find_whole(self.model, self.base), self.rollouts, self.settings, **given))

    def _key(self, policy: Policy, settings: MeasureSettings) -> dict[str, Any]:
        from gradscope.models import policy_hashes
        from gradscope.readers.files import rollouts_hash

        return {
            "gradscope": __version__,
            **policy_hashes(policy),
            "rollouts": rollouts_hash(self.rollouts),
            "format": self.format,
            "settings": asdict(settings),
            "blocks": policy.blocks_name,
            "dtype": str(policy.dtype).removeprefix("torch."),
            "device": policy.device.type,
        }

    def _measure(self, policy: Policy, measurement: TableMeasurement, folder: RunFolder, dump: Dump) -> None:
        processes, count = measurement.processes, len(measurement.batch)
        with measurement, ExitStack() as held:  # checks itself, before anything is written
            with processes.together():
                if processes.is_main:
                    held.enter_context(folder.writing())
                    self._announce(measurement, resumed=folder.open(overwrite=self.overwrite))
                left = [row for row in range(count) if not folder.has_part(row)] if processes.is_main else []
            with processes.together():
                self._measure_share(measurement, folder, processes.gather(left))
            if not processes.is_main:
                return
            table = join_responses(folder.read_parts(count))
            write_parquet(folder.staged / "tokens.parquet", table)
            if measurement.estimate_plan is not None:
                write_text(folder.staged / "interval_norms.csv", interval_norms(table).to_csv(index=False))
            rollouts = {"path": str(self.rollouts), "sha256": folder.key["rollouts"]}
            rollouts |= {"format": dump.format, "notes": list(dump.notes)}
            folder.close(self._manifest(policy, measurement, folder.key, table) | {"rollouts": rollouts})
        print(f"{len(table):,} tokens of {count} responses: {folder.folder / 'tokens.parquet'}")

    def _announce(self, measurement: TableMeasurement, *, resumed: bool) -> None:
        if resumed:
            print(f"taking up the unfinished run in {self.out}")
        if measurement.estimate_plan is not None:
            print(measurement.estimate_plan)
        if self.settings.tokens_per_interval == "auto" and (each := measurement.settings.tokens_per_interval):
            print(
                f"measuring a random sample, {each:,} tokens of each interval at most: {measurement.num_tokens:,} "
                f"tokens are more than {BUDGET:,} (--tokens-per-interval none measures them all)"
            )

    def _measure_share(self, measurement: TableMeasurement, folder: RunFolder, left: list[int]) -> None:
        """Write the parts that are left and this process's; of several, the main one shows its own share."""
        counts = measurement.batch.response_mask.sum(1).tolist()
        mine, processes = measurement.share(left), measurement.processes
        show = None if processes.is_main else True
        total = sum(counts) if processes.count == 1 else sum(counts[row] for row in mine)
        with tqdm(total=total, desc="measuring", unit="token", disable=show) as bar:
            bar.update(total - sum(counts[row] for row in mine))
            for row in mine:
                folder.write_part(row, measurement.measure_response(row))
                bar.update(counts[row])

    def _draw(self, policy: Policy, measurement: TableMeasurement, folder: RunFolder) -> None:
        """Add figures and summary to a finished run, unless they are there: the table is safe by then."""
        from gradscope.summary import summarize_measurement, write_figures

        drawn = {"constants": self.constants}
        if folder.manifest.get("figures") == drawn and (self.out / SUMMARY).is_file():
            return
        table, progress = pd.read_parquet(self.out / "tokens.parquet"), sys.stderr.isatty()
        with folder.writing():
            folder.stage()
            summary = summarize_measurement(
                policy, measurement.batch, table, measurement.settings, contexts=self.constants, progress=progress
            )
            write_figures(folder.staged / "figures", policy, table, summary, progress=progress)
            folder.close(folder.manifest | {"figures": drawn})

    def _manifest(
        self, policy: Policy, measurement: TableMeasurement, key: dict[str, Any], table: pd.DataFrame
    ) -> dict[str, Any]:
        meter, check = measurement.meter, measurement.check
        return {
            "gradscope": __version__,
            "versions": library_versions(),
            "model": {"path": self.model, "class": type(policy.model).__name__, "sha256": key["model"]},
            "base_model": None if policy.base is None else {"path": policy.base, "sha256": key["base_model"]},
            "params": policy.params,
            "settings": asdict(measurement.settings),
            "sample": self._sample(measurement),
            "seed": self.settings.seed,
            "dtype": key["dtype"],
            "device": str(policy.device),
            "device_map": getattr(policy.model, "hf_device_map", None) if self.device_map is not None else None,
            "processes": measurement.processes.count,
            "self_check": "off" if check is None else asdict(check),
            "engine": {
                "blocks": policy.blocks_name,
                "rules": "the model's graph" if meter.precision is None else "decoder",
                "precision": meter.precision or "exact",
                "joint": meter.joint,
                "batched": meter.graph.batched,
                "modules_by_rule": len(meter.claims.rules),
                "parameters_on_the_general_path": list(meter.claims.general),
            },
            "tokens": len(table),
        } | self._norms(measurement, table)

    def _sample(self, measurement: TableMeasurement) -> dict[str, Any] | str:
        """Which tokens have norms, and who said so."""
        if (each := measurement.settings.tokens_per_interval) is None:
            return "every token"
        asked = "the default above" if self.settings.tokens_per_interval == "auto" else "asked for"
        return {"tokens_per_interval": each, "why": f"{asked} {BUDGET:,} tokens" if "above" in asked else asked}

    def _norms(self, measurement: TableMeasurement, table: pd.DataFrame) -> dict[str, Any]:
        """What the manifest says of the norms: how many tokens have one, and how it was come by."""
        known = int(table["param_grad_norm"].notna().sum())
        if measurement.estimate_plan is None:
            return {"norms": "exact", "tokens_measured": known}
        plan = asdict(measurement.estimate_plan)
        plan = plan.pop("counts") | plan | {"in_words": str(measurement.estimate_plan)}
        return {"norms": "estimate", "tokens_measured": 0, "tokens_estimated": known, "estimate": plan}


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


def read_prompts(path: Path) -> list[Any]:
    """Questions without an answer, from a text file (a prompt per line) or JSONL with a field "prompt"."""
    from gradscope.tasks import Question

    if not path.is_file():
        raise InputError(f"{path} is not there; give a file with a prompt per line, or JSONL with a field 'prompt'")
    try:
        lines = [(number, line) for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error}); give a text file") from error
    if not lines:
        raise InputError(f"{path} is empty; give a prompt per line")
    if path.suffix != ".jsonl":
        return [Question(line, None) for _, line in lines]
    return [Question(_parse_prompt(f"{path}, line {number}", line), None) for number, line in lines]


def _parse_prompt(place: str, line: str) -> str | list[dict[str, str]]:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f'{place}: not a JSON object with a field "prompt"; write {{"prompt": "…"}}') from error
    check_prompt(prompt, place)
    return prompt


REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def _name_value(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """One word for the value of a flag in the help, also where it may be "none"."""
    words = {str: ("NAME", str), int: ("N", int), float: ("X", float), int | float: ("X", float), Path: ("PATH", Path)}
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
    """Run one command; 0: done, 2: the input or a flag is at fault, 1: no numbers to trust, or the system's word."""
    args = sys.argv[1:] if args is None else list(args)
    try:
        command = tyro.cli(
            Demo | Sample | Measure | Tune | train_with_preset(args) | Evaluate,
            args=args,
            prog="gradscope",
            description="Which tokens does an RL update of a language model serve?",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            registry=REGISTRY,
        )
        command.run()
    except InputError as error:
        _stop(error, 2)
    except (SelfCheckError, SyncError, DivergedError, OSError) as error:
        _stop(error, 1)
    except KeyboardInterrupt:
        advice = "`train` goes on with --resume, the others where they were when started again"
        _stop(RuntimeError(f"interrupted; {advice}"), 1)
    except torch.OutOfMemoryError as error:
        advice = "try a smaller --chunk-memory, --micro-batch-size, --batch-size or --dtype, or --no-figures"
        _stop(RuntimeError(f"out of memory on the device ({str(error).splitlines()[0]}); {advice}"), 1)


def _stop(error: Exception, status: int) -> None:
    if status == 1 or os.environ.get("RANK", "0") == "0":  # all processes see a mistake of the user: one tells it
        print(f"gradscope: {' '.join(str(error).split())}", file=sys.stderr)
    elif status == 2:
        time.sleep(3)  # the launcher ends all processes with the first: the one that tells it needs its moment
    raise SystemExit(status)


if __name__ == "__main__":
    main()
