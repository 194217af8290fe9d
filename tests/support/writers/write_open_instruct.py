"""open-instruct's save_traces, made here from its source.

github.com/allenai/open-instruct at e6c3044aa6201c8bfa4573c1b03142af599e730d, 2026-08-20: `RolloutRecord`,
`_save_rollouts` and `save_rollout_metadata` in open_instruct/rl_utils.py; the advantages and the step of
`_data_preparation_loop` in open_instruct/data_loader.py; `process_tool_tokens` and the end-of-sequence token of an
empty response in open_instruct/vllm_utils.py.

    PYTHONPATH=tests python tests/support/writers/write_open_instruct.py OUT
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import fmean, pstdev

from support.writers.sampled import EOS, STEPS, flat

RUN = "grpo__1__1787000000"


def write_open_instruct(out: Path) -> Path:
    """One shard and the run's metadata; the log has no mask, and what the trainer drops is there all the same."""
    out.mkdir(parents=True, exist_ok=True)
    about = {"run_name": RUN, "git_commit": "e6c3044", "model_name": "policy", "timestamp": "2026-08-20T00:00:00+00:00"}
    (out / f"{RUN}_metadata.jsonl").write_text(json.dumps(about) + "\n")
    with (out / f"{RUN}_rollouts_000000.jsonl").open("w") as file:
        for step in range(len(STEPS)):
            for at, sample in enumerate(flat(step)):
                rewards = [one.reward for one in STEPS[step][at // 3]]
                record = {
                    "step": step,
                    "sample_idx": at,
                    "prompt_idx": at // 3,
                    "prompt_tokens": sample.prompt,
                    "response_tokens": sample.response or [EOS],
                    "reward": sample.reward,
                    "advantage": (sample.reward - fmean(rewards)) / (pstdev(rewards) + 1e-8),
                    "finish_reason": sample.end,
                    "dataset": "gsm8k",
                    "ground_truth": [42],
                    "request_info": {"num_calls": 0, "tool_calleds": not all(sample.mask)},
                    "logprobs": sample.sampler or [math.nan],
                }
                file.write(json.dumps(record) + "\n")
    return out


if __name__ == "__main__":
    write_open_instruct(Path(sys.argv[1]))
