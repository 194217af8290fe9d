"""Count lines of code by room, without blank lines, comments and docstrings.

    python analyses/benchmarks/code_lines.py [REPOSITORY]

A room is a folder of gradscope/, analyses/ or tests/; files outside these folders count under the parent's name.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Return how many lines of the source hold code.

    >>> code_lines('"Says what it does."\\n\\nx = 1  # a number\\n# nothing\\ny = (\\n    2,\\n)\\n')
    4
    """
    strings = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    said = {line for n in strings if isinstance(n.value.value, str) for line in range(n.lineno, n.end_lineno + 1)}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in BLANK]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - said)


def count(repository: Path) -> Counter[str]:
    """Return the lines of code of each room, such as "gradscope/gradients"."""
    lines: Counter[str] = Counter()
    for top in ("gradscope", "analyses", "tests"):
        for path in (p for end in ("py", "pyi") for p in (repository / top).rglob(f"*.{end}")):
            inside = path.relative_to(repository / top).parts
            lines["/".join([top, *inside[:-1][:1]])] += code_lines(path.read_text(encoding="utf-8"))
    return lines


if __name__ == "__main__":
    found = count(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    for room, lines in sorted(found.items()):
        print(f"{lines:>7,}  {room}")
    for top in ("gradscope", "analyses", "tests"):
        print(f"{sum(n for room, n in found.items() if room.split('/')[0] == top):>7,}  {top} together")
