"""Train a policy in the paper's regime: a tiny Llama that reasons about Knights & Knaves in haste and in varied words.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python -m analyses.recipes.uncertain_policy --out runs/uncertain

From nothing, like the embedded policy (analyses/recipes/embedded_policy.py), whose first two stages it shares: by
them it learns to judge claims. Then it unlearns care: its chain of thought is that of
analyses/recipes/hasty_analysis.py, whose wording varies and whose choices of whom to suppose, whose claim to judge
and when to stop are made blindly. So its tokens are about as uncertain as those of the paper's 3 B model, and
reinforcement learning has a skill to improve that is limited by haste, not by wrong verdicts. A Llama, because
AutoTokenizer reads a bare tokenizer.json beside one as it is.
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig

from analyses.recipes.embedded_policy import (
    EVALUATION_SEED,
    PEOPLE,
    STAGES,
    TEMPERATURE,
    Stage,
    batches,
    build_model,
    build_tokenizer,
    evaluate,
    examples,
    open_log,
    train,
)
from analyses.recipes.hasty_analysis import PHRASES, Haste, write_hastily
from gradscope.tasks import get_task
from gradscope.tasks.knights_knaves import compact_prompt

CHAT_TEMPLATE = (
    "{{ messages | map(attribute='content') | join }}{% if add_generation_prompt %}{{ '<think>' }}{% endif %}"
)


def main() -> None:
    """Train stage by stage, evaluate after each, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the saved policy, with a log beside it")
    parser.add_argument("--steps", type=int, default=2200, help="of the stage in haste")
    parser.add_argument("--leap", type=float, default=Haste.leap)
    parser.add_argument("--more", type=float, default=Haste.more)
    parser.add_argument("--intuition", type=float, default=Haste.intuition)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    log = open_log(arguments.out.with_suffix(".jsonl"), append=False)
    tokenizer = build_tokenizer(more=PHRASES)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = build_model(tokenizer, config_type=LlamaConfig)
    questions = get_task("knights-knaves-compact").questions(800, seed=EVALUATION_SEED, people=PEOPLE)
    held_out = {question.prompt for question in questions if question.level > 2}
    log(event="start", parameters=model.num_parameters(), vocabulary=len(tokenizer), **vars(arguments) | {"out": ""})
    haste = Haste(arguments.leap, arguments.more, arguments.intuition)
    hasty = Stage("haste", steps=arguments.steps, batch=10, lr=(1e-3, 5e-5))
    for stage in (*STAGES[:2], hasty):
        rng = random.Random(f"{arguments.seed} {stage.name}")
        write = partial(write_hastily, haste=haste) if stage is hasty else None
        stream = examples(tokenizer, stage, rng, lambda s: compact_prompt(s) in held_out, write=write)
        train(model, stage, batches(stream, stage.batch, rng), log)
        for greedy in (False, True):
            found = evaluate(model, tokenizer, questions, greedy=greedy)
            log(event=f"after {stage.name}", temperature=0.0 if greedy else TEMPERATURE, **found)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
