"""Stand-ins for verl's configuration, trainer and batch, as much of them as its writer sees."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gradscope.integrations.verl.batch_writer import VerlWriter, WriterSettings, put_into
from support.words import make_tokenizer

TEMPERATURE = 0.7
PLAIN = {"clip_ratio": 0.3, "clip_ratio_low": None, "clip_ratio_high": 0.25, "clip_ratio_c": 3.0, "use_kl_loss": True}
PLAIN |= {"kl_loss_coef": 0.02, "kl_loss_type": "low_var_kl", "loss_agg_mode": "token-mean", "entropy_coeff": 0}
PLAIN |= {"ppo_mini_batch_size": 3, "ppo_epochs": 1, "loss_scale_factor": None, "shuffle": False}
PLAIN |= {"ppo_micro_batch_size_per_gpu": 2, "use_dynamic_bsz": False}


class Config(dict):
    """Read as verl's are, by attribute and by `get`."""

    def __getattr__(self, name):
        return self[name]


DISTILLED = {"loss_mode": "k1", "use_policy_gradient": True, "use_task_rewards": False, "loss_max_clamp": None}
DISTILLED |= {"distillation_loss_coef": 0.5, "clip_ratio_low": 0.1, "clip_ratio_high": 0.2}


def make_config(folder, *, policy=None, correction=None, distillation=None, **actor):
    policy_loss = Config({"loss_mode": "vanilla"} | (policy or {}))
    rollout = Config(n=2, temperature=TEMPERATURE)
    actor = Config(PLAIN | {"policy_loss": policy_loss} | actor)
    return Config(
        actor_rollout_ref=Config(actor=actor, rollout=rollout),
        algorithm=Config(rollout_correction=Config({"bypass_mode": False} | (correction or {}))),
        distillation=Config(
            enabled=distillation is not None, distillation_loss=Config(DISTILLED | (distillation or {}))
        ),
        data=Config(train_batch_size=3),
        trainer=Config(default_local_dir=str(folder)),
    )


def make_trainer(config, kind, **known):
    """The least trainer with verl's two methods, whose class has a writer."""

    class Trainer:
        tokenizer, global_steps, ended, norm = make_tokenizer(), 1, False, 0.25
        actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})

        def _update_actor(self, batch, metrics=None):
            if metrics is None:
                return SimpleNamespace(meta_info={"metrics": {"actor/grad_norm": [self.norm]}})
            metrics["actor/grad_norm"] = self.norm
            return batch

        def _shutdown_dump_executor(self):
            self.ended = True

    writer = VerlWriter(WriterSettings(**known))
    put_into(Trainer, writer)
    trainer = Trainer()
    trainer.config, trainer.kind = config, kind
    return trainer, writer


def update(trainer, batch):
    if trainer.kind == "padded":
        return trainer._update_actor(batch)
    metrics = {}
    assert trainer._update_actor(batch, metrics=metrics) is batch and metrics == {"actor/grad_norm": trainer.norm}


def as_padded(rows):
    """A DataProto's stand-in: prompts padded on the left, responses on the right."""
    width, length = max(len(r["prompt"]) for r in rows), max(len(r["ids"]) for r in rows)

    def right(name, values):
        padded = [torch.cat([v, v.new_zeros(length - len(v))]) for v in values]
        return {name: torch.stack(padded)}

    tensors = {
        "prompts": torch.stack(
            [torch.cat([r["prompt"].new_zeros(width - len(r["prompt"])), r["prompt"]]) for r in rows]
        )
    }
    before = torch.stack([torch.arange(width) >= width - len(r["prompt"]) for r in rows])
    after = torch.stack([torch.arange(length) < len(r["ids"]) for r in rows])
    tensors |= {"attention_mask": torch.cat([before, after], 1).long()}
    tensors |= right("responses", [r["ids"] for r in rows]) | right("response_mask", [r["mask"] for r in rows])
    tensors |= right("token_level_scores", [r["scores"] for r in rows])
    for name in ("advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs", "rollout_is_weights"):
        tensors |= right(name, [r[name] for r in rows])
    for name in (name for name in ("teacher_logprobs", "teacher_ids") if name in rows[0]):
        tensors[name] = rows[0][name].new_zeros(len(rows), width + length, rows[0][name].shape[1])
        for row, own in zip(tensors[name], rows, strict=True):
            start = width - len(own["prompt"])
            row[start : start + len(own[name])] = own[name]
    return SimpleNamespace(batch=tensors, non_tensor_batch={"uid": np.array([r["uid"] for r in rows], dtype=object)})


def write_distillation(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """The log that verl's writer makes of a step of distillation (k1, policy gradient) on native rows.

    The teacher gives every other token half of its probability, and twice as much to the others, up to 1.
    """
    given = []
    for row in rows:
        ids, old = torch.tensor(row["response_ids"]), torch.tensor(row["old_logprobs"])
        apart = torch.where(torch.arange(len(ids)) % 2 == 0, -0.7, 0.7)
        teacher = torch.cat([torch.zeros(len(row["prompt_ids"]) - 1), (old + apart).clamp(max=0.0), torch.zeros(1)])
        own = {"prompt": torch.tensor(row["prompt_ids"]), "ids": ids, "mask": torch.ones_like(ids)}
        own |= {name: old for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs")}
        own |= {"advantages": torch.zeros(len(ids)), "rollout_is_weights": torch.ones(len(ids))}
        own |= {"scores": torch.zeros(len(ids)), "uid": str(row["group"]), "teacher_logprobs": teacher[:, None]}
        given.append(own)
    trainer, _ = make_trainer(make_config(folder, distillation={}, ppo_mini_batch_size=len(rows) // 2), "padded")
    trainer.config["actor_rollout_ref"]["rollout"]["temperature"] = rows[0]["temperature"]
    update(trainer, as_padded(given))
    trainer._shutdown_dump_executor()
    return folder / "gradscope" / "rollouts"
