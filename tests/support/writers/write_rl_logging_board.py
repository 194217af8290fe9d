"""RLLoggingBoard's rl_logging_board_data.jsonl, made here from its source: what stands in the file, and in which order.

The board: github.com/HarderThenHarder/RLLoggingBoard at cf56d5d97b293eddc75e6474e6607c9ccafc7fd5, 2025-02-20 (README
and rl_logging_board.py). Its writer: `save_rollout_data_for_rl_logging_board` of OpenRLHF's pull request 658 (read
without its commit), called for each experience of a step, whose sequences are padded as a batch; padding has
log-probabilities too.

    PYTHONPATH=tests python tests/support/writers/write_rl_logging_board.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.writers.sampled import EOS, STEPS, Sample

SPECIAL = {0: "<pad>", EOS: "<eos>"}


def write_rl_logging_board(out: Path) -> Path:
    """rl_logging_board_data.jsonl; a batch for each prompt."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "rl_logging_board_data.jsonl").open("w") as file:
        for step, groups in enumerate(STEPS, start=1):
            width = max(len(group[0].prompt) for group in groups)
            for group in groups:
                longest = max(len(sample.response) for sample in group)
                for sample in group:
                    row = columns(sample, width - len(sample.prompt), longest - len(sample.response))
                    file.write(json.dumps(row | {"step": step}, ensure_ascii=False) + "\n")
    return out


def columns(sample: Sample, before: int, behind: int) -> dict[str, Any]:
    filled = [-3.0] * behind
    response = sample.response + [0] * behind
    return {
        "prompt": decode([0] * before + sample.prompt),
        "response": decode(response),
        "response_tokens": [decode([token]) for token in response],
        "logprobs": sample.trainer + filled,
        "ref_logprobs": [value - 0.5 for value in sample.trainer] + filled,
        "values": [0.25] * len(response),
        "token_rewards": [0.0] * (len(response) - 1) + [sample.reward],
        "reward": sample.reward,
    }


def decode(ids: list[int]) -> str:
    return " ".join(SPECIAL.get(i, f"w{i}") for i in ids)


if __name__ == "__main__":
    write_rl_logging_board(Path(sys.argv[1]) / "rl_logging_board")
