"""Sampling from a policy, with transformers or vLLM behind one protocol, and evaluating its accuracy."""

from gradscope.sampling.engines import make_sampler
from gradscope.sampling.evaluation import Evaluation, Exam, evaluate, summarize_responses
from gradscope.sampling.hf import HFSampler, check_prompts
from gradscope.sampling.protocol import Sample, Sampler
from gradscope.sampling.rollouts import SamplingSettings, batch_rows, check_count, rollout_rows, sample

__all__ = [
    "Evaluation", "Exam", "HFSampler", "Sample", "Sampler", "SamplingSettings", "batch_rows", "check_count",
    "check_prompts", "evaluate", "make_sampler", "rollout_rows", "sample", "summarize_responses",
]  # fmt: skip
