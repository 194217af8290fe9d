"""Notebooks as pages of the site: text, code, and the outputs that they were saved with."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"<p>gradscope-output-(\w+)-(\d+)-(\d+)</p>")
"""Where an output stands in a page until Markdown is done."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """A page for each notebook."""
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        parts = [_cell(cell, path.stem, number) for number, cell in enumerate(_cells(path.stem))]
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content="\n\n".join(filter(None, parts))))
    return files


def on_page_content(html: str, *, page: Page, **_: Any) -> str:
    """Put the outputs in."""
    return PLACE.sub(lambda found: _output(_cells(found[1])[int(found[2])]["outputs"][int(found[3])]), html)


def _cells(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / f"docs/notebooks/{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def _cell(cell: dict[str, Any], name: str, number: int) -> str:
    """A cell as Markdown, with a place for each of its outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    places = [f"gradscope-output-{name}-{number}-{output}" for output in range(len(cell.get("outputs", ())))]
    return "\n\n".join([f"```python\n{source}\n```", *places]) if source else ""


def _output(output: dict[str, Any]) -> str:
    """An output as HTML: its table or viewer, its picture, or its text."""
    data = output.get("data", {})
    if "text/html" in data:
        return f"<div>{''.join(data['text/html'])}</div>"
    if "image/png" in data:
        return f'<img alt="What the code above draws" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    return f"<pre><code>{escape(''.join(data.get('text/plain', output.get('text', ''))))}</code></pre>"
