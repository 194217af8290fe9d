"""What is private to a trainer stands in one file; the TRL installed has it, and what another lacks is told at once."""

import ast
import inspect
import re
from functools import cache

import pytest
from support.trl_runs import import_trl, make_trainer, needs_trl, save_policy

from gradscope.errors import InputError
from gradscope.integrations.trl import GradScopeCallback, GradScopeGRPOTrainer, RolloutWriter, TokenMonitor
from gradscope.integrations.trl.internals import HEAD, INTERNALS, TRACKERS

pytestmark = needs_trl


def kinds() -> dict[str, type]:
    """TRL's trainers and transformers', and its callbacks of trackers, by name."""
    from transformers import Trainer
    from transformers.integrations import MLflowCallback, TrackioCallback, WandbCallback

    trl, trackers = import_trl(), zip(TRACKERS, (WandbCallback, TrackioCallback, MLflowCallback), strict=True)
    return {name: getattr(trl, name, Trainer) for name in INTERNALS} | dict(trackers)


@cache
def known() -> dict[str, set[str]]:
    """Names of each class's attributes and, as its source assigns them, of its instances'."""
    found = {}
    for name, kind in kinds().items():
        sources = {each: inspect.getsource(each) for each in kind.__mro__ if each is not object}
        found[name] = set(dir(kind)).union(*(re.findall(r"self\.(\w+) = ", source) for source in sources.values()))
    return found


def foreign(source: str, private: set[str], *, trainer: bool = False) -> set[str]:
    """Private names of any object but a file's own, and these as strings; trainer: its own objects are trainers."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            own = ast.unparse(node.value) in ("self", "cls", "super()")
            found |= set() if own and not (trainer and node.attr in private) else {node.attr}
        elif isinstance(node, ast.Constant):
            found |= {node.value} & private
        elif isinstance(node, ast.FunctionDef) and trainer:
            found |= {node.name} & private
    return found


def test_no_other_file_touches_what_is_private_to_a_trainer(repository):
    private = {name for names in known().values() for name in names if re.match("_[^_]", name)} | {HEAD}
    touching = []
    for path in sorted((repository / "gradscope" / "integrations" / "trl").glob("*.py")):
        if foreign(path.read_text(encoding="utf-8"), private, trainer=path.name == "mixin.py"):
            touching.append(path.name)
    assert touching == ["internals.py"]


@pytest.mark.parametrize(
    "line", ["a._x", "self.b._x", "super()._x", "getattr(a, '_x')", "def _x(self): ...", "self._x"]
)
def test_a_private_name_is_seen_wherever_it_stands(line):
    assert foreign(line, {"_x"}, trainer=True) == {"_x"}


def test_the_installed_classes_have_every_internal():
    from trl.trainer import utils

    for name, wanted in INTERNALS.items():
        assert set(wanted) <= known()[name]
    for name, attribute in TRACKERS.items():
        assert {attribute, "_initialized"} <= known()[name]
    assert hasattr(utils, HEAD)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("GRPOTrainer", "_calculate_rewards"), ("GRPOTrainer", "_compute_loss"), ("Trainer", "_get_grad_norm")],
)
def test_an_internal_that_is_missing_is_named_before_training(tmp_path, monkeypatch, kind, name):
    checkpoint = save_policy(tmp_path / "policy")
    trainer = make_trainer(checkpoint, tmp_path / "out")
    monkeypatch.delattr(kinds()[kind], name)
    for callback in (GradScopeCallback, TokenMonitor, RolloutWriter):
        with pytest.raises(InputError, match=rf"TRL \S+ .*{kind}\.{name}.*1\.16"):
            callback(trainer)
    with pytest.raises(InputError, match=rf"{kind}\.{name}"):  # though the mixin has methods of these names
        make_trainer(checkpoint, tmp_path / "out", kind=GradScopeGRPOTrainer, methods={"reweight_alpha": 0.5})


def test_the_monitor_needs_the_head_that_sums_squares(tmp_path, monkeypatch):
    from trl.trainer import utils

    trainer = make_trainer(save_policy(tmp_path / "policy"), tmp_path / "out")
    monkeypatch.delattr(utils, HEAD)
    RolloutWriter(trainer)
    with pytest.raises(InputError, match=HEAD):
        TokenMonitor(trainer)
