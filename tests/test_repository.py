"""What is shipped: the wheel holds every file of the package, and the checks that the tests rely on are really on."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path


def test_the_wheel_holds_every_file_of_the_package(repository, tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(build, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("gradscope/")}
    assert shipped == {path.relative_to(repository).as_posix() for path in package_files(repository)}


def test_the_embedded_policy_is_at_most_four_megabytes(repository):
    policy = [path for path in package_files(repository) if "embedded" in path.relative_to(repository).parts]
    assert any(path.suffix == ".safetensors" for path in policy)
    assert sum(path.stat().st_size for path in policy) <= 4 * 2**20


def test_every_dependency_is_pinned(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    lines = (repository / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {bare_name(line) for line in wanted} <= {bare_name(name) for name in pinned}
    assert pinned["torch"] == "2.13.0"  # without a local part: pip then takes the build that the index offers


def package_files(repository: Path) -> list[Path]:
    return [p for p in (repository / "gradscope").rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def bare_name(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement).group().lower().replace("_", "-")
