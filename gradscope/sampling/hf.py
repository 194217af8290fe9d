"""Sampling with transformers alone: batched decoding in which every response has a random stream of its own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.batch import Response, TokenBatch, collate
from gradscope.errors import InputError
from gradscope.models import Policy
from gradscope.sampling import Sample, Sampler


@dataclass(frozen=True)
class HFSampler:
    """Samples with the policy's own forward pass and transformers' key-value cache.

    A response depends on the generator, its prompt's index and its own, not on batch_size (up to rounding: a uniform
    number within rounding of a boundary between two tokens may fall to either).
    """

    policy: Policy
    batch_size: int = 64
    """Responses decoded together; memory grows with it, results do not depend on it."""
    progress: bool = True
    """A bar on stderr, where that is a terminal."""

    def sample(
        self,
        prompt_ids: list[list[int]],
        *,
        n: int,
        temperature: float,
        max_new_tokens: int,
        generator: torch.Generator,
    ) -> list[list[Sample]]:
        """n responses to each prompt, ended by a stop token, max_new_tokens or the policy's context.

        Raises InputError for a prompt that is empty, leaves no room in the context or has ids outside the vocabulary.
        """
        from tqdm import tqdm

        _check_settings(n, temperature, max_new_tokens, self.batch_size)
        _check_prompts(prompt_ids, self.policy)
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        samples: dict[tuple[int, int], Sample] = {}
        model, was_training = self.policy.model, self.policy.model.training
        model.eval()
        try:
            with tqdm(
                total=len(prompt_ids) * n, desc="sampling", unit="response", disable=not self.progress or None
            ) as bar:
                for keys in self._batches([len(ids) for ids in prompt_ids], n):
                    prompts = [prompt_ids[p] for p, _ in keys]
                    uniforms = [_uniforms(seed, key, max_new_tokens) for key in keys]
                    decoded = _decode(self.policy, prompts, torch.stack(uniforms), temperature, bar)
                    samples.update(zip(keys, decoded, strict=True))
        finally:
            model.train(was_training)
        return [[samples[p, s] for s in range(n)] for p in range(len(prompt_ids))]

    def _batches(self, lengths: list[int], n: int) -> Iterator[list[tuple[int, int]]]:
        """(prompt, sample) keys that are decoded together: neighbours in length, which need little padding.

        float64 is not padded at all: there, transformers' eager attention makes NaN of a padding row, all of whose
        scores are masked, and NaN spreads from the next layer on.
        """
        order = sorted(range(len(lengths)), key=lambda p: lengths[p])
        runs = groupby(order, key=lambda p: lengths[p] if self.policy.dtype == torch.float64 else 0)
        for _, prompts in runs:
            keys = [(p, s) for p in prompts for s in range(n)]
            for start in range(0, len(keys), self.batch_size):
                yield keys[start : start + self.batch_size]


def rollout_rows(
    policy: Policy,
    questions: Iterable[Any],
    *,
    n: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    task: Any | None = None,
    sampler: Sampler | None = None,
) -> list[dict[str, Any]]:
    """Sample n responses to each question, as rows of the native rollout format.

    questions: of gradscope.tasks: `prompt` (a string or a chat) and `level` are read.
    task: its `reward(response_text, question)` fills the column `reward`; None leaves it out.
    sampler: default HFSampler(policy).
    """
    questions = list(questions)
    prompts = [policy.encode_prompt(question.prompt) for question in questions]
    sampler = HFSampler(policy) if sampler is None else sampler
    sampled = sampler.sample(
        prompts,
        n=n,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        generator=torch.Generator().manual_seed(seed),
    )
    rows = []
    for group, (question, prompt_ids, samples) in enumerate(zip(questions, prompts, sampled, strict=True)):
        for sample in samples:
            response = policy.tokenizer.decode(sample.response_ids, skip_special_tokens=True)
            row = {"prompt_ids": prompt_ids, "response_ids": sample.response_ids, "prompt": question.prompt}
            row |= {"response": response, "group": group, "old_logprobs": sample.logprobs, "temperature": temperature}
            if task is not None:
                row["reward"] = float(task.reward(response, question))
            rows.append(row | {"level": question.level, "finished": sample.finished})
    return rows


def batch_rows(rows: Iterable[dict[str, Any]]) -> TokenBatch:
    """The rows of `rollout_rows` as a batch, on-policy: the log-probabilities of the sampler are left out."""
    names = ("prompt_ids", "response_ids", "group", "temperature")
    return collate([Response(**{n: row[n] for n in names}, reward=row.get("reward")) for row in rows])


def draw_tokens(
    logits: Float[Tensor, "B N"], uniforms: Float[Tensor, " B"], temperature: float
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """The token at which the cumulative softmax(logits / temperature) passes the uniform number, and its log π.

    Raises InputError for logits that are NaN.

    >>> logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(3, 3)
    >>> draw_tokens(logits, torch.tensor([0.0, 0.6, 0.8]), 1.0)[0].tolist()
    [0, 1, 2]
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    # float64, so that a vocabulary's worth of rounding does not move a boundary; below 1, so that no token of
    # probability 0 at the end is ever drawn.
    cumulative = logprobs.exp().double().cumsum(-1)
    if cumulative[:, -1].isnan().any():
        raise InputError("the policy's logits are NaN: its weights or its dtype are broken; try --dtype float32")
    level = uniforms.to(cumulative).clamp(max=1 - 1e-12)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, level, right=True)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def stop_ids(policy: Policy) -> set[int]:
    """Ids that end a response: the generation configuration's, else the configuration's, else the tokenizer's."""
    for source in (getattr(policy.model, "generation_config", None), policy.config, policy.tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return {ids} if isinstance(ids, int) else set(ids)
    return set()


def _uniforms(seed: int, key: tuple[int, int], length: int) -> Float[Tensor, " length"]:
    """A response's own uniform numbers, one per step, in float64: PCG64, as torch seeds with 32 bits only."""
    return torch.from_numpy(np.random.default_rng([seed, *key]).random(length))


@torch.no_grad()  # not inference_mode: buffers that a model makes on the way could never be used for training again
def _decode(
    policy: Policy, prompts: list[list[int]], uniforms: Float[Tensor, "B L"], temperature: float, bar: Any
) -> list[Sample]:
    """One response of at most L tokens per prompt; a finished one leaves the batch at once."""
    stops = stop_ids(policy)
    longest = [min(uniforms.shape[1], (policy.context or sys.maxsize) - len(prompt)) for prompt in prompts]
    ids: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    logits, cache, mask = _prefill(policy, prompts)
    alive = list(range(len(prompts)))
    for step in range(max(longest)):
        tokens, token_logprobs = draw_tokens(logits, uniforms[alive, step].to(logits.device), temperature)
        for row, token, logprob in zip(alive, tokens.tolist(), token_logprobs.tolist(), strict=True):
            ids[row].append(token)
            logprobs[row].append(logprob)
        going = [k for k, row in enumerate(alive) if ids[row][-1] not in stops and step + 1 < longest[row]]
        bar.update(len(alive) - len(going))
        if not going:
            break
        if len(going) < len(alive):
            kept = torch.tensor(going, device=tokens.device)
            cache.reorder_cache(kept)  # every kind of layer has it, also those without batch_select_indices
            tokens, mask, alive = tokens[kept], mask[kept], [alive[k] for k in going]
        mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        logits = _forward(policy, tokens[:, None], mask, cache)
    return [Sample(i, p, i[-1] in stops) for i, p in zip(ids, logprobs, strict=True)]


def _prefill(policy: Policy, prompts: list[list[int]]) -> tuple[Float[Tensor, "B N"], Any, Bool[Tensor, "B P"]]:
    """Logits after each prompt, the cache and the mask of what is padding; equal prompts are computed once."""
    from transformers import DynamicCache

    unique = {prompt: k for k, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    width = max(map(len, unique))
    ids = torch.zeros(len(unique), width, dtype=torch.long)
    mask = torch.zeros(len(unique), width, dtype=torch.bool)
    for prompt, k in unique.items():
        ids[k, width - len(prompt) :] = torch.tensor(prompt)
        mask[k, width - len(prompt) :] = True
    ids, mask = ids.to(policy.device), mask.to(policy.device)
    cache = DynamicCache(config=policy.model.config)
    logits = _forward(policy, ids, mask, cache)
    pick = torch.tensor([unique[tuple(p)] for p in prompts], device=policy.device)
    cache.reorder_cache(pick)
    return logits[pick], cache, mask[pick]


def _forward(policy: Policy, ids: Int[Tensor, "B s"], mask: Bool[Tensor, "B S"], cache: Any) -> Float[Tensor, "B N"]:
    """Logits of the last column, which is real in every row: padding is on the left."""
    known = inspect.signature(policy.model.forward).parameters
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    extra = {"position_ids": positions, "logits_to_keep": 1}
    extra = {name: value for name, value in extra.items() if name in known}
    out = policy.model(input_ids=ids, attention_mask=mask.long(), past_key_values=cache, use_cache=True, **extra)
    return out.logits[:, -1]


def _check_settings(n: int, temperature: float, max_new_tokens: int, batch_size: int) -> None:
    for name, value in (("n", n), ("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    if not 0 < temperature < float("inf"):
        raise InputError(f"temperature is {temperature}; sampling needs a positive one (0 would be greedy decoding)")


def _check_prompts(prompt_ids: list[list[int]], policy: Policy) -> None:
    for index, ids in enumerate(prompt_ids):
        if not ids:
            raise InputError(f"prompt {index} is empty; give at least one token (a BOS token will do)")
        if policy.context is not None and len(ids) >= policy.context:
            raise InputError(
                f"prompt {index} has {len(ids)} tokens and the policy's context is {policy.context}: no room for a "
                "response; shorten the prompt"
            )
        if min(ids) < 0 or max(ids) >= policy.vocab_size:
            raise InputError(
                f"prompt {index} has ids from {min(ids)} to {max(ids)}; the policy's vocabulary is 0 to "
                f"{policy.vocab_size - 1}"
            )
