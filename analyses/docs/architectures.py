"""How exactly is each architecture measured? Tiny random models against one autograd call per token, in float64.

    python -m analyses.docs.architectures [--out figures/cost/data/architectures.csv] [--only mamba gpt2]

A row per model type that transformers' AutoModelForCausalLM loads (in the version tested, and in the newest, whose own
types `--only` adds), built small from its configuration
(`tests/support/shrunk.py`: width 32, four layers, a vocabulary of 96), and one per variant that the tests know
(`tests/support/policies.py`). Each is saved, loaded by `load_policy`, self-checked as `measure` does, and measured: all
tokens of a sequence of 28, at two temperatures, against a backward pass each through the model as it was loaded. The
error is the largest relative difference over tokens, layers, all parameters and each module (a module's relative to its
own norm and a hundredth of the whole). Both sides are in float64 all through, also where transformers casts to float32.
It shows that the equations agree, not how float32 or a trained checkpoint rounds; for your own policy `measure`'s
self-check shows that.

The speed is that of the same numbers from one autograd call per token, over gradscope's, in float32 on one thread, in
turns: the last 16 tokens of a sequence of 60. At this size it reflects overheads; real sizes are in
`figures/cost/data/benchmark_*.csv`.

Each model runs for at most LIMIT CPU seconds in a process of its own, so that a crash costs only its row.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import pandas as pd
import torch
import transformers
import tyro
from torch import Tensor

import gradscope
from analyses.common.script import exit_with
from gradscope.errors import InputError, SelfCheckError
from gradscope.gradients import SequenceTokens, TokenGradientMeter, check_engine, measuring
from gradscope.policy import Policy, load_policy
from gradscope.runs import write_text
from tests.support.oracle import TrueFloat64, brute_force, largest_error
from tests.support.policies import ARCHITECTURES, LLAMA_LIKE, RULED, UNRULED, VOCAB, Architecture, make_model
from tests.support.shrunk import MODEL_TYPES, left_out, make_shrunk_model

LENGTH, CHECKED, TEMPERATURES = 28, (0, 9, 20, 26), (1.0, 0.7)
ERRORS = [f"worst_error_t{temperature:g}" for temperature in TEMPERATURES]
COLUMNS = ("policy", "model_type", "class", "variant", "outcome", "path", "one_by_one", *ERRORS, "speed", "reason")
TIMED, LAST, ROUNDS = 60, 16, 3
LIMIT = 120
"""CPU seconds per model; on a busy machine they may take ten times as long."""
EXACT = 1e-10
"""Both sides are float64 throughout: some thousand roundings of 1e-16, and cancellation."""
BLOCKS = {
    "blt": "model.local_decoder.layers",
    "hrm_text": "model.H_module.layers",
    "xlm": "transformer.layer_norm2",
}
"""--blocks of models with several lists of blocks, for which gradscope asks."""
ENTRIES: dict[str, Architecture] = ARCHITECTURES | RULED | UNRULED
PLAIN = {
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "ffn_dim", "layer_types"),
    *("word_embed_proj_dim", "query_pre_attn_scalar", "moe_intermediate_size", "mlp_only_layers", "num_experts"),
    *("num_local_experts", "num_experts_per_tok", "max_window_layers", "use_sliding_window"),
}
"""Settings that every model of a family has, and that name no variant."""


@dataclass(frozen=True)
class Options:
    """The table of architectures."""

    out: Path = Path("figures/cost/data/architectures.csv")
    """File to write."""
    only: tuple[str, ...] = ()
    """Model types or test policies whose rows to remake; none: all."""


def variant(name: str) -> str:
    """Return what sets this test policy apart from its family, in its configuration's words."""
    settings = ENTRIES[name].settings
    told = {key: value for key, value in settings.items() if key not in PLAIN}
    if name in RULED:  # those of one family that differ in the shape of their heads
        told = {key: settings[key] for key in LLAMA_LIKE if settings[key] != LLAMA_LIKE[key]} | told
    if rope := told.pop("rope_parameters", None):
        told["rope_type"] = rope["rope_type"]
    return ", ".join(f"{key}={value}" for key, value in told.items())


VARIANTS = tuple(name for name in ENTRIES if variant(name) and name not in MODEL_TYPES)


def random_sequence(length: int) -> tuple[Tensor, Tensor]:
    """Return (ids, targets): all tokens but the first."""
    ids = torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(0))
    return ids, torch.arange(1, length)


def save_and_load(name: str, folder: str) -> Policy:
    """Return the tiny policy as `measure` gets it, loaded from a checkpoint."""
    model = make_shrunk_model(name) if name in MODEL_TYPES else make_model(name)
    model.save_pretrained(folder)
    return load_policy(folder, blocks=BLOCKS.get(name))


def measure_exactness(policy: Policy) -> dict[str, object]:
    """Return the path and the errors at both temperatures, after the self-check. Converts the policy to float64."""
    policy.model.double()
    ids, targets = random_sequence(LENGTH)
    everything, errors = torch.arange(len(targets)), []
    with _default_float64(), TrueFloat64():
        with measuring(policy.model):
            meter = TokenGradientMeter(policy, ids)
            check_engine(meter, [SequenceTokens(ids, targets, torch.tensor(CHECKED))])
        for temperature in TEMPERATURES:
            truth = brute_force(policy, ids, targets, temperature=temperature)
            with measuring(policy.model):
                ours = meter.measure(ids, targets, everything, temperature=temperature)
            errors.append(largest_error(ours, truth))
    path = "analytic" if meter.precision else "autograd" if meter.graph.batched else "autograd, token by token"
    singles, tensors = len(meter.ownership.general), sum(1 for _ in policy.model.parameters())
    return {"path": path, "one_by_one": f"{singles} of {tensors}"} | dict(zip(ERRORS, errors, strict=True))


def measure_speed(policy: Policy) -> float:
    """Time one autograd call per token relative to gradscope, in turns. Converts the policy to float32."""
    policy.model.float()
    ids, targets = random_sequence(TIMED)
    targets, everything = targets[-LAST:], torch.arange(LAST)
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids)
        ways = (
            lambda: brute_force(policy, ids, targets),
            lambda: meter.measure(ids, targets, everything, temperature=1.0),
        )
        return median(_seconds(ways[0]) / _seconds(ways[1]) for _ in range(ROUNDS))


def one_row(name: str) -> dict[str, object]:
    """Return the result for one model type or one of the tests' policies."""
    if name in MODEL_TYPES:
        row = {"policy": name, "model_type": name, "class": MODEL_TYPES[name], "variant": ""}
        if reason := left_out(name):
            return row | {"outcome": "left out", "reason": reason}
        if name in BLOCKS:
            row["variant"] = f"--blocks {BLOCKS[name]}"
    else:
        row = {"policy": name, "model_type": "", "class": ENTRIES[name].model, "variant": variant(name)}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            policy = save_and_load(name, "checkpoint")
            row["model_type"] = name if name in MODEL_TYPES else policy.model.config.model_type
            if not row["variant"] and getattr(policy.config, "is_decoder", False):
                row["variant"] = "is_decoder=True"
            found = measure_exactness(policy)
        except InputError as refusal:
            return row | {"outcome": "refused", "reason": str(refusal)}
        except SelfCheckError as failure:
            return row | {"outcome": "failed the self-check", "reason": str(failure)}
        outcome = "exact" if max(found[column] for column in ERRORS) < EXACT else "WRONG"
        return row | {"outcome": outcome} | found | {"speed": measure_speed(policy)}


def row_in_its_own_process(name: str) -> dict[str, object]:
    """Do the same in its own process; "crashed" or "timed out" without an answer."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_row, args=(name, theirs))
    process.start()
    theirs.close()
    row: dict[str, object] = {"policy": name}
    try:
        row = ours.recv() if ours.poll(10 * LIMIT) else row | {"outcome": "timed out", "reason": f"{LIMIT} seconds"}
    except EOFError:
        row |= {"outcome": "crashed", "reason": f"the process ended without a word, or after {LIMIT} seconds"}
    process.kill()
    process.join()
    return row


def _send_row(name: str, out: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # progress bars and warnings
    warnings.simplefilter("ignore")
    try:
        out.send(one_row(name))
    except Exception as error:  # one model must not end the table: its row says what happened
        out.send({"policy": name, "outcome": "failed", "reason": f"{type(error).__name__}: {error}"})


@contextlib.contextmanager
def _default_float64() -> Iterator[None]:
    """Make new tensors float64, since some models create theirs without a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _seconds(call: Callable[[], object]) -> float:
    """Return CPU seconds of one thread, which exclude other programs."""
    start = time.process_time()
    call()
    return time.process_time() - start


def make_table(rows: list[dict[str, object]]) -> pd.DataFrame:
    """Return the rows as words for a CSV, with provenance."""
    made_by = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "gradscope": gradscope.__version__,
    }
    told = [{column: _in_words(column, row.get(column, "")) for column in COLUMNS} | made_by for row in rows]
    return pd.DataFrame(told, columns=[*COLUMNS, *made_by], dtype=str)


def _in_words(column: str, value: object) -> str:
    if isinstance(value, str):
        return " ".join(value.split())
    return f"{value:.1f}" if column == "speed" else f"{value:.1e}"


def main(options: Options) -> None:
    """Measure each architecture; write the table after each, so that `--only` can continue it."""
    torch.set_num_threads(1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    names = options.only or (*MODEL_TYPES, *VARIANTS)
    table = make_table([])
    if options.out.is_file():
        table = pd.read_csv(options.out, dtype=str, keep_default_na=False)
        elsewhere = table["transformers"] != transformers.__version__  # another version may have other model types
        table = table[table["policy"].isin([*MODEL_TYPES, *VARIANTS]) | elsewhere]
    for name in names:
        row = row_in_its_own_process(name)
        print("{policy}: {outcome}".format(**row), flush=True)
        table = pd.concat([make_table([row]), table]).drop_duplicates("policy").sort_values(["model_type", "variant"])
        write_text(options.out, table.to_csv(index=False))
    print(table["outcome"].value_counts().to_string())


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options)))
