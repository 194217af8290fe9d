"""What every test shares: no network, no display, a fixed number of threads, and where the real data are."""

import os

# Before torch, transformers or matplotlib are imported: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from gradscope.tasks import data

REPOSITORY = Path(__file__).resolve().parents[1]

# Sums in another order differ in the last digits; the tests' tolerances were seen with this many threads.
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return REPOSITORY


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data (GRADSCOPE_DATA, else shared/data beside the repository); absent, the test is skipped."""
    folder = data.data_folder()
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not a folder (set GRADSCOPE_DATA to where they are)")
    return folder


SLOW = frozenset(
    [
        "test_train",
        "test_reproduce",
        "test_memory_budget",
        "test_cli",
        "test_measure_together",
        "test_vllm",
        "test_norm_estimates",
        "test_distributed",
        "test_prompt_gradients",
        "test_figures_measured",
        "test_notebooks",
        "test_cli_diagnose",
        "test_figures_math",
        "test_figures_ablations",
        "test_cli_diagnose_processes",
        "test_cli_diagnose_cases",
        "test_cost_measure",
        "test_cli_tune",
        "test_cli_diagnose_rollouts",
        "test_diagnosis",
        "test_trl",
        "test_measure_processes",
        "test_trl_methods",
        "test_real_size",
    ]
)
"""Files of the dearest tests, which `make test-fast` leaves out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker("slow")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="rewrite golden texts, to be read before they are kept")


@pytest.fixture(scope="module")
def undrawn() -> Iterator[None]:
    """Pictures are empty: for tests of numbers and words, since most of a page's time is drawing."""
    empty = '<svg xmlns="http://www.w3.org/2000/svg" width="9pt" height="9pt" viewBox="0 0 9 9"/>'

    def save(_figure: Figure, target: str | os.PathLike | io.StringIO, **_: object) -> None:
        if isinstance(target, io.StringIO):
            target.write(empty)
        else:
            Path(target).write_text(empty)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        patch.setattr(Figure, "draw_without_rendering", lambda _: None)
        yield


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    """Whether golden texts are to be rewritten."""
    return request.config.getoption("--regenerate")
