"""NeMo-RL's train_data_step{N}.jsonl, made here from its source.

github.com/NVIDIA-NeMo/RL at 7ea279abfbeb698b092856d0dab61e7cf39bc909, 2026-08-22: the ends of `grpo_train` and
`validate`, and `add_grpo_token_loss_masks_and_generation_logprobs`, in nemo_rl/algorithms/grpo.py;
`log_batched_dict_as_jsonl` in nemo_rl/utils/logger.py, which cuts the batch into slices of one sample
(`BatchedDataDict.slice`): each value is a list with one entry.

    PYTHONPATH=tests python tests/support/writers/write_nemo_rl.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from support.writers.sampled import STEPS, flat, words


def write_nemo_rl(out: Path, *, forced: bool = False) -> Path:
    """forced: a run with force_on_policy_ratio, whose prev_logprobs stay zeros."""
    out.mkdir(parents=True, exist_ok=True)
    for step in range(len(STEPS)):
        width = max(len(sample.prompt + sample.response) for sample in flat(step))
        columns: dict[str, list[Any]] = {}
        for at, sample in enumerate(flat(step)):
            rewards = [one.reward for one in STEPS[step][at // 3]]
            advantage = (sample.reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
            before, length = len(sample.prompt), len(sample.prompt + sample.response)

            def pad(values: list, before: int = before, length: int = length, width: int = width) -> list:
                return [0] * before + values + [0] * (width - length)

            row = {
                "content": words(sample.prompt + sample.response),
                "rewards": sample.reward,
                "input_lengths": length,
                "token_ids": sample.prompt + sample.response + [0] * (width - length),
                "token_loss_mask": pad(sample.mask),
                "sample_loss_mask": 0.0 if sample.dropped else 1.0,
                "advantages": [advantage] * width,
                "generation_logprobs": [float(value) for value in pad(sample.sampler)],
                # The trainer's own are computed of every token; of the first there is none.
                "prev_logprobs": [0.0] * width
                if forced
                else [0.0] + [-3.0] * (before - 1) + pad(sample.trainer)[before:],
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
        with (out / f"train_data_step{step + 1}.jsonl").open("w") as file:
            for at in range(len(columns["rewards"])):
                sliced = {name: values[at : at + 1] for name, values in columns.items()}
                file.write(json.dumps({**sliced, "idx": at}) + "\n")
        with (out / f"val_data_step{step + 1}.jsonl").open("w") as file:
            for at, sample in enumerate(flat(step)[:2]):
                message = {"role": "assistant", "content": words(sample.response)}
                file.write(json.dumps({"content": [[message]], "rewards": [sample.reward], "idx": at}) + "\n")
    return out


if __name__ == "__main__":
    write_nemo_rl(Path(sys.argv[1]))
