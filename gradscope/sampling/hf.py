"""Sampling with transformers: batched decoding with a separate random stream for every response."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import isnan
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.errors import InputError, NanLogitsError
from gradscope.policy import Policy, takes, without_cudnn_attention
from gradscope.runs import Advance, Progress, settle_progress
from gradscope.sampling.protocol import Sample

Draw = Callable[[Float[Tensor, "B N"], Int[Tensor, " B"], int], tuple[Int[Tensor, " B"], Float[Tensor, " B"]]]
"""Draws tokens: (logits, row numbers in the batch, step 0, 1, 2, …) → tokens and their log π."""
STEPS_AT_ONCE = 256
"""Decoding steps whose random numbers are drawn together."""


@dataclass(frozen=True)
class HFSampler:
    """Samples with the policy's own forward pass and transformers' key-value cache.

    A response depends on the generator, the index of its prompt and its own index, but not on batch_size (except that
    rounding may decide when a random number falls on the boundary between two tokens).
    """

    policy: Policy
    batch_size: int = 64
    """Responses decoded together; affects speed and memory, not results."""
    progress: bool | Progress = True
    """Whether to show progress, or the object that receives it."""

    def sample(
        self,
        prompt_ids: list[list[int]],
        *,
        n: int,
        temperature: float,
        max_new_tokens: int,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> list[list[Sample]]:
        """Sample n responses to each prompt, until a stop token, max_new_tokens or the end of the context.

        greedy: take the likeliest token, with ties to the lowest id; all n responses to a prompt are then equal.
        Raises InputError for prompts that are empty, fill the context or have ids outside the vocabulary.
        """
        from gradscope.sampling.kv_cache import decoding_attention

        check_settings(n, temperature, max_new_tokens)
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}; it must be at least 1")
        check_prompts(prompt_ids, self.policy)
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        samples: dict[tuple[int, int], Sample] = {}
        model, was_training, distinct = self.policy.model, self.policy.model.training, 1 if greedy else n
        model.eval()
        try:
            with (
                decoding_attention(model),
                settle_progress(self.progress).stage("sampling", len(prompt_ids) * distinct, "responses") as advance,
            ):
                for keys in self._batches([len(ids) for ids in prompt_ids], distinct):
                    draw = _greedy(temperature) if greedy else _random(seed, keys, temperature)
                    prompts = [prompt_ids[p] for p, _ in keys]
                    decoded = _decode(self.policy, prompts, max_new_tokens, draw, temperature, advance)
                    samples.update(zip(keys, decoded, strict=True))
        finally:
            model.train(was_training)
        return [[samples[p, s % distinct] for s in range(n)] for p in range(len(prompt_ids))]

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Do nothing: the sampler uses the policy's own weights."""

    def close(self) -> None:
        """Do nothing: the sampler holds no resources of its own."""

    def _batches(self, lengths: list[int], n: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the (prompt, sample) keys to decode together, of similar length to minimise padding.

        In float64 there is no padding at all: transformers' eager attention turns fully masked padding rows into NaN,
        which spreads from the next layer on.
        """
        order = sorted(range(len(lengths)), key=lambda p: lengths[p])
        runs = groupby(order, key=lambda p: lengths[p] if self.policy.dtype == torch.float64 else 0)
        for _, prompts in runs:
            keys = [(p, s) for p in prompts for s in range(n)]
            for start in range(0, len(keys), self.batch_size):
                yield keys[start : start + self.batch_size]


def draw_tokens(
    logits: Float[Tensor, "B N"], uniforms: Float[Tensor, " B"], temperature: float
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Return the token at which the cumulative softmax(logits / temperature) exceeds the uniform number, and its log π.

    Rows with NaN get log π = NaN.

    >>> logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(3, 3)
    >>> draw_tokens(logits, torch.tensor([0.0, 0.6, 0.8]), 1.0)[0].tolist()
    [0, 1, 2]
    """
    logprobs = _log_softmax(logits, temperature)
    # float64, so that summing over the vocabulary does not move boundaries; below 1, so that no token of
    # probability 0 at the end is ever drawn.
    cumulative = logprobs.exp().double().cumsum(-1)
    level = uniforms.to(cumulative).clamp(max=1 - 1e-12)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, level, right=True).clamp(max=logits.shape[-1] - 1)  # past the end: NaN
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def _log_softmax(logits: Float[Tensor, "B N"], temperature: float) -> Float[Tensor, "B N"]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)


def _why_nan(logits: Float[Tensor, "B N"], temperature: float) -> InputError:
    if logits.isfinite().all():
        return InputError(f"temperature is {temperature}: logits divided by it overflow; give a higher one")
    return NanLogitsError("the policy's logits are NaN, so its weights are broken or overflow; try --dtype float32")


def _random(seed: int, keys: list[tuple[int, int]], temperature: float) -> Draw:
    """Make a `Draw` with a separate stream of float64 uniforms for each (prompt, sample)."""
    # PCG64, since torch seeds have only 32 bits.
    streams = [np.random.default_rng([seed, *key]) for key in keys]
    uniforms = torch.empty(0)

    def draw(logits: Tensor, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        nonlocal uniforms
        if step % STEPS_AT_ONCE == 0:
            drawn = np.stack([stream.random(STEPS_AT_ONCE) for stream in streams])
            uniforms = torch.from_numpy(drawn).to(logits.device, non_blocking=True)
        return draw_tokens(logits, uniforms[:, step % STEPS_AT_ONCE][rows], temperature)

    return draw


def _greedy(temperature: float) -> Draw:
    def draw(logits: Tensor, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        tokens = logits.argmax(-1)  # ties go to the first
        return tokens, _log_softmax(logits, temperature).gather(-1, tokens[:, None])[:, 0]

    return draw


@without_cudnn_attention()
@torch.no_grad()  # not inference_mode: buffers created here could not be used in training later
def _decode(
    policy: Policy, prompts: list[list[int]], length: int, draw: Draw, temperature: float, advance: Advance
) -> list[Sample]:
    """Decode at most `length` tokens per prompt, dropping finished responses; synchronises once per step."""
    from gradscope.sampling.kv_cache import take_rows

    stops, width = policy.stop_ids, max(map(len, prompts))
    longest = [min(length, (policy.context or sys.maxsize) - len(prompt)) for prompt in prompts]
    ids: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    logits, cache, mask = _prefill(policy, prompts)
    alive, rows = list(range(len(prompts))), torch.arange(len(prompts), device=logits.device)
    for step in range(max(longest)):
        tokens, token_logprobs = draw(logits, rows, step)
        drawn = torch.stack([tokens.double(), token_logprobs.double()]).tolist()  # exact, for ids and for log π
        if any(map(isnan, drawn[1])):
            raise _why_nan(logits, temperature)
        for row, token, logprob in zip(alive, *drawn, strict=True):
            ids[row].append(int(token))
            logprobs[row].append(logprob)
        going = [k for k, row in enumerate(alive) if ids[row][-1] not in stops and step + 1 < longest[row]]
        advance(len(alive) - len(going))
        if not going:
            break
        if len(going) < len(alive):
            going = _close_gaps(going)
            kept = take_rows(cache, going, logits.device)
            tokens, mask, rows, alive = tokens[kept], mask[kept], rows[kept], [alive[k] for k in going]
        mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        padded = any(len(prompts[row]) < width for row in alive)
        logits = _forward(policy, tokens[:, None], mask, cache, padded=padded)
    return [Sample(i, p, i[-1] in stops) for i, p in zip(ids, logprobs, strict=True)]


def _close_gaps(going: list[int]) -> list[int]:
    """Reorder the rows so that most keep their place, filling gaps with the last ones.

    >>> _close_gaps([0, 2, 4, 5])
    [0, 5, 2, 4]
    """
    staying = {k for k in going if k < len(going)}
    last = [k for k in going if k >= len(going)]
    return [k if k in staying else last.pop() for k in range(len(going))]


def _prefill(policy: Policy, prompts: list[list[int]]) -> tuple[Float[Tensor, "B N"], Any, Bool[Tensor, "B P"]]:
    """Return the logits after each prompt, the cache and the padding mask; equal prompts are computed once."""
    from gradscope.sampling.kv_cache import growing_cache

    unique = {prompt: k for k, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    width = max(map(len, unique))
    ids = torch.zeros(len(unique), width, dtype=torch.long)
    mask = torch.zeros(len(unique), width, dtype=torch.bool)
    for prompt, k in unique.items():
        ids[k, width - len(prompt) :] = torch.tensor(prompt)
        mask[k, width - len(prompt) :] = True
    padded, ids, mask = not mask.all(), ids.to(policy.device), mask.to(policy.device)
    cache = growing_cache(policy.model.config)
    logits = _forward(policy, ids, mask, cache, padded=padded)
    pick = torch.tensor([unique[tuple(p)] for p in prompts], device=policy.device)
    cache.reorder_cache(pick)
    return logits[pick], cache, mask[pick]


def _forward(
    policy: Policy, ids: Int[Tensor, "B s"], mask: Bool[Tensor, "B S"], cache: Any, *, padded: bool
) -> Float[Tensor, "B N"]:
    """Return the logits of the last column, which is never padding (padding is on the left).

    padded: whether there is padding; a model with a mask synchronises with the device to see if it masks anything.
    """
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    extra = {"position_ids": positions, "logits_to_keep": 1}
    extra = {name: value for name, value in extra.items() if takes(policy.model, name)}
    extra["attention_mask"] = mask.long() if padded else None
    # transformers 5.24 renamed the argument.
    extra["cache" if takes(policy.model, "cache") else "past_key_values"] = cache
    out = policy.model(input_ids=ids, use_cache=True, **extra)
    return out.logits[:, -1]


def check_settings(n: int, temperature: float, max_new_tokens: int) -> None:
    """Raise InputError for settings that no sampler supports."""
    for name, value in (("n", n), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    if not 0 < temperature < float("inf"):
        raise InputError(f"temperature is {temperature}; give a positive one (0 would be greedy decoding)")


def check_prompts(prompt_ids: list[list[int]], policy: Policy) -> None:
    """Raise InputError for a prompt that is empty, fills the context or has ids outside the vocabulary."""
    for index, ids in enumerate(prompt_ids):
        if not ids:
            raise InputError(f"prompt {index} is empty; give at least one token (a BOS token will do)")
        if policy.context is not None and len(ids) >= policy.context:
            raise InputError(
                f"prompt {index} has {len(ids)} tokens, which leaves no room for a response in the policy's context of "
                f"{policy.context}; shorten the prompt"
            )
        if min(ids) < 0 or max(ids) >= policy.vocab_size:
            raise InputError(
                f"prompt {index} has ids from {min(ids)} to {max(ids)}; the policy's vocabulary is 0 to "
                f"{policy.vocab_size - 1}"
            )
