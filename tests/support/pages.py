"""Checkpoints and rollouts for the tests of `gradscope diagnose`, and what a finished page must hold."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pandas as pd

from support.policies import make_policy, make_responses, write_jsonl

COLUMNS = ("prompt_ids", "response_ids", "group", "reward", "old_logprobs", "response_mask")
BRIEF = (
    "--no-compare",
    "--no-actual-step",
    "--influence-tokens",
    "none",
    "--no-self-check",
    "--device",
    "cpu",
)
"""Without the parts that take longest."""


def native_rows(**changes: object) -> list[dict]:
    """Six responses of tiny's qwen2 to three prompts; changes: columns of every row."""
    responses = make_responses(make_policy("qwen2"))
    return [{name: getattr(r, name) for name in COLUMNS} | changes for r in responses]


def write_rows(path: Path, rows: list[dict] | None = None, **changes: object) -> Path:
    return write_jsonl(path, native_rows(**changes) if rows is None else rows)


INLINE = ("span", "a")


class Reader(HTMLParser):
    """Tags, attributes and visible text of a page, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.words.append("" if tag in INLINE else " ")

    def handle_endtag(self, tag):
        self.words.append("" if tag in INLINE else " ")

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("script", "style"):
            self.scripts += [data] if self.tags[-1] == "script" else []
        else:
            self.words.append(data)


def read_page(out: Path) -> Reader:
    return Reader((out / "report.html").read_text(encoding="utf-8"))


def read_statistics(out: Path) -> pd.DataFrame:
    return pd.read_csv(out / "data" / "statistics.csv", keep_default_na=False, na_values={"value": "", "lower": ""})


def value(statistics: pd.DataFrame, statistic: str, metric: str = "raw") -> list[float]:
    """Of each interval, in their order."""
    own = statistics[(statistics["statistic"] == statistic) & (statistics["metric"] == metric)]
    return own.loc[own["interval"] != "all", "value"].astype(float).tolist()
