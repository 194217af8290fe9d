"""Responses sampled from a policy, by transformers or vLLM behind one protocol, and how many of them are right."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "engines": ["make_sampler"],
        "evaluation": ["Evaluation", "Exam", "evaluate", "summarize_responses"],
        "hf": ["HFSampler", "check_prompts"],
        "protocol": ["Sample", "Sampler"],
        "rollouts": ["batch_rows", "check_count", "rollout_rows"],
    },
)
