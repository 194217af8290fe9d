"""What a training run is: one frozen dataclass, which is the command line, the saved config.json and their manual."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gradscope.errors import InputError
from gradscope.objective import LossSettings, Method, Weighting, make_weighting
from gradscope.sampling import check_count

Number = int | float


@dataclass(frozen=True)
class TrainConfig:
    """A run of GRPO or REINFORCE++; the defaults are the paper's for Knights & Knaves (arXiv:2505.12929, Table 2)."""

    model: str = "embedded"
    """Checkpoint folder of transformers, a name on the model hub, or "embedded"."""
    task: str = "knights-knaves-compact"
    """A registered task or path/to/file.py:NAME: prompts and a reward."""
    data: tuple[str, ...] = ()
    """Files of questions, wildcards allowed, as given or below $GRADSCOPE_DATA; none: the task makes questions up."""
    people: tuple[int, ...] = ()
    """For Knights & Knaves: only puzzles with these numbers of people; none: all that the task has."""
    steps: int | None = None
    """Batches of responses to train on."""
    epochs: int | None = None
    """Passes over the questions of `data`; with steps too, the run ends at whichever comes first."""
    questions_per_step: int = 64
    """Questions in a batch."""
    group_size: int = 8
    """Responses to each question."""
    max_new_tokens: int = 4096
    """Longest response."""
    temperature: float = 0.7
    """Sampling temperature; every probability is taken at it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, for a task whose prompts are chats, such as '{"enable_thinking": false}'."""

    algorithm: Literal["grpo", "reinforce++"] = "grpo"
    """Advantages within groups with the KL in the loss, or of whole returns with the KL in the reward (Eq. 20, 21)."""
    clip_ratio_low: Number = 0.2
    """ε_low of Eq. 1."""
    clip_ratio_high: Number = 0.24
    """ε_high of Eq. 1."""
    clip_ratio_c: Number | None = 10.0
    """Dual clip of negative advantages; none: off."""
    kl_coef: Number = 0.001
    """β, of the KL to the policy as it was before training; at 0 no reference policy is kept."""
    method: str | None = None
    """A token weighting, NAME[:key=value,…] or FILE.py:NAME[:key=value,…], as `gradscope compare` takes it, in the
    place of the flags below; none: as those say."""
    reweight_alpha: Number | None = None
    """α of Advantage Reweighting (Eq. 4); none: off. The paper: 0.3 for GRPO on puzzles, else 0.1."""
    lopti_eta: Number | None = None
    """η of Lopti (Alg. 1); none: off. The paper: 0.5."""
    lopti_order: Literal["low-first", "high-first"] = "low-first"
    """Which tokens are updated first; high-first is the paper's ablation."""
    lopti_schedule: Literal["sweep", "interleaved"] = "sweep"
    """All mini-batches' low tokens, then all high (L1 L2 H1 H2, the authors' code), or L1 H1 L2 H2."""
    mask_probs: tuple[float, float] | None = None
    """Ablation: tokens with π_old in [low, high) are left out of the loss; a high of 1 is in."""
    control: Literal["random-split", "permuted-weights", "matched-norm"] | None = None
    """A matched control: Lopti's passes over a random split of the same sizes (needs lopti_eta), Reweight's weights
    permuted across tokens, or plain advantages with the gradient rescaled to Reweight's norm (need reweight_alpha)."""

    mini_batch_size: int = 256
    """Responses per optimizer step. Halve it to give plain GRPO as many steps as Lopti takes."""
    micro_batch_size: int = 32
    """Most responses in one forward pass; changes speed and memory only."""
    learning_rate: Number = 1e-6
    """AdamW's learning rate, constant after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""
    weight_decay: Number = 0.01
    """AdamW's weight decay."""
    max_grad_norm: Number = 1.0
    """Each optimizer step's gradient is clipped to this norm."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward passes; weights and optimizer are float32 either way."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: a third more time for a fraction of their memory."""
    lora_rank: int | None = None
    """Train low-rank adapters of this rank on all linear layers (peft) instead of all weights; none: off."""
    lora_alpha: Number = 32
    """Scale of the adapters is lora_alpha / lora_rank."""

    engine: Literal["hf", "vllm"] = "hf"
    """What samples: transformers with the trained weights themselves, or vLLM, synchronised every step."""
    sampling_batch_size: int = 256
    """hf: responses decoded together; changes speed and memory only."""
    vllm_memory: float = 0.4
    """vllm: share of the GPU's memory for its weights and KV cache."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Whose π_old: recomputed by the trainer, or as the sampler reported them."""

    save_every: int = 20
    """Steps between checkpoints; the last step has one too."""
    keep_checkpoints: int | None = None
    """Only the newest so many are kept; none: all."""
    save_rollouts: bool = False
    """Keep every step's responses in rollouts/, in the native format."""
    gradients_every: int | None = None
    """Every so many steps, log the intervals' gradient norms and right-direction shares; none: never."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers of accelerate, beside metrics.jsonl: tensorboard, wandb, trackio, … if installed."""
    seed: int = 0
    """Draws questions, responses and whatever a control permutes."""
    device: str | None = None
    """cpu, or a GPU of torch; none: accelerate's choice."""

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        for name, kind in get_type_hints(TrainConfig).items():
            if not _fits(value := getattr(self, name), kind):
                wanted = TrainConfig.__annotations__[name].replace("Number", "float")
                raise InputError(f"{name} is {value!r}, of type {type(value).__name__}; give {wanted}")
        for name, words in _choices().items():
            if getattr(self, name) not in words:
                raise InputError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(map(str, words))}")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and most < value < float("inf"):
                raise InputError(f"{name} is {value}; give {most:,} at most")
        self.loss.check()
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise InputError(f"{name} is {value}; give {least} or more")
        check_count(self.questions_per_step, self.group_size)
        for name in ("temperature", "learning_rate", "max_grad_norm", "lora_alpha"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}; give a positive number")
        if self.algorithm == "grpo" and self.group_size == 1:
            raise InputError("group_size is 1: GRPO compares the responses to one question; give 2 or more")
        _ = self.passes, self.weighting  # refuses what no weighting is
        if not 0 < self.vllm_memory <= 1:
            raise InputError(f"vllm_memory is {self.vllm_memory}, a share of the GPU's memory; give 0 to 1")

    @property
    def passes(self) -> Method:
        """Which tokens each optimizer step trains, and with which advantages."""
        if self.method is None:
            return Method(self.reweight_alpha, self.lopti_eta, self.lopti_order, self.mask_probs, self.control)
        own = ("reweight_alpha", "lopti_eta", "mask_probs", "control")
        if given := [name for name in own if getattr(self, name) is not None]:
            raise InputError(f"method is {self.method} and {given[0]} is given, too; give one of the two")
        return replace(make_weighting(self.method).passes, lopti_order=self.lopti_order)

    @property
    def weighting(self) -> Weighting | None:
        """What weighs the tokens in every optimizer step; None: `passes` says all of it."""
        found = None if self.method is None else make_weighting(self.method)
        return None if found is None or found.passes != Method() or found == make_weighting("grpo") else found

    @property
    def loss(self) -> LossSettings:
        """The loss of each pass (Eq. 1); REINFORCE++ has its KL in the reward instead."""
        return LossSettings(
            self.clip_ratio_low,
            self.clip_ratio_high,
            self.clip_ratio_c,
            kl_coef=0.0 if self.algorithm == "reinforce++" else self.kl_coef,
            reweight_alpha=self.passes.reweight_alpha,
        )

    @property
    def num_responses(self) -> int:
        """Responses of one step."""
        return self.questions_per_step * self.group_size


_LEAST = {
    **dict.fromkeys(("steps", "epochs", "questions_per_step", "group_size", "max_new_tokens", "mini_batch_size"), 1),
    **dict.fromkeys(("micro_batch_size", "lora_rank", "sampling_batch_size", "save_every", "keep_checkpoints"), 1),
    **dict.fromkeys(("gradients_every",), 1),
    **dict.fromkeys(("kl_coef", "warmup_steps", "weight_decay", "seed"), 0),
}
"""The least value of each count."""

_MOST = {
    **dict.fromkeys((name for name in _LEAST if name not in ("kl_coef", "weight_decay")), 2**31 - 1),
    **dict.fromkeys(("learning_rate", "clip_ratio_high", "clip_ratio_c", "kl_coef", "lora_alpha"), 10**6),
}
"""The largest value of each count, and of numbers that float32 must hold with room to spare."""


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a field's type; a whole number is a float too, a bool no number, and words come later."""
    if get_origin(kind) is Literal:
        return True
    if get_origin(kind) is dict:
        return isinstance(value, dict)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(part, get_args(kind)[0]) for part in value)
    if get_args(kind):
        return any(_fits(value, part) for part in get_args(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _choices() -> dict[str, tuple[str | None, ...]]:
    """What each field of words takes: the command line checks that by itself, Python code does not."""
    choices = {}
    for name, kind in get_type_hints(TrainConfig).items():
        words = [get_args(part) for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
        if words:
            choices[name] = words[0] + ((None,) if type(None) in get_args(kind) else ())
    return choices
