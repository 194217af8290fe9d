"""torchtitan's own rollout_samples.jsonl, of rollouts that are made here.

Package: torchtitan 0.3.0 (its recorder is that of b5bcd76c66d0acb1a08b176d9639425bc55e0b2a, 2026-08-21). Called, of
torchtitan/experiments/rl: `RolloutSampleRecorder`, `AdvantageEstimator` and `TrainingSampleBuilder`, whose samples
`truth.json` holds. Importing their packages whole would need vLLM and Monarch: these are left out.

    PYTHONPATH=tests python tests/support/writers/write_torchtitan.py OUT ids|text
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

from support.writers.sampled import EOS, STEPS, Sample, words

PACKAGE = "torchtitan.experiments.rl"


def package(name: str, folder: Path) -> ModuleType:
    """A package of this folder whose __init__ is not run."""
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = [str(folder)]
    return module


package("renderers", Path(".")).Message = dict
folder = Path(importlib.util.find_spec("torchtitan").origin).parent / "experiments" / "rl"
package(PACKAGE, folder)
for name in ("components", "observability", "observability.metrics"):
    package(f"{PACKAGE}.{name}", folder / name.replace(".", "/"))
metrics = importlib.import_module(f"{PACKAGE}.observability.metrics.types")
vars(sys.modules[f"{PACKAGE}.observability.metrics"]).update(vars(metrics))

from torchtitan.experiments.rl.components.training_sample_builder import TrainingSampleBuilder  # noqa: E402
from torchtitan.experiments.rl.rollout import Rollout, RolloutGroup, RolloutStatus, RolloutTurn  # noqa: E402
from torchtitan.experiments.rl.rollout.advantage import AdvantageEstimator  # noqa: E402
from torchtitan.experiments.rl.rollout_recorder import KeepExtremeRewardsFilter, RolloutSampleRecorder  # noqa: E402
from torchtitan.experiments.rl.types import RolloutTurnID  # noqa: E402


def turns(sample: Sample, group: int, index: int, version: int) -> list[RolloutTurn]:
    """Two where a tool answered, whose output the second prompt holds; an empty answer is an end without log π."""
    response, sampler = sample.response or [EOS], sample.sampler or [math.nan]
    mask = sample.mask or [1]
    edges = [at for at in range(len(mask) + 1) if [*mask, 0][at] != [0, *mask][at]]
    return [
        RolloutTurn(
            rollout_id=RolloutTurnID(group_id=group, rollout_id=index, turn_id=number),
            prompt_token_ids=sample.prompt + response[:start],
            completion_token_ids=response[start:end],
            completion_logprobs=sampler[start:end],
            min_policy_version=version + (number > 0),
            max_policy_version=version + (number > 0),
            prompt_messages=[{"role": "user", "content": words(sample.prompt)}],
            completion_message={"role": "assistant", "content": words(response[start:end])},
            env_messages=[],
        )
        for number, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=True))
    ]


def made(samples: list[Sample], group: int, version: int) -> RolloutGroup:
    status = {"stop": RolloutStatus.COMPLETED, "length": RolloutStatus.TRUNCATED_LENGTH}
    rollouts = [
        Rollout(
            group_id=group,
            rollout_id=index,
            turns=turns(sample, group, index, version),
            status=status[sample.end],
            reward=sample.reward,
            reward_breakdown={"right": sample.reward},
        )
        for index, sample in enumerate(samples)
    ]
    out = RolloutGroup(group_id=group, rollouts=rollouts)
    for rollout, advantage in zip(rollouts, AdvantageEstimator.Config().build()(out), strict=True):
        rollout.advantage = advantage
    return out


def main(out: Path, kind: str) -> None:
    opted = {"log_tensors": kind == "ids", "log_logprobs": kind == "ids"}
    config = RolloutSampleRecorder.Config(filter=KeepExtremeRewardsFilter.Config(k=2), **opted)
    recorder, truth = config.build(dump_dir=str(out)), []
    recorder.record(is_validation=True, rollout_groups=[made(STEPS[0][1], -1, 0)])
    for step, groups in enumerate(STEPS):
        for number, samples in enumerate(groups):
            group = made(samples, 2 * step + number, step)
            recorder.record(is_validation=False, rollout_groups=[group])
            for sample in TrainingSampleBuilder.Config().build().build_from_group(rollout_group=group).training_samples:
                known = {"step": step, "group": group.group_id, "token_ids": sample.token_ids}
                known |= {"loss_mask": sample.loss_mask, "advantage": sample.advantage}
                truth.append(known | {"logprobs": [v if math.isfinite(v) else None for v in sample.logprobs]})
    lines = ",\n".join(json.dumps(row) for row in truth)
    (out / "truth.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
