"""A padded batch of responses, and the alignment rule that all other modules follow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from gradscope.errors import InputError
from gradscope.rollouts.trained_run import TrainedRun
from gradscope.runs import counted

LARGEST = 1e12
"""Bound on rewards, advantages, log-probabilities and temperatures, so that squares do not overflow float32."""

ROUNDING = 1e-3
"""Nats by which a log-probability may exceed 0, as written by half-precision trainers; such values are read as 0."""


class Note(str):
    """A remark that anyone interpreting results from these rollouts should know, with its kind."""

    kind: str
    """Its kind; for rollout logs: dump, left-out, unknown-values, step, other-step, pooled, on-policy, temperature,
    other-temperature, groups-of-one, zero-advantages, impossible-advantages, mixed-groups, certain-tokens, padding,
    several-runs, loss; of a loss: doubtful-loss."""

    def __new__(cls, text: str, kind: str = "dump") -> Note:
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    def __getnewargs__(self) -> tuple[str, str]:
        return str(self), self.kind


LOGPROBS = ("old_logprobs", "ref_logprobs", "sampler_logprobs", "teacher_logprobs")
_PER_TOKEN = ("advantages", "uncorrected_advantages", *LOGPROBS)
CANDIDATES = ("teacher_top_ids", "teacher_top_logprobs")
_PER_RESPONSE = {
    **{"rewards": "reward", "steps": "step", "loss_scales": "loss_scale", "grad_norms": "grad_norm"},
    **{"group_reward_means": "group_reward_mean", "group_reward_stds": "group_reward_std"},
    **{"process_ids": "process", "micro_batch_ids": "micro_batch", "pair_ids": "pair", "chosen": "chosen"},
    "z0s": "z0",
}
"""Field → its name in a row."""


@dataclass(frozen=True)
class TokenBatch:
    """Responses with their prompts, padded to one length; column s is about token s given the tokens before it.

    Padding may be on the left, right or both sides, without affecting results. A sequence's first real token has
    nothing before it and is never a response token. The tensors stay on the CPU; measurements move a few sequences at a
    time.
    """

    input_ids: Int[Tensor, "B S"]
    """Ids of prompt and response; arbitrary where attention_mask is False."""
    attention_mask: Bool[Tensor, "B S"]
    """True on real tokens, which form one contiguous run per row."""
    response_mask: Bool[Tensor, "B S"]
    """True on tokens the policy sampled; False on prompt, tool output and padding."""
    response_start: Int[Tensor, " B"]
    """Column of the response's first token, kept or not, from which positions are counted."""
    group_ids: Int[Tensor, " B"]
    """Id shared by the responses to a prompt: GRPO's groups and the bootstrap's clusters."""
    temperature: Float[Tensor, " B"]
    """Sampling temperature of each response: π is softmax(logits / temperature)."""
    rewards: Float[Tensor, " B"] | None = None
    """Reward of each response."""
    reward_parts: Mapping[str, Float[Tensor, " B"]] | None = None
    """Further numbers logged per response, such as each reward function's value; NaN where unknown."""
    advantages: Float[Tensor, "B S"] | None = None
    """Advantage of each token; NaN where unknown."""
    old_logprobs: Float[Tensor, "B S"] | None = None
    """log π_old in nats, under the policy that sampled; None: on-policy, ratio 1."""
    ref_logprobs: Float[Tensor, "B S"] | None = None
    """log π_ref in nats, under the reference policy."""
    sampler_logprobs: Float[Tensor, "B S"] | None = None
    """The sampling engine's log-probabilities, in nats, if logged in addition to the trainer's `old_logprobs`."""
    teacher_logprobs: Float[Tensor, "B S"] | None = None
    """log ν in nats, under the teacher of a distillation."""
    teacher_top_ids: Int[Tensor, "B S c"] | None = None
    """Ids of the tokens whose log ν was logged at each position, in any order, each once; any for none."""
    teacher_top_logprobs: Float[Tensor, "B S c"] | None = None
    """Their log ν in nats; −inf for none."""
    steps: Int[Tensor, " B"] | None = None
    """Training step of each response, as numbered in the log; a group belongs to a single step."""
    group_reward_means: Float[Tensor, " B"] | None = None
    """Mean reward of the response's whole group, if the batch does not determine it: part of the group was left out, or
    the trainer has a special rule for groups of one. None: the mean over the batch's responses."""
    group_reward_stds: Float[Tensor, " B"] | None = None
    """Sample standard deviation (n − 1) of the same rewards; exactly 0 if they are equal."""
    loss_scales: Float[Tensor, " B"] | None = None
    """Factor of the loss on each response's terms, besides 1/N with N tokens in the optimizer step: N/D for a trainer
    that divides by D. None: 1, the mean over tokens."""
    process_ids: Float[Tensor, " B"] | None = None
    """Index of the trainer's process that trained on the response."""
    micro_batch_ids: Float[Tensor, " B"] | None = None
    """Index of the response's micro-batch within its process and step."""
    pair_ids: Float[Tensor, " B"] | None = None
    """Id shared by the chosen and the rejected response of a preference pair."""
    chosen: Float[Tensor, " B"] | None = None
    """1 for the chosen response of a pair (or a desirable one), 0 for the rejected."""
    z0s: Float[Tensor, " B"] | None = None
    """KTO's z₀, the trainer's estimate of the KL divergence from the reference, in nats."""
    grad_norms: Float[Tensor, " B"] | None = None
    """Norm of the step's gradient before clipping, as logged by the trainer."""
    uncorrected_advantages: Float[Tensor, "B S"] | None = None
    """`advantages` before the sampler correction, in responses where that correction is 0 at some token; else NaN."""
    notes: tuple[Note, ...] = ()
    """Remarks for anyone interpreting results: what was assumed, left out or mixed when reading."""
    run: TrainedRun = field(default_factory=TrainedRun)
    """What the log says of the run."""

    def __post_init__(self) -> None:
        self._check_shapes()
        with torch.inference_mode(False):  # whose tensors could not be used in a gradient
            for name, value in vars(self).items():
                if isinstance(value, Tensor) and value.is_inference():
                    object.__setattr__(self, name, value.clone())
        if self.input_ids.shape[0] == 0:
            raise InputError("the batch has no responses; give at least one")
        mask = self.attention_mask
        if (mask[:, 1:] & ~mask[:, :-1]).sum(1).add(mask[:, 0]).ne(1).any():
            raise InputError("attention_mask must be one contiguous run of True per row; pad at the ends only")
        if (self.response_mask & ~mask).any():
            raise InputError("response_mask keeps padding; it must be False where attention_mask is False")
        columns = torch.arange(mask.shape[1], device=mask.device)
        before = (columns < self.response_start[:, None]) | (columns == mask.int().argmax(1)[:, None])
        if (wrong := (self.response_mask & before).any(1)).any():
            raise InputError(
                f"response_mask of response {int(wrong.int().argmax())} keeps its first token, which nothing predicts, "
                "or one before response_start; give a prompt of at least one token, and the column after it"
            )
        if (self.temperature <= 0).any() or not self.temperature.isfinite().all():
            raise InputError("temperature must be a positive number; greedy decoding (0) has no gradient to measure")

    def _check_shapes(self) -> None:
        """Raise InputError unless every tensor has its field's shape, masks are bool and ids integers."""
        if not isinstance(self.input_ids, Tensor) or self.input_ids.dim() != 2:
            raise InputError("input_ids must be a tensor of responses × columns, [B, S]")
        per_response = ("response_start", "group_ids", "temperature", *_PER_RESPONSE)
        if any(part.shape != self.input_ids.shape[:1] for part in (self.reward_parts or {}).values()):
            raise InputError(f"reward_parts do not match the {len(self.input_ids)} responses; give a number for each")
        candidates = [getattr(getattr(self, name), "shape", None) for name in CANDIDATES]
        if candidates[0] != candidates[1]:
            raise InputError("teacher_top_ids and teacher_top_logprobs are not of one shape; give both, [B, S, c] each")
        named = [f.name for f in fields(self) if f.name not in ("notes", "reward_parts", "run")]
        for name, value in ((name, getattr(self, name)) for name in named):
            if value is None and name in (*_PER_RESPONSE, *_PER_TOKEN, *CANDIDATES):
                continue
            shape = self.input_ids.shape[:1] if name in per_response else self.input_ids.shape
            if name in CANDIDATES:
                shape = torch.Size([*shape, value.shape[-1] if isinstance(value, Tensor) and value.dim() == 3 else 1])
            if not isinstance(value, Tensor) or value.shape != shape:
                given = f"of shape {[*value.shape]}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise InputError(f"{name} is {given}; give a tensor of shape {[*shape]}, as input_ids has it")
            if (name in ("attention_mask", "response_mask")) != (value.dtype == torch.bool):
                wanted = "numbers" if value.dtype == torch.bool else "bool, such as mask.bool()"
                raise InputError(f"{name} is of {value.dtype}; give {wanted}")
            if name in ("input_ids", "response_start", "group_ids", "steps", "teacher_top_ids") and (
                value.is_floating_point() or value.is_complex()
            ):
                raise InputError(f"{name} is {value.dtype}; give integers, such as ids.long()")

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def width(self) -> int:
        """Number of columns, at least the length of the longest sequence."""
        return self.input_ids.shape[1]

    @property
    def candidates(self) -> tuple[Int[Tensor, "B S c"], Float[Tensor, "B S c"]] | tuple[()]:
        """Return the teacher's logged candidates and their log ν; nothing if none were logged."""
        return () if self.teacher_top_ids is None else (self.teacher_top_ids, self.teacher_top_logprobs)

    @property
    def num_tokens(self) -> int:
        """Number of response tokens that response_mask keeps: the denominator of the token-mean loss."""
        return int(self.response_mask.sum())

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> TokenBatch:
        """Select responses: batch[0], batch[:8], batch[[3, 1]] or batch[mask]."""
        if not isinstance(rows, int | slice | Tensor):
            rows = torch.as_tensor([*rows]) if len(rows) else torch.zeros(0, dtype=torch.long)
        return self.select(torch.arange(len(self))[rows].view(-1))

    def select(self, rows: Sequence[int] | Tensor) -> TokenBatch:
        """Return the batch with only these rows, in the given order."""
        rows = torch.as_tensor(rows)
        parts = self.reward_parts and {name: value[rows] for name, value in self.reward_parts.items()}
        return replace(self, reward_parts=parts, **{name: value[rows] for name, value in self.tensors().items()})

    def of_prompts(self, prompts: Sequence[int] | Int[Tensor, " p"]) -> TokenBatch:
        """Return the batch keeping only the tokens of these prompts; every response keeps its row.

        >>> batch = collate([Response([5], [7], group=0), Response([6], [7, 8], group=1)])
        >>> batch.of_prompts(batch.group_ids[:1]).response_mask.any(1).tolist()
        [True, False]
        """
        own = torch.isin(self.group_ids, torch.as_tensor(prompts))
        return replace(self, response_mask=self.response_mask & own[:, None])

    def deal(self, prompts: Int[Tensor, " p"], count: int, generator: torch.Generator) -> list[TokenBatch]:
        """Randomly divide the prompts into at most `count` batches of (almost) equally many prompts."""
        order = prompts[torch.randperm(len(prompts), generator=generator)]
        parts = order.tensor_split(min(count, len(order)))
        return [self.select(torch.isin(self.group_ids, part).nonzero()[:, 0]) for part in parts]

    def at_temperature(self, temperature: int | float) -> TokenBatch:
        """Return the responses as if sampled at this temperature.

        >>> collate([Response([5], [7]), Response([5], [7, 8])]).at_temperature(0.5).temperature.tolist()
        [0.5, 0.5]
        """
        known = self.without_notes("temperature")
        return replace(known, temperature=torch.full((len(self),), float(temperature)))

    def without_notes(self, kind: str) -> TokenBatch:
        """Return the batch without notes of this kind."""
        return replace(self, notes=tuple(note for note in self.notes if note.kind != kind))

    def micro_batches(self, size: int) -> Iterator[TokenBatch]:
        """Split into consecutive batches of at most `size` responses."""
        for start in range(0, len(self), size):
            yield self.select(torch.arange(start, min(start + size, len(self))))

    def left_aligned(self) -> tuple[TokenBatch, Int[Tensor, "B n"]]:
        """Shift each response to start at column 0; return that batch, as wide as its longest row, and the columns'
        origin.

        Padding is then on the right, where causal attention hides it: a forward pass needs no mask.
        """
        start, lengths = self.attention_mask.int().argmax(1), self.attention_mask.sum(1)
        offsets = torch.arange(int(lengths.max()), device=start.device)
        # Columns past the end repeat the last one: masked, with a valid id.
        columns = (start[:, None] + offsets).clamp(max=self.input_ids.shape[1] - 1)
        values = self.tensors()
        rows = torch.arange(len(self), device=start.device)[:, None]
        values = {name: v[rows, columns] if v.dim() > 1 else v for name, v in values.items()}
        real = offsets < lengths[:, None]
        values["attention_mask"], values["response_mask"] = real, values["response_mask"] & real
        values["input_ids"] = values["input_ids"].masked_fill(~real, 0)
        values["response_start"] = self.response_start - start
        return replace(self, **values), columns

    def narrow(self, width: int) -> TokenBatch:
        """Return the first `width` columns."""
        return replace(self, **{name: v[:, :width] if v.dim() > 1 else v for name, v in self.tensors().items()})

    def to(self, device: torch.device | str) -> TokenBatch:
        """Move the batch to a device, for a forward pass."""
        moved = copy(self)  # already checked; checking again would synchronise with the device
        # Copies to a device are asynchronous, copies from it are not.
        on_the_way = torch.device(device).type != "cpu"
        vars(moved).update({name: v.to(device, non_blocking=on_the_way) for name, v in self.tensors().items()})
        return moved

    def tensors(self) -> dict[str, Tensor]:
        """Return the batch's tensors by name."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}

    def key(self) -> dict[str, Any]:
        """Return what tells this batch from others, for the key of a run: its temperatures, then its `digest`."""
        found = self.temperature.unique().tolist()
        return {"temperature": found[0] if len(found) == 1 else found, "rollouts": self.digest()}

    def digest(self) -> str:
        """Return the SHA-256 of all tensors, in hexadecimal; equal batches have equal digests, wherever read from."""
        found = hashlib.sha256()
        for name, value in self.tensors().items():
            found.update(f"{name} {value.dtype} {[*value.shape]}".encode())
            found.update(value.contiguous().numpy().tobytes())
        return found.hexdigest()

    def sequence(self, row: int) -> tuple[Int[Tensor, " n"], Int[Tensor, " m"]]:
        """Return one response's ids without padding [n], and the indices of its kept response tokens [m]."""
        real = self.attention_mask[row]
        return self.input_ids[row][real], self.response_mask[row][real].nonzero()[:, 0]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a native row per response with everything known, as for `write_rollouts`; advantages as corrected."""
        per_token = {"advantage": "advantages"} | {name: name for name in LOGPROBS}
        for row, start in enumerate(self.response_start.tolist()):
            real = self.attention_mask[row].nonzero()[:, 0]
            own = real[real >= start]
            told = {"prompt_ids": self.input_ids[row, real[real < start]], "response_ids": self.input_ids[row, own]}
            told |= {"group": self.group_ids[row], "temperature": self.temperature[row]}
            told |= {
                to: value[row]
                for name, to in _PER_RESPONSE.items()
                if (value := getattr(self, name)) is not None and not value[row].isnan()
            }
            if not (kept := self.response_mask[row, own]).all():
                told["response_mask"] = kept
            told |= {
                to: getattr(self, name)[row, own] for to, name in per_token.items() if getattr(self, name) is not None
            }
            parts = {name: value[row].item() for name, value in (self.reward_parts or {}).items()}
            lists = {"reward_parts": parts} if parts else {}
            if self.candidates:
                known = self.teacher_top_logprobs[row, own] > -torch.inf
                for name, values in zip(CANDIDATES, self.candidates, strict=True):
                    lists[name] = [one[there].tolist() for one, there in zip(values[row, own], known, strict=True)]
            yield {name: value.tolist() for name, value in told.items()} | lists

    def positions(self) -> Int[Tensor, "B S"]:
        """Return positions [B, S] in the response from 0, kept or dropped; negative on the prompt."""
        return torch.arange(self.input_ids.shape[1]) - self.response_start[:, None]

    def spread_over_tokens(self, values: Float[Tensor, " B"]) -> Float[Tensor, "B S"]:
        """Broadcast one number per response to its tokens (including masked ones)."""
        return values[:, None].expand(self.input_ids.shape).clone()

    def __repr__(self) -> str:
        rows, width = self.input_ids.shape
        known = [name for name in ("rewards", *_PER_TOKEN, *CANDIDATES[:1]) if getattr(self, name) is not None]
        told = f"; {counted(len(self.notes), 'note')}" if self.notes else ""
        return (
            f"TokenBatch({counted(rows, 'response')} to {counted(len(self.group_ids.unique()), 'prompt')}, "
            f"{counted(self.num_tokens, 'response token')}, width {width}; with {', '.join(known) or 'ids only'}{told})"
        )


@dataclass(frozen=True)
class Response:
    """An unpadded response, as produced by a reader before batching."""

    prompt_ids: list[int]
    response_ids: list[int]
    group: int = 0
    temperature: float = 1.0
    reward: float | None = None
    advantage: float | list[float] | None = None
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    response_mask: list[bool] | None = None
    sampler_logprobs: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    teacher_top_ids: Int[np.ndarray, "m c"] | None = None
    teacher_top_logprobs: Float[np.ndarray, "m c"] | None = None
    step: int | None = None
    group_reward_mean: float | None = None
    group_reward_std: float | None = None
    loss_scale: float | None = None
    process: float | None = None
    micro_batch: float | None = None
    pair: float | None = None
    chosen: float | None = None
    z0: float | None = None
    grad_norm: float | None = None
    reward_parts: Mapping[str, float] | None = None
    uncorrected_advantage: float | list[float] | None = None


def collate(responses: Sequence[Response], *, pad_id: int = 0, side: str = "right") -> TokenBatch:
    """Pad responses into a TokenBatch; a field is set if any response has it, with NaN for the others.

    side: "right" (padding after the response) or "left" (before the prompt).

    >>> batch = collate([Response([5, 6], [7, 8, 9]), Response([5], [7])])
    >>> batch.response_mask.int().tolist()
    [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    >>> batch.positions().tolist()[1]
    [-1, 0, 1, 2, 3]
    """
    if not responses:
        raise InputError("there are no responses to batch; give at least one")
    pad_rows = partial(pad_sequence, batch_first=True, padding_side=side)

    def spread(field: str, default: bool | float, fill: bool | float, dtype: torch.dtype) -> Tensor:
        """Place a number or a list per response at its columns [B, S]; `default` if it has none, `fill` elsewhere."""
        rows = []
        for r in responses:
            value = default if getattr(r, field) is None else getattr(r, field)
            own = torch.as_tensor(value, dtype=dtype).expand(len(r.response_ids))
            rows.append(pad(own, (len(r.prompt_ids), 0), value=fill))
        return pad_rows(rows, padding_value=fill)

    def spread_candidates(field: str, fill: int | float, dtype: torch.dtype) -> Tensor | None:
        """Place c numbers per token [B, S, c]; `fill` where there are fewer."""
        given = [getattr(r, field) for r in responses]
        if (most := max((value.shape[1] for value in given if value is not None), default=None)) is None:
            return None
        rows = [torch.full((len(r.prompt_ids) + len(r.response_ids), most), fill, dtype=dtype) for r in responses]
        for own, value, r in zip(rows, given, responses, strict=True):
            if value is not None:
                own[len(r.prompt_ids) :, : value.shape[1]] = torch.as_tensor(value)
        return pad_rows(rows, padding_value=fill)

    ids = [torch.tensor(r.prompt_ids + r.response_ids, dtype=torch.long) for r in responses]
    attention_mask = pad_rows([torch.ones(len(own), dtype=torch.bool) for own in ids])
    prompts = torch.tensor([len(r.prompt_ids) for r in responses])

    def stack(field: str, dtype: torch.dtype) -> Tensor | None:
        """Stack a number per response [B]."""
        values = [getattr(r, field) for r in responses]
        if all(value is None for value in values):
            return None
        return torch.tensor([float("nan") if value is None else value for value in values], dtype=dtype)

    steps, known = [r.step for r in responses], [r.reward_parts or {} for r in responses]
    names = dict.fromkeys(name for own in known for name in own)
    nan = float("nan")
    parts = {name: torch.tensor([own.get(name, nan) for own in known]) for name in names}
    exact = ("group_reward_mean", "group_reward_std")
    single = {"advantages": "advantage", "uncorrected_advantages": "uncorrected_advantage"}
    per_token = {name: single.get(name, name) for name in _PER_TOKEN}
    per_token = {name: own for name, own in per_token.items() if any(getattr(r, own) is not None for r in responses)}
    return TokenBatch(
        input_ids=pad_rows(ids, padding_value=pad_id),
        attention_mask=attention_mask,
        response_mask=spread("response_mask", True, False, torch.bool),
        response_start=attention_mask.int().argmax(1) + prompts,
        group_ids=torch.tensor([r.group for r in responses]),
        temperature=torch.tensor([float(r.temperature) for r in responses]),
        reward_parts=parts or None,
        steps=None if None in steps else torch.tensor(steps),
        **{
            name: stack(own, torch.float64 if own in exact else torch.float32)
            for name, own in _PER_RESPONSE.items()
            if name != "steps"
        },
        **{name: spread(own, nan, nan, torch.float32) for name, own in per_token.items()},
        teacher_top_ids=spread_candidates("teacher_top_ids", -1, torch.long),
        teacher_top_logprobs=spread_candidates("teacher_top_logprobs", -torch.inf, torch.float64),
    )
