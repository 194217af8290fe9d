"""The configuration of a training run: a frozen dataclass that defines the command line, config.json and their help."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

from beartype import BeartypeConf
from beartype.door import is_bearable

from gradscope.errors import InputError
from gradscope.objective import LossSettings, StepRule, Weighting, check_weighting, make_weighting
from gradscope.sampling import check_count

Number = int | float
INT_IS_FLOAT = BeartypeConf(is_pep484_tower=True)


@dataclass(frozen=True)
class Range:
    """The range of a field; open: excludes its lower end."""

    low: Number
    high: Number
    open: bool = False

    def __contains__(self, value: Number) -> bool:
        return self.low <= value <= self.high and not (self.open and value == self.low)

    def __str__(self) -> str:
        return f"{'more than ' if self.open else ''}{self.low}{'' if self.open else ' or more'}, {self.high:,} at most"


COUNT, NATURAL = Range(1, 2**31 - 1), Range(0, 2**31 - 1)
POSITIVE, NOT_NEGATIVE = Range(0, 10**6, open=True), Range(0, 10**6)
"""Ranges that float32 can hold with room to spare."""


@dataclass(frozen=True)
class TrainConfig:
    """A run of GRPO or REINFORCE++; the defaults are the paper's for Knights & Knaves (arXiv:2505.12929, Table 2)."""

    model: str = "embedded"
    """Checkpoint folder, a name on the model hub, or "embedded"."""
    task: str = "knights-knaves-compact"
    """A registered task or path/to/file.py:NAME: prompts and a reward."""
    data: tuple[str, ...] = ()
    """Files of questions, wildcards allowed, as given or below $GRADSCOPE_DATA; none: the task generates them."""
    people: tuple[int, ...] = ()
    """For Knights & Knaves: only puzzles with these numbers of people; none: all."""
    steps: Annotated[int | None, COUNT] = None
    """Number of training steps; each samples one batch of responses and takes all of its optimizer steps."""
    epochs: Annotated[int | None, COUNT] = None
    """Passes over the questions in `data`; with `steps` too, the run ends at whichever comes first."""
    questions_per_step: Annotated[int, COUNT] = 64
    """Questions per batch."""
    group_size: Annotated[int, COUNT] = 8
    """Responses per question."""
    max_new_tokens: Annotated[int, COUNT] = 4096
    """Longest response, in tokens."""
    temperature: Annotated[float, POSITIVE] = 0.7
    """Sampling temperature, also used for all probabilities: π = softmax(logits / temperature)."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template for tasks with chat prompts, such as '{"enable_thinking": false}'."""

    algorithm: Literal["grpo", "reinforce++"] = "grpo"
    """GRPO: group-normalised rewards, KL in the loss. REINFORCE++: batch-whitened return-to-go, KL in the reward
    (Eq. 20, 21 of arXiv:2505.12929)."""
    clip_ratio_low: Annotated[Number, Range(0, 1)] = 0.2
    """ε_low of Eq. 1, arXiv:2505.12929."""
    clip_ratio_high: Annotated[Number, NOT_NEGATIVE] = 0.24
    """ε_high of Eq. 1, arXiv:2505.12929."""
    clip_ratio_c: Annotated[Number | None, NOT_NEGATIVE] = 10.0
    """c of the dual clip, which bounds the ratio of tokens with a negative advantage; none: off."""
    kl_coef: Annotated[Number, NOT_NEGATIVE] = 0.001
    """β, the weight of the KL to the initial policy; with 0, no reference policy is kept."""
    method: str | None = None
    """Token weighting, NAME[:key=value,…] or FILE.py:NAME[:key=value,…] as in `gradscope compare`, instead of the flags
    below."""
    reweight_alpha: Number | None = None
    """α of Advantage Reweighting (Eq. 4, arXiv:2505.12929); none: off. The paper uses 0.3 for GRPO on puzzles, else
    0.1."""
    lopti_eta: Number | None = None
    """η of Lopti (Alg. 1, arXiv:2505.12929); none: off. The paper uses 0.5."""
    lopti_order: Literal["low-first", "high-first"] = "low-first"
    """Which tokens are updated first; high-first is the paper's ablation."""
    lopti_schedule: Literal["sweep", "interleaved"] = "sweep"
    """sweep: low tokens of all mini-batches, then high (L1 L2 H1 H2, the authors' code); interleaved: L1 H1 L2 H2."""
    mask_probs: tuple[float, float] | None = None
    """Ablation: exclude tokens with π_old in [low, high) from the loss; a high of 1 is inclusive."""
    control: Literal["random-split", "permuted-weights", "matched-norm"] | None = None
    """A matched control: Lopti's optimizer steps on a random split of the same sizes (needs lopti_eta), Reweight's
    weights permuted across tokens, or the plain gradient rescaled to Reweight's norm (both need reweight_alpha)."""

    mini_batch_size: Annotated[int, COUNT] = 256
    """Responses per optimizer step. Halve it to give plain GRPO as many steps as Lopti takes."""
    micro_batch_size: Annotated[int, COUNT] = 32
    """Most responses in one forward pass; affects only speed and memory."""
    learning_rate: Annotated[Number, POSITIVE] = 1e-6
    """AdamW's learning rate, constant after the warm-up."""
    warmup_steps: Annotated[int, NATURAL] = 0
    """Training steps (not optimizer steps) over which the learning rate rises linearly."""
    weight_decay: Annotated[Number, Range(0, 1e300)] = 0.01
    """AdamW's weight decay."""
    max_grad_norm: Annotated[Number, POSITIVE] = 1.0
    """Clip the gradient of each optimizer step to this norm."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward passes; weights and optimizer are float32 either way."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: a third more time, a fraction of the memory."""
    lora_rank: Annotated[int | None, COUNT] = None
    """Train low-rank adapters of this rank on all linear layers (peft) instead of all weights; none: off."""
    lora_alpha: Annotated[Number, POSITIVE] = 32
    """The adapters are scaled by lora_alpha / lora_rank."""

    engine: Literal["hf", "vllm"] = "hf"
    """Sampling engine: transformers with the trained weights themselves, or vLLM, synchronised at every step."""
    sampling_batch_size: Annotated[int, COUNT] = 256
    """hf: responses decoded together; affects only speed and memory."""
    vllm_memory: Annotated[float, Range(0, 1, open=True)] = 0.4
    """vllm: fraction of the GPU's memory for its weights and KV cache."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Source of log π_old: recomputed by the trainer before the update, or reported by the sampler."""

    save_every: Annotated[int, COUNT] = 20
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Annotated[int | None, COUNT] = None
    """Number of newest checkpoints to keep; none: all."""
    save_rollouts: bool = False
    """Save every step's responses to rollouts/, in the native format."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers supported by accelerate, in addition to metrics.jsonl: tensorboard, wandb, trackio, … if installed."""
    seed: Annotated[int, NATURAL] = 0
    """Seed for questions, responses and the controls' permutations."""
    device: str | None = None
    """cpu, or a torch GPU device; none: accelerate's choice."""

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        plain = get_type_hints(TrainConfig)
        for name, hint in get_type_hints(TrainConfig, include_extras=True).items():
            value, kind = getattr(self, name), plain[name]
            if isinstance(value, bool) != (kind is bool) or not is_bearable(value, kind, conf=INT_IS_FLOAT):
                wanted = getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
                wanted = wanted.replace("typing.", "").replace("int | float", "float")
                raise InputError(f"{name} is {value!r}, of type {type(value).__name__}; give {wanted}")
            for numbers in getattr(hint, "__metadata__", ()):
                if value is not None and value not in numbers:
                    raise InputError(f"{name} is {value}; give {numbers}")
        if self.algorithm == "grpo" and self.group_size == 1:
            raise InputError("group_size is 1, but GRPO compares the responses to a question; give 2 or more")
        check_count(self.questions_per_step, self.group_size)
        self.loss.check()
        _ = self.rule  # refuses bad values
        if self.weighting is not None and self.old_logprobs == "sampler":
            try:
                check_weighting(self.weighting, sampler_logprobs=False)
            except InputError as error:
                raise InputError(
                    f"method {self.method} corrects for π_sampler, which old_logprobs sampler makes π_old; give trainer"
                ) from error

    @property
    def rule(self) -> StepRule:
        """The tokens that each optimizer step trains on, and their advantages."""
        if self.method is None:
            return StepRule(self.reweight_alpha, self.lopti_eta, self.lopti_order, self.mask_probs, self.control)
        own = ("reweight_alpha", "lopti_eta", "mask_probs", "control")
        if given := [name for name in own if getattr(self, name) is not None]:
            raise InputError(f"method is {self.method}, but {given[0]} is given too; give only one of them")
        return replace(make_weighting(self.method).rule, lopti_order=self.lopti_order)

    @property
    def weighting(self) -> Weighting | None:
        """The token weighting of every optimizer step; None if a StepRule expresses the method."""
        found = None if self.method is None else make_weighting(self.method)
        return None if found is None or found.rule != StepRule() or found == make_weighting("grpo") else found

    @property
    def loss(self) -> LossSettings:
        """The loss of each optimizer step (Eq. 1, arXiv:2505.12929); REINFORCE++ has its KL in the reward instead."""
        return LossSettings(
            self.clip_ratio_low,
            self.clip_ratio_high,
            self.clip_ratio_c,
            kl_coef=0.0 if self.algorithm == "reinforce++" else self.kl_coef,
            reweight_alpha=self.rule.reweight_alpha,
        )

    @property
    def num_responses(self) -> int:
        """Number of responses per training step."""
        return self.questions_per_step * self.group_size
