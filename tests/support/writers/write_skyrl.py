"""SkyRL's own dumped_data (trainer.dump_data_batch), of batches that are made here.

Package: skyrl 0.3.0. Called, of `RayPPOTrainer` in `skyrl/train/trainer.py`: `convert_to_training_input`,
`compute_advantages_and_returns` and `dump_data`. The log-probabilities of the forward passes are made here.
`truth.json` beside the log says what the trainer held: ids, mask, group, advantage, log-probabilities of each response.

    PYTHONPATH=tests python tests/support/writers/write_skyrl.py OUT
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic wants this one before Python 3.12, SkyRL imports the other

import torch  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from support.words import EOS, make_tokenizer  # noqa: E402

A, B, C, D = [4, 5, 6], [11, 12], [20, 21, 22], [30]
# Prompt, response, mask, reward. The second was cut off and filtered (apply_overlong_filtering); the third is EOS.
# The last of the second prompt holds a tool's output and ends in an EOS that SkyRL put there and trains on.
STEPS = [
    [
        (A, [7, 8, EOS], [1, 1, 1], 1.0),
        (A, [9, 7, 8, 10], [0, 0, 0, 0], 0.0),
        (A, [EOS], [1], 0.0),
        (B, [13, EOS], [1, 1], 0.0),
        (B, [13, 8, EOS], [1, 1, 1], 1.0),
        (B, [14, 50, 51, 15, EOS], [1, 0, 0, 1, 1], 0.5),
    ],
    [
        (C, [23, EOS], [1, 1], 1.0),
        (C, [24, 25, EOS], [1, 1, 1], -1.0),
        (C, [24, EOS], [1, 1], 0.0),
        (D, [31, 32, EOS], [1, 1, 1], 0.75),
        (D, [31, EOS], [1, 1], 0.75),
        (D, [33, 34], [1, 1], 0.75),
    ],
]


def main(out: Path) -> None:
    config = SkyRLTrainConfig()
    config.trainer.export_path = str(out)
    config.trainer.train_batch_size = config.trainer.policy_mini_batch_size = 2
    config.generator.n_samples_per_prompt = 3
    trainer = SimpleNamespace(cfg=config, tokenizer=make_tokenizer(), all_metrics={})
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 4)
    trainer.ref_model = trainer.critic = None
    truth: list[dict[str, Any]] = []
    for step, rows in enumerate(STEPS, start=1):
        sampler = [[-0.5 - 0.125 * s for s in range(len(ids))] for _, ids, _, _ in rows]
        if step == 1:
            sampler[-1][-1] = 0.0  # of a token that nobody sampled
        given = {
            "prompt_token_ids": [prompt for prompt, _, _, _ in rows],
            "response_ids": [ids for _, ids, _, _ in rows],
            "rewards": [[0.0] * (len(ids) - 1) + [reward] for _, ids, _, reward in rows],
            "loss_masks": [mask for _, _, mask, _ in rows],
            "rollout_logprobs": sampler,
        }
        uids = [f"{step}-{'-'.join(map(str, prompt))}" for prompt, _, _, _ in rows]
        batch = RayPPOTrainer.convert_to_training_input(trainer, given, uids)
        dtype = torch.bfloat16 if step == 2 else torch.float32
        batch["base_action_log_probs"] = None
        batch["action_log_probs"] = (batch["rollout_logprobs"] - 0.25).to(dtype)
        batch["values"] = None
        batch = RayPPOTrainer.compute_advantages_and_returns(trainer, batch)
        batch.pop("rewards")
        batch.metadata.pop("uids")
        batch.metadata.pop("is_last_step", None)
        RayPPOTrainer.dump_data(trainer, batch, file_name=f"global_step_{step}_training_input")
        for row, (prompt, ids, mask, _) in enumerate(rows):
            known = {"step": step, "group": uids[row], "prompt_ids": prompt, "response_ids": ids, "response_mask": mask}
            known["advantage"] = float(batch["advantages"][row, -len(ids)])
            known["sampler_logprobs"] = sampler[row]
            known["old_logprobs"] = batch["action_log_probs"][row, -len(ids) :].tolist()
            truth.append(known)
    lines = ",\n".join(json.dumps(row) for row in truth)
    (out / "truth.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    main(Path(sys.argv[1]))
