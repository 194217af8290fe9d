"""Samplers by the name of their engine."""

from __future__ import annotations

from gradscope.errors import InputError
from gradscope.policy import Policy
from gradscope.runs import Progress
from gradscope.sampling.hf import HFSampler
from gradscope.sampling.protocol import Sampler


def make_sampler(
    engine: str,
    policy: Policy,
    *,
    batch_size: int = 64,
    dtype: str | None = None,
    memory: float = 0.4,
    progress: bool | Progress = True,
) -> Sampler:
    """Return a sampler of this policy: "hf" (transformers, with the policy's own weights) or "vllm" (a copy from its
    folder).

    batch_size: hf: responses decoded together; vLLM decides this itself.
    dtype, memory: vllm: precision of the copy (default: the policy's), and its fraction of the GPU's memory.

    Raises InputError for an unknown engine, or if vLLM is not installed.
    """
    if engine == "hf":
        return HFSampler(policy, batch_size, progress)
    if engine == "vllm":
        from gradscope.sampling.vllm import VLLMSampler

        return VLLMSampler(policy, dtype=dtype, memory=memory, progress=progress)
    raise InputError(f"engine {engine!r} is not known; give hf or vllm")
