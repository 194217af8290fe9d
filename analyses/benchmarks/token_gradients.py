"""Time the exact norm of a token's gradient: gradscope against every other way and the FLOP floor, in one run.

    python -m analyses.benchmarks.token_gradients --prepare
    python -m analyses.recipes.pretrained smollm2 --out work/smollm2
    python -m analyses.benchmarks.token_gradients --smollm2 work/smollm2 \
        --out figures/cost/benchmark_token_gradients.png

`peers` has the ways, and `--prepare` makes the environment of those that are packages, `.venv-peers`. Every way runs
in a process of its own, on one thread. In a round each takes its turn, in random order, with the same tokens: blocks of
the last three quarters of random sequences of T tokens (`PLANS`). A short measurement is repeated until half a CPU
second is over. Times are CPU time, medians over rounds; ratios are the median, least and largest of each round's.

S = Qwen2, hidden 128, 4 layers, vocabulary 512; M = hidden 512, 8 layers, vocabulary 8000; random weights. SmolLM2 is
the recipe's checkpoint, measured at the first length alone. All are in float32 and untied (Opacus refuses tied
weights). Measured are the parameters of linear layers alone, weights and biases, or all parameters; gradscope measures
all in either case.

The floor is the minimum number of FLOPs of an exact norm (`gradscope.gradients.gradient_flops`: the activation
gradients' backward pass over each token's prefix, and the contractions to norms) at the speed of a large float32 matrix
product, measured in every round. Preparing a policy (`setup_s`) is left out. Errors are the largest, relative, over
four tokens, of which autograd gives the norms in float64. Peak memory is the most that is allocated beside the policy
for the last 8 tokens of each sequence, according to the profiler. A way that cannot keeps its row, with its `reason`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor, nn

from analyses.benchmarks.peers import OWN, PACKAGES, WAYS, loop, measure
from analyses.common.places import save_picture
from analyses.common.script import exit_with
from gradscope.errors import InputError
from gradscope.gradients import ModelShape, gradient_flops
from gradscope.plots import finish, new_panels, paper_style
from gradscope.policy import Policy, find_blocks

SIZES = {
    "S": {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 512, "intermediate_size": 384},
    "M": {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 8000, "intermediate_size": 1536},
}
HEADS = {
    "S": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "M": {"num_attention_heads": 8, "num_key_value_heads": 4},
}
ROOT = Path(__file__).parents[2]
HOME = ROOT / ".venv-peers"
"""The peers' environment."""
INSTALLED = (
    # bergson's requirements without torchvision, torchaudio and bitsandbytes, which it does not import: PyPI's
    # torchvision is built for CUDA and, beside a torch for CPUs, keeps transformers from being imported.
    ("datasets", "jaxtyping", "ml_dtypes", "natsort", "peft", "petname", "scipy", "simple-parsing", "torchopt"),
    ("torch", "transformers", "opacus==1.6.0", "torchjd==0.18.0", "dattri-llm[transformers]==0.1.0"),
    ("--no-deps", "bergson==2.5.1"),
)
"""pip's arguments, a call each."""
LABELS = {"graph": "gradscope, by autograd", "opacus": "Opacus", "vmap": "torch.func vmap"}
COLORS = {"S": "#0072b2", "M": "#d55e00", "SmolLM2": "#2a7f62"}
DIGITS = {"ms_per_token": 3, "ms_min": 3, "ms_max": 3, "wall_ms": 3, "peak_mb": 0, "setup_s": 2} | dict.fromkeys(
    ("ratio", "ratio_min", "ratio_max", "best_min", "best", "best_max", "fraction_of_floor"), 2
)


@dataclass(frozen=True)
class Plan:
    """How a policy is measured."""

    rounds: int
    sequences: int
    block: int
    """Consecutive tokens that a pass of the other ways serves; about their fastest."""
    blocks: int
    """Blocks of each sequence, at most."""


PLANS = {"S": Plan(5, 2, 16, 6), "M": Plan(3, 1, 8, 3), "SmolLM2": Plan(1, 1, 4, 2)}


@dataclass(frozen=True)
class Options:
    sizes: tuple[str, ...] = ("S", "M")
    lengths: tuple[int, ...] = (64, 128)
    smollm2: Path | None = None
    """Folder of SmolLM2-135M's checkpoint, to measure that as well, at the first length."""
    rounds: int | None = None
    """Rounds; none: 5 at S, 3 at M, 1 for SmolLM2."""
    ways: tuple[str, ...] = tuple(WAYS)
    prepare: bool = False
    """Make the peers' environment, and stop."""
    out: Path | None = None
    """Figure to write; its CSV is written to data/ beside it."""


def prepare() -> None:
    """Make the environment of the peers, with the versions that gradscope is tested with where those are pinned."""
    subprocess.run([sys.executable, "-m", "venv", HOME], check=True)
    pip = [HOME / "bin" / "python", "-m", "pip", "install", "--constraint", ROOT / ".ci" / "constraints.txt"]
    for arguments in INSTALLED:
        subprocess.run([*pip, *arguments], check=True)


class Cannot(Exception):
    """A way's own complaint."""


class Process:
    """A way in a process of its own, with the Python of its environment."""

    def __init__(self, name: str) -> None:
        python = HOME / "bin" / "python" if name in PACKAGES else Path(sys.executable)
        if not python.exists():
            raise InputError(f"{name} needs the environment {HOME.name}, which is not there; run this with --prepare")
        self.name, self.log = name, tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        command = [python, "-m", "analyses.benchmarks.peers", name]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def ask(self, method: str, *arguments: object) -> object:
        pickle.dump((method, arguments), self.process.stdin)
        self.process.stdin.flush()
        try:
            answer, complaint = pickle.load(self.process.stdout)
        except EOFError:
            self.log.seek(0)
            last = self.log.read().decode(errors="replace").strip().splitlines()[-1:]
            raise InputError(f"the process of {self.name} ended: {' '.join(last)}") from None
        if complaint:
            raise Cannot(complaint)
        return answer


def make_policy(size: str, *, tied: bool = True) -> Policy:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**SIZES[size], **HEADS[size], tie_word_embeddings=tied, attn_implementation="eager")
    model = Qwen2ForCausalLM(config).eval()
    return Policy(model, None, find_blocks(model))


def untie(checkpoint: Path) -> nn.Module:
    """Load a policy with a head of its own that equals the embedding."""
    from transformers import AutoModelForCausalLM

    tied = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tied.config.tie_word_embeddings = False
    twin = type(tied)(tied.config)
    twin.load_state_dict(tied.state_dict())
    return twin.eval()


def draw_tokens(vocabulary: int, length: int, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return (ids [B, length], indices of the tokens to measure): whole blocks, evenly spaced over the response."""
    ids = torch.randint(0, vocabulary, (plan.sequences, length), generator=torch.Generator().manual_seed(1))
    blocks = torch.arange(length // 4, length).split(plan.block)
    taken = torch.linspace(0, len(blocks) - 1, min(plan.blocks, len(blocks))).long()
    return ids, torch.cat([blocks[i] for i in taken])


def product_speed() -> float:
    """Return the FLOPs per CPU second of a large float32 matrix product."""
    a, b = torch.randn(2, 1024, 1024).unbind()
    seconds = []
    for _ in range(5):
        start = time.process_time()
        a @ b
        seconds.append(time.process_time() - start)
    return 2 * 1024**3 / min(seconds)


def benchmark(size: str, model: nn.Module, length: int, plan: Plan, processes: Mapping[str, Process]) -> pd.DataFrame:
    """Return a row per kind of parameters and way."""
    ids, targets = draw_tokens(model.config.vocab_size, length, plan)
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for parameters in ("linear layers", "all"):
            setup, reasons, linear = {}, {}, parameters == "linear layers"
            for name, process in processes.items():
                try:
                    setup[name] = process.ask("prepare", folder, linear, plan.block)
                except Cannot as reason:
                    reasons[name] = str(reason)
            able = {name: processes[name] for name in setup}
            table = take_rounds(able, ids, targets, plan.rounds, ModelShape.of(model))
            table["max_relative_error"] = errors(model, linear, ids, targets, table.pop("norms"))
            table = table.assign(setup_s=pd.Series(setup)).reindex(list(processes))
            table["reason"] = pd.Series(reasons, dtype=object)
            table["version"] = {name: process.ask("version") for name, process in processes.items()}
            table = table.rename_axis("way").reset_index()
            where = pd.DataFrame({"size": size, "length": length, "parameters": parameters}, table.index)
            tables.append(where.join(table))
            print(tables[-1].round(DIGITS).to_string(index=False), flush=True)
    return pd.concat(tables)


def take_rounds(
    processes: Mapping[str, Process], ids: Tensor, targets: Tensor, rounds: int, shape: ModelShape
) -> pd.DataFrame:
    """Let every way take its turn in each round; return a row per way."""
    work, tokens = (ids.tolist(), targets.tolist()), ids.shape[0] * len(targets)
    cpu, wall, norms = ({name: [] for name in processes} for _ in range(3))
    peaks = {name: process.ask("peak", *work) for name, process in processes.items()}  # and warms it up
    speeds = []
    for number in range(rounds):
        speeds.append(product_speed())
        for name in np.random.default_rng(number).permutation(list(processes)):
            seconds, clock, norms[name] = processes[name].ask("time", *work)
            cpu[name].append(1e3 * seconds / tokens)
            wall[name].append(1e3 * clock / tokens)
    each = pd.DataFrame(cpu)
    ratios = each.div(each["gradscope"], axis=0)
    outside = ratios.drop(columns=list(OWN), errors="ignore").min(axis=1)
    floor = 1e3 * sum(gradient_flops(shape, targets.tolist()).values()) / len(targets) / np.array(speeds)
    table = pd.DataFrame(
        {
            "tokens": tokens,
            "rounds": rounds,
            "ms_per_token": each.median(),
            "ms_min": each.min(),
            "ms_max": each.max(),
            "wall_ms": pd.DataFrame(wall).median(),
            "ratio": ratios.median(),
            "ratio_min": ratios.min(),
            "ratio_max": ratios.max(),
            "fraction_of_floor": (1 / each).mul(floor, axis=0).median(),
            "peak_mb": pd.Series(peaks) / 2**20,
            "gflops_of_product": np.median(speeds) / 1e9,
            "norms": pd.Series(norms),
        }
    )
    # The best way outside of gradscope in each round, by gradscope's time in it.
    for column, value in {"best_min": outside.min(), "best": outside.median(), "best_max": outside.max()}.items():
        table.loc["gradscope", column] = value
    return table


def errors(model: nn.Module, linear: bool, ids: Tensor, targets: Tensor, norms: pd.Series) -> pd.Series:
    """Return each way's largest relative error over four tokens of the first sequence, against autograd in float64."""
    some = torch.linspace(0, len(targets) - 1, 4).long()
    exact = measure(loop(model.double(), linear), "loop", 4, ids[:1], targets[some])
    model.float()
    found = {name: torch.tensor(own, dtype=exact.dtype)[some] for name, own in norms.items()}
    off = {name: ((own - exact) / exact).abs().max().item() for name, own in found.items()}
    return pd.Series(off, dtype=float).rename("max_relative_error")


def in_words(table: pd.DataFrame) -> str:
    """Return the rows of docs/cost.md: milliseconds of each way, the best other by gradscope, share of the floor."""
    lines = []
    for (size, length, parameters), own in table.groupby(["size", "length", "parameters"], sort=False):
        own, ours = own.set_index("way"), own.set_index("way").loc["gradscope"]
        times = [f"{ms:.3g}" if ms < 1000 else "–" if np.isnan(ms) else f"{ms:.0f}" for ms in own["ms_per_token"]]
        bounds = f" [{ours['best_min']:.2f}, {ours['best_max']:.2f}]" if ours["rounds"] > 1 else ""
        share = f"{ours['fraction_of_floor']:.2f}".lstrip("0")
        cells = [*times[:-1], f"**{times[-1]}**", f"{ours['best']:.2f}×{bounds}", share]
        lines.append(" | ".join([f"| {size}, {length}, {parameters}", *cells]) + " |")
    return "\n".join(lines)


@paper_style()
def draw(table: pd.DataFrame) -> Figure:
    """Draw each way's time by gradscope's, with its least and largest over rounds."""
    figure, axes = new_panels(2, width=3.4, height=2.6)
    others = [name for name in table["way"].unique() if name != "gradscope"]
    for ax, (parameters, rows) in zip(axes, table.groupby("parameters", sort=False), strict=True):
        groups = rows[rows["way"] != "gradscope"].groupby(["size", "length"], sort=False)
        for number, ((size, length), own) in enumerate(groups):
            at = [others.index(name) + 0.13 * (number - (len(groups) - 1) / 2) for name in own["way"]]
            reach = [own["ratio"] - own["ratio_min"], own["ratio_max"] - own["ratio"]]
            look = {
                "fmt": "os^"[sorted(rows["length"].unique()).index(length)],
                "ms": 3,
                "lw": 0.8,
                "color": COLORS[size],
            }
            ax.errorbar(own["ratio"], at, xerr=reach, label=f"{size}, T = {length}", **look)
        best = rows["best"].dropna()
        ax.axvline(1, color="0.4", lw=0.8)
        ax.set(xscale="log", xlabel="CPU time by gradscope's", yticks=range(len(others)))
        ax.set_yticklabels([LABELS.get(name, name) for name in others])
        ax.set_xticks(ticks := [1, 2, 4, 8, 16], [f"{tick}×" for tick in ticks])
        ax.minorticks_off()
        ax.invert_yaxis()
        words = " to ".join(dict.fromkeys(f"{ratio:.1f}" for ratio in (best.min(), best.max())))
        ax.set_title(f"{parameters.capitalize()}\nthe best other: {words}×", loc="left")
        finish(ax, rows)
    axes[1].set_yticklabels([])
    axes[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)
    return figure


def main(options: Options) -> None:
    if options.prepare:
        return prepare()
    torch.set_num_threads(1)
    tables, work = [], [(size, length) for length in options.lengths for size in options.sizes]
    if options.smollm2:
        work.insert(len(options.sizes), ("SmolLM2", options.lengths[0]))
    with ExitStack() as stack:
        processes = {name: stack.enter_context(Process(name)) for name in options.ways}
        for size, length in work:
            model = untie(options.smollm2) if size == "SmolLM2" else make_policy(size, tied=False).model
            plan = PLANS[size] if options.rounds is None else replace(PLANS[size], rounds=options.rounds)
            tables.append(benchmark(size, model, length, plan, processes))
            if options.out:
                table = pd.concat(tables, ignore_index=True)
                save_picture(draw(table), options.out, table)
    print(in_words(pd.concat(tables)))
    return None


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
