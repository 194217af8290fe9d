"""The memory that `gradscope train --plan` predicts against measured peaks, on small Qwen2 policies on the CPU.

    python -m analyses.benchmarks.plan_memory --out figures/benchmark_plan_memory.csv

Measured is what torch's CPU allocator hands out above what lies there before, at its peak, temporaries inside kernels
included (the profiler's records of every allocation): neither the interpreter nor fragmentation blurs it, as they
would resident memory. Predicted is the same part of the plan: all but weights, gradients, moments and reference, whose
sizes are known exactly. Each policy has random weights; three quarters of each sequence are response. Moments:

    training         one micro-batch, forward, loss and backward, into gradients that are there
    scoring          log-probabilities and entropies of the same responses, without gradient
    sampling         transformers' cache, every response of full length, attention as on a GPU
    optimizer step   AdamW as it runs on a GPU (foreach)

Predicted over measured, 28 policies: training .97 to 1.09 in float32, .94 (LoRA) to 1.18 (vocabulary 32,768) in
bfloat16; scoring .93 (LoRA) to 1.02, sampling .91 to .95 (the cache keeps up to 64 columns to spare, here an eighth
of its length), optimizer step 1.00. FSDP's gathered weights, DDP's buckets and vLLM's share are not measured here.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import tyro

from gradscope.gradients import Dtype, ModelShape
from gradscope.objective import PAPER, Updater, batch_statistics, whole_passes
from gradscope.policy import Policy, find_blocks
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.sampling import HFSampler
from gradscope.trainer import TrainConfig, plan_training

MOMENTS = ("training", "scoring", "sampling", "optimizer step")
KNOWN = ("weights", "gradients", "AdamW's moments", "reference policy")
"""Parts of the plan whose sizes are known exactly."""
PROMPTS, GROUP, PROMPT_LENGTH, SAMPLED_TOKENS = 4, 8, 496, 16
"""What is sampled, one token shorter from prompt to prompt: few steps, as the profiler is slow."""


@dataclass(frozen=True)
class Case:
    """A policy, and what goes through it at once."""

    hidden: int = 256
    layers: int = 8
    vocab: int = 8192
    tied: bool = True
    responses: int = 4
    length: int = 256
    precision: Dtype = "float32"
    checkpointing: bool = False
    lora_rank: int | None = None

    @property
    def config(self) -> Any:
        from transformers import Qwen2Config

        return Qwen2Config(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 128,
            intermediate_size=self.hidden * 43 // 16,  # the ratio of Qwen2.5-0.5B and 3B, rounded
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
        )

    @property
    def response_length(self) -> int:
        return self.length * 3 // 4


@dataclass(frozen=True)
class Options:
    """Settings of the benchmark."""

    out: Path | None = None
    """CSV to write."""


CASES = [
    *(
        Case(precision=precision, checkpointing=checkpointing, vocab=vocab, responses=responses, length=length)
        for precision, checkpointing in product(("float32", "bfloat16"), (False, True))
        for vocab, responses, length in ((512, 4, 256), (8192, 4, 256), (8192, 1, 1024), (32768, 2, 256))
    ),
    *(
        replace(case, precision=precision, checkpointing=checkpointing)
        for case in (Case(hidden=512, layers=4, tied=False), Case(lora_rank=8), Case(lora_rank=8, vocab=512))
        for precision, checkpointing in product(("float32", "bfloat16"), (False, True))
    ),
]


def allocated_peak(call: Callable[[], object]) -> int:
    """Bytes that the call's allocations on the CPU reach at most, above what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    records = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for record in sorted(records, key=lambda e: e.start_ns()):
        held += record.nbytes()
        peak = max(peak, held)
    return peak


def make_policy(case: Case) -> Policy:
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(case.config).eval()
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # recomputation is done in training mode alone
    if case.lora_rank is not None:
        from peft import LoraConfig, get_peft_model

        get_peft_model(model, LoraConfig(r=case.lora_rank, target_modules="all-linear"))
    return Policy(model, None, find_blocks(model))


def make_batch(case: Case) -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(case.vocab, (case.responses, case.length), generator=generator).tolist()
    start = case.length - case.response_length
    known = {"advantage": 1.0, "old_logprobs": [-5.0] * case.response_length, "temperature": 0.7}
    return collate([Response(row[:start], row[start:], group=k, **known) for k, row in enumerate(ids)], pad_id=0)


def measured_peaks(case: Case, moments: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Each moment's name in the plan and its peak in bytes."""
    policy, batch = make_policy(case), make_batch(case)
    model, cpu = policy.model, torch.device("cpu")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
    updater, (part,) = Updater(model, optimizer, cpu, len(batch)), whole_passes(batch, len(batch))
    score = {"micro_batch_size": len(batch), "device": cpu}
    calls = {
        "training": lambda: updater.accumulate(part, PAPER),
        "scoring": lambda: batch_statistics(model, batch, **score),
        "sampling": lambda: sample(policy),
    }
    updater.accumulate(part, PAPER)  # makes the gradients
    for name in [name for name in calls if name in moments]:
        with torch.autocast("cpu", torch.bfloat16) if case.precision == "bfloat16" else nullcontext():
            yield name, allocated_peak(calls[name])
    optimizer.step()  # makes the moments
    yield "optimizer step", allocated_peak(optimizer.step)


def sample(policy: Policy) -> None:
    # Without it, sdpa runs as on a GPU; with it, a kernel of the CPU's shares keys and values among queries.
    policy.model._supports_attention_backend = False
    prompts = [list(range(start, PROMPT_LENGTH)) for start in range(PROMPTS)]
    sampler = HFSampler(policy, batch_size=PROMPTS * GROUP, progress=False)
    generator = torch.Generator().manual_seed(2)
    sampler.sample(prompts, n=GROUP, temperature=1.0, max_new_tokens=SAMPLED_TOKENS, generator=generator)


def predicted_peaks(case: Case) -> dict[str, float]:
    """The same moments' bytes, by the plan."""
    shape = ModelShape.from_config(case.config)
    config = TrainConfig(
        mini_batch_size=case.responses,
        micro_batch_size=case.responses,
        max_new_tokens=case.response_length,
        precision=case.precision,
        gradient_checkpointing=case.checkpointing,
        lora_rank=case.lora_rank,
        device="cpu",
    )
    sampled = replace(config, questions_per_step=PROMPTS, group_size=GROUP, max_new_tokens=SAMPLED_TOKENS)
    plan = plan_training(config, shape, prompt_tokens=case.length - case.response_length)
    memory = plan.memory | {"sampling": plan_training(sampled, shape, prompt_tokens=PROMPT_LENGTH).memory["sampling"]}
    known = {moment: {*KNOWN} for moment in memory}
    known["optimizer step"].add("bfloat16 copies")  # made by the pass before it
    return {m: sum(size for part, size in parts.items() if part not in known[m]) for m, parts in memory.items()}


def compare(case: Case, moments: Sequence[str] = MOMENTS) -> pd.DataFrame:
    """One row per moment: MB predicted, MB measured, their ratio."""
    predicted = predicted_peaks(case)
    rows = [
        asdict(case) | {"moment": name, "predicted_mb": predicted[name] / 1e6, "measured_mb": measured / 1e6}
        for name, measured in measured_peaks(case, moments)
    ]
    table = pd.DataFrame(rows)
    table["predicted_over_measured"] = table.predicted_mb / table.measured_mb
    return table


def main(options: Options) -> None:
    torch.set_num_threads(1)
    table = pd.concat([compare(case) for case in CASES], ignore_index=True)
    digits = {"predicted_mb": 1, "measured_mb": 1, "predicted_over_measured": 2}
    table = table.round(digits)
    print(table.to_string(index=False))
    print(table.groupby("moment").predicted_over_measured.describe()[["count", "min", "50%", "max"]])
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(options.out, index=False)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
