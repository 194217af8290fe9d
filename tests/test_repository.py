"""What is shipped: the wheel holds every file of the package, and the checks that the tests rely on are really on."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import gradscope
from gradscope.policy import EMBEDDED


@pytest.fixture(scope="module")
def built(repository, tmp_path_factory) -> Path:
    """The folder of the wheel and the source distribution, as `python -m build` makes them."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(build, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The bin of an environment that holds the wheel and sees the libraries of this one, but not this repository."""
    environment = tmp_path_factory.mktemp("installed") / "env"
    venv.create(environment, with_pip=False)
    bin_ = environment / "bin"
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(bin_ / "python"),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, str(next(built.glob("*.whl")))], check=True)
    return bin_


@pytest.mark.all
def test_the_wheel_holds_every_file_of_the_package_and_the_source_what_its_tests_need(repository, built):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("gradscope/")}
    assert shipped == {path.relative_to(repository).as_posix() for path in package_files(repository)}
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped | {"README.md", "LICENSE", "Makefile", "tests/conftest.py", "docs/index.md", "mkdocs.yml"} <= names


@pytest.mark.all
def test_the_wheel_runs_in_another_folder(installed, tmp_path):
    said = run_in(tmp_path, installed / "gradscope", "--version")
    assert said.split() == ["gradscope", gradscope.__version__]
    place = run_in(tmp_path, installed / "python", "-c", "import gradscope; print(gradscope.__file__)")
    assert Path(place.strip()).is_relative_to(installed.parent)


@pytest.mark.all
def test_the_demo_runs_from_the_wheel(installed, tmp_path):
    said = run_in(tmp_path, installed / "gradscope", "demo", "--out", "demo")
    assert "response tokens were measured" in said and (tmp_path / "demo" / "figures" / "figure_1.png").is_file()


def run_in(folder: Path, *command: object) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_is_one_page(repository):
    words = (repository / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= 1_000


def test_each_embedded_policy_is_at_most_four_megabytes(repository):
    files = [path for path in package_files(repository) if "embedded" in path.relative_to(repository).parts]
    assert {path.parent for path in files if path.suffix == ".safetensors"} == set(EMBEDDED.values())
    for folder in EMBEDDED.values():
        assert sum(path.stat().st_size for path in files if path.parent == folder) <= 4 * 2**20


@pytest.mark.skipif(not (Path(__file__).parents[1] / ".git").exists(), reason="not in the source distribution")
def test_the_kept_runs_and_tables_are_few_files_and_at_most_thirty_megabytes(repository):
    listed = ["git", "ls-files", "-z", "analyses/runs"]
    done = subprocess.run(listed, cwd=repository, capture_output=True, text=True, check=True)
    names = done.stdout.rstrip("\0").split("\0")
    # Runs and measurements of an experiment that is not whole stay in folders (analyses/common/pack_runs.py).
    packed = [name for name in names if not re.search(r"/cpu/(measured/)?horizon/", name)]
    assert 50 < len(packed) <= 110 and sum((repository / name).stat().st_size for name in names) <= 30e6


def test_every_dependency_is_pinned(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["docs"], *extras["test-all"]]
    lines = (repository / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {bare_name(line) for line in wanted} <= {bare_name(name) for name in pinned}
    assert pinned["torch"] == "2.13.0"  # without a local part: pip then takes the build that the index offers


def package_files(repository: Path) -> list[Path]:
    return [p for p in (repository / "gradscope").rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def bare_name(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement).group().lower().replace("_", "-")
