"""verl's own rollout_data_dir, by its default (v1) trainer and by the older one, of batches that are made here.

Package: verl 0.9.1 with TransferQueue 0.1.11 (the v1 trainer's store, on a local ray). Called: the agent loop's
`_agent_loop_postprocess`, `upsample_batch_to_divisible_size`, `_compute_advantage` and `_log_rollout_data` of
`trainer/ppo/v1/trainer_base.py`; `compute_advantage`, `_log_rollout_data` of `trainer/ppo/ray_trainer.py`.
`truth.json` beside each log says what the trainer held: ids, mask, group and advantage of each response.

    PYTHONPATH=tests python tests/support/writers/write_verl.py OUT v1|v0
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import torch
from omegaconf import OmegaConf
from support.words import EOS, PAD, make_tokenizer


@dataclass(frozen=True)
class Session:
    """What one session of an agent loop gives: outputs of (ids, mask), the score of the last one."""

    prompt: list[int]
    outputs: list[tuple[list[int], list[int]]]
    score: float
    extra: dict[str, object] = field(default_factory=dict)


def once(prompt: list[int], ids: list[int], score: float, mask: list[int] | None = None, **extra: object) -> Session:
    return Session(prompt, [(ids, [1] * len(ids) if mask is None else mask)], score, extra)


A, B, C, D = [4, 5, 6], [11, 12], [20, 21, 22], [30]
STEPS = [
    [
        # The second response is cut off, the third is EOS alone.
        [once(A, [7, 8, EOS], 1.0), once(A, [9, 7, 8, 10], 0.0), once(A, [EOS], 0.0), once(A, [7, 8, 8, EOS], 1.0)],
        # A tool's output between the second response's tokens; a session of two outputs counts once, by its last.
        [
            once(B, [13, EOS], 1.0),
            once(B, [14, 50, 51, 15, EOS], 0.0, mask=[1, 0, 0, 1, 1]),
            Session(B, [([16, EOS], [1, 1]), ([17, 18, EOS], [1, 1, 1])], 0.5),
            once(B, [19, EOS], 0.0),
        ],
    ],
    # One response to a prompt keeps its score as its advantage.
    [[once(C, [23, EOS], 1.0), once(C, [24, 25, EOS], -1.0)], [once(D, [31, 32, EOS], 0.75)]],
]
V0 = [
    [
        [once(A, [7, 8, EOS], 1.0), once(A, [9, 7, 8, 10], -1.5), once(A, [EOS], -1.0), once(A, [7, 8, 8, EOS], 1.0)],
        [once(B, [13, EOS], 1.0), once(B, [14, 50, 51, 15, EOS], -1.25, mask=[1, 0, 0, 1, 1])],
    ],
    [[once(C, [23, EOS], 1.0), once(C, [24, 25, EOS], -1.0)], [once(D, [31, 32, EOS], 0.75)]],
]
CONFIG = OmegaConf.create(
    {
        "algorithm": {"adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False},
        "actor_rollout_ref": {"rollout": {"n": 4}},
    }
)


def write_v1(out: Path) -> None:
    import ray
    import transfer_queue as tq
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    os.environ["RAY_AUTH_MODE"] = "disabled"  # else a token is left in the home folder
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init()
    worker = object.__new__(AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    worker.reward_loop_worker_handles = worker.processor = None
    worker.distillation_enabled = False
    trainer = object.__new__(PPOTrainerSync)
    trainer.tokenizer, trainer.config = make_tokenizer(), CONFIG
    trainer._init_dump_executor()
    names, truth = Random(0), []
    for step, groups in enumerate(STEPS, start=1):
        known, tags = {}, []
        for sessions in groups:
            uid = str(uuid.UUID(int=names.getrandbits(128), version=4))
            for number, session in enumerate(sessions):
                outputs = [
                    AgentLoopOutput(
                        prompt_ids=session.prompt,
                        response_ids=ids,
                        response_mask=mask,
                        response_logprobs=[-0.5] * len(ids),
                        reward_score=session.score if (ids, mask) == session.outputs[-1] else None,
                        num_turns=2,
                        metrics=AgentLoopMetrics(),
                        extra_fields={"reward_extra_info": {}, "min_global_steps": step - 1},
                    )
                    for ids, mask in session.outputs
                ]
                given = {"uid": uid, "session_id": number, "global_steps": step, "reward_model": {"ground_truth": "42"}}
                asyncio.run(worker._agent_loop_postprocess(outputs, False, **given))
                for index, (ids, mask) in enumerate(session.outputs):
                    key = f"{uid}_{number}_{index}"
                    known[key] = {"uid": key, "group": uid, "prompt_ids": session.prompt, "response_ids": ids}
                    known[key]["response_mask"] = mask
                    tags.append({"is_padding": False})
        batch = tq.KVBatchMeta(keys=[*known], tags=tags, partition_id="train", fields=None)
        batch.extra_info = {}
        batch = trainer._compute_advantage(batch, metrics={})
        batch = tq.KVBatchMeta(keys=[*known], tags=tags, partition_id="train", fields=None, extra_info={})
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages"])
        for key, advantages in zip(batch.keys, data["advantages"].unbind(), strict=True):
            mask = known[key]["response_mask"]
            truth.append({"step": step} | known[key] | {"advantage": float(advantages[mask.index(1)])})
        batch = upsample_batch_to_divisible_size(batch, 6, EOS)
        trainer.global_steps = step
        trainer._log_rollout_data(batch, {}, str(out))
        tq.kv_clear(keys=batch.keys, partition_id="train")
    trainer._shutdown_dump_executor()
    save(out, truth)
    ray.shutdown()


def write_v0(out: Path) -> None:
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage

    trainer = object.__new__(RayPPOTrainer)
    trainer.tokenizer, trainer.config = make_tokenizer(), CONFIG
    trainer._init_dump_executor()
    names, truth = Random(1), []
    for step, groups in enumerate(V0, start=1):
        rows = [(f"g{g}", session) for g, sessions in enumerate(groups) for session in sessions]
        width = max(len(session.outputs[0][0]) for _, session in rows)
        prompts = torch.full((len(rows), 3), PAD)
        responses, mask, scores = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width), torch.zeros(0)
        scores = torch.zeros(len(rows), width)
        for row, (_, session) in enumerate(rows):
            ids, kept = session.outputs[0]
            prompts[row, 3 - len(session.prompt) :] = torch.tensor(session.prompt)
            responses[row, : len(ids)], mask[row, : len(ids)] = torch.tensor(ids), torch.tensor(kept).float()
            scores[row, len(ids) - 1] = session.score
        data = DataProto.from_single_dict(
            {
                "prompts": prompts,
                "responses": responses,
                "response_mask": mask,
                "token_level_scores": scores,
                "token_level_rewards": scores,
                "uid": np.array([uid for uid, _ in rows], dtype=object),
                "request_id": np.array([f"{names.getrandbits(32):08x}" for _ in rows], dtype=object),
                "reward_model": np.array([{"ground_truth": "42"}] * len(rows), dtype=object),
            }
        )
        data = compute_advantage(data, adv_estimator="grpo", num_repeat=4, config=CONFIG.algorithm)
        # What the DAPO reward manager logs of math_dapo's answer with overlong_buffer_cfg.log: `score` is the
        # answer's own and overwrites the batch's, the penalty stands beside it.
        penalty = [min(0.0, session.score + 1) for _, session in rows]
        raw = [session.score - p for (_, session), p in zip(rows, penalty, strict=True)]
        extras = {"score": raw, "acc": [s > 0 for s in raw], "overlong_reward": penalty}
        extras["overlong"] = [p < 0 for p in penalty]
        trainer.global_steps = step
        trainer._log_rollout_data(data, extras, {}, str(out))
        for row, (uid, session) in enumerate(rows):
            ids, kept = session.outputs[0]
            known = {"step": step, "group": f"{step}-{uid}", "prompt_ids": session.prompt, "response_ids": ids}
            advantage = float(data.batch["advantages"][row, kept.index(1)])
            truth.append(known | {"response_mask": kept, "reward": session.score, "advantage": advantage})
    trainer._shutdown_dump_executor()
    save(out, truth)


def save(out: Path, truth: list[dict[str, object]]) -> None:
    lines = ",\n".join(json.dumps(row) for row in truth)
    (out / "truth.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    {"v1": write_v1, "v0": write_v0}[sys.argv[2]](Path(sys.argv[1]))
