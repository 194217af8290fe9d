"""The key of a run's folder, all that decides its numbers, and its manifest, all that it was made with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from gradscope import __version__
from gradscope.errors import InputError
from gradscope.gradients import describe_reread
from gradscope.policy import Policy, policy_hashes, precision_in_words
from gradscope.rollouts import READER, Dump
from gradscope.runs import RunFolder, file_hash, provenance


def make_key(policy: Policy, **asked: Any) -> dict[str, Any]:
    """The key of a run: gradscope's version, the policy (an adapter with its base), its precision, what was asked."""
    return {
        "gradscope": __version__,
        **policy_hashes(policy),
        "dtype": precision_in_words(policy.model),
        "device": policy.device.type,
        **asked,
    }


def make_manifest(model: str, policy: Policy, key: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """manifest.json of a run with a policy: who made it, from which files by their hashes, how, and other facts."""
    base = None if policy.base is None else {"path": policy.base, "sha256": key["base_model"]}
    return {
        **provenance(),
        "model": {"path": model, "class": type(policy.model).__name__, "sha256": key["model"]},
        "base_model": base,
        "params": policy.params,
        "dtype": key["dtype"],
        "device": str(policy.device),
        **facts,
    }


def own_weightings(methods: Iterable[str]) -> list[str]:
    """Hashes of the user's files among weightings, FILE.py:NAME[:key=value,…]."""
    return [file_hash(Path(method.rpartition(".py:")[0] + ".py")) for method in methods if ".py:" in method]


def describe_dump(path: Path, dump: Dump, sha256: str) -> dict[str, Any]:
    """The rollouts in a manifest: which file, as which format it was read, and what a reader must know of it."""
    step = next((note for note in dump.notes if note.kind in ("step", "other-step")), None)
    other = any(note.kind == "other-step" for note in dump.notes)
    told = {"path": str(path), "sha256": sha256, "format": dump.format, "reader": READER, "notes": list(dump.notes)}
    return told | {"step_note": step, "other_step": other}


def refuse_reread(folder: RunFolder, dumps: Sequence[Dump], *, table: str | None = None) -> None:
    """InputError where the folder's run is of the same files and settings, which an earlier reader took otherwise.

    table: name of the token table in the folder, if it has one, of which can be told what was taken otherwise.
    """
    manifest = folder.manifest or {}
    earlier, now = (
        {name: value for name, value in key.items() if name not in ("read", "gradscope")}
        for key in (manifest.get("key", {}), folder.key)
    )
    read = manifest.get("key", {}).get("read")
    if earlier != now or read == folder.key["read"]:
        return
    told, path = "", None if table is None else folder.folder / table
    if path is not None and path.is_file():
        told = describe_reread(pd.read_parquet(path, columns=["group"]), dumps[0].batch)
    raise InputError(
        f"{folder.folder} was made of these rollouts by an earlier reader, which {told or 'took them otherwise'}; what "
        "it says may be wrong: --overwrite makes it anew, or give another --out"
    )
