"""slime's --dump-details, and miles's, made here from their sources: what stands in the files, and in which order.

slime: github.com/THUDM/slime at 624b824a898ab0ec1fcb4d373004c7f3852bf515, 2026-08-21: `save_debug_rollout_data` in
slime/observability/rollout_data_utils.py; `Sample` in slime/utils/types.py; `_post_process_rewards`,
`_convert_samples_to_train_data`, `_split_train_data_by_dp` in slime/ray/rollout.py; `_build_dump_payload` in
slime/observability/train_data_utils.py.
miles: github.com/radixark/miles at 31f1ca961a94cb860cec3b2dea34ec332bfa8f76, 2026-08-21: `save_debug_rollout_data` in
miles/ray/rollout/debug_data.py; `Sample` in miles/utils/types.py; miles/ray/rollout/train_data_conversion.py;
`save_debug_train_data_for_rank` in miles/utils/train_dump_utils.py.

    PYTHONPATH=tests python tests/support/writers/write_slime.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from support.writers.sampled import STEPS, Sample, flat, words

RANKS = 2


def write_slime(out: Path) -> Path:
    """rollout_data/{id}.pt, eval_{id}.pt beside, train_data/{id}.pt."""
    for step in range(len(STEPS)):
        samples = [slime_sample(sample, step, at) for at, sample in enumerate(flat(step))]
        save({"rollout_id": step, "samples": samples}, out / "rollout_data" / f"{step}.pt")
        save({"rollout_id": step, "samples": samples[:2]}, out / "rollout_data" / f"eval_{step}.pt")
        trained = [slime_trained(sample, step, at) for at, sample in enumerate(flat(step))]
        layout = [{"rank": r, "data_parallel_rank": r, "partition": [*range(r, 6, RANKS)]} for r in range(RANKS)]
        payload = {"format_version": 2, "rollout_id": step, "rank": 0, "samples": trained, "dp_shards": layout}
        save(payload | {"raw_reward": [s.reward for s in flat(step)]}, out / "train_data" / f"{step}.pt")
    return out


def write_miles(out: Path) -> Path:
    """rollout_data/{id}.pt, eval_{id}.pt beside, train_data/{id}_{rank}.pt, and folders that hold no rollouts."""
    for step in range(len(STEPS)):
        samples = [miles_sample(sample, step, at) for at, sample in enumerate(flat(step))]
        save({"rollout_id": step, "metadata": {}, "samples": samples}, out / "rollout_data" / f"{step}.pt")
        save({"rollout_id": step, "metadata": {}, "samples": samples[:2]}, out / "rollout_data" / f"eval_{step}.pt")
        for rank in range(RANKS + 1):
            own = [*range(rank % RANKS, 6, RANKS)]
            data = {"partition": own, "raw_reward": [s.reward for s in flat(step)]}
            data["total_lengths"] = [len(s.prompt + s.response) for s in flat(step)]
            columns = [trained_columns(flat(step)[at], step, at) for at in own]
            if rank == RANKS:  # an earlier stage of the pipeline has the samples, and no numbers of the model
                made = ("log_probs", "ref_log_probs", "advantages", "returns", "kl", "entropy")
                columns = [{name: value for name, value in one.items() if name not in made} for one in columns]
            data |= {name: [one[name] for one in columns] for name in columns[0]}
            payload = {"rollout_id": step, "rank": rank, "rollout_data": data, "cp_rank": 0, "cp_size": 1}
            save(payload | {"qkv_format": "thd"}, out / "train_data" / f"{step}_{rank}.pt")
    (out / "trajectory").mkdir(exist_ok=True)
    (out / "trajectory" / "0.jsonl").write_text('{"sample_index": 0, "messages": []}\n')
    return out


def slime_sample(sample: Sample, step: int, at: int) -> dict[str, Any]:
    """`Sample.to_dict()`, before it becomes train data: a removed one still has no mask."""
    status = {"stop": "completed", "length": "truncated"}[sample.end]
    return {
        "group_index": 2 * step + at // 3,
        "index": 6 * step + at,
        "rollout_id": None,
        "prompt": words(sample.prompt),
        "tokens": sample.prompt + sample.response,
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "multimodal_train_input_id": None,
        "apply_chat_template_kwargs": {},
        "response": words(sample.response),
        "response_length": len(sample.response),
        "label": "42",
        "reward": sample.reward,
        "loss_mask": None if all(sample.mask) else sample.mask,
        "weight_versions": [str(step + 1)] if at else [str(step)],
        "rollout_log_probs": sample.sampler,
        "rollout_top_p_token_ids": None,
        "rollout_top_p_token_offsets": None,
        "rollout_routed_experts": None,
        "remove_sample": sample.dropped,
        "teacher_log_probs": None,
        "status": status,
        "metadata": {},
        "generate_function_path": None,
        "custom_rm_path": None,
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": {"spec_accept_token_num": 0, "spec_draft_token_num": 0},
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
    }


def miles_sample(sample: Sample, step: int, at: int) -> dict[str, Any]:
    """The same of miles: numpy's array of experts, numpy's rewards, and no more of slime's own fields."""
    own = slime_sample(sample, step, at)
    for name in ("multimodal_train_input_id", "apply_chat_template_kwargs", "custom_rm_path", "session_id"):
        own.pop(name)
    experts = np.arange(2 * 2 * (len(own["tokens"]) - 1), dtype=np.int32).reshape(-1, 2, 2)
    return own | {"reward": np.float64(sample.reward), "rollout_routed_experts": experts, "adapter": None}


def normalised(step: int, at: int) -> float:
    """GRPO's, of the three samples of the prompt, removed and empty ones too."""
    rewards = [sample.reward for sample in STEPS[step][at // 3]]
    return (flat(step)[at].reward - fmean(rewards)) / (stdev(rewards) + 1e-6)


def trained_columns(sample: Sample, step: int, at: int) -> dict[str, Any]:
    """What train data have of each sample, by the names that they have there."""
    length, reward = len(sample.response), normalised(step, at)
    mask = [0] * length if sample.dropped else sample.mask
    return {
        "tokens": torch.tensor(sample.prompt + sample.response),
        "response_lengths": length,
        "rewards": reward,
        "truncated": int(sample.end == "length"),
        "sample_indices": 6 * step + at,
        "rollout_ids": at,
        "loss_masks": torch.tensor(mask, dtype=torch.int),
        "rollout_mask_sums": torch.tensor(float(sum(mask))),
        "rollout_log_probs": torch.tensor(sample.sampler),
        "log_probs": torch.tensor(sample.trainer),
        "ref_log_probs": torch.tensor(sample.trainer) - 0.5,
        "advantages": torch.full((length,), reward),
        "returns": torch.full((length,), reward),
        "kl": torch.zeros(length),
        "entropy": torch.tensor(sample.entropy),
    }


def slime_trained(sample: Sample, step: int, at: int) -> dict[str, Any]:
    """A sample of format_version 2: plural names but for the two that say which it is."""
    own = trained_columns(sample, step, at)
    return {"data_parallel_rank": at % RANKS, "sample_index": own.pop("sample_indices"), "rollout_position": at} | own


def save(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


if __name__ == "__main__":
    write_slime(Path(sys.argv[1]) / "slime")
    write_miles(Path(sys.argv[1]) / "miles")
