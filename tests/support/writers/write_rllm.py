"""rLLM's episode logs (trainer.log_episodes), made here from its source: what stands in the files.

github.com/rllm-org/rllm at 9beb6e0f676a46d38858991fd79ac5f8e0b16d4c, 2026-08-15: `EpisodeLogger` in
rllm/utils/episode_logger.py; `Step.from_model_output` and the episode's id in rllm/types.py.

    PYTHONPATH=tests python tests/support/writers/write_rllm.py OUT
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from support.writers.sampled import STEPS, Sample, words


def write_rllm(out: Path) -> Path:
    """episodes/train_step_{n}_epoch_0/, with a validation's folder and each step's summary."""
    for step, groups in enumerate(STEPS, start=1):
        log_step(out / "episodes" / f"train_step_{step}_epoch_0", step, groups, "train")
    log_step(out / "episodes" / "val_step_2_epoch_0", 2, STEPS[0][:1], "val")
    return out / "episodes"


def log_step(folder: Path, step: int, groups: list[list[Sample]], mode: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, group in enumerate(groups):
        for index, sample in enumerate(group):
            data = episode(sample, step, f"task-{step}-{number}:{index}")
            safe = data["episode_id"].replace(":", "_").replace("/", "_")
            names.append(f"episode_hash{data['task_hash']}_id{safe}.json")
            (folder / names[-1]).write_text(json.dumps(data, indent=2, default=str) + "\n")
    summary = {"training_step": step, "epoch": 0, "mode": mode, "num_episodes": len(names), "episode_files": names}
    summary["summary_stats"] = {"total_correct": 0, "total_incorrect": len(names), "accuracy": 0.0}
    (folder / "batch_summary.json").write_text(json.dumps(summary, indent=2))


def episode(sample: Sample, step: int, name: str) -> dict[str, Any]:
    task = {"question": words(sample.prompt)}
    ends = {"stop": "env_done", "length": "max_response_length_exceeded"}
    return {
        "training_step": step,
        "epoch": 0,
        "episode_id": name,
        "session_id": None,
        "task": task,
        "task_hash": hashlib.sha256(json.dumps(task, sort_keys=True, default=str).encode()).hexdigest()[:8],
        "is_correct": sample.reward == 1.0,
        "termination_reason": ends[sample.end],
        "metrics": {"n_turns": 1.0},
        "metadata": {},
        "timing": {},
        "trajectories": [
            {
                "name": "solver",
                "uid": f"uid-{name}",
                "reward": sample.reward,
                "num_steps": 1,
                "timing": {},
                "steps": [answer(sample)],
            }
        ],
    }


def answer(sample: Sample) -> dict[str, Any]:
    said = {"role": "assistant", "content": words(sample.response), "reasoning": None}
    return {
        "observation": None,
        "thought": "",
        "action": None,
        "reward": 0.0,
        "done": False,
        "model_response": said["content"],
        "chat_completions": [{"role": "user", "content": words(sample.prompt)}, said],
        "timing": {},
    }


if __name__ == "__main__":
    write_rllm(Path(sys.argv[1]) / "rllm")
