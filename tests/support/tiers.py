"""Which cases of a long list `make test` runs; `make test-all` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrization: every step-th is in `make test`, from the first one on."""
    return [case if place % step == 0 else _dear(case) for place, case in enumerate(cases)]


def _dear(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.all)
