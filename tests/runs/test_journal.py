"""The folder of a run that goes on step by step: what is gone on with, and metrics.jsonl as it is written and cut."""

from __future__ import annotations

import json
import math

import pytest
from support.refusals import refused

from gradscope.errors import InputError
from gradscope.runs import Journal, scalars

NAN = float("nan")
SETTINGS = {"rate": 0.1, "data": ("a",)}


def test_a_run_is_gone_on_with_by_its_settings_and_begun_anew_elsewhere(tmp_path):
    journal = Journal(tmp_path / "run", SETTINGS, ("kept",))
    assert not journal.has_run(overwrite=False)
    (tmp_path / "run").mkdir()
    assert journal.begin({"model": "a"}, 0) is None
    journal.log({"step": 1})
    assert journal.has_run(overwrite=False) and not journal.has_run(overwrite=True)
    assert journal.begin({"model": "a"}, 1, fixed=("model",)) == {"model": "a"}
    other = Journal(tmp_path / "run", SETTINGS | {"rate": 0.2})
    assert other.has_run(overwrite=False, changeable=("rate",)) and not other.has_run(overwrite=True)
    with pytest.raises(InputError):
        other.has_run(overwrite=False)
    with pytest.raises(InputError):
        journal.begin({"model": "b"}, 1, fixed=("model",))


def test_settings_of_before_are_known_by_name_and_others_are_of_no_run(tmp_path):
    Journal(tmp_path, SETTINGS | {"old": 3}).begin({}, 0)
    assert Journal(tmp_path, SETTINGS).has_run(overwrite=False, dropped=("old",))
    for wanted, dropped in ((SETTINGS, ()), (SETTINGS | {"new": 1}, ("old",))):
        with pytest.raises(InputError):
            Journal(tmp_path, wanted).has_run(overwrite=False, dropped=dropped)


def test_what_a_run_wrote_is_removed_and_nothing_else(tmp_path):
    journal = Journal(tmp_path, SETTINGS, ("kept",))
    journal.begin({}, 0)
    (tmp_path / "kept").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert journal.remove() and not journal.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_is_not_finite_is_written_as_null_and_the_rest_digit_by_digit(tmp_path):
    log = Journal(tmp_path, {})
    record = {"step": 1, "kl": NAN, "loss": [0.1, math.inf, -math.inf], "passes": ["low"], "deep": {"x": (NAN, 1 / 3)}}
    log.log(record)
    log.log({"step": 2, "kl": 0.1 + 0.2})
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[0] == {
        "step": 1,
        "kl": None,
        "loss": [0.1, None, None],
        "passes": ["low"],
        "deep": {"x": [None, 1 / 3]},
    }
    assert lines[1] == {"step": 2, "kl": 0.1 + 0.2}


BROKEN = [
    b'{"step": 5, "los',
    b'{"step": 5, "loss": 1',
    b"{",
    b"5",
    b"[]",
    b'"step"',
    b'{"loss": 1}',
    b"\xff\xfe",
    b"null",
]
BROKEN += [b'{"step": "5"}', b'{"step": null}']


@pytest.mark.parametrize("tail", [b"", *BROKEN])
def test_lines_after_the_checkpoint_and_what_follows_a_broken_one_are_left_out(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 5):
        Journal(tmp_path, {}).log({"step": step, "loss": [step / 3]})
    whole = path.read_text()
    content = whole.encode() + tail + b'\n{"step": 4}\n'
    path.write_bytes(content)
    assert Journal(tmp_path, {}).lines_up_to(4).startswith(whole)
    assert Journal(tmp_path, {}).lines_up_to(3) == "".join(line + "\n" for line in whole.splitlines()[:3])
    assert Journal(tmp_path, {}).lines_up_to(0) == ""
    assert path.read_bytes() == content


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_record_of_a_step_that_the_checkpoint_has_is_refused(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 3}\n')
    assert Journal(tmp_path, {}).lines_up_to(1) == '{"step": 1}\n'
    with refused("step 2") as caught:
        Journal(tmp_path, {}).lines_up_to(3)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_has_no_lines_and_is_missed_where_there_is_a_checkpoint(tmp_path):
    assert Journal(tmp_path, {}).lines_up_to(0) == ""
    with pytest.raises(InputError):
        Journal(tmp_path, {}).lines_up_to(3)


def test_a_tracker_gets_numbers_lists_by_their_mean_and_nothing_that_it_cannot_draw():
    record = {"step": 3, "kl": NAN, "loss": [1.0, 2.0], "grad_norm": [1.0, NAN], "passes": ["low"], "none": None}
    assert scalars(record | {"empty": [], "right": True}) == {"step": 3, "loss": 1.5, "right": 1}
