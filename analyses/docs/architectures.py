"""Which architectures are measured how exactly: tiny random policies against one autograd call per token, in float64.

    python -m analyses.docs.architectures [--out docs/data/architectures.csv] [--only llama gpt2]

A row per architecture that the tests know (`tests/support/policies.py`): three blocks of width 32, random weights, a
vocabulary of 96. Some tokens of a sequence of 28 are measured by the engine and, one backward pass each, by autograd;
the error is the largest relative difference over tokens, layers, all parameters and each module (a module's relative
to its own norm and a hundredth of the whole). Both sides are in float64 all through, also where transformers casts to
float32. It says how the equations agree, not how float32 or a trained checkpoint rounds: the self-check of `measure`
does that for your own policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import torch
import transformers
import tyro

from analyses.common.script import exit_with
from gradscope.gradients import TokenGradientMeter, measuring
from gradscope.runs import write_text
from tests.support.oracle import TrueFloat64, brute_force, largest_error
from tests.support.policies import ARCHITECTURES, LLAMA_LIKE, RULED, UNRULED, VOCAB, Architecture, make_policy

ENTRIES: dict[str, Architecture] = ARCHITECTURES | RULED | UNRULED
LENGTH, TARGETS = 28, (1, 2, 3, 10, 16, 17, 21, 22, 23, 26, 27)
PLAIN = {
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "ffn_dim", "layer_types"),
    *("word_embed_proj_dim", "query_pre_attn_scalar", "moe_intermediate_size", "mlp_only_layers", "num_experts"),
    *("num_local_experts", "num_experts_per_tok", "max_window_layers", "use_sliding_window"),
}
"""Settings that every model of the family has in some value: they name no variant."""


@dataclass(frozen=True)
class Options:
    """The table of supported architectures."""

    out: Path = Path("docs/data/architectures.csv")
    """File to write."""
    only: tuple[str, ...] = ()
    """Some of the architectures; none: all of them."""


def variant(name: str) -> str:
    """What sets this policy apart from its family, in the words of its configuration."""
    settings = ENTRIES[name].settings
    told = {key: value for key, value in settings.items() if key not in PLAIN}
    if name in RULED:  # those of one family that differ in the shape of their heads
        told = {key: settings[key] for key in LLAMA_LIKE if settings[key] != LLAMA_LIKE[key]} | told
    if rope := told.pop("rope_parameters", None):
        told["rope_type"] = rope["rope_type"]
    return ", ".join(f"{key}={value}" for key, value in told.items())


def one_row(name: str) -> dict[str, object]:
    """The engine against brute force on one architecture, with eager attention and, if it is the same, sdpa."""
    ids = torch.randint(4, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))
    targets = torch.tensor(TARGETS)
    errors, analytic = [], []
    # sdpa leaves a soft cap on attention scores out; gradscope loads such a checkpoint with eager attention.
    for attention in ("eager",) if "attn_logit_softcapping" in ENTRIES[name].settings else ("eager", "sdpa"):
        with TrueFloat64():
            policy = make_policy(name, torch.float64, attention=attention)
            truth = brute_force(policy, ids, targets)
            with measuring(policy.model):
                meter = TokenGradientMeter(policy, ids)
                ours = meter.measure(ids, targets, torch.arange(len(targets)), temperature=1.0)
            errors.append(largest_error(ours, truth))
            analytic.append(meter.precision is not None)
    return {
        "architecture": ENTRIES[name].model,
        "variant": variant(name),
        "path": "analytic" if all(analytic) else "autograd",
        "worst_relative_error": f"{max(errors):.1e}",
        "tokens": len(targets),
        "policy": name,
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }


def main(options: Options) -> None:
    """Measure each architecture; write the table."""
    torch.set_num_threads(1)
    rows = []
    for name in options.only or ENTRIES:
        rows.append(one_row(name))
        print("{policy}: {path}, {worst_relative_error}".format(**rows[-1]), flush=True)
    table = pd.DataFrame(rows).sort_values(["architecture", "policy"], key=lambda column: column.str.lower())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.out, table.to_csv(index=False))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options)))
