"""ROLL's rollout_dump_data.step_{n}.jsonl, made here from its source.

github.com/alibaba/ROLL at 8eb27cc2dc34c4d1310b169d9b86d339004d811a, 2026-08-19: `dump_rollout_to_specific_path` and
`write_to_json_process` in roll/pipeline/rlvr/utils.py; the steps and the batches of two domains in `run` of
roll/pipeline/rlvr/rlvr_pipeline.py, where `get_encode_function` says what the prompt is.

    PYTHONPATH=tests python tests/support/writers/write_roll.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.writers.sampled import STEPS, flat, words

TEMPERATURE = 0.75


def write_roll(out: Path) -> Path:
    """A data set with `messages` and with another text as `prompt`; a domain for each prompt."""
    out.mkdir(parents=True, exist_ok=True)
    for step in range(len(STEPS)):
        samples, count = flat(step), len(flat(step))
        generation = {"max_new_tokens": 4, "top_p": 1.0, "temperature": TEMPERATURE, "num_return_sequences": 1}
        about = json.dumps({"global_step": step, "generation_config": generation})
        data: dict[str, list[Any]] = {
            # Ids count within a data set: both domains have the same.
            "id": [str(step)] * count,
            "source": ["math" if at < 3 else "code" for at in range(count)],
            "difficulty": ["1"] * count,
            "prompt": [f"question {words(sample.prompt)}" for sample in samples],
            "messages": [json.dumps([{"role": "user", "content": words(sample.prompt)}]) for sample in samples],
            "ground_truth": ["42"] * count,
            "tag": ["math" if at < 3 else "code" for at in range(count)],
            "domain": ["math_rule" if at < 3 else "code_sandbox" for at in range(count)],
            "responses": [words(sample.response) for sample in samples],
            "scores": [sample.reward for sample in samples],
            "sampling_params": [about] * count,
            "global_step": [step] * count,
        }
        path = out / f"rollout_dump_data.step_{step}.jsonl"
        path.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
    return out


if __name__ == "__main__":
    write_roll(Path(sys.argv[1]))
