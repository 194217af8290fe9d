"""What every test shares: no network, no display, a fixed number of threads, and where the real data are."""

import os

# Before torch, transformers or matplotlib are imported: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
# vLLM would have one small function compiled, by a C++ compiler and for a quarter of a minute.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
# On a busy machine any command may take the seconds after which it says how far it is.
os.environ["GRADSCOPE_PROGRESS"] = "off"

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.pictures import draw_nothing

from gradscope import resampling
from gradscope.tasks import data

REPOSITORY = Path(__file__).resolve().parents[1]

# The tests of gradients spend a twentieth of their time on looking for garbage otherwise.
gc.set_threshold(20_000)

# Sums in another order differ in the last digits; the tests' tolerances were seen with this many threads.
THREADS = int(os.environ["OMP_NUM_THREADS"].split(",")[0])
torch.set_num_threads(THREADS)

# A shell's background job ignores Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def few_prompts_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of few prompts are those of many, percentiles: a table is then small enough for loops."""
    monkeypatch.setattr(resampling, "FEWEST", 2)
    monkeypatch.setattr(resampling, "MANY", 2)


@pytest.fixture(autouse=True)
def as_many_threads() -> None:
    """Each test begins with the threads of the processes that it starts: scripts of analyses leave one behind."""
    if torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)


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


DEAREST = """
    test_train test_contradictions test_audit test_comparison test_loading test_cli test_cli_diagnose test_trl test_math
    test_token_sample test_contributions test_distributed test_output_encodings test_diagnosis test_diagnosis_numbers
    test_paper_repro test_influence test_figures test_follow test_architectures test_memory_budget test_trl_methods
""".split()  # noqa: SIM905
"""Files that take longest, which begin: a process that ends with one of them would keep the others waiting."""

CHECK = """
    test_house test_imports test_intervals test_repository
    test_objective test_batch_loss test_logprobs test_step_rule test_weightings test_steps
    test_knights_knaves test_word_problems test_models test_rewind test_module_groups
    test_batch test_logs_as_written test_reading_rules test_which_format test_readers_agreement
    test_rules test_decoder_rules test_hooks test_jacobian test_group_gradients test_token_table
    test_theory test_drivers test_gains test_sampling
    test_algorithm test_train_config test_checkpoints
    test_directions test_make_update test_updates
    test_run_folder test_journal test_contrasts test_kept_tables
    test_improbable test_summary test_help test_leading test_cli_compare
""".split()  # noqa: SIM905
"""Files of `make check`: of every room those that tell most in little time."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m check`, other files are not even imported, which would take as long as the tests."""
    asked = config.option.markexpr.startswith("check")
    other = collection_path.match("test_*.py") and collection_path.stem not in CHECK
    return True if asked and other else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in CHECK:
            item.add_marker("check")
    items.sort(key=lambda item: DEAREST.index(item.path.stem) if item.path.stem in DEAREST else len(DEAREST))


def pytest_collection_finish(session: pytest.Session) -> None:
    # All that is imported stays, and no garbage collection looks through it again: an eighth of the time of some files.
    # Hypothesis must be among it: its plugins look for references that this hides.
    if len(session.items) > 1000 and "hypothesis" in sys.modules:
        gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="rewrite golden texts, to be read before they are kept")


@pytest.fixture(scope="module")
def undrawn() -> Iterator[None]:
    """Pictures are empty: for tests of numbers and words, since most of a page's time is drawing."""
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch.setattr)
        yield


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    """Whether golden texts are to be rewritten."""
    return request.config.getoption("--regenerate")
