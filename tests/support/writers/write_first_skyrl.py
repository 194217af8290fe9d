"""A batch as SkyRL's first versions saved them: tensors twice, as torch pickles them and as bytes.

Package: skyrl 0.1.0. Called: `TrainingInputBatch.save` of `skyrl/backends/skyrl_train/training_batch.py`, loaded from
its file, for the package around it wants engines that need a GPU.

    python tests/support/writers/write_first_skyrl.py OUT
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.metadata import files
from pathlib import Path
from types import ModuleType

import torch

NAME = "skyrl.backends.skyrl_train.training_batch"


def main(out: Path) -> None:
    [source] = [path.locate() for path in files("skyrl") if str(path) == NAME.replace(".", "/") + ".py"]
    parts = NAME.split(".")
    for many in range(1, len(parts)):
        sys.modules[".".join(parts[:many])] = ModuleType(parts[many - 1])
    module = sys.modules[NAME] = ModuleType(NAME)
    SourceFileLoader(NAME, str(source)).exec_module(module)
    logprobs = torch.tensor([[-0.5, -0.25, -1.0], [-1.5, -0.75, 0.0]])
    batch = module.TrainingInputBatch(
        {
            "sequences": torch.tensor([[0, 4, 5, 7, 8, 2], [4, 5, 6, 9, 2, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
            "response_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
            "loss_mask": torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]),
            "advantages": torch.tensor([[0.5, 0.5, 0.5], [-0.5, -0.5, 0.0]]),
            "action_log_probs": logprobs.bfloat16(),
            "rollout_logprobs": logprobs,
            "base_action_log_probs": None,
            "values": None,
        }
    )
    batch.metadata = {"response_length": 3, "avg_response_length": 2.5}
    folder = out / "dumped_data"
    folder.mkdir(parents=True, exist_ok=True)
    batch.save(folder / "global_step_7_training_input.pkl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
