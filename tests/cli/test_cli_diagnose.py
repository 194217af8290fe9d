"""`gradscope diagnose` end to end: its files are what the functions give, it resumes, and it refuses in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.adapters import save_adapter
from support.cli import refusal, run
from support.pages import BRIEF, read_page, read_statistics, value, write_rows
from support.policies import make_model, make_tokenizer, save_checkpoint
from support.training import train

from gradscope.cli.measuring import read_step
from gradscope.diagnosis import DiagnosisSettings, diagnose
from gradscope.diagnosis.products.contributions import drop_columns
from gradscope.gradients import measure
from gradscope.policy import load_policy, read_adamw_state, read_state
from gradscope.rollouts import read_rollouts
from gradscope.updates import StepSettings

pytestmark = pytest.mark.usefixtures("undrawn")

KEYS = ["statistic", "metric", "interval"]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """Checkpoints of one training, an adapter, and rollouts."""
    folder = tmp_path_factory.mktemp("job")
    for step, seed in ((3, 0), (20, 1)):  # the first is the one that sampled
        save_checkpoint(folder / f"checkpoint-{step}", "qwen2", seed=seed)
    save_adapter(folder / "adapter", folder / "checkpoint-3", r=2, target_modules=["q_proj", "up_proj"])
    write_rows(folder / "rollouts.jsonl")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """checkpoint-3 of transformers' Trainer, whose schedule ended there; AdamW's state has its two groups."""
    out = tmp_path_factory.mktemp("trained")
    train(make_model("qwen2"), out)
    make_tokenizer().save_pretrained(out / "checkpoint-3")
    return out / "checkpoint-3"


@pytest.fixture(scope="module")
def single(job, tmp_path_factory) -> Path:
    """One checkpoint, the brief way; tests copy it before they write there."""
    out = tmp_path_factory.mktemp("single") / "out"
    run("diagnose", job / "checkpoint-3", "--rollouts", job / "rollouts.jsonl", "--out", out, *BRIEF)
    return out


# One checkpoint.


def test_the_files_are_what_the_functions_give_and_steps_go_on_from_the_optimizer(job, trained, tmp_path, capsys):
    rollouts, out = job / "rollouts.jsonl", tmp_path / "out"
    run("diagnose", trained, "--rollouts", rollouts, "--out", out, "--device", "cpu")
    printed = capsys.readouterr().out
    policy = load_policy(trained)
    batch = read_rollouts(rollouts, policy)
    metric = read_adamw_state(policy, max_grad_norm=1.0)
    table = measure(policy, batch, module_groups=True, metric="adamw", optimizer_state=metric)
    written = pd.read_parquet(out / "tokens.parquet")
    pd.testing.assert_frame_equal(drop_columns(written), table)
    assert written["gradient_share"].sum() == pytest.approx(1.0, rel=1e-4) == written["gradient_share_adamw"].sum()

    # The schedule's last rate is 0: the one that it began with is taken, Trainer's default, clipped at 1.
    state = read_state(trained / "optimizer.pt")
    assert [group["lr"] for group in state["param_groups"]] == [0, 0]
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
    step = StepSettings("adamw", 5e-5, None, (0.9, 0.999), 1e-8, max_grad_norm=1.0)
    settings = DiagnosisSettings(step=step)
    wanted = diagnose(policy, batch, table, settings=settings, optimizer_state=state)
    found = read_statistics(out)
    assert found[KEYS].to_dict("list") == wanted.statistics[KEYS].to_dict("list")
    # The same numbers in the same order; a CSV holds them to the last digit.
    np.testing.assert_allclose(found["value"].astype(float), wanted.statistics["value"], rtol=1e-6)
    assert {"adamw", "raw", "none"} == {*found["metric"]}
    assert any(name.endswith("_actual") for name in found["statistic"])

    page = read_page(out)
    assert "learning rate is 0 (the end of its schedule); steps use 5e-05 instead" in page.text
    assert f"gradscope diagnosis: {trained}" in page.text and "AdamW's, saved" in page.text
    assert "training step" in page.text and "PartialState" not in page.text
    *_, last = printed.splitlines()
    said = [line for line in printed.splitlines() if line.startswith("- ")]
    assert last == str(out / "report.html") and 1 <= len(said) <= 3
    on_page = {finding.statement: finding.brief or finding.statement for finding in wanted.findings}
    texts = [" ".join(line[2:].split()) for line in said]
    assert all(on_page.get(text, text) in page.text for text in texts)
    for note in wanted.notes:
        assert " ".join(note.split()) in page.text
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["diagnosis"]["max_grad_norm"] == 1.0 and len(manifest["diagnosis"]["optimizer_state"]) == 64
    assert manifest["summed_gradients"]["way"] == "whole"
    assert all((out / name).is_file() for name in manifest["files"]) and "data/statistics.csv" in manifest["files"]
    assert not (out / ".partial").exists()


@pytest.mark.all
def test_the_same_arguments_are_recognised_and_other_ones_of_the_page_leave_the_table(job, single, tmp_path, capsys):
    out = Path(shutil.copytree(single, tmp_path / "out"))
    command = ("diagnose", job / "checkpoint-3", "--rollouts", job / "rollouts.jsonl", "--out", out, *BRIEF)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    run(*command)
    printed = capsys.readouterr().out
    assert "already measured" in printed and "already diagnosed with these arguments" in printed
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    run(*command, "--actual-step")
    printed = capsys.readouterr().out
    assert "already measured" in printed and "already diagnosed" not in printed
    assert (out / "tokens.parquet").stat().st_mtime_ns == before[out / "tokens.parquet"]
    assert "right_direction_positive_actual" in {*read_statistics(out)["statistic"]}


@pytest.mark.all
def test_killed_between_table_and_page_it_goes_on_with_the_page(job, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    command = ("diagnose", job / "checkpoint-3", "--rollouts", job / "rollouts.jsonl", "--out", out, *BRIEF)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr("gradscope.cli.diagnose.diagnose", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        run(*command)
    assert stopped.value.code == 130
    assert capsys.readouterr().err.endswith("gradscope: interrupted; run the same command to continue\n")
    table = (out / "tokens.parquet").stat().st_mtime_ns
    assert not (out / "report.html").exists() and not (out / "data").exists()
    assert "temperature None, not 0.5" in refusal(capsys, "diagnose", *command[1:], "--temperature", "0.5")
    assert "(model " in refusal(capsys, "diagnose", job / "adapter", *command[2:], "--params", "adapter")
    assert not (out / "report.html").exists() and (out / "tokens.parquet").stat().st_mtime_ns == table
    run(*command)
    assert "already measured" in capsys.readouterr().out
    assert (out / "report.html").is_file() and "gradient_share" in pd.read_parquet(out / "tokens.parquet")


@pytest.mark.all
def test_of_an_adapter_alone_all_shares_are_of_its_own_parameters(job, tmp_path):
    rollouts, out = job / "rollouts.jsonl", tmp_path / "out"
    run("diagnose", job / "adapter", "--rollouts", rollouts, "--out", out, "--params", "adapter", *BRIEF)
    table, statistics = pd.read_parquet(out / "tokens.parquet"), read_statistics(out)
    squares = (table["weight"].astype(float) * table["param_grad_norm"]) ** 2
    shares = [squares[table["interval"] == i].sum() / squares.sum() for i in range(4)]
    assert value(statistics, "squared_share") == pytest.approx(shares, rel=1e-5)

    # The summed gradients: one backward pass per interval, in float64, over what the adapter trains.
    policy = load_policy(job / "adapter", params="adapter", dtype="float64")
    batch = read_rollouts(rollouts, policy)
    parameters = [p for name, p in policy.model.named_parameters() if "lora_" in name]
    for parameter in parameters:
        parameter.requires_grad_(True)
    logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
    chosen = logprobs[batch.response_mask[:, 1:]]
    weights, interval = torch.tensor(table["weight"].to_numpy()).double(), torch.tensor(table["interval"].to_numpy())
    sums = []
    for i in range(4):
        loss = (chosen * weights * (interval == i)).sum()
        sums.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)]))
    whole = sum(sums)
    # Float32 gradients against float64: 1e-4 of the largest.
    assert value(statistics, "gradient_share") == pytest.approx(
        [float(g @ whole / whole.square().sum()) for g in sums], abs=1e-4
    )
    assert "adapter" in read_page(out).text


@pytest.mark.all
def test_an_optimizer_of_something_else_is_left_out_beside_the_checkpoint_and_refused_where_it_is_named(
    job, single, tmp_path, capsys
):
    shutil.copytree(single, tmp_path / "out")
    model = Path(shutil.copytree(job / "checkpoint-3", tmp_path / "checkpoint-3"))
    other = torch.nn.Linear(3, 2)
    torch.save(torch.optim.AdamW(other.parameters()).state_dict(), model / "optimizer.pt")
    command = (model, "--rollouts", job / "rollouts.jsonl", "--out", tmp_path / "out", *BRIEF)
    run("diagnose", *command)
    assert (
        "optimizer.pt beside the checkpoint is ignored: the optimizer state has 2 parameters"
        in read_page(tmp_path / "out").text
    )
    assert {*read_statistics(tmp_path / "out")["metric"]} == {"raw", "none"}
    named = (*command[: -len(BRIEF) - 1], tmp_path / "out", *BRIEF, "--optimizer-state")
    assert "has 2 parameters" in (said := refusal(capsys, "diagnose", *named, model / "optimizer.pt"))
    assert said.count(str(model / "optimizer.pt")) == 1
    fresh = (*command[: -len(BRIEF) - 1], tmp_path / "fresh", *BRIEF, "--optimizer-state")
    assert "has 2 parameters" in refusal(capsys, "diagnose", *fresh, model / "optimizer.pt")
    assert not (tmp_path / "fresh").exists()  # before anything is measured
    sgd = torch.optim.SGD(other.parameters(), momentum=0.9)
    for write in (lambda path: torch.save(sgd.state_dict(), path), lambda path: path.write_text("no tensor")):
        write(model / "optimizer.pt")
        assert refusal(capsys, "diagnose", *named, model / "optimizer.pt").count(str(model / "optimizer.pt")) == 1
        state, step, notes = read_step(load_policy(model), model / "optimizer.pt", asked=False)
        assert state is step is None and len(notes) == 1
        assert notes[0].startswith("optimizer.pt beside the checkpoint is ignored: ") and str(model) not in notes[0]


# Several checkpoints.


def test_several_checkpoints_have_a_page_each_and_one_of_the_trend_with_their_very_numbers(
    job, single, tmp_path, capsys
):
    out, rollouts = tmp_path / "out", job / "rollouts.jsonl"
    shutil.copytree(single, out / "checkpoint-3")  # as an interrupted run of both leaves it
    models = (job / "checkpoint-20", job / "checkpoint-3")
    run("diagnose", *models, "--rollouts", rollouts, "--out", out, *BRIEF)
    assert "the trend over 2 checkpoints" in capsys.readouterr().out
    parts = [read_statistics(out / f"checkpoint-{step}").assign(step=str(step)) for step in (3, 20)]
    trend = pd.read_csv(out / "data" / "trend.csv", keep_default_na=False, dtype=str)
    wanted = pd.concat(parts, ignore_index=True)
    assert trend[[*KEYS, "step"]].to_dict("list") == wanted[[*KEYS, "step"]].to_dict("list")
    found = pd.to_numeric(trend["value"]), wanted["value"].astype(float)
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert not np.allclose(*(part["value"].astype(float).fillna(0) for part in parts))  # two checkpoints, two answers
    page = read_page(out)
    links = [href for name, href in page.attributes if name == "href" and href.endswith("report.html")]
    assert links == ["checkpoint-20/report.html", "checkpoint-3/report.html"]
    assert all((out / link).is_file() for link in links) and "steps 3 to 20" in page.text

    run("diagnose", *models[::-1], "--rollouts", rollouts, rollouts, "--out", out, *BRIEF)
    assert capsys.readouterr().out.count("already diagnosed") == 2
    again = pd.read_csv(out / "data" / "trend.csv", keep_default_na=False, dtype=str)
    pd.testing.assert_frame_equal(again, trend)
    # Sums of other numbers of prompts, as minutes leave them, are counted.
    manifest = json.loads((out / "checkpoint-3" / "manifest.json").read_text())
    whole = manifest["summed_prompts"]
    assert "differ in their number of prompts" not in read_page(out).text
    (out / "checkpoint-3" / "manifest.json").write_text(json.dumps(manifest | {"summed_prompts": whole - 1}))
    run("diagnose", *models, "--rollouts", rollouts, "--out", out, *BRIEF)
    assert f"{whole - 1} at 1 of the checkpoints, {whole} at 1 of the checkpoints" in read_page(out).text
    # A page of one checkpoint has no place where the trend's is, nor the reverse.
    to = ("--rollouts", rollouts, "--out", out, *BRIEF)
    assert "give another --out, or --overwrite" in refusal(capsys, "diagnose", models[0], *to)
    assert (out / "data" / "trend.csv").is_file()


# Refused before anything is written.


def bad_arguments(job: Path, folder: Path) -> dict[str, tuple[tuple[object, ...], str]]:
    model, rollouts = job / "checkpoint-3", job / "rollouts.jsonl"
    given, to = ("--rollouts", rollouts), ("--out", folder / "out")
    (folder / "file").write_text("")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "even").mkdir()
    return {
        "no out": ((model, *given), "--out is missing"),
        "nothing": (to, "no checkpoint is given"),
        "rollouts and a task": ((model, *given, "--task", "knights-knaves", *to), "leave one out"),
        "neither": ((model, *to), "--task NAME or --prompts FILE"),
        "both": ((model, "--task", "math", "--prompts", rollouts, *to), "--task NAME or --prompts FILE"),
        "counts": ((model, model, model, "--rollouts", rollouts, rollouts, *to), "2 files for 3 checkpoints"),
        "format": ((model, *given, "--format", "vlre", *to), "'vlre' is not known"),
        "format of none": ((model, "--task", "math", "--format", "trl", *to), "apply to given rollouts"),
        "missing model": ((model, folder / "nowhere", *given, *to), "nowhere is not a folder"),
        "no model in the second": ((model, folder / "even", *given, *to), "even holds no config.json"),
        "no model in it": ((model.parent, *given, *to), "folder of a training run"),
        "missing rollouts": ((model, "--rollouts", folder / "r.jsonl", *to), "r.jsonl does not exist"),
        "missing prompts": ((model, "--prompts", folder / "p.txt", *to), "p.txt does not exist"),
        "unknown task": ((model, "--task", "chess", *to), "no task is called 'chess'"),
        "a file as out": ((model, *given, "--out", folder / "file"), "is not a folder"),
        "below a file": ((model, *given, "--out", folder / "file" / "out"), "is not a folder"),
        "a loop": ((model, *given, "--out", folder / "loop" / "out"), "is not a folder"),
        "clipping": ((model, *given, "--max-grad-norm", "0", *to), "--max-grad-norm is 0"),
        "influence": ((model, *given, "--influence-tokens", "0", *to), "influence_tokens is 0"),
        "adapter": ((model, *given, "--params", "adapter", *to), "holds no adapter"),
        "state": ((model, *given, "--optimizer-state", folder / "o.pt", *to), "o.pt does not exist"),
        "state of two": ((model, model, *given, "--optimizer-state", rollouts, *to), "2 are given"),
        "flops": ((model, *given, "--flops", "1e13", *to), "add --plan"),
        "plan of none": ((model, "--task", "math", "--plan"), "--plan needs rollouts"),
        "tokens": ((model, *given, "--tokens-per-interval", "0", *to), "tokens_per_interval"),
        "temperature": ((model, *given, "--temperature", "0", *to), "temperature"),
    }


def test_arguments_that_cannot_be_met_are_one_line_and_leave_nothing_behind(job, tmp_path, capsys, monkeypatch):
    cases = bad_arguments(job, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for name, (arguments, words) in cases.items():
        said = refusal(capsys, "diagnose", *arguments, "--device", "cpu")
        assert words in said.replace("--tokens-per-interval", "tokens_per_interval"), (name, said)
        assert sorted(tmp_path.rglob("*")) == before, name
    monkeypatch.setenv("WORLD_SIZE", "2")
    to = ("--out", tmp_path / "out", "--device", "cpu")
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert "sample first" in refusal(capsys, "diagnose", job / "checkpoint-3", "--task", "math", *to)
    assert not (tmp_path / "out").exists()


def test_a_plan_is_printed_for_each_checkpoint_and_nothing_is_written(job, tmp_path, capsys):
    command = (job / "checkpoint-3", job / "checkpoint-20", "--rollouts", job / "rollouts.jsonl")
    run("diagnose", *command, "--plan", "--flops", "1e13", "--out", tmp_path / "out")
    told = capsys.readouterr().out
    assert told.count("FLOP") >= 2 and "Left out" not in told
    assert not (tmp_path / "out").exists()
    run("diagnose", *command[1:], "--plan", "--flops", "1e13", "--minutes", "1e-9")
    assert "Time limit 1e-09 min" in capsys.readouterr().out
