"""A diagnosis as plain data: diagnosis.json beside the page."""

from __future__ import annotations

from typing import Any

import pandas as pd

from gradscope import __version__
from gradscope.diagnosis.findings import Finding
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import COLUMNS
from gradscope.runs import plain_json

FILE = "diagnosis.json"


def to_json(found: Diagnosis) -> dict[str, Any]:
    """Return the findings with their numbers, all numbers, notes and what is left out; what is NaN is null.

    Keys: gradscope (the version); scope (prompts, responses, tokens, and of how many); findings, most important first
    (kind, verdict, statement, detail, next, and numbers: rows of statistics); next (what to do, most urgent first);
    statistics (rows with the columns of `rows.COLUMNS`); notes (kind, text); left_out (product or part → why).
    """
    supply, table = found.scope.supply, found.table
    scope = {"prompts": supply.prompts, "informative_prompts": supply.informative, "of_prompts": found.scope.of_prompts}
    scope |= {"responses": supply.responses, "summed_prompts": found.scope.summed}
    scope |= {"tokens": None if table is None else len(table), "of_tokens": found.scope.of_tokens}
    return plain_json(
        {
            "gradscope": __version__,
            "scope": scope,
            "findings": [_describe(found, finding) for finding in found.findings],
            "next": list(found.advice),
            "statistics": _records(found.statistics),
            "notes": [{"kind": getattr(note, "kind", ""), "text": str(note)} for note in found.notes],
            "left_out": dict(found.left_out),
        }
    )


def _describe(found: Diagnosis, finding: Finding) -> dict[str, Any]:
    rows = [row for key in finding.about if (row := found.pick(*key)) is not None]
    told = {"kind": finding.kind, "verdict": str(finding.verdict), "statement": finding.statement}
    numbers = _records(pd.DataFrame(rows)) if rows else []
    return told | {"detail": finding.detail, "next": finding.next, "numbers": numbers}


def _records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    shown = rows[COLUMNS].astype(object)
    return shown.where(shown.notna(), None).to_dict("records")
