"""One HTML file that fetches nothing: findings, sections with figures and tables, and a viewer of tokens."""

from gradscope.diagnosis.page.page import (
    Block,
    Definition,
    Figure,
    Finding,
    Formula,
    Links,
    Page,
    Paragraph,
    Section,
    Table,
)
from gradscope.diagnosis.page.render import write_page
from gradscope.diagnosis.page.viewer import QUANTITIES, Quantity, Viewer, prompt_texts

__all__ = [
    "QUANTITIES",
    "Block",
    "Definition",
    "Figure",
    "Finding",
    "Formula",
    "Links",
    "Page",
    "Paragraph",
    "Quantity",
    "Section",
    "Table",
    "Viewer",
    "prompt_texts",
    "write_page",
]
