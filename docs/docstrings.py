"""Docstrings of gradscope as Markdown: a line such as `batch: what was sampled` becomes an entry of a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMES = r"\*{0,2}[A-Za-z_][A-Za-z0-9_]*"
PARAMETER = re.compile(rf"({NAMES}(?:, {NAMES})*): (?=\S)")
SECTIONS = ("Args:", "Returns:", "Yields:", "Raises:", "Attributes:", "Example:", "Examples:")


class ParametersAsLists(griffe.Extension):
    """Rewrites docstrings as they are collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Every object that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Parameters and sections such as `Args:` as lists, doctests as code; the rest is Markdown already.

    >>> print(to_markdown("What it does.\\n\\npath: a file, or\\n    a folder.\\nseed: draws."))
    What it does.
    <BLANKLINE>
    - `path`: a file, or a folder.
    - `seed`: draws.
    >>> print(to_markdown("Args:\\n    path: a file, or\\n        a folder.\\n\\nReturns:\\n    A row per token."))
    **Args:**
    <BLANKLINE>
    - `path`: a file, or a folder.
    <BLANKLINE>
    **Returns:** A row per token.
    """
    return "\n\n".join(filter(None, map(_paragraph, text.split("\n\n"))))


def _paragraph(text: str) -> str:
    lines = text.strip("\n").splitlines()
    if lines and lines[0].startswith(">>> "):
        return "```pycon\n" + "\n".join(lines) + "\n```"
    if lines and lines[0] in SECTIONS:
        return _section(lines[0], lines[1:])
    if lines and lines[0].startswith("    "):  # an example: a block of code
        return "```python\n" + "\n".join(line.removeprefix("    ") for line in lines) + "\n```"
    return _entries(lines)


def _section(head: str, lines: list[str]) -> str:
    """A section whose lines are indented: a list, or a sentence or two."""
    body = _entries([line.removeprefix("    ") for line in lines])
    return f"**{head}**" + ("\n\n" if body.startswith("- ") else " ") + body


def _entries(lines: list[str]) -> str:
    """Lines such as `batch: what was sampled` as entries, with those below that go on; others as they are."""
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
