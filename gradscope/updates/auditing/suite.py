"""Cases to try a trainer on: steps of few responses that tell readings apart, and what a trainer makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from gradscope.errors import InputError, checked
from gradscope.objective import Estimator, LossSettings, grpo_advantages
from gradscope.policy import asked_by_peft, find_checkpoint, load_policy, load_tokenizer, make_small_model
from gradscope.rollouts import write_rollouts
from gradscope.runs import check_is_folder, load_tensors, read_json, write_json
from gradscope.updates.audit import Audit, audit
from gradscope.updates.auditing.products import FLOAT32
from gradscope.updates.auditing.readings import AGGREGATIONS, Reading

Average = Literal["token-mean", "sequence-mean", "micro-batches"]
"""What a trainer may mean to average over: the manifest declares everything else."""
MODEL, ADAPTER, MANIFEST = "model", "adapter", "manifest.json"
"""Names in the suite's folder."""
ROLLOUTS, GRADIENT = "rollouts.parquet", "gradient.safetensors"
"""Names in each case's folder."""
LENGTHS, PROMPTS = (9, 3, 12, 5, 7, 1, 10, 4), (5, 8)
REWARDS = ((1.0, 0.0, 0.5, 0.0), (0.0, 1.0, 1.0, 0.0))
TIED = ((1.0, 1.0, 1.0, 1.0), REWARDS[1])
DIVIDE = {
    "token-mean": "divide sums over tokens by the tokens of all micro-batches together",
    "sequence-mean": "average over each response's own tokens, then over all responses of the step",
    "micro-batches": "divide each micro-batch's sum by its own tokens, then average over micro-batches",
}
"""What to do for the expected average."""
BESIDE = {
    True: (1.22, 1.26, 1.35, 0.7, 1.1, 2.0, 0.9, 0.78),
    False: (0.78, 0.74, 0.65, 1.35, 0.9, 0.5, 1.1, 1.22),
}
"""Ratios π/π_old in turn, by whether Â > 0: a clip that differs from 1 ± .2 by .04 on one side cuts others of them."""
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
    beside: bool = False
    """Whether ratios are BESIDE the clips, and beyond."""
    moved: float = 0.0
    """Standard deviation of log π − log π_old, if ratios are not; 0: on-policy."""
    within: float = torch.inf
    """Largest |log π − log π_old|."""
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
    "clips": Case("ratios beside and beyond both clips", beside=True),
    "kl": Case("KL to a reference, β 1, ratios within the clips", moved=0.1, within=0.15, kl_coef=1.0),
    "equal-rewards": Case("a group of equal rewards", 2, rewards=TIED),
    "temperature": Case("a sampling temperature of .7", temperature=0.7),
    "lora": Case("a LoRA, and KL to the model without it, β 1", 2, moved=0.1, within=0.15, kl_coef=1.0, lora=True),
    "all": Case("all of these but LoRA", 2, tools=True, beside=True, kl_coef=0.1, rewards=TIED, temperature=0.7),
}


def write_suite(
    checkpoint: str,
    out: str | Path,
    *,
    kl_corrected: bool = False,
    kl_estimator: Estimator = "k3",
    trust_remote_code: bool = False,
) -> Path:
    """Write a small model of the checkpoint's architecture and a step of eight responses for each of SUITE.

    OUT/model is the checkpoint itself if it has few parameters, with its tokenizer, OUT/adapter a LoRA on it; without
    peft there is none, nor its case. OUT/CASE/rollouts.parquet has native rows with the loss's settings,
    OUT/manifest.json the same settings to read. kl_corrected, kl_estimator: as in `LossSettings`, where there is KL.

    Raises InputError if `out` is not a folder or the configuration cannot be shrunk.
    """
    out = Path(out)
    check_is_folder(out)
    source = find_checkpoint(checkpoint)
    model = make_small_model(source, trust_remote_code=trust_remote_code)
    model.save_pretrained(out / MODEL)
    with suppress(InputError):  # rows of ids need none
        if (tokenizer := load_tokenizer(source, trust_remote_code=trust_remote_code)) is not None:
            tokenizer.save_pretrained(out / MODEL)
    adapted = _adapt(out) if find_spec("peft") else None
    told: dict[str, Any] = {}
    for name, case in SUITE.items():
        if case.lora and adapted is None:
            continue
        (out / name).mkdir(exist_ok=True)
        pull = {"kl_corrected": kl_corrected, "kl_estimator": kl_estimator} if case.kl_coef else {}
        loss = asdict(replace(case.loss, **pull))
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
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # so that log π − log π_ref is of some tenths, and no token's KL outweighs all
                parameter.data.mul_(0.05)
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
    advantages, rows, taken = grpo_advantages(rewards, groups), [], Counter()
    prompts = [torch.randint(FIRST, vocabulary, (size,), generator=draw) for size in PROMPTS]
    for number, length in enumerate(LENGTHS):
        prompt, answer = prompts[groups[number]], torch.randint(FIRST, vocabulary, (length,), generator=draw)
        own, noise = _logprobs(model, prompt, answer, case.temperature), torch.randn(2, length, generator=draw)
        row = {"prompt_ids": prompt.tolist(), "response_ids": answer.tolist(), "group": int(groups[number])}
        row |= {"reward": float(rewards[number]), "advantage": float(advantages[number])}
        row |= {"temperature": case.temperature, "micro_batch": number * case.parts // len(LENGTHS), "step": 1}
        if case.tools:  # in the middle of the longer ones
            row["response_mask"] = [not (length > 6 and 2 <= place < 5) for place in range(length)]
        by, sign = (case.moved * noise[0]).clamp(-case.within, case.within), float(advantages[number].sign())
        if case.beside:
            ratios = torch.tensor(BESIDE[sign > 0])
            by = ratios[(taken[sign] + torch.arange(length)) % len(ratios)].log()
            taken[sign] += length
        if by.any():
            row["old_logprobs"] = (own - by).clamp(max=0).tolist()
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


def check_kl(out: str | Path, *, kl_corrected: bool, kl_estimator: Estimator) -> None:
    """Raise InputError if a setting that is not the default is another than that which a suite was written with."""
    own, default = _declared(Path(out)).get("kl", {}).get("loss", {}), LossSettings()
    for name, value in (("kl_corrected", kl_corrected), ("kl_estimator", kl_estimator)):
        if value not in (getattr(default, name), own.get(name)):
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{out} was written without this {flag}; write another suite with it, to another folder")


def _declared(out: Path) -> dict[str, Any]:
    """Return the settings of the cases in a suite's manifest."""
    return (read_json(out / MANIFEST) or {}).get("cases", {})


@dataclass(frozen=True, eq=False)
class SuiteAudit:
    """What a trainer makes of each case of a suite."""

    cases: pd.DataFrame
    """A row per case: what it tries; kind, "right", or what is wrong: "average" (not the expected one), "fault" (a
    named one), "factor", "parameters", "tokens" or "other" as in `Audit`, "invalid" (it cannot be audited), "missing";
    found, the same in words; average, those that the gradient is consistent with; the factor on the nearest reading
    and its cause, and what is left (distance); verdict and what to do (to_do)."""
    audits: Mapping[str, Audit]
    """By case, of those that could be audited."""
    averages: tuple[str, ...]
    """The averages that all cases are consistent with, of those that have one; empty: none."""
    verdict: str
    """Verdict over all cases in words."""

    @property
    def wrong(self) -> list[str]:
        """A line for each case that is not right, and what to do; a factor of one cause, and an average, once."""
        rows, told = self.cases[~self.cases["kind"].isin(("right", "missing"))], []
        own = rows["case"].where(rows["kind"] != "average", rows["verdict"])
        alike = rows["cause"].fillna(rows["factor"].map("{:.3g}".format))
        for _, some in rows.groupby(own.where(rows["kind"] != "factor", alike), sort=False):
            first, names = some.iloc[0], ", ".join(some["case"])
            verdict = first["verdict"]
            if len(some) > 1 and first["kind"] == "factor":
                verdict = f"the factor has one cause; if it is meant, they are right. Of {first['case']}: {verdict}"
            told += [f"{names}: {verdict}", *(f"To do: {remedy}." for remedy in first["to_do"])]
        if missing := [*self.cases["case"][self.cases["kind"] == "missing"]]:
            told.append(f"{', '.join(missing)}: there is no {GRADIENT}.")
        return told


@checked
def audit_suite(out: str | Path, *, expect: Average | None = None) -> SuiteAudit:
    """Audit the gradient that a trainer saved for each case, OUT/CASE/gradient.safetensors.

    expect: what the trainer means to average over; None: any average is right. A case that cannot be audited is told
    of, and the others go on. Raises InputError if the folder is not a suite's.
    """
    out = Path(out)
    if not is_suite(out):
        raise InputError(f"{out} has no {MANIFEST}; write a suite first: gradscope audit MODEL --suite {out}")
    cases = _declared(out)
    load = cache(lambda lora: load_policy(out / ADAPTER, params="adapter") if lora else load_policy(out / MODEL))
    rows, audits = [], {}
    for name, case in SUITE.items():
        if name not in cases:
            continue
        row = {"case": name, "tries": case.words, "kind": "missing", "found": "missing", "average": ()}
        row |= {"factor": np.nan, "cause": None, "distance": np.nan, "verdict": "", "to_do": ()}
        if (path := out / name / GRADIENT).is_file():
            try:
                audits[name] = audit(load(case.lora), out / name / ROLLOUTS, load_tensors(path))
                row |= _judge(audits[name], case, expect)
            except InputError as error:
                told = str(error) if str(path) in str(error) else f"{path}: {error}"
                row |= {"kind": "invalid", "found": "wrong: cannot be audited", "verdict": f"{told}."}
        rows.append(row)
    table = pd.DataFrame(rows)
    known = [{*names} for names in table["average"] if names]
    averages = tuple(name for name in AGGREGATIONS if known and name in set.intersection(*known))
    return SuiteAudit(table, audits, averages, _over_all(table, averages, expect))


def _judge(found: Audit, case: Case, expect: Average | None) -> dict[str, Any]:
    """Return a case's columns of `SuiteAudit.cases`."""
    row = {"factor": found.factor, "cause": found.cause, "distance": found.readings["distance"].min()}
    row |= {"verdict": found.verdict, "to_do": found.remedies}
    if found.kind == "other":
        return row | {"kind": "other", "found": "wrong: that of no reading"}
    faults = tuple(found.fault.split("+")) if found.fault else ()
    reading = Reading(found.aggregation, faults, found.part, found.value)
    average, averages = str(replace(reading, faults=())), _averages(found, case)
    another = expect is not None and expect not in averages
    # The suite declares its micro-batches, so that other parts are a fault.
    named = bool(reading.faults) or reading.aggregation in ("parts", "strides")
    kind = found.kind if found.kind in ("parameters", "tokens") else "fault" if named else found.kind
    kind = {"same": "right", "rounding": "right"}.get(kind, kind)
    if another:
        told = f"The gradient is that of {average}, not of {AGGREGATIONS[expect]}."
        told = told if kind == "right" else f"{found.verdict} That of {AGGREGATIONS[expect]} was expected."
        row |= {"verdict": told, "to_do": (*found.remedies, DIVIDE[expect])}
        kind = "average" if kind == "right" else kind
    words = {
        f"{found.factor:.4g} times": abs(found.factor - 1) > FLOAT32,
        average: another or (named and not reading.faults),
        reading.wrong: bool(reading.faults),
        "other weights of tokens": kind == "tokens",
        f"{len(found.odd)} parameters": kind == "parameters",
    }
    wrong = ", ".join(word for word, said in words.items() if said)
    return row | {"kind": kind, "found": "right" if kind == "right" else f"wrong: {wrong}", "average": averages}


def _averages(found: Audit, case: Case) -> tuple[str, ...]:
    """Return the aggregations whose reading, with the same fault, is the gradient's."""
    rows = found.readings
    like = rows["fault"].isna() if found.fault is None else rows["fault"] == found.fault
    like &= (rows["fitting"] >= 0.5) & ((rows["factor"] - found.factor).abs() <= FLOAT32 * abs(found.factor))
    names = {found.aggregation, *rows["aggregation"][like]}
    if case.parts == 1 and "token-mean" in names:
        names.add("micro-batches")
    return tuple(name for name in AGGREGATIONS if name in names)


def _over_all(table: pd.DataFrame, averages: tuple[str, ...], expect: Average | None) -> str:
    """Return the verdict over all cases: how many are right, and with which average."""
    audited = table[table["kind"] != "missing"]
    right = int((audited["kind"] == "right").sum())
    told = f"{right} of {len(audited)} gradients are right"
    told += f", with {AGGREGATIONS[expect]}." if expect else ", if their average is the one you mean." if right else "."
    known = audited[audited["average"].map(len) > 0]
    if expect or not len(known):
        return told
    if not averages:
        each = known.groupby("average", sort=False)["case"].agg(", ".join)
        some = "; ".join(f"{' or '.join(names)} in {own}" for names, own in each.items())
        return f"{told} No single average is consistent with all: {some}."
    told += f" All are consistent with {', and with '.join(AGGREGATIONS[name] for name in averages)}"
    if len(averages) > 1:
        return f"{told}; these cases do not tell them apart."
    told += ", and with no other average"
    if averages == ("micro-batches",):
        told += f"; with micro-batches of different lengths that is not {AGGREGATIONS['token-mean']}"
    others = "|".join(name for name in get_args(Average) if name not in averages)
    return f"{told}. If you mean another, name it: --expect {others}."
