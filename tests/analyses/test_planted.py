"""The study that counts false verdicts asks each of its questions, and a verdict against the truth counts as false."""

import pytest

from analyses.verdicts.planted import judge_world, opposes, tabulate
from gradscope.diagnosis import Verdict


@pytest.mark.all
def test_each_kind_of_question_is_asked_of_a_world():
    table = tabulate(judge_world(1, 64)).set_index("kind")
    asked = {"ranking", "dominance_raw", "added", "driver", "summed", "signal", "influence", "direction", "trend"}
    assert asked <= {*table.index} and table["tables"].min() >= 1
    assert (table["false"] <= table["given"]).all()


@pytest.mark.parametrize("verdict", [Verdict.MORE, Verdict.LESS, Verdict.DOMINATES, Verdict.UNDECIDED])
def test_a_verdict_on_the_wrong_side_is_false(verdict):
    assert opposes(verdict, 0.2) == (verdict is Verdict.LESS)
    assert opposes(verdict, -0.2) == (verdict in (Verdict.MORE, Verdict.DOMINATES))
