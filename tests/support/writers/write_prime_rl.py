"""prime-rl's token exports and the annotations of its traces, made here from its source.

github.com/PrimeIntellect-ai/prime-rl at 559b44772e471d1538537b8805cc77f3824a5e64, 2026-08-21: `TokenExporter` in
src/prime_rl/trainer/rl/token_export.py, `shift_tensor_right` and the parts of the loss in loss.py beside it. Traces:
write_verifiers.py; what is added to them: `_effective_update` of src/prime_rl/monitors/file.py and
`TraceAnnotationWriter` of the trainer, in a later state of the repository (read without its commit).

    PYTHONPATH=tests python tests/support/writers/write_prime_rl.py OUT
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from support.writers.sampled import STEPS, Sample, flat

VOCAB = 96
MASKED_BEYOND = 0.2


def write_prime_rl(out: Path) -> Path:
    """token_exports/step_{n}/rank_{r}.jsonl of two ranks; the last step's folder has no STABLE yet.

    The second rank's micro-batch of the second step trains its last sample by cross-entropy alone, and one token of
    another at half the weight. A sequence without a trained token is never written.
    """
    for step in range(len(STEPS)):
        folder = out / "token_exports" / f"step_{step + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        for rank in (0, 1):
            with (folder / f"rank_{rank}.jsonl").open("w") as file:
                written = 0
                for at in range(3 * rank, 3 * rank + 3):
                    sample = flat(step)[at]
                    if sample.dropped or not sample.response:
                        continue
                    place = {"micro_step": 0, "micro_sequence_idx": at % 3, "export_sequence_idx": written}
                    weights = _weights(sample, at) if (step, rank) == (1, 1) else (None, None)
                    columns = _columns(sample, _advantage(step, at), *weights)
                    scalars = {"schema_version": 1, "step": step + 1, "rank": rank, **place, "env_name": "math"}
                    file.write(json.dumps(scalars | columns, separators=(",", ":"), allow_nan=False) + "\n")
                    written += 1
        (folder / "STABLE").touch()
    unfinished = out / "token_exports" / f"step_{len(STEPS) + 1}"
    unfinished.mkdir(exist_ok=True)
    (unfinished / "rank_0.jsonl").write_text((out / "token_exports" / "step_1" / "rank_0.jsonl").read_text())
    return out / "token_exports"


def _advantage(step: int, at: int) -> float:
    return flat(step)[at].reward - fmean(one.reward for one in STEPS[step][at // 3])


def _weights(sample: Sample, at: int) -> tuple[list[float], list[float]]:
    """Streams of the policy gradient and of cross-entropy, a number per token of the sequence."""
    before, length = len(sample.prompt), len(sample.prompt + sample.response)
    if at == 5:
        return [0.0] * length, [0.0] * before + [1.0] * len(sample.response)
    rl = [0.0] * before + [1.0] * len(sample.response)
    if at == 3:
        rl[-1] = 0.5
    return rl, [0.0] * length


def _columns(sample: Sample, advantage: float, rl: list[float] | None, ce: list[float] | None) -> dict[str, list[Any]]:
    before, length = len(sample.prompt), len(sample.prompt + sample.response)
    # Shifted right: the first token has the uniform distribution's numbers.
    trainer = [math.log(1 / VOCAB)] + [-3.0] * (before - 1) + sample.trainer
    entropy = [math.log(VOCAB)] + [3.0] * (before - 1) + sample.entropy
    sampler, mask = [0.0] * before + sample.sampler, [False] * before + [keep == 1 for keep in sample.mask]
    moved = [math.exp(own) - math.exp(said) for own, said in zip(trainer, sampler, strict=True)]
    wrong = [d > MASKED_BEYOND if advantage > 0 else d < -MASKED_BEYOND for d in moved]
    masked = [keep and bad for keep, bad in zip(mask, wrong, strict=True)]
    log_ratio = [own - said for own, said in zip(trainer, sampler, strict=True)]
    ratio = [math.exp(value) for value in log_ratio]
    return {
        "token_ids": sample.prompt + sample.response,
        "position_ids": [*range(length)],
        "loss_mask": mask,
        "advantages": [advantage] * length,
        "inference_logprobs": sampler,
        "trainer_logprobs": trainer,
        "entropy": entropy,
        "mismatch_kl": [r - log - 1 for r, log in zip(ratio, log_ratio, strict=True)],
        "log_importance_ratio": log_ratio,
        "importance_ratio": ratio,
        "prob_delta": moved,
        "is_masked": masked,
        "is_masked_high": masked if advantage > 0 else [False] * length,
        "is_masked_low": masked if advantage < 0 else [False] * length,
        "rl_weights": [None] * length if rl is None else rl,
        "ce_weights": [None] * length if ce is None else ce,
        "ref_kl_weights": [None] * length,
    }


if __name__ == "__main__":
    write_prime_rl(Path(sys.argv[1]))
