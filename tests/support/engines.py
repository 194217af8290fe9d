"""A vLLM engine beside the policy that it was started from."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from gradscope.policy import Policy
from gradscope.sampling import Sample
from gradscope.sampling.vllm import VLLMSampler

PROMPTS = [list(range(4, 74)), [11], [12, 13, 14]]  # the first fills two blocks of 32 tokens of the prefix cache


@dataclass(frozen=True)
class Engine:
    """A sampler and the policy from whose folder it was started."""

    policy: Policy
    sampler: VLLMSampler

    def sample(self, *, seed: int = 0, **settings) -> list[list[Sample]]:
        settings = {"prompt_ids": PROMPTS, "n": 3, "temperature": 1.0, "max_new_tokens": 12} | settings
        return self.sampler.sample(generator=torch.Generator().manual_seed(seed), **settings)

    def drift(self, policy: Policy, **settings) -> float:
        """Largest |Δ log π| in nats between what is sampled and a forward pass of this policy, in 3 × 3 responses."""
        temperature = settings.setdefault("temperature", 1.0)
        pairs = zip(PROMPTS, self.sample(**settings), strict=True)
        return max(
            float((torch.tensor(s.logprobs) - full_logprobs(policy, prompt, s.response_ids, temperature)).abs().max())
            for prompt, samples in pairs
            for s in samples
        )


def full_logprobs(policy: Policy, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """log π of each response token from one pass over the sequence without padding or cache, in float64."""
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits.double() / temperature, -1)[len(prompt) - 1 : -1]
    return logprobs[torch.arange(len(response)), torch.tensor(response)]


def perturbed(policy: Policy, seed: int) -> Policy:
    """The policy with a twentieth of every weight's spread added to it as noise."""
    model, generator = copy.deepcopy(policy.model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return replace(policy, model=model)
