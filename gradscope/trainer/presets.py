"""Named settings for whole runs: two for a laptop, and the paper's (arXiv:2505.12929, Tables 2 and 3).

    kk-embedded          the embedded policy on Knights & Knaves: minutes on two cores
    arithmetic-embedded  a smoke test of the math pipeline; the policy knows no arithmetic
    kk-qwen2.5-3b        Qwen2.5-3B-Instruct on Knights & Knaves
    kk-qwen2.5-7b        Qwen2.5-7B-Instruct-1M on the same puzzles
    math-qwen2.5-7b      Qwen2.5-7B (base) on DSR-Uniform
    orz-qwen2.5-7b       the same on ORZ's 57k problems, a file in verl's layout to be placed at `data`

With Qwen2.5 the full weights do not fit on one 80 GB GPU (20 bytes a parameter, plus vLLM's share), and the trainer
does not shard weights; add --lora-rank.

Each preset is plain GRPO; the paper's variants are flags on top of it:

    variant                    puzzles                                 math
    Advantage Reweighting      --reweight-alpha 0.3 (code: 0.2)        --reweight-alpha 0.1
    Lopti                      --lopti-eta 0.5                         --lopti-eta 0.5
    both                       --reweight-alpha 0.3 --lopti-eta 0.5    no better than one alone, per the paper
    REINFORCE++                --algorithm reinforce++                 not in the paper
      with Reweighting         … --reweight-alpha 0.1
    Lopti reversed, Fig. 6 (b) --lopti-eta 0.5 --lopti-order high-first
    masking, Fig. 6 (a)        --mask-probs, with the ablation's bounds

Recommended for puzzles: α from 0.2 to 0.3, η around 0.5. Differences between the paper's text and its released code are
noted next to the setting.
"""

from __future__ import annotations

from dataclasses import replace

from gradscope.errors import InputError, checked
from gradscope.trainer.config import TrainConfig

_EMBEDDED = TrainConfig(
    model="embedded",
    questions_per_step=16,
    group_size=8,
    temperature=0.7,
    mini_batch_size=64,
    micro_batch_size=16,
    learning_rate=2e-4,
    weight_decay=0.01,
    kl_coef=0.001,
    steps=60,
    save_every=20,
)

_PAPER = TrainConfig(
    questions_per_step=64,
    group_size=8,
    max_new_tokens=4096,
    temperature=0.7,
    clip_ratio_low=0.2,
    clip_ratio_high=0.24,
    clip_ratio_c=10.0,  # in the released code; the text has no dual clip
    kl_coef=0.001,
    # Table 2 calls 64 (questions) ppo_mini_batch_size and 256 ppo_micro_batch_size; in the code, 256 responses make an
    # optimizer step and 32, over four GPUs, a forward pass. The latter affects only speed and memory: here, what fits.
    mini_batch_size=256,
    micro_batch_size=8,
    learning_rate=1e-6,
    # For settings not in its tables, the paper keeps verl's defaults.
    weight_decay=0.01,
    warmup_steps=0,
    max_grad_norm=1.0,
    precision="bfloat16",
    gradient_checkpointing=True,
    engine="vllm",
    save_every=20,
)

_LARGE = {"micro_batch_size": 2, "vllm_memory": 0.25}

_PUZZLES = replace(_PAPER, task="knights-knaves", data=("kk/*/train.parquet",), epochs=5)

_MATH = replace(
    _PAPER,
    model="Qwen/Qwen2.5-7B",
    task="math-plain",
    temperature=1.0,
    questions_per_step=128,
    mini_batch_size=512,
    **_LARGE,
)

PRESETS: dict[str, TrainConfig] = {
    "kk-embedded": replace(_EMBEDDED, task="knights-knaves-compact", people=(2, 3, 4), max_new_tokens=400),
    # The answer is three digits, but the policy writes about puzzles, 70 tokens on average.
    "arithmetic-embedded": replace(_EMBEDDED, task="arithmetic", max_new_tokens=128, steps=20),
    "kk-qwen2.5-3b": replace(_PUZZLES, model="Qwen/Qwen2.5-3B-Instruct"),
    "kk-qwen2.5-7b": replace(_PUZZLES, model="Qwen/Qwen2.5-7B-Instruct-1M", **_LARGE),
    "math-qwen2.5-7b": replace(_MATH, data=("math/dsr_uniform_train.parquet",), epochs=5),
    "orz-qwen2.5-7b": replace(_MATH, data=("math/orz_train.parquet",), epochs=1),
}


@checked
def get_preset(name: str) -> TrainConfig:
    """Return the settings of that name.

    >>> get_preset("kk-qwen2.5-3b").learning_rate
    1e-06
    """
    if name not in PRESETS:
        raise InputError(f"no preset is called {name!r}; give one of {', '.join(PRESETS)}")
    return PRESETS[name]
