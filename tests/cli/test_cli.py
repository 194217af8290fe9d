"""The command line: what it writes, what it refuses and how, and that a killed run is taken up where it was."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.cli import Outcome, assert_one_line, outcome_of
from support.policies import CONTEXT, VOCAB, make_policy, make_responses, save_checkpoint, write_jsonl
from support.processes import Command
from support.tiers import every

from gradscope.cli.sample import Sample
from gradscope.gradients import Resources, TableMeasurement, measure
from gradscope.gradients.engine import autograd, norms as rules
from gradscope.gradients.engine.decoder import block as decoder_block
from gradscope.objective import LossSettings
from gradscope.policy import EMBEDDED, load_policy
from gradscope.resampling import TOO_FEW
from gradscope.rollouts import read_rollouts
from gradscope.runs import file_hash, folder as run_folder
from gradscope.tasks import get_task

pytestmark = pytest.mark.usefixtures("undrawn")

ROW = {"prompt_ids": [4, 5, 6], "response_ids": [7, 8, 9], "reward": 1.0, "group": 0}
QUICK = ("--no-figures", "--no-self-check")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_checkpoint(folder / "llama", "llama", sharpness=5.0, chat=True)
    save_checkpoint(folder / "bert", "bert")
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB, **t5)).save_pretrained(
        folder / "t5"
    )
    return folder


@pytest.fixture(scope="session")
def model(checkpoints) -> Path:
    return checkpoints / "llama"


@pytest.fixture
def rollouts(tmp_path) -> Path:
    """What a policy of the same weights sampled: two responses to each of three prompts."""
    responses = make_responses(make_policy("llama", sharpness=5.0))
    names = ("prompt_ids", "response_ids", "group", "reward", "old_logprobs", "ref_logprobs", "response_mask")
    return write_jsonl(tmp_path / "rollouts.jsonl", [{n: getattr(r, n) for n in names} for r in responses])


@pytest.fixture
def run(capsys):
    """Run a command in this process: its exit status and what it printed."""
    return partial(outcome_of, capsys)


def files(folder: Path) -> dict[str, int]:
    """Everything in a folder, with the time that it was written."""
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*")}


# What measure writes.


def test_measure_writes_the_table_that_the_function_returns_and_a_manifest(run, model, rollouts, tmp_path):
    out = tmp_path / "out"
    outcome = run("measure", model, rollouts, "--out", out)
    assert (outcome.status, outcome.err) == (0, "")
    policy = load_policy(model)
    expected = measure(policy, read_rollouts(rollouts, policy))
    pd.testing.assert_frame_equal(pd.read_parquet(out / "tokens.parquet"), expected)
    assert f"{len(expected)} tokens of 6 responses: {out / 'tokens.parquet'}" in outcome.out
    assert (out / "figures" / "summary.txt").read_text().rstrip() in outcome.out
    assert set(os.listdir(out)) == {"tokens.parquet", "manifest.json", "figures"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["model"]["path"] == str(model) and manifest["rollouts"]["path"] == str(rollouts)
    assert manifest["rollouts"]["sha256"] == file_hash(rollouts)
    assert re.fullmatch("[0-9a-f]{64}", manifest["model"]["sha256"])
    assert torch.__version__.startswith(manifest["versions"]["torch"]) and manifest["versions"]["python"]  # "+cu130"
    assert (manifest["seed"], manifest["dtype"], manifest["device"]) == (0, "float32", "cpu")
    assert manifest["threads"] == torch.get_num_threads()
    assert manifest["settings"]["loss"]["kl_coef"] == 0.001
    assert 0 < manifest["self_check"]["largest_difference"] < manifest["self_check"]["tolerance"] == 1e-3
    assert manifest["tokens"] == manifest["tokens_measured"] == len(expected)
    assert set(manifest["files"]) == {n for n in files(out) if n not in ("manifest.json", "figures")}


@pytest.mark.filterwarnings("ignore::gradscope.gradients.ContradictionWarning")  # at another temperature
def test_the_flags_reach_the_measurement(run, model, rollouts, tmp_path):
    out = tmp_path / "out"
    flags = ["--temperature", "0.7", "--tokens-per-interval", 2, "--seed", 3, "--dtype", "float64", "--per-module"]
    flags += ["--device", "cpu", "--blocks", "model.layers", "--chunk-memory", 100_000]
    flags += ["--kl-coef", 0, "--clip-ratio-c", "none"]
    assert run("measure", model, rollouts, "--out", out, *QUICK, *flags).status == 0
    policy = load_policy(model, dtype="float64")
    settings = {"temperature": 0.7, "tokens_per_interval": 2, "seed": 3, "per_module": True}
    loss = LossSettings(kl_coef=0, clip_ratio_c=None)
    settings |= {"loss": loss, "self_check": False, "resources": Resources(activations=100_000)}
    expected = measure(policy, read_rollouts(rollouts, policy), **settings)
    pd.testing.assert_frame_equal(pd.read_parquet(out / "tokens.parquet"), expected)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["self_check"] == "off" and manifest["dtype"] == "float64" and manifest["seed"] == 3
    assert manifest["tokens_measured"] < manifest["tokens"]


# What is refused.


def spoil(checkpoints: Path, to: Path, change) -> Path:
    change(Path(shutil.copytree(checkpoints / "llama", to)))
    return to


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def configure(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def replace_by_bin(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)


def spoil_weight(folder: Path, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


BAD_CHECKPOINTS = {
    "no weights": lambda d: (d / "model.safetensors").unlink(),
    "half of the weights": lambda d: cut(d / "model.safetensors", 5000),
    "four bytes of weights": lambda d: cut(d / "model.safetensors", 4),
    "an empty .bin": lambda d: replace_by_bin(d, b""),
    "a .bin of rubbish": lambda d: replace_by_bin(d, b"rubbish"),
    "a layer without weights": lambda d: configure(d, num_hidden_layers=4),
    "a layer too many": lambda d: configure(d, num_hidden_layers=2),
    "another vocabulary": lambda d: configure(d, vocab_size=200),
    "no configuration": lambda d: (d / "config.json").unlink(),
    "half a configuration": lambda d: cut(d / "config.json", 50),
    "a width in words": lambda d: configure(d, hidden_size="wide"),
    "heads of no width": lambda d: configure(d, num_attention_heads=3),
    "no activation": lambda d: configure(d, hidden_act="soft"),
    "no heads": lambda d: configure(d, num_attention_heads=0),
    "a vocabulary of billions": lambda d: configure(d, vocab_size=10**10),
    "blocks without end": lambda d: configure(d, num_hidden_layers=10**9),
    "tuples": lambda d: configure(d, return_dict=False),
    "an unknown type": lambda d: configure(d, model_type="nobody's"),
    "weights that are NaN": lambda d: spoil_weight(d, float("nan")),
    "weights that are infinite": lambda d: spoil_weight(d, float("inf")),
}


@pytest.mark.parametrize("what", BAD_CHECKPOINTS)
def test_a_checkpoint_that_cannot_be_used_is_refused_in_one_line(run, checkpoints, rollouts, tmp_path, what):
    folder = spoil(checkpoints, tmp_path / "spoiled", BAD_CHECKPOINTS[what])
    assert_one_line(run("measure", folder, rollouts, "--out", tmp_path / "out"), str(folder))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("logs", "flags", "words"),
    [
        ({"old_logprobs": [-200.0] * 3}, ["--clip-ratio-c", "none"], "0 of response 0 is -inf: its ratio, the expon"),
        ({"ref_logprobs": [0.0] * 3}, ["--kl-coef", "1e38"], "0 of response 0 is inf: its KL term, of log π"),
    ],
)
def test_a_weight_beyond_float32_is_refused_before_anything_is_written(run, model, tmp_path, logs, flags, words):
    row = {"prompt_ids": [4, 5], "response_ids": [7, 8, 9], "advantage": -1.0} | logs
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    assert_one_line(run("measure", model, path, "--out", tmp_path / "out", *flags), words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["measure", "diagnose"])
def test_a_budget_that_holds_no_gradient_is_refused(run, model, rollouts, tmp_path, command):
    given = [model, rollouts] if command == "measure" else [model, "--rollouts", rollouts]
    assert_one_line(run(command, *given, "--out", tmp_path / "out", "--gradient-memory", "10KiB"), "10,240")
    assert not (tmp_path / "out").exists()


@pytest.mark.all
def test_a_small_budget_changes_how_gradients_are_summed_and_the_run_says_how(run, model, rollouts, tmp_path):
    budgets = {"whole": (), "sketches": ("1MiB",)}
    for way, flags in budgets.items():
        given = ("--gradient-memory", *flags) if flags else ()
        outcome = run("measure", model, rollouts, "--out", tmp_path / way, "--no-self-check", *given)
        assert outcome.status == 0 and (way in outcome.out or way == "whole")
        assert json.loads((tmp_path / way / "manifest.json").read_text())["summed_gradients"]["way"] == way
    shares = [pd.read_csv(tmp_path / way / "figures" / "figure_1.csv") for way in budgets]
    assert len(shares[0]) == len(shares[1])
    assert "sketches of" in (tmp_path / "sketches" / "figures" / "summary.txt").read_text()


@pytest.mark.parametrize(
    "rows", [[], [ROW, {"prompt_ids": [4], "reward": 0.0, "group": 0}], [ROW | {"prompt_ids": [4] * CONTEXT}]]
)
def test_rollouts_that_cannot_be_used_are_refused_in_one_line(run, model, tmp_path, rows):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert_one_line(run("measure", model, path, "--out", tmp_path / "out"), str(path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--blocks", "model.norm"],
        ["--temperature", "0"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--tokens-per-interval", "0"],
        ["--tokens-per-interval", "-4"],
        ["--seed", "-1"],
        ["--reweight-alpha", "2"],
        ["--chunk-memory", "0"],
        ["--chunk-memory", "9" * 26],
        ["--device", "nowhere"],
        ["--device", "meta"],
        ["--device", "cpu", "--device-map", "auto"],
    ],
)
def test_flags_with_impossible_values_are_refused_in_one_line(run, model, rollouts, tmp_path, flags):
    outcome = run("measure", model, rollouts, "--out", tmp_path / "out", *flags)
    assert_one_line(outcome, flags[1] if flags[0] == "--blocks" else "")
    assert flags[0] == "--blocks" or flags[0].strip("-") in outcome.err.replace("_", "-")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 800 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_a_machine_without_memory_is_one_line_with_status_1(run, model, rollouts, tmp_path, monkeypatch, error):
    def fall(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("gradscope.cli.measure.Measure.measure", fall)
    assert_one_line(run("measure", model, rollouts, "--out", tmp_path / "out"), "out of memory", status=1)


def test_a_failed_self_check_is_one_line_with_status_1_and_nothing_is_written(
    run, model, rollouts, tmp_path, monkeypatch
):
    right = rules.linear_square_norms
    for module in (autograd, decoder_block):  # both ways through the body
        monkeypatch.setattr(module, "linear_square_norms", lambda *args, **kw: 1.02 * right(*args, **kw))
    out = tmp_path / "out"
    assert_one_line(run("measure", model, rollouts, "--out", out), "module model.layers.", status=1)
    assert not out.exists()
    assert run("measure", model, rollouts, "--out", out, *QUICK).status == 0


# Finished, other arguments, killed.


def test_a_finished_run_says_so_and_is_left_alone(run, model, rollouts, tmp_path):
    args = ["measure", model, rollouts, "--out", tmp_path / "out"]
    assert run(*args, "--no-figures").status == 0
    before = files(tmp_path / "out")
    again = run(*args, "--no-figures")
    assert (again.status, again.err) == (0, "") and "already measured with these arguments" in again.out
    assert files(tmp_path / "out") == before
    with_figures = run(*args)  # the figures were left out, so they are added; the table stays
    assert TOO_FEW in with_figures.out  # of three prompts
    after = files(tmp_path / "out")
    assert "figures/figure_1.png" in after and after["tokens.parquet"] == before["tokens.parquet"]
    assert run(*args).out == with_figures.out and files(tmp_path / "out") == after
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    del manifest["key"]["settings"]["loss"]["kl_estimator"]  # as earlier versions left it
    for settings in ({"constants": 0, "gradient_memory": None}, {"constants": 0}):
        (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest | {"figures": settings}))
        before = files(tmp_path / "out")
        assert run(*args).out == with_figures.out
        assert (files(tmp_path / "out") == before) == ("gradient_memory" in settings)
    assert_one_line(run(*args, "--kl-estimator", "k1"), "kl_estimator k3, not k1")


@pytest.mark.filterwarnings("ignore::gradscope.gradients.ContradictionWarning")  # at another temperature
def test_other_arguments_are_refused_until_overwrite_is_given(run, model, rollouts, tmp_path):
    out = tmp_path / "out"
    args = ["measure", model, rollouts, "--out", out, *QUICK]
    assert run(*args).status == 0
    (out / "notes.txt").write_text("mine")
    before = files(out)
    assert_one_line(run(*args, "--temperature", "0.7"), "temperature None, not 0.7")
    rollouts.write_text(rollouts.read_text() + json.dumps(json.loads(rollouts.read_text().splitlines()[0])) + "\n")
    assert_one_line(run(*args), "holds a run with other arguments (rollouts ")
    assert files(out) == before
    cold = run(*args, "--temperature", "0.7", "--overwrite")
    assert cold.status == 0 and (out / "notes.txt").read_text() == "mine"
    assert json.loads((out / "manifest.json").read_text())["settings"]["temperature"] == 0.7
    policy = load_policy(model)
    expected = measure(policy, read_rollouts(rollouts, policy), temperature=0.7, self_check=False)
    pd.testing.assert_frame_equal(pd.read_parquet(out / "tokens.parquet"), expected)


@pytest.mark.all
def test_killed_in_the_middle_a_run_is_taken_up_where_it_was(run, model, tmp_path):
    """kill -9 after the third response; started again, it finishes, and the table is an undisturbed run's."""
    ids = torch.randint(4, VOCAB, (12, 25), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"prompt_ids": row[:5], "response_ids": row[5:]} for row in ids]
    rollouts = write_jsonl(tmp_path / "rollouts.jsonl", rows)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    args = ["measure", model, rollouts, "--no-figures", "--chunk-memory", 1, "--out"]
    third = killed / ".partial" / "part-000002.parquet"
    assert Command("-m", "gradscope", *args, killed).kill_when(third.is_file).stderr == ""
    parts = {p.name: p.stat().st_mtime_ns for p in (killed / ".partial").glob("part-*")}
    assert 3 <= len(parts) < len(rows) and set(os.listdir(killed)) == {".partial", ".lock"}

    assert_one_line(run(*args, killed, "--temperature", "0.7"), "holds an unfinished run with other arguments")
    assert {p.name: p.stat().st_mtime_ns for p in (killed / ".partial").glob("part-*")} == parts

    written = []
    right = run_folder.RunFolder.write_part
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder.RunFolder, "write_part", lambda *args: (written.append(args[1]), right(*args)))
        resumed = run(*args, killed)
    assert resumed.status == 0 and "resuming the unfinished run" in resumed.out
    assert written == list(range(len(parts), len(rows)))
    assert run(*args, whole).status == 0
    assert (killed / "tokens.parquet").read_bytes() == (whole / "tokens.parquet").read_bytes()
    assert set(os.listdir(killed)) == set(os.listdir(whole)) == {"tokens.parquet", "manifest.json"}


def test_stopped_by_a_full_disk_within_a_group_a_run_finishes_to_the_same_table(run, model, tmp_path):
    ids = torch.randint(4, VOCAB, (12, 25), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"prompt_ids": row[:5], "response_ids": row[5:]} for row in ids]
    rollouts = write_jsonl(tmp_path / "rollouts.jsonl", rows)
    args, stopped, whole = ["measure", model, rollouts, *QUICK, "--out"], tmp_path / "stopped", tmp_path / "whole"
    written, right, sizes = [], run_folder.RunFolder.write_part, []
    measure_group = TableMeasurement.measure_responses

    def write(folder, row, frame):
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(row)
        right(folder, row, frame)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder.RunFolder, "write_part", write)
        patch.setattr(
            TableMeasurement, "measure_responses", lambda m, g: (sizes.append(len(g)), measure_group(m, g))[1]
        )
        assert_one_line(run(*args, stopped), "No space left on device", status=1)
    assert sizes[0] > 3 and len(written) == 3  # within the first group
    assert set(os.listdir(stopped)) == {".partial"}
    assert "resuming the unfinished run" in run(*args, stopped).out
    assert run(*args, whole).status == 0
    assert (stopped / "tokens.parquet").read_bytes() == (whole / "tokens.parquet").read_bytes()
    assert set(os.listdir(stopped)) == {"tokens.parquet", "manifest.json"}


def test_a_real_process_prints_one_line_of_error_and_no_traceback(tmp_path):
    command = [sys.executable, "-m", "gradscope", "sample", "embedded", "--out", str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert_one_line(Outcome(done.returncode, done.stdout, done.stderr), "--task")


# sample


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("w4 w5 w6\n\nw7 w8\n")
    return path


SHORT = ("--n", 3, "--max-new-tokens", 5)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_sample_writes_what_measure_reads_and_the_same_for_the_same_seed(run, model, prompts, tmp_path, suffix):
    paths = [tmp_path / f"{name}.{suffix}" for name in ("a", "b", "c")]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        outcome = run(
            "sample", model, "--prompts", prompts, "--out", path, "--seed", seed, "--temperature", 0.7, *SHORT
        )
        assert (outcome.status, outcome.err) == (0, "") and "6 responses to 2 prompts" in outcome.out
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    policy = load_policy(model)
    batch = read_rollouts(paths[0], policy)
    assert batch.temperature.tolist() == pytest.approx([0.7] * 6) and batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.sequence(0)[0][:3].tolist() == [4, 5, 6] and batch.sequence(5)[0][:2].tolist() == [7, 8]
    table = measure(policy, batch, self_check=False)
    assert (table["logprob"] - table["old_logprob"]).abs().max() < 1e-4


def test_sample_takes_a_task_from_a_file_of_the_users(run, model, tmp_path):
    task = tmp_path / "parity.py"
    task.write_text(
        "from gradscope.tasks import Question, register\n"
        "class Parity:\n"
        "    name = 'parity'\n"
        "    def questions(self, n, *, seed, **options):\n"
        "        return [Question(f'w{4 + (seed + i) % 8} w5', i % 2) for i in range(n)]\n"
        "    def reward(self, response, question):\n"
        "        return float(len(response.split()) % 2 == question.answer)\n"
        "register(Parity())\n"
    )
    out = tmp_path / "out.jsonl"
    outcome = run("sample", model, "--task", f"{task}:parity", "--questions", 3, "--out", out, *SHORT)
    assert outcome.status == 0 and "9 responses to 3 prompts" in outcome.out and "mean reward" in outcome.out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(row["reward"] == (len(row["response"].split()) % 2 == row["group"] % 2) for row in rows)


def test_a_chat_is_sampled_through_the_template(run, model, tmp_path):
    chat = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": [{"role": "user", "content": "w4 w5"}]}])
    out = tmp_path / "out.parquet"
    assert run("sample", model, "--prompts", chat, "--out", out, *SHORT).status == 0
    assert pd.read_parquet(out)["prompt_ids"][0].tolist() == [1, 4, 5, 1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give exactly one of --task NAME and --prompts FILE"),
        (["--task", "knights"], "no task is called 'knights'"),
        (["--task", "no.py:x"], "does not exist"),
        (["--prompts", "no.txt"], "no.txt does not exist"),
        (["--task", "knights-knaves", "--prompts", "no.txt"], "give exactly one"),
        (["--task", "knights-knaves", "--questions", "0"], "--questions is 0"),
        (["--task", "knights-knaves", "--seed", "-1"], "--seed -1"),
        (["--task", "knights-knaves", "--questions", str(10**20)], "more than 10,000,000"),
        (["--task", "knights-knaves", "--questions", "100000", "--n", "101"], "more than 10,000,000"),
        (["--prompts", "{prompts}", "--n", "5000001"], "5000001 responses to each of 2 questions are more than"),
        (["--prompts", "{prompts}", "--temperature", "1e-300"], "temperature is 1e-300: logits divided by it overflow"),
        (["--prompts", "{prompts}", "--temperature", "0"], "temperature is 0"),
        (["--prompts", "{prompts}", "--temperature", "nan"], "temperature is nan"),
        (["--prompts", "{prompts}", "--n", "0"], "n is 0"),
        (["--prompts", "{prompts}", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--prompts", "{prompts}", "--batch-size", "0"], "batch_size is 0"),
        (["--prompts", "{prompts}", "--device", "nowhere"], "device 'nowhere'"),
    ],
)
def test_what_sample_cannot_do_is_refused_in_one_line(run, model, prompts, tmp_path, flags, words):
    flags = [flag.format(prompts=prompts) for flag in flags]
    assert_one_line(run("sample", model, "--out", tmp_path / "out.jsonl", *flags), words)
    assert not (tmp_path / "out.jsonl").exists()


# demo


def test_the_demo_samples_measures_and_is_finished_the_second_time(run, tmp_path, monkeypatch):
    """The whole of it on fewer questions: the embedded policy, its rollouts, the table and the figures."""
    right, fewer = Sample.sample, {"questions": 3, "n": 2, "max_new_tokens": 40}
    monkeypatch.setattr(Sample, "sample", lambda sample: right(replace(sample, **fewer)))
    out = tmp_path / "demo"
    first = run("demo", "--out", out)
    assert (first.status, first.err) == (0, "")
    assert {"rollouts_seed0.jsonl", "tokens.parquet", "manifest.json", "figures"} == set(os.listdir(out))
    before = files(out)
    again = run("demo", "--out", out)
    assert again.status == 0 and "already measured" in again.out and files(out) == before
    assert_one_line(run("demo", "--out", out, "--seed", 1), "seed 0, not 1")
    assert files(out) == before


@pytest.mark.all
@pytest.mark.parametrize("name", every(2, ["embedded-certain", "embedded"]))
def test_the_demo_asks_another_policy_word_problems(run, tmp_path, monkeypatch, name):
    """Policies that write any text, as if they came from elsewhere; only one of them has a template."""
    right, fewer = Sample.sample, {"questions": 3, "n": 2, "max_new_tokens": 12}
    monkeypatch.setattr(Sample, "sample", lambda sample: right(replace(sample, **fewer)))
    policy, out = shutil.copytree(EMBEDDED[name], tmp_path / "policy"), tmp_path / "demo"
    first = run("demo", "--policy", policy, "--out", out)
    assert (first.status, first.err) == (0, "")
    rows = [json.loads(line) for line in (out / "rollouts_seed0.jsonl").read_text().splitlines()]
    wanted = [question.prompt for question in get_task("word-problems-examples").questions(3, seed=0)]
    assert [row["prompt"] for row in rows[::2]] == wanted and {row["temperature"] for row in rows} == {1.0}
    table = pd.read_parquet(out / "tokens.parquet")
    assert len(table) == sum(len(row["response_ids"]) for row in rows) and table["param_grad_norm"].notna().all()
    assert (out / "figures" / "figure_1.png").is_file()
    before = files(out)
    again = run("demo", "--policy", policy, "--out", out)
    assert again.status == 0 and files(out) == before


def test_at_a_stated_speed_a_plan_loads_no_weights_and_writes_nothing(run, checkpoints, rollouts, tmp_path):
    folder = spoil(checkpoints, tmp_path / "outline", lambda d: [p.unlink() for p in d.glob("*.safetensors")])
    before = sorted(tmp_path.rglob("*"))
    outcome = run("measure", folder, rollouts, "--plan", "--flops", "1e13")
    assert outcome.status == 0 and "backward rules" in outcome.out and "1e+13 FLOP/s" in outcome.out
    assert sorted(tmp_path.rglob("*")) == before
    assert_one_line(run("measure", folder, rollouts), "--out is missing")
