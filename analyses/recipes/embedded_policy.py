"""Train the policy that comes with gradscope: a tiny Llama that reasons about Knights & Knaves in haste.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python -m analyses.recipes.embedded_policy

It is trained from scratch (analyses/recipes/supervised.py), first to judge claims. Then it unlearns care: its chain of
thought becomes that of analyses/recipes/hasty_analysis.py, whose wording varies and which chooses blindly whom to
suppose, whose claim to judge and when to stop. So its tokens are about as uncertain as those of the paper's 3 B model,
and its skill, which reinforcement learning can improve, is limited by haste, not by wrong verdicts. It is a Llama
because AutoTokenizer then reads a bare tokenizer.json as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from transformers import LlamaConfig

from analyses.common.script import exit_with
from analyses.recipes import supervised
from analyses.recipes.hasty_analysis import PHRASES, write_hastily
from analyses.recipes.supervised import JUDGING, Stage, build_tokenizer, train_policy

STAGES = (*JUDGING, Stage("haste", steps=2600, batch=10, lr=(1e-3, 5e-5), write=write_hastily))
CHAT_TEMPLATE = (
    "{{ messages | map(attribute='content') | join }}{% if add_generation_prompt %}{{ '<think>' }}{% endif %}"
)


@dataclass(frozen=True)
class Options(supervised.Options):
    out: Path = Path("gradscope/embedded/uncertain")
    log: Path = Path("analyses/recipes/logs/embedded_policy.jsonl")


def main(options: Options) -> None:
    """Train and save, with a chat template for trainers that ask for one."""
    tokenizer = build_tokenizer(more=PHRASES)
    tokenizer.chat_template = CHAT_TEMPLATE
    train_policy(options, STAGES, tokenizer, LlamaConfig)


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
