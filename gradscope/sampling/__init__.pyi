"""What is at the door: a file is loaded when one of its names is first used."""

from .engines import make_sampler as make_sampler
from .evaluation import (
    Evaluation as Evaluation,
    Exam as Exam,
    evaluate as evaluate,
    summarize_responses as summarize_responses,
)
from .hf import HFSampler as HFSampler, check_prompts as check_prompts
from .protocol import Sample as Sample, Sampler as Sampler
from .rollouts import (
    batch_rows as batch_rows,
    check_count as check_count,
    rollout_rows as rollout_rows,
    sample as sample,
)
