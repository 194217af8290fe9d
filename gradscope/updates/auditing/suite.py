"""Cases to try a trainer on: steps of few responses that tell readings apart, and what a trainer makes of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from gradscope.errors import InputError
from gradscope.objective import LossSettings, grpo_advantages
from gradscope.policy import asked_by_peft, find_checkpoint, load_policy, make_small_model
from gradscope.rollouts import write_rollouts
from gradscope.runs import check_is_folder, load_tensors, read_json, write_json
from gradscope.updates.audit import audit

MODEL, ADAPTER, MANIFEST = "model", "adapter", "manifest.json"
"""Names in the suite's folder."""
ROLLOUTS, GRADIENT = "rollouts.parquet", "gradient.safetensors"
"""Names in each case's folder."""
LENGTHS, PROMPTS = (9, 3, 12, 5, 7, 1, 10, 4), (5, 8)
REWARDS = ((1.0, 0.0, 0.5, 0.0), (0.0, 1.0, 1.0, 0.0))
TIED = ((1.0, 1.0, 1.0, 1.0), REWARDS[1])
FIRST = 4
"""The least id of a token; those below are special."""


@dataclass(frozen=True)
class Case:
    """What a step tries."""

    words: str
    parts: int = 1
    """Micro-batches."""
    tools: bool = False
    """Whether responses contain tokens that the policy did not sample."""
    moved: float = 0.0
    """Standard deviation of log π − log π_old; 0: on-policy."""
    kl_coef: float = 0.0
    lora: bool = False
    """Whether an adapter is trained, and the model without it is the reference."""
    rewards: tuple[tuple[float, ...], ...] = REWARDS
    temperature: float = 1.0
    clips: dict[str, float | None] = field(default_factory=lambda: {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2})

    @property
    def loss(self) -> LossSettings:
        """The loss that the trainer should compute."""
        return LossSettings(**self.clips, clip_ratio_c=None, kl_coef=self.kl_coef)


SUITE = {
    "lengths": Case("responses of unequal length"),
    "micro-batches": Case("two micro-batches with different numbers of tokens", 2),
    "tools": Case("tool output inside responses", 2, tools=True),
    "clips": Case("ratios beyond both clips", moved=0.3),
    "kl": Case("KL to a reference, β .1", kl_coef=0.1),
    "equal-rewards": Case("a group of equal rewards", 2, rewards=TIED),
    "temperature": Case("a sampling temperature of .7", temperature=0.7),
    "lora": Case("a LoRA, and KL to the model without it, β .1", 2, kl_coef=0.1, lora=True),
    "all": Case("all of these but LoRA", 2, tools=True, moved=0.3, kl_coef=0.1, rewards=TIED, temperature=0.7),
}


def write_suite(checkpoint: str, out: str | Path, *, trust_remote_code: bool = False) -> Path:
    """Write a small model of the checkpoint's architecture and a step of eight responses for each of SUITE.

    OUT/model is the checkpoint itself if it has few parameters, OUT/adapter a LoRA on it; without peft there is none,
    nor its case. OUT/CASE/rollouts.parquet has native rows with the loss's settings, OUT/manifest.json the same
    settings to read.

    Raises InputError if `out` is not a folder or the configuration cannot be shrunk.
    """
    out = Path(out)
    check_is_folder(out)
    model = make_small_model(find_checkpoint(checkpoint), trust_remote_code=trust_remote_code)
    model.save_pretrained(out / MODEL)
    adapted = _adapt(out) if find_spec("peft") else None
    told: dict[str, Any] = {}
    for name, case in SUITE.items():
        if case.lora and adapted is None:
            continue
        (out / name).mkdir(exist_ok=True)
        loss = asdict(case.loss)
        rows = make_rows(adapted, case, reference=model) if case.lora else make_rows(model, case)
        write_rollouts(out / name / ROLLOUTS, rows, loss=loss)
        told[name] = {"tries": case.words, "micro_batches": case.parts, "temperature": case.temperature}
        told[name] |= {"adapter": ADAPTER} if case.lora else {}
        told[name]["loss"] = {key: value for key, value in loss.items() if value is not None}
    write_json(out / MANIFEST, {"model": MODEL, "of": checkpoint, "cases": told})
    return out


def _adapt(out: Path) -> Any:
    """Save a LoRA on all linear layers, none of it 0, to OUT/adapter, and return the model with it."""
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    model = load_policy(out / MODEL).model
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    settings = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, fan_in_fan_out=transposed
    )
    with asked_by_peft(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = get_peft_model(model, settings)
        adapted.peft_config["default"].base_model_name_or_path = f"../{MODEL}"
        adapted.save_pretrained(out / ADAPTER, save_embedding_layers=False)
    return adapted


def make_rows(model: Any, case: Case, *, reference: Any = None) -> list[dict[str, Any]]:
    """Return the native rows of a case: two prompts of four responses, from random ids.

    reference: the model of π_ref; None: noise on the policy's.
    """
    draw, vocabulary = torch.Generator().manual_seed(0), model.config.get_text_config().vocab_size
    rewards = torch.tensor(case.rewards).flatten()
    groups = torch.arange(len(PROMPTS)).repeat_interleave(len(rewards) // len(PROMPTS))
    advantages, rows = grpo_advantages(rewards, groups), []
    prompts = [torch.randint(FIRST, vocabulary, (size,), generator=draw) for size in PROMPTS]
    for number, length in enumerate(LENGTHS):
        prompt, answer = prompts[groups[number]], torch.randint(FIRST, vocabulary, (length,), generator=draw)
        own, noise = _logprobs(model, prompt, answer, case.temperature), torch.randn(2, length, generator=draw)
        row = {"prompt_ids": prompt.tolist(), "response_ids": answer.tolist(), "group": int(groups[number])}
        row |= {"reward": float(rewards[number]), "advantage": float(advantages[number])}
        row |= {"temperature": case.temperature, "micro_batch": number * case.parts // len(LENGTHS), "step": 1}
        if case.tools:  # in the middle of the longer ones
            row["response_mask"] = [not (length > 6 and 2 <= place < 5) for place in range(length)]
        if case.moved:
            row["old_logprobs"] = (own - case.moved * noise[0]).clamp(max=0).tolist()
        if case.kl_coef:
            ref = own - 0.3 * noise[1]
            if reference is not None:
                ref = _logprobs(reference, prompt, answer, case.temperature)
            row["ref_logprobs"] = ref.clamp(max=0).tolist()
        rows.append(row)
    return rows


def _logprobs(model: Any, prompt: Tensor, answer: Tensor, temperature: float) -> Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1).gather(-1, answer[:, None])[:, 0]


def is_suite(out: str | Path) -> bool:
    """Return whether a suite was written to the folder."""
    return (Path(out) / MANIFEST).is_file()


def audit_suite(out: str | Path) -> pd.DataFrame:
    """Audit the gradient that a trainer saved for each case, OUT/CASE/gradient.safetensors.

    A row per case: kind, reading, factor, fault, what is left (distance), and the verdict; kind "missing" without a
    gradient. Raises InputError if the folder is not a suite's, or as `audit` does.
    """
    out = Path(out)
    if not is_suite(out):
        raise InputError(f"{out} has no {MANIFEST}; write a suite first: gradscope audit MODEL --suite {out}")
    cases = (read_json(out / MANIFEST) or {}).get("cases", ())
    policies, rows = {False: load_policy(out / MODEL)}, []
    for name, case in SUITE.items():
        if name not in cases:
            continue
        row: dict[str, Any] = {"case": name, "tries": case.words, "kind": "missing"}
        if (path := out / name / GRADIENT).is_file():
            if case.lora:
                policies[True] = load_policy(out / ADAPTER, params="adapter")
            found = audit(policies[case.lora], out / name / ROLLOUTS, load_tensors(path))
            row |= {"kind": found.kind, "reading": found.reading, "factor": found.factor}
            row |= {"distance": found.readings["distance"].min(), "verdict": found.verdict}
        rows.append(row)
    return pd.DataFrame(rows)
