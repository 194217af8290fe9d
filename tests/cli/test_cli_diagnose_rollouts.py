"""`gradscope diagnose` and what it is given: logs of several steps, tasks, prompts, hostile text."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from support import dumps
from support.cli import refusal, run
from support.pages import BRIEF, native_rows, read_page, read_statistics, write_rows
from support.policies import save_checkpoint

from gradscope.diagnosis.products.contributions import drop_columns
from gradscope.gradients import measure
from gradscope.policy import load_policy
from gradscope.rollouts import read_dump, read_rollouts, write_rollouts

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-3", "qwen2")


def test_of_a_dump_of_several_steps_each_checkpoint_gets_what_it_sampled(model, tmp_path, capsys):
    for step in (3, 4, 5):
        dumps.write_prime_rl(tmp_path, step=step)
    command = (model, "--rollouts", tmp_path / "token_exports", *BRIEF)
    run("diagnose", *command, "--out", tmp_path / "own", "--step", "own")
    told = "the log holds 3 training steps, 3 to 5; step 4 is taken, the one after this checkpoint's"
    assert f"note: {told}" in capsys.readouterr().out and told[1:] in read_page(tmp_path / "own").text
    assert told in json.loads((tmp_path / "own" / "manifest.json").read_text())["rollouts"]["notes"]
    table = pd.read_parquet(tmp_path / "own" / "tokens.parquet")
    policy = load_policy(model)
    batch = read_dump(tmp_path / "token_exports", policy, step=4).batch
    wanted = measure(policy, batch, self_check=False, module_groups=True)
    assert table["response"].nunique() == len(dumps.SAMPLES)
    pd.testing.assert_frame_equal(drop_columns(table).drop(columns="group"), wanted.drop(columns="group"))
    assert "has no step 9" in refusal(capsys, "diagnose", *command, "--out", tmp_path / "none", "--step", "9")
    assert not (tmp_path / "none").exists()


def test_steps_with_too_few_prompts_are_taken_together_and_the_page_says_how_far_their_policies_are(model, tmp_path):
    rows = [row for step in (2, 3, 4) for row in native_rows(step=step)]
    log, policy, gaps = tmp_path / "log.jsonl", load_policy(model), {2: 0.3, 3: 0.1, 4: 0.0}
    batch = read_rollouts(write_rows(log, rows), policy, step="all")
    kept, own = batch.response_mask, measure(policy, batch, self_check=False)["logprob"]
    old = torch.zeros(kept.shape).masked_scatter(kept, torch.tensor(own.to_numpy()))
    away = torch.tensor([gaps[step] for step in batch.steps.tolist()])
    write_rollouts(log, replace(batch, old_logprobs=(old - away[:, None]) * kept))
    run("diagnose", model, "--rollouts", log, *BRIEF, "--out", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["tokens"] == len(own) * 2 // 3 and "step 4 is taken" in manifest["rollouts"]["step_note"]
    found = dict(re.findall(r"([\d.]+) at step (\d)", read_page(tmp_path / "out").text))
    assert found == {"0": "4", "0.1": "3"}  # six prompts have an advantage without step 2
    own, whole = manifest["own_responses"], manifest["supply"]["responses"]
    assert 0 < own < whole and f"{own} of the {whole} responses here" in read_page(tmp_path / "out").text


@pytest.mark.all
def test_what_a_log_grows_by_leaves_the_diagnosis_of_a_step_as_it_is(model, tmp_path, capsys):
    rows = [*native_rows(step=4), *native_rows(step=5)]
    log, out = write_rows(tmp_path / "log.jsonl", rows), tmp_path / "out"
    command = ("diagnose", model, "--rollouts", log, *BRIEF, "--out", out)
    run(*command)
    written = (out / "report.html").stat().st_mtime_ns
    longer = [{name: row[name] for name in ("prompt_ids", "group", "reward")} for row in native_rows()]
    longer = [row | {"response_ids": [5, 6, 7] * 10, "step": 6} for row in longer]
    write_rows(log, [{name: row[name] for name in longer[0]} for row in rows] + longer)
    assert "rollouts" in refusal(capsys, *command)  # of step 4, too, log π_old and mask are gone
    write_rows(log, [*rows, *({"response_mask": [1] * 30, "old_logprobs": [-1.0] * 30} | row for row in longer)])
    capsys.readouterr()
    run(*command)
    assert "already diagnosed" in capsys.readouterr().out and (out / "report.html").stat().st_mtime_ns == written


# Rollouts that it samples.


TASK = """
from gradscope.tasks import Question

class Words:
    name = "words"
    def questions(self, n, *, seed):
        return [Question(f"w4 w{5 + i} w6", None) for i in range(n)]
    def reward(self, response, question):
        return float(len(set(response.split())))

words = Words()
"""


def test_without_rollouts_a_task_is_sampled_once_and_diagnosed(model, tmp_path, capsys):
    (tmp_path / "task.py").write_text(TASK)
    command = ("diagnose", model, "--task", f"{tmp_path}/task.py:words", "--questions", "3", "--n", "3")
    command += ("--max-new-tokens", "5", "--out", tmp_path / "out", *BRIEF)
    run(*command)
    assert "9 responses to 3 prompts" in capsys.readouterr().out
    (rollouts,) = tmp_path.glob("out/rollouts-*.jsonl")
    table = pd.read_parquet(tmp_path / "out" / "tokens.parquet")
    policy = load_policy(model)
    batch = read_dump(rollouts, policy).batch
    pd.testing.assert_frame_equal(drop_columns(table), measure(policy, batch, self_check=False, module_groups=True))
    assert (table["weight"] != 0).any() and "squared_share" in {*read_statistics(tmp_path / "out")["statistic"]}
    written = rollouts.stat().st_mtime_ns
    run(*command)
    printed = capsys.readouterr().out
    assert "already diagnosed" in printed and "9 responses" not in printed
    assert rollouts.stat().st_mtime_ns == written
    assert "rollouts" in refusal(capsys, "diagnose", *command[1:], "--seed", "1")  # other responses, in the same folder


# What a model wrote stays text.


HOSTILE = "</script><script>broken()</script><img/src=x/onerror=broken()>{{7*7}}"


def test_tokens_prompts_and_paths_that_look_like_html_stay_text(model, tmp_path):
    # Of this tokenizer w7 is hostile; blanks would be split.
    model = Path(shutil.copytree(model, tmp_path / "<img src=x onerror=broken()>"))
    content = (model / "tokenizer.json").read_text(encoding="utf-8")
    assert '"w7"' in content
    (model / "tokenizer.json").write_text(content.replace('"w7"', json.dumps(HOSTILE)), encoding="utf-8")
    rows = native_rows(prompt_ids=[4, 7, 5])
    rows[0]["response_ids"][0] = 7
    rollouts = write_rows(tmp_path / "r<b>.jsonl", [row | {"group": n // 2} for n, row in enumerate(rows)])
    out = tmp_path / "out"
    run("diagnose", model, "--rollouts", rollouts, "--out", out, *BRIEF)
    assert HOSTILE in {*pd.read_parquet(out / "tokens.parquet")["token"]}
    page, plain = read_page(out), (out / "report.html").read_text(encoding="utf-8")
    assert "<img src=x onerror=broken()>" in page.text and "r<b>.jsonl" in page.text  # shown, as text
    assert HOSTILE in json.loads(page.scripts[0])["tokens"] and "<script>broken()" not in plain and "<img" not in plain
    assert "img" not in page.tags and "b" not in page.tags
    assert page.tags.count("script") == 2  # the viewer's data and the page's own
    assert not [name for name, _ in page.attributes if name.startswith("on")]
