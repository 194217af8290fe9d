"""Docstrings of gradscope as Markdown: a line such as `batch: what was sampled` becomes an entry of a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMES = r"[a-z_][A-Za-z0-9_]*"
PARAMETER = re.compile(rf"({NAMES}(?:, {NAMES})*): (?=\S)")
DOCTEST = re.compile(r"((?:^>>> .*\n?(?:^(?!\n).+\n?)*)+)", re.M)


class ParametersAsLists(griffe.Extension):
    """Rewrites docstrings as they are collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Every object that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Parameters as a list, doctests as code; the rest is Markdown already.

    >>> print(to_markdown("What it does.\\n\\npath: a file, or\\n    a folder.\\nseed: draws."))
    What it does.
    <BLANKLINE>
    - `path`: a file, or a folder.
    - `seed`: draws.
    """
    return "\n\n".join(filter(None, map(_paragraph, text.split("\n\n"))))


def _paragraph(text: str) -> str:
    lines = text.strip("\n").splitlines()
    if lines and lines[0].startswith(">>> "):
        return "```pycon\n" + "\n".join(lines) + "\n```"
    if lines and lines[0].startswith("    "):  # an example: a block of code
        return "```python\n" + "\n".join(line.removeprefix("    ") for line in lines) + "\n```"
    out: list[str] = []
    inside = False
    for line in lines:
        found = PARAMETER.match(line)
        if found:
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            if out and not inside:
                out.append("")
            out.append(f"- {names}: {line[found.end() :]}")
            inside = True
        elif inside:
            out[-1] += " " + line.strip()
        else:
            out.append(line)
    return "\n".join(out)
