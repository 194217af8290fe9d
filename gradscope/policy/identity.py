"""The key and manifest of a run with a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradscope import __version__
from gradscope.policy.checkpoint import policy_hashes
from gradscope.policy.policy import Policy
from gradscope.policy.upcasting import precision_in_words
from gradscope.runs import provenance


def make_key(policy: Policy, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Make the key of a run: gradscope's version, hashes (including an adapter's base), precision, settings."""
    return {
        "gradscope": __version__,
        **policy_hashes(policy),
        "dtype": precision_in_words(policy.model),
        "device": policy.device.type,
        **asked,
    }


def make_manifest(model: str, policy: Policy, key: dict[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Make the manifest of a run: versions, file hashes, precision, device, and other facts."""
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
