"""Would the tests notice a mistake? Mutants of gradscope's lines, drawn by a seed, and the test that kills each.

    python -m tests.support.mutants draw --count 200            writes tests/support/mutants.csv, a row per mutant
    python -m tests.support.mutants kill --column before        runs tests against each, and fills a column

A mutant is one expression of one file, changed by one operator: the sign of a term flipped, a comparison made strict or
not, a constant index or the end of a slice shifted by one, a mask, a clip or a `where` dropped, two plain arguments
swapped. Tests that import the module come first, then those that import what imports it, until one fails or
the time is over: "alive" says that those that were run, SECONDS long at most, passed.

A mutant is found again by its function and its expression, so that code may move between files. The table's column
`after` was filled by those tests that run the mutant's line, as coverage.py recorded them.
"""

from __future__ import annotations

import ast
import csv
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Annotated

import tyro

HERE = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.csv")
SECONDS = 90
"""Of tests for each mutant."""
FIELDS = ("function", "operator", "expression", "mutant", "file")


@dataclass(frozen=True)
class Mutant:
    """One expression, changed."""

    file: str
    """Below the repository, where it was drawn."""
    function: str
    """Class and function that it stands in."""
    operator: str
    expression: str
    """As it stands in the source."""
    mutant: str
    start: int = 0
    """Offset of the expression in the file."""


class _Finder(ast.NodeVisitor):
    """All mutants of a file."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source, self.found, self._scope = file, source, [], []
        lines = [0]
        for line in source.splitlines(keepends=True):
            lines.append(lines[-1] + len(line.encode()))
        self._lines, self._bytes = lines, source.encode()

    def _enter(self, node: ast.AST) -> None:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()

    visit_FunctionDef = visit_ClassDef = visit_AsyncFunctionDef = _enter

    def _text(self, node: ast.AST) -> str:
        start = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[node.end_lineno - 1] + node.end_col_offset
        return self._bytes[start:end].decode()

    def _add(self, node: ast.AST, operator: str, text: str) -> None:
        if self._scope and "\n" not in (before := self._text(node)) and text != before:
            start = len(self._bytes[: self._lines[node.lineno - 1] + node.col_offset].decode())
            self.found.append(Mutant(self.file, ".".join(self._scope), operator, before, text, start))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        left, right = self._text(node.left), self._text(node.right)
        if isinstance(node.op, ast.Add | ast.Sub) and not isinstance(node.right, ast.Constant | ast.JoinedStr):
            sign = "-" if isinstance(node.op, ast.Add) else "+"
            self._add(node, "sign", f"{left} {sign} {right}")
        if isinstance(node.op, ast.BitAnd) or (isinstance(node.op, ast.Mult) and "mask" in right):
            self._add(node, "drop mask", left)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self._add(node, "sign", self._text(node.operand))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        turned = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
        if len(node.ops) == 1 and (sign := turned.get(type(node.ops[0]))):
            self._add(node, "comparison", f"{self._text(node.left)} {sign} {self._text(node.comparators[0])}")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        value, index = self._text(node.value), node.slice
        if isinstance(index, ast.Constant) and isinstance(index.value, int) and isinstance(node.ctx, ast.Load):
            self._add(node, "index", f"{value}[{index.value + 1}]")
        if isinstance(index, ast.Slice) and index.step is None and (index.lower or index.upper):
            lower, upper = (self._text(end) if end else "" for end in (index.lower, index.upper))
            ends = (f"{lower}:{upper} + 1") if upper else (f"{lower} + 1:")
            self._add(node, "slice", f"{value}[{ends}]")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = self._text(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if name == "where" and len(node.args) == 3:
            self._add(node, "drop where", self._text(node.args[1]))
        elif name in ("clamp", "clip") and owner not in ("np", "torch"):
            self._add(node, "drop clip", owner)
        elif name in ("clip", "clamp", "minimum", "maximum") or (
            not owner and name in ("min", "max") and len(node.args) > 1
        ):
            self._add(node, "drop clip", self._text(node.args[0]))
        elif len(node.args) > 1 and all(isinstance(a, ast.Name) for a in node.args[:2]) and not node.keywords:
            texts = [self._text(a) for a in node.args]
            texts[:2] = texts[1], texts[0]
            self._add(node, "swap arguments", f"{self._text(node.func)}({', '.join(texts)})")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        """Annotations and defaults are no place for mutants."""


def find_mutants(root: Path) -> list[Mutant]:
    """Every mutant there is, in the order of files and lines."""
    found = []
    for path in sorted((root / "gradscope").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        finder = _Finder(str(path.relative_to(root)), source)
        finder.visit(ast.parse(source))
        found += finder.found
    return found


def place_of(root: Path, row: dict[str, str], everything: list[Mutant]) -> Mutant | None:
    """Where a drawn mutant is now: in its file, else wherever its function's name and its expression are."""
    alike = [m for m in everything if (m.operator, m.expression, m.mutant) == tuple(row[f] for f in FIELDS[1:4])]
    name = row["function"].rpartition(".")[2]
    near = [m for m in alike if m.function.rpartition(".")[2] == name] or alike
    return next((m for m in near if m.file == row["file"]), near[0] if near else None)


def order_tests(root: Path, module: str) -> list[str]:
    """Test files that import a module, then those that import what imports it, and so on."""
    uses: dict[str, set[str]] = defaultdict(set)
    names = {_name(root, path): path for path in (root / "gradscope").rglob("*.py")}
    for name, path in names.items():
        for imported in _imports(path):
            if imported in names:
                uses[imported].add(name)
    tests = {path: _imports(path) for path in sorted((root / "tests").rglob("test_*.py"))}
    reached, ring, out = {module}, {module}, []
    while ring:
        out += [str(p.relative_to(root)) for p, imported in tests.items() if imported & ring and str(p) not in out]
        ring = {user for name in ring for user in uses[name]} - reached
        reached |= ring
    return list(dict.fromkeys(out))


def _name(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def kill(tree: Path, row: dict[str, str], seconds: float) -> str:
    """The first test that fails on a mutant; "alive", or "gone" where its expression is no more."""
    found = place_of(tree, row, find_mutants(tree))
    if found is None:
        return "gone"
    path = tree / found.file
    source = path.read_text(encoding="utf-8")
    changed = source[: found.start] + found.mutant + source[found.start + len(found.expression) :]
    path.write_text(changed, encoding="utf-8")
    own = {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    tests = order_tests(tree, _name(tree, path))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        *tests,
    ]
    process = subprocess.Popen(
        command, cwd=tree, env=os.environ | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said = process.communicate()[0]
    finally:
        path.write_text(source, encoding="utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said or "", re.MULTILINE)
    return failed[1] if failed else "alive"


@dataclass(frozen=True)
class Draw:
    """Draw mutants, alike from every file with any."""

    count: int = 200
    seed: int = 0

    def run(self) -> None:
        by_file, chosen = defaultdict(list), []
        rng = random.Random(self.seed)
        for mutant in find_mutants(HERE):
            by_file[mutant.file].append(mutant)
        for own in by_file.values():
            rng.shuffle(own)
        files = sorted(by_file)
        while len(chosen) < self.count and files:
            rng.shuffle(files)
            chosen += [by_file[file].pop() for file in files][: self.count - len(chosen)]
            files = sorted(file for file in files if by_file[file])
        rows = sorted(({f: getattr(m, f) for f in FIELDS} for m in chosen), key=lambda row: tuple(row.values()))
        _write(rows)


@dataclass(frozen=True)
class Kill:
    """Run tests against each mutant of the table, and write which one kills it into a column."""

    column: Annotated[str, tyro.conf.arg(help_behavior_hint="")] = "before"
    seconds: float = SECONDS
    jobs: int = 2

    def run(self) -> None:
        rows, trees = _read(), Queue()
        with tempfile.TemporaryDirectory() as scratch:
            git = ["git", "-C", str(HERE), "worktree"]
            places = [Path(scratch) / str(job) for job in range(self.jobs)]
            try:
                for place in places:
                    subprocess.run([*git, "add", "--detach", "--quiet", str(place), "HEAD"], check=True)
                    trees.put(place)

                def one(row: dict[str, str]) -> None:
                    if row.get(self.column):
                        return
                    tree = trees.get()
                    row[self.column] = kill(tree, row, self.seconds)
                    trees.put(tree)
                    print(
                        f"{row['file']} {row['function']}: {row['expression']} -> {row['mutant']}: {row[self.column]}",
                        flush=True,
                    )
                    _write(rows)

                with ThreadPoolExecutor(self.jobs) as pool:
                    list(pool.map(one, rows))
            finally:
                for place in places:
                    subprocess.run([*git, "remove", "--force", str(place)], check=False)


def _read() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _write(rows: list[dict[str, str]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    tyro.cli(Draw | Kill, description=__doc__, config=(tyro.conf.OmitSubcommandPrefixes,)).run()
