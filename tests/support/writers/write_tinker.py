"""Native rows of Tinker's datums, by the recipe of docs/formats/native.md.

Package: tinker 0.38.0, whose own Datum, ModelInput and TensorData are filled here as `trajectory_to_data` and
`assemble_training_data` of tinker_cookbook/rl/data_processing.py fill them (tinker-cookbook 0.6.1, and
9dfcc3a2cf44432d621a01005073dc6d76a1e87a, 2026-08-19).

    PYTHONPATH=tests python tests/support/writers/write_tinker.py OUT
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from support.writers.sampled import STEPS, Sample
from tinker import Datum, EncodedTextChunk, ModelInput, TensorData

PAGE = Path(__file__).parents[3] / "docs" / "formats" / "native.md"


def datum(sample: Sample, advantage: float) -> Datum:
    """Targets are one token ahead of the input; 0 stands at what nobody sampled, or was masked after an error."""
    before, mask = [0.0] * len(sample.prompt), [0.0 if sample.dropped else float(keep) for keep in sample.mask]
    tokens = sample.prompt + sample.response
    lists = {
        "logprobs": (before + sample.sampler)[1:],
        "advantages": (before + [advantage * keep for keep in mask])[1:],
        "mask": (before + mask)[1:],
    }
    inputs = {name: TensorData(data=values, dtype="float32") for name, values in lists.items()}
    inputs["target_tokens"] = TensorData(data=tokens[1:], dtype="int64")
    return Datum(model_input=ModelInput(chunks=[EncodedTextChunk(tokens=tokens[:-1])]), loss_fn_inputs=inputs)


def recipe() -> Any:
    """The page's function; rows go into a file here, without gradscope."""
    gradscope, rollouts = ModuleType("gradscope"), ModuleType("gradscope.rollouts")
    rollouts.write_rollouts = lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sys.modules |= {"gradscope": gradscope, "gradscope.rollouts": rollouts}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    space: dict[str, Any] = {}
    exec(next(block for block in blocks if "def write_datums" in block), space)
    return space["write_datums"]


def main(out: Path) -> None:
    write_datums, truth = recipe(), []
    for step, groups in enumerate(STEPS, start=1):
        data, metadata = [], []
        for number, group in enumerate(groups):
            mean = fmean(sample.reward for sample in group)
            for index, sample in enumerate(group):
                advantage = sample.reward - mean
                data.append(datum(sample, advantage))
                metadata.append({"group_idx": number, "traj_idx": index})
                known = {"step": step, "group": [step, number], "prompt_ids": sample.prompt}
                known |= {"response_ids": sample.response, "advantage": advantage, "old_logprobs": sample.sampler}
                truth.append(known | {"response_mask": [] if sample.dropped else sample.mask})
        write_datums(out / f"rollouts_step_{step}.jsonl", data, metadata, step)
    lines = ",\n".join(json.dumps(row) for row in truth)
    (out / "truth.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    main(Path(sys.argv[1]))
