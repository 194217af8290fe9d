"""The house: a room imports rooms above it in one list, by their doors, and no chain of imports is long.

Functions take few parameters, and public ones only such as have a type.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import gradscope

ROOMS = (
    *("errors", "resampling", "intervals", "runs", "tasks", "policy", "rollouts", "sampling", "objective", "trainer"),
    *("gradients", "theory", "updates", "plots", "diagnosis", "integrations", "cli", "embedded"),
)
"""A room imports those that stand before it in this list, and nothing else of the package."""
OPEN = {
    "cli": {"pages"},
    "diagnosis": {"plots"},
    "tasks": {"data", "knights_knaves", "knights_knaves_wording", "math", "word_problems"},
    "integrations": {"trl", "verl", "verl_engine"},
}
"""Files that a room shows as they are: other programs import them by name, or the door must stay light."""
DRIVING = {
    *("backward", "vmap", "functional_call", "micro_batches", "kept_logprobs", "kept_numbers", "loss_logprobs"),
    *("stream_gradients", "add_gradients", "changes_along", "differentiable", "vector_bytes", "zero_vectors"),
    *("free_memory", "gradient_budget", "autograd"),
}
NAMES = ast.Attribute | ast.Name
DIFFERENTIATES = {"rollouts/batch.py", "sampling/hf.py", "integrations/trl/batch.py"}
"""What a batch's micro-batches are, and TRL's own; responses sampled together."""
EQUATIONS = ("objective/equations.py", "gradients/engine/decoder/")
"""Whose functions may have as many parameters as the equation has symbols."""
MOST = 8
"""Parameters of any other function."""
LONGEST = 15
"""Files in a chain of imports; a name that a door hands on counts as the file that defines it."""


def test_the_package_keeps_its_house(repository):
    assert complaints(repository / "gradscope") == []


def test_products_with_the_jacobian_are_driven_by_gradients_alone(repository):
    """Elsewhere nobody differentiates, cuts a batch into pieces or asks about memory."""
    for path in sorted((repository / "gradscope").rglob("*.py")):
        name = path.relative_to(repository / "gradscope").as_posix()
        if name.split("/")[0] not in ("gradients", "objective", "trainer", "policy") and name not in DIFFERENTIATES:
            tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            used = {getattr(node, "attr", getattr(node, "id", None)) for node in tree if isinstance(node, NAMES)}
            assert used & DRIVING == set(), name


def test_scripts_enter_by_doors(repository):
    """Benchmarks measure parts, and may take them from where they are."""
    package, scripts = House(repository / "gradscope"), []
    for path in sorted((repository / "analyses").rglob("*.py")):
        if "benchmarks" not in path.parts:
            scripts += [f"{path.name}: {words}" for words in package.trespasses(path, room=None)]
    assert scripts == []


def test_no_test_imports_another(repository):
    for path in sorted((repository / "tests").rglob("*.py")):
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = [getattr(n, "module", None) or n.names[0].name for n in nodes]
        assert not [name for name in names if name.split(".")[-1].startswith("test_")], path


def test_every_test_file_has_a_name_of_its_own(repository):
    names = [path.name for path in (repository / "tests").rglob("test_*.py")]  # else pytest takes one for the other
    assert sorted(names) == sorted(set(names))


def test_no_submodule_bears_the_name_of_a_public_function(repository):
    functions = {name for name in gradscope.__all__ if name not in ROOMS}
    assert functions.isdisjoint(path.stem for path in (repository / "gradscope").iterdir())


def test_an_import_from_a_lower_room_is_named(tmp_path):
    write(tmp_path, {"rollouts/batch.py": "def f():\n    import gradscope.cli", "cli/__init__.py": ""})
    assert complaints(tmp_path) == ["rollouts.batch imports cli, which stands below rollouts"]


def test_functions_take_few_parameters_with_a_type(repository):
    assert crowded(repository / "gradscope") == []


def test_a_crowded_function_and_loose_keywords_are_named(tmp_path):
    many = "def f(a, b, /, c, d, *, e, f, g, h, i): ...\nclass C:\n    def __init__(self, a, b, c, d, e, f, g, h): ..."
    loose = "def f(**settings: object): ...\ndef _f(**settings): ...\nclass C:\n    def g(self, **keywords: Any): ..."
    write(tmp_path, {"plots/many.py": many, "plots/loose.py": loose, "objective/equations.py": many})
    assert crowded(tmp_path) == ["plots/loose.py: f", "plots/loose.py: g", "plots/many.py: f"]


def crowded(package: Path) -> list[str]:
    """Functions with more than MOST parameters, and public ones that take keywords of any name and type.

    A task's options are its own; a keyword argument called `_` is not looked at.
    """
    found = []
    for path in sorted(package.rglob("*.py")):
        name, tree = path.relative_to(package).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        public = [*tree.body, *(inner for node in tree.body if isinstance(node, ast.ClassDef) for inner in node.body)]
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or name.startswith(EQUATIONS):
                continue
            own, rest = node.args, node.args.kwarg
            given = {each.arg for each in (*own.posonlyargs, *own.args, *own.kwonlyargs)} - {"self", "cls"}
            loose = rest and rest.arg != "_" and not name.startswith("tasks/")
            loose = loose and (rest.annotation is None or ast.unparse(rest.annotation) in ("Any", "object"))
            if len(given) > MOST or (loose and node in public and not node.name.startswith("_")):
                found.append(f"{name}: {node.name}")
    return found


class House:
    """A package's files, what is at each room's door, and who imports what."""

    def __init__(self, package: Path) -> None:
        paths = [path for path in sorted(package.rglob("*.py")) if path.stem != "__main__"]
        self.files = {name_of(path.relative_to(package)): path for path in paths}
        self.doors = {room: self._door(room) for room in {name.partition(".")[0] for name in self.files} - {""}}

    def _door(self, room: str) -> dict[str, str]:
        """Name → the file that defines it."""
        path, found = self.files.get(room), {}
        if path is None or path.name != "__init__.py":
            return found
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("gradscope."):
                source = node.module.removeprefix("gradscope.")
                found |= {alias.name: source for alias in node.names if f"{source}.{alias.name}" not in self.files}
        return found

    def imports(self, path: Path) -> list[tuple[str, str | None]]:
        """(file or room, name taken from it) wherever in the file it stands, but for types alone."""
        tree, found = ast.parse(path.read_text(encoding="utf-8")), []
        skipped = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if node in skipped:
                continue
            if isinstance(node, ast.Import):
                found += [(a.name.partition(".")[2], None) for a in node.names if a.name.split(".")[0] == "gradscope"]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradscope":
                source = node.module.partition(".")[2]
                for alias in node.names:
                    inside = f"{source}.{alias.name}".strip(".")
                    at_door = alias.name in self.doors.get(source, ())  # a file may bear its function's name
                    found.append((inside, None) if inside in self.files and not at_door else (source, alias.name))
        return found

    def trespasses(self, path: Path, room: str | None) -> list[str]:
        """What a file of a room, or of none, takes from other rooms otherwise than by their doors."""
        found = []
        for target, name in self.imports(path):
            there, _, inside = target.partition(".")
            if there in ("", room):
                continue
            if inside and inside not in OPEN.get(there, ()):
                found.append(f"imports {target} past the door of {there}")
            elif not inside and name and self._is_folder(there) and name not in self.doors[there]:
                found.append(f"imports {name}, which is not at the door of {there}")
        return found

    def _is_folder(self, room: str) -> bool:
        return room not in self.files or self.files[room].name == "__init__.py"

    def graph(self) -> dict[str, set[str]]:
        """File → files that it imports; of a door, the file behind the name."""
        graph = {}
        for name, path in self.files.items():
            targets = set()
            for target, taken in self.imports(path):
                behind = self.doors.get(target, {})
                targets |= set(behind.values()) if taken is None else {behind.get(taken, target)}
                targets |= {target} if taken is None else set()
            is_door = path.name == "__init__.py"
            graph[name] = set() if is_door else {target for target in targets if target in self.files} - {"", name}
        return graph


def complaints(package: Path) -> list[str]:
    """What is wrong with the imports of the package in this folder, a line each; empty when nothing is."""
    house = House(package)
    found = {room for name in house.files if (room := name.partition(".")[0])}
    if homeless := sorted(found - set(ROOMS)) or (len(ROOMS) > 18 and ["the last"]):
        return [f"{homeless[0]} is no room: give it a place in ROOMS, at most 18 of them"]
    wrong = []
    for name, path in house.files.items():
        room = name.partition(".")[0]
        for target, taken in house.imports(path) if room else ():
            there = target.partition(".")[0]
            if not there and taken != "__version__":
                return [f"{name} imports the whole package: import the room that is needed"]
            if there and ROOMS.index(there) > ROOMS.index(room):
                wrong.append(f"{name} imports {target}, which stands below {room}")
    for name, path in house.files.items():
        wrong += [f"{name} {words}" for words in house.trespasses(path, name.partition(".")[0]) if name]
    if wrong:
        return list(dict.fromkeys(wrong))
    graph = house.graph()
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        path = error.args[1][::-1]  # graphlib lists the imported module first
        start = path.index(min(path))
        return ["cycle: " + " → ".join([*path[start:-1], *path[:start], path[start]])]
    chains: dict[str, list[str]] = {}
    for name in order:
        below = max((chains[target] for target in sorted(graph[name])), key=len, default=[])
        chains[name] = [name, *below]
    longest = max(chains.values(), key=len)
    return [f"chain of {len(longest)}: " + " → ".join(longest)] if len(longest) > LONGEST else []


def name_of(path: Path) -> str:
    """runs/folder.py → runs.folder, runs/__init__.py → runs, and "" for the package's own."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def write(package: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
