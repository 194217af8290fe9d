"""Do two commits give the same numbers? Each runs the same jobs on the same inputs, and what they write is compared.

    python -m tests.support.freeze COMMIT [--only measure diagnose] [--out DIR]

COMMIT is checked out into a worktree; the other side is this tree as it lies here. Jobs go through the command line and
through functions that README names (`freeze_calls`), a job of the one right after the same job of the other. Compared
are the values of all tables, of JSON and of weights, bit for bit, and texts; not pictures, pages, seconds, paths,
versions and hashes of files that hold such.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parents[2]
INPUTS = "{in}"
"""In a job's arguments: the folder of `write_inputs`; "{out}": that of the job's results."""
ARCHITECTURES = ("qwen2", "gpt2", "mixtral", "gemma2")
"""Measured whole; a fifth is an adapter. All rollouts have holes."""
LOOSE = re.compile(r"second|time|version|path|sha256|gradscope|file|host|memory|threads|model$|^out$")
"""Names of JSON's and tables' entries that may differ: of clocks, places and versions."""
SKIPPED = {".png", ".html", ".pt", ".log", ".lock", ".ipynb", ".pdf"}
SHORT = ("--no-self-check", "--device", "cpu")
TRAIN = ("train", "--preset", "kk-embedded", "--steps", "6", "--device", "cpu")
METHODS = {
    "grpo": (),
    "reweight-lopti": ("--reweight-alpha", "0.3", "--lopti-eta", "0.5"),
    "reinforce-pp": ("--algorithm", "reinforce++"),
}


def list_jobs() -> dict[str, list[str]]:
    """Arguments of Python by the job's name."""
    gradscope = ["-m", "gradscope"]
    jobs = {"demo": [*gradscope, "demo", "--out", "{out}"]}
    for name in (*ARCHITECTURES, "adapter"):
        params = ["--params", "adapter"] if name == "adapter" else []
        own = [
            f"{INPUTS}/{name}",
            f"{INPUTS}/{'llama' if name == 'adapter' else name}.jsonl",
            *params,
            "--out",
            "{out}",
        ]
        jobs[f"measure-{name}"] = [*gradscope, "measure", *own, "--device", "cpu"]
    page = [f"{INPUTS}/qwen2", "--rollouts", f"{INPUTS}/qwen2.jsonl", "--out", "{out}"]
    jobs["diagnose"] = [*gradscope, "diagnose", *page, *SHORT]
    asked = ["--task", "knights-knaves-compact", "--questions", "6", "--k", "2", "--max-new-tokens", "24"]
    jobs["evaluate"] = [*gradscope, "evaluate", "embedded", *asked, "--out", "{out}", "--device", "cpu"]
    for name, flags in METHODS.items():
        jobs[f"train-{name}"] = [*gradscope, *TRAIN, *flags, "--out", "{out}"]
    jobs["calls"] = [str(HERE / "tests/support/freeze_calls.py"), INPUTS, "{out}"]
    jobs["figures"] = ["-m", "analyses.figures", "--out", "{out}"]
    return jobs


def write_inputs(folder: Path) -> None:
    """Checkpoints and rollouts, made here once for both sides."""
    sys.path.insert(0, str(HERE / "tests"))
    from peft import LoraConfig, get_peft_model

    from support import policies as tiny

    names = ("prompt_ids", "response_ids", "group", "reward", "old_logprobs", "ref_logprobs", "response_mask")
    for name in (*ARCHITECTURES, "llama"):
        tiny.save_checkpoint(folder / name, name)
        responses = tiny.make_responses(tiny.make_policy(name))
        tiny.write_jsonl(folder / f"{name}.jsonl", [{n: getattr(r, n) for n in names} for r in responses])
    base = tiny.make_model("llama")
    adapter = get_peft_model(base, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapter.save_pretrained(folder / "adapter")
    config = json.loads((folder / "adapter/adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(folder / "llama")
    (folder / "adapter/adapter_config.json").write_text(json.dumps(config))


def run_job(tree: Path, arguments: list[str], inputs: Path, out: Path) -> None:
    """Ends with the command's last words if it fails."""
    places = {INPUTS: str(inputs), "{out}": str(out)}
    told = [re.sub(r"\{in\}|\{out\}", lambda found: places[found[0]], argument) for argument in arguments]
    own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "MPLBACKEND": "Agg"}
    ended = subprocess.run(
        [sys.executable, *told], cwd=tree, env=os.environ | own, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise SystemExit(f"{tree}: {' '.join(told)}\n{ended.stderr[-2000:]}")


def list_differences(old: Path, new: Path) -> Iterator[str]:
    """What the results of one job differ in."""
    names = [[p.relative_to(side) for p in side.rglob("*") if p.is_file()] for side in (old, new)]
    files = [{name for name in own if not name.name.startswith("events.out.")} for own in names]
    for name in sorted(files[0] ^ files[1]):
        yield f"{name} is on one side only"
    for name in sorted(files[0] & files[1]):
        if name.suffix not in SKIPPED:
            yield from (f"{name}: {found}" for found in _compare(old / name, new / name))


def _compare(old: Path, new: Path) -> Iterator[str]:
    if old.suffix in (".parquet", ".csv"):
        read = pd.read_parquet if old.suffix == ".parquet" else pd.read_csv
        yield from _compare_tables(read(old), read(new))
    elif old.suffix == ".safetensors":
        one, two = load_file(old), load_file(new)
        if one.keys() != two.keys():
            yield "other tensors"
        yield from (n for n in one.keys() & two.keys() if not np.array_equal(one[n], two[n], equal_nan=True))
    elif old.suffix in (".json", ".jsonl"):
        values = [[json.loads(line) for line in _documents(path)] for path in (old, new)]
        yield from _compare_values(*values, place="")
    else:
        one, two = (_without_clocks(path.read_text(encoding="utf-8", errors="replace")) for path in (old, new))
        yield from (f"{a!r}, not {b!r}" for a, b in zip_longest(one, two) if a != b)


def _compare_tables(old: pd.DataFrame, new: pd.DataFrame) -> Iterator[str]:
    if list(old) != list(new) or len(old) != len(new):
        yield f"columns or rows: {old.shape} and {new.shape}, {sorted(set(old) ^ set(new))[:5]}"
        return
    for name in old:
        if not LOOSE.search(str(name).lower()) and not old[name].equals(new[name]):
            yield f"column {name}"


def _compare_values(old: Any, new: Any, place: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            if not LOOSE.search(name.lower()):
                yield from _compare_values(old.get(name), new.get(name), f"{place}.{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _compare_values(*pair, f"{place}[{index}]")
    elif old != new and not (old != old and new != new):
        yield f"{place}: {old!r}, not {new!r}"


def _documents(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def _without_clocks(text: str) -> list[str]:
    return [re.sub(r"/[^\s]*|[\d.,]+ (s|seconds|min|minutes|ms)\b", "…", line) for line in text.splitlines()]


@dataclass(frozen=True)
class Freeze:
    """Compare this tree with an older commit."""

    commit: Annotated[str, tyro.conf.Positional]
    only: tuple[str, ...] = ()
    """Jobs whose names begin so; none: all."""
    out: Path | None = None
    """Where results are kept; none: they are not."""

    def run(self) -> int:
        with tempfile.TemporaryDirectory() as scratch:
            out, tree = self.out or Path(scratch) / "results", Path(scratch) / "old"
            git = ["git", "-C", str(HERE), "worktree"]
            subprocess.run([*git, "add", "--detach", "--quiet", str(tree), self.commit], check=True)
            try:
                return self._compare(tree, out.resolve())
            finally:
                subprocess.run([*git, "remove", "--force", str(tree)], check=True)

    def _compare(self, tree: Path, out: Path) -> int:
        inputs = out / "inputs"
        shutil.rmtree(out, ignore_errors=True)
        inputs.mkdir(parents=True)
        write_inputs(inputs)
        failed = 0
        for name, arguments in list_jobs().items():
            if self.only and not name.startswith(self.only):
                continue
            folders = [out / side / name for side in ("old", "new")]
            for side, folder in zip((tree, HERE), folders, strict=True):
                folder.parent.mkdir(parents=True, exist_ok=True)
                run_job(side, arguments, inputs, folder)
            found = list(list_differences(*folders))
            failed += bool(found)
            print(f"{name}: {'equal' if not found else f'{len(found)} differences'}", flush=True)
            print("".join(f"    {line}\n" for line in found[:10]), end="")
        return min(1, failed)


if __name__ == "__main__":
    sys.exit(tyro.cli(Freeze, description=__doc__).run())
