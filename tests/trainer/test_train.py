"""A run of the trainer: what it writes, that it learns, resumes to the same numbers, and how it is refused."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.processes import Command
from support.refusals import refused
from support.tiers import every

from gradscope import load_policy, read_rollouts
from gradscope.cli import main
from gradscope.errors import DivergedError, InputError, NanLogitsError, SyncError
from gradscope.gradients import interval_gradients
from gradscope.objective import batch_statistics
from gradscope.objective.equations import grpo_advantages
from gradscope.policy import EMBEDDED
from gradscope.sampling import HFSampler
from gradscope.tasks import get_task
from gradscope.trainer import TrainConfig, train
from gradscope.trainer.learner import Learner

SMALL = TrainConfig(
    people=(2,),
    steps=3,
    questions_per_step=3,
    group_size=4,
    mini_batch_size=6,
    micro_batch_size=6,
    max_new_tokens=200,
    learning_rate=2e-4,
    save_every=2,
    trackers=(),
)
TIMES = ("seconds_sampling", "seconds_training", "seconds_other", "tokens_per_second")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of three steps with everything that can be kept."""
    out = tmp_path_factory.mktemp("run") / "grpo"
    config = replace(SMALL, save_rollouts=True, trackers=("tensorboard",))
    train(config, out, progress=False)
    return out


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def numbers(out: Path) -> list[dict]:
    """What is logged, but for times."""
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records(out)]


def stop(*args: str, capsys) -> tuple[int, str]:
    """Exit status and standard error of a command that is refused, but for the lines about its steps."""
    with pytest.raises(SystemExit) as stopped:
        main(["train", *args])
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return stopped.value.code, "".join(line for line in lines if not line.startswith("step "))


def flags(config: TrainConfig = SMALL) -> list[str]:
    """The small run as a command line."""
    names = ("steps", "questions_per_step", "group_size", "mini_batch_size", "micro_batch_size", "max_new_tokens")
    names += ("learning_rate", "save_every")
    pairs = [(f"--{name.replace('_', '-')}", str(getattr(config, name))) for name in names]
    return [*(word for pair in pairs for word in pair), "--people", "2", "--trackers"]


def test_a_run_writes_a_line_per_step_its_settings_and_checkpoints(run):
    assert [record["step"] for record in records(run)] == [1, 2, 3]
    assert json.loads((run / "config.json").read_text())["learning_rate"] == 2e-4
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["processes"], manifest["threads"]) == (1, torch.get_num_threads())
    assert list((run / "trackers").rglob("events.*"))


def test_what_is_logged_of_the_responses_is_what_the_kept_rollouts_say(run):
    for record in records(run):
        rows = pd.read_parquet(run / f"rollouts/step-{record['step']:06d}.parquet")
        lengths = rows["response_ids"].map(len)
        assert len(rows) == 12
        assert record["reward_mean"] == pytest.approx(rows["reward"].mean())
        assert record["reward_sd"] == pytest.approx(rows["reward"].std(), rel=1e-5)
        assert record["accuracy"] == pytest.approx((rows["reward"] == 3).mean())
        assert record["response_length"] == pytest.approx(lengths.mean())
        assert record["num_tokens"] == lengths.sum()
        assert record["truncated"] == pytest.approx(1 - rows["finished"].mean())
        probs = torch.tensor([p for row in rows["old_logprobs"] for p in row]).exp()
        shares = [((probs >= low) & (probs < high)).float().mean() for low, high in ((0, 0.25), (0.25, 0.5))]
        assert [record["token_share_0"], record["token_share_1"]] == pytest.approx([float(s) for s in shares], abs=1e-6)


def test_the_first_steps_rollouts_are_read_natively_and_give_the_logged_gradient_norms(run):
    record, policy = records(run)[0], load_policy("embedded")
    batch = read_rollouts(run / "rollouts/step-000001.parquet", policy)
    # The policy before training is its own reference.
    again = batch_statistics(policy.model, batch, micro_batch_size=4, device=policy.device).logprob
    keep = batch.response_mask
    assert torch.allclose(again[keep], batch.old_logprobs[keep], atol=2e-5)
    assert torch.allclose(batch.ref_logprobs[keep], batch.old_logprobs[keep], atol=2e-5)
    assert torch.allclose(batch.sampler_logprobs[keep], batch.old_logprobs[keep], atol=2e-5)
    wanted = grpo_advantages(batch.rewards, batch.group_ids)
    assert torch.allclose(batch.advantages[keep], batch.spread_over_tokens(wanted)[keep])
    first = batch.select(torch.arange(SMALL.mini_batch_size))
    norms = interval_gradients(policy, first).table.set_index("interval")["norm"]
    assert record["grad_norm"][0] == pytest.approx(norms["all"], rel=1e-4)


def test_the_kept_advantages_are_those_that_are_trained_on(tmp_path):
    trained, control = [], {"reweight_alpha": 0.3, "control": "permuted-weights"}

    @contextmanager
    def watch(step):
        trained.append(step.batch)
        yield

    for name, changed in (("grpo", {}), ("permuted", control)):
        train(replace(SMALL, steps=1, save_rollouts=True, **changed), tmp_path / name, on_step=watch, progress=False)
    plain, permuted = (
        torch.tensor([a for row in pd.read_parquet(path)["advantage"] for a in row])
        for path in (tmp_path / name / "rollouts/step-000001.parquet" for name in ("grpo", "permuted"))
    )
    for kept, batch in zip((plain, permuted), trained, strict=True):
        assert torch.equal(kept.float(), batch.advantages[batch.response_mask].float())
    factors = (permuted / plain)[plain != 0]
    assert (factors >= 0.7 - 1e-6).all() and (factors <= 1 + 1e-6).all() and factors.std() > 0.01


def test_a_callback_sees_the_policy_before_and_after_the_update(tmp_path):
    seen = []

    @contextmanager
    def watch(step):
        weight = next(step.policy.model.parameters())
        before = weight.detach().clone()
        yield
        seen.append((step.number, bool((weight != before).any())))
        step.metrics["watched"] = 1.0

    train(replace(SMALL, steps=2), tmp_path / "run", on_step=watch, progress=False)
    assert seen == [(1, True), (2, True)]
    assert [record["watched"] for record in records(tmp_path / "run")] == [1.0, 1.0]


def test_a_checkpoint_is_a_folder_that_transformers_loads_with_the_trained_weights(run):
    from transformers import AutoModelForCausalLM

    trained, original = load_policy(run / "checkpoints/step-000003"), load_policy("embedded")
    loaded = AutoModelForCausalLM.from_pretrained(run / "checkpoints/step-000003")
    for (name, a), b, c in zip(
        trained.model.named_parameters(), loaded.parameters(), original.model.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
    assert trained.tokenizer("Zoey: ").input_ids == original.tokenizer("Zoey: ").input_ids


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(run, tmp_path):
    kept = replace(SMALL, save_rollouts=True)
    train(kept, tmp_path / "again", progress=False)
    assert numbers(tmp_path / "again") == numbers(run)
    train(replace(SMALL, seed=1, steps=1), tmp_path / "other", progress=False)
    assert numbers(tmp_path / "other")[0]["num_tokens"] != numbers(run)[0]["num_tokens"]


@pytest.mark.all
def test_after_kill_9_a_resumed_run_has_the_metrics_of_an_undisturbed_one_bit_for_bit(tmp_path):
    config = replace(SMALL, steps=5, questions_per_step=2, group_size=3, lopti_eta=0.5, reweight_alpha=0.3)
    train(config, tmp_path / "whole", progress=False)
    killed = ("--lopti-eta", "0.5", "--reweight-alpha", "0.3", "--out", tmp_path / "killed")
    log = tmp_path / "killed/metrics.jsonl"
    # Past the checkpoint of step 2, so that a line must be dropped.
    Command("-m", "gradscope", "train", *flags(config), *killed).kill_when(
        lambda: log.is_file() and log.read_text().count("\n") >= 3
    )
    assert [record["step"] for record in records(tmp_path / "killed")][:3] == [1, 2, 3]
    assert len(records(tmp_path / "killed")) < config.steps
    train(config, tmp_path / "killed", resume=True, progress=False)
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    last = "checkpoints/step-000005/model.safetensors"
    assert (tmp_path / "killed" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


def test_a_finished_run_does_nothing_and_names_its_last_checkpoint(run):
    before = files(run)
    config = replace(SMALL, save_rollouts=True, trackers=("tensorboard",))
    assert train(config, run) == run / "checkpoints/step-000003" and files(run) == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--preset", "kk-embeded"], "kk-embedded"),
        (["--steps", "none"], "steps"),
        (["--epochs", "2"], "epochs"),
        (["--data", "nowhere/*.parquet"], "nowhere/*.parquet"),
        (["--model", "nowhere"], "nowhere"),
        (["--trackers", "wand"], "wand"),
        (["--temperature", "0"], "temperature"),
        (["--max-new-tokens", "3"], "max_new_tokens"),
        (["--micro-batch-size", "99999999999999999999"], "micro_batch_size"),
        (["--lora-rank", "1000000000"], "lora_rank"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_exit_2_and_nothing_is_written(changed, said, tmp_path, capsys):
    status, error = stop(*flags(), "--out", str(tmp_path / "run"), *changed, capsys=capsys)
    assert status == 2
    assert error.count("\n") == 1 and said in error
    assert not (tmp_path / "run").exists()


def test_a_folder_with_another_run_is_refused_and_overwritten_on_request(run, tmp_path, capsys):
    status, error = stop(*flags(), "--out", str(run), "--temperature", "0.9", capsys=capsys)
    assert status == 2 and "temperature 0.7, not 0.9" in error
    out = tmp_path / "run"
    train(replace(SMALL, steps=1), out, progress=False)
    (out / "notes.txt").write_text("mine")
    status, error = stop(*flags(), "--out", str(out), capsys=capsys)
    assert status == 2 and "--resume" in error
    train(replace(SMALL, steps=1, seed=3), out, overwrite=True, progress=False)
    assert json.loads((out / "config.json").read_text())["seed"] == 3
    assert (out / "notes.txt").read_text() == "mine"
    status, error = stop(*flags(), "--out", str(out), "--resume", "--overwrite", capsys=capsys)
    assert status == 2 and "give one of them" in error


def files(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_overwriting_deletes_what_the_old_run_wrote_and_says_so(tmp_path, capsys):
    out = tmp_path / "run"
    train(replace(SMALL, steps=1, save_rollouts=True, trackers=("tensorboard",)), out, progress=False)
    (out / "notes.txt").write_text("mine")
    capsys.readouterr()
    train(replace(SMALL, steps=1, seed=3), out, overwrite=True, progress=False)
    assert capsys.readouterr().err.count(str(out)) == 1
    kept = {path.relative_to(out).parts[0] for path in files(out)}
    assert kept == {"checkpoints", "config.json", "manifest.json", "metrics.jsonl", "notes.txt"}
    assert json.loads((out / "config.json").read_text())["seed"] == 3


@pytest.mark.parametrize("what", every(2, ["model", "tracker", "engine"]))
def test_what_is_refused_before_the_new_run_begins_leaves_the_old_one_alone(what, tmp_path, monkeypatch):
    out = tmp_path / "run"
    train(replace(SMALL, steps=1), out, progress=False)
    before, other = files(out), replace(SMALL, seed=3)
    if what == "engine":
        monkeypatch.setitem(sys.modules, "vllm", None)  # cannot be imported
    changed = {"model": {"model": "vanished"}, "tracker": {"trackers": ("none",)}, "engine": {"engine": "vllm"}}
    with pytest.raises(InputError):
        train(replace(other, **changed[what]), out, overwrite=True, progress=False)
    assert files(out) == before


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    out, said = tmp_path / "run", []

    @contextmanager
    def start_another(step):
        with pytest.raises(InputError) as caught:
            train(SMALL, out, resume=True, progress=False)
        said.append(str(caught.value))
        yield

    train(replace(SMALL, steps=1), out, on_step=start_another, progress=False)
    assert len(said) == 1 and [record["step"] for record in records(out)] == [1]
    assert not (out / ".lock").exists()


@pytest.mark.parametrize("name", ["manifest.json", "checkpoints/mine.bin", "config.json"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_something_that_no_run_wrote_is_refused_and_left_alone(tmp_path, name, overwrite):
    file = tmp_path / "other" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"model_type": "qwen2"}')
    with pytest.raises(InputError):
        train(SMALL, tmp_path / "other", overwrite=overwrite, progress=False)
    assert file.read_text() == '{"model_type": "qwen2"}'
    assert [path for path in (tmp_path / "other").rglob("*") if path.is_file()] == [file]


def test_a_run_whose_policy_has_changed_since_it_began_is_not_resumed(tmp_path):
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(EMBEDDED["embedded"], model)
    config = replace(SMALL, model=str(model))
    train(replace(config, steps=1), tmp_path / "run", progress=False)
    weights = load_file(model / "model.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, model / "model.safetensors", {"format": "pt"})
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with refused("model"):
        train(config, tmp_path / "run", resume=True, progress=False)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


TASK = """
from gradscope.tasks import get_task, register
class Moody:
    name = "moody"
    inner = get_task("knights-knaves-compact")
    graded = 0
    def questions(self, n, *, seed):
        return self.inner.questions(n, seed=seed, people=(2,))
    def reward(self, response, question):
        Moody.graded += 1
        if Moody.graded > {graded}:
            raise KeyError("no such answer")
        return self.inner.reward(response, question)
register(Moody())
"""


def test_a_task_whose_reward_raises_stops_the_run_and_loses_nothing(tmp_path, capsys):
    # 12 responses a step: the third step's fifth grade raises.
    (tmp_path / "task.py").write_text(TASK.format(graded=28))
    args = [*flags(replace(SMALL, save_every=20)), "--task", f"{tmp_path}/task.py:moody", "--people"]
    status, error = stop(*args, "--out", str(tmp_path / "run"), capsys=capsys)
    assert status == 2
    assert "moody" in error and "KeyError" in error and error.count("\n") == 1
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run/checkpoints/step-000002/model.safetensors").is_file()


def test_three_steps_without_a_finite_gradient_end_the_run_with_the_checkpoint_kept(tmp_path):
    out, calls = tmp_path / "run", []

    def poison(gradient):
        calls.append(1)
        # Two mini-batches a step; one good step between bad ones starts anew.
        return gradient * float("inf") if len(calls) > 4 and len(calls) != 6 else gradient

    @contextmanager
    def watch(step):
        handle = next(step.policy.model.parameters()).register_hook(poison)
        yield
        handle.remove()

    for resume in (False, True):  # resumed after step 4, the run knows of its two bad ones
        with pytest.raises(DivergedError):
            train(replace(SMALL, steps=9), out, on_step=watch, resume=resume, progress=False)
        assert [record["nonfinite_steps"] for record in records(out)] == [0, 0, 1, 2, 1]
    assert [record["optimizer_steps"] for record in records(out)] == [2, 2, 1, 0, 0]
    assert all(torch.isfinite(p).all() for p in load_policy(out / "checkpoints/step-000004").model.parameters())


def test_weights_that_a_step_has_made_infinite_end_the_run_and_are_not_saved(tmp_path, capsys):
    args = [*flags(replace(SMALL, steps=1)), "--weight-decay", "1e300", "--out", str(tmp_path / "run")]
    status, error = stop(*args, capsys=capsys)
    assert status == 1
    assert "weights are not finite after step 1; there is no earlier checkpoint; try a lower" in error
    assert error.count("\n") == 1
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.all
def test_logits_that_steps_have_made_nan_are_divergence_and_the_checkpoint_before_them_is_named(tmp_path):
    @contextmanager
    def blow_up(step):
        yield
        if step.number == 2:
            for parameter in step.policy.model.parameters():
                parameter.data.mul_(1e30)  # finite as yet

    out = tmp_path / "run"
    with pytest.raises(DivergedError) as caught:
        train(replace(SMALL, model="embedded-certain", save_every=1), out, on_step=blow_up, progress=False)
    assert f"{out / 'checkpoints/step-000001'};" in str(caught.value)
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == ["step-000001", "step-000002"]


@pytest.mark.parametrize(("step", "error"), every(2, [(1, NanLogitsError), (3, DivergedError)]))
def test_logits_that_are_nan_for_the_trainer_alone_are_divergence_once_steps_are_taken(
    step, error, tmp_path, monkeypatch
):
    whole, calls = Learner.statistics, []

    def poisoned(self, batch):
        calls.append(1)
        found = whole(self, batch)
        return replace(found, logprob=found.logprob * float("nan")) if len(calls) == step else found

    monkeypatch.setattr(Learner, "statistics", poisoned)
    with pytest.raises(error):
        train(SMALL, tmp_path / "run", progress=False)
    assert (tmp_path / "run").exists() == (step > 1)  # refused before its first checkpoint, a run leaves nothing


@pytest.mark.parametrize("what", every(2, ["__init__", "close"]))
def test_a_disk_that_is_full_for_a_tracker_is_named_with_the_remedy(what, tmp_path, monkeypatch, capsys):
    from torch.utils.tensorboard import SummaryWriter

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SummaryWriter, what, full)
    status, error = stop(*flags(), "tensorboard", "--out", str(tmp_path / "run"), capsys=capsys)
    assert status == 1
    said = f"{tmp_path / 'run/trackers'} could not be written (No space left on device); make room there"
    assert said in error and error.count("\n") == 1


def test_what_was_not_deleted_yet_when_the_last_step_was_done_is_deleted_by_the_next_start(run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    shutil.copytree(out / "checkpoints/step-000002", out / "checkpoints/.step-000001.partial")
    settings = json.loads((out / "config.json").read_text()) | {"keep_checkpoints": 1}
    config = TrainConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()})
    assert train(config, out, resume=True) == out / "checkpoints/step-000003"
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000003"]


@pytest.mark.parametrize("content", [None, b"", b'{"step": 1', b'{"step": 1, "reward_mean": "x"}\n'])
def test_a_finished_run_whose_records_are_damaged_is_one_line(content, run, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (out / "metrics.jsonl").unlink()
    if content is not None:
        (out / "metrics.jsonl").write_bytes(content)
    status, error = stop(*flags(), "--out", str(out), "--resume", capsys=capsys)
    assert status == 2 and str(out / "metrics.jsonl") in error and error.count("\n") == 1


@pytest.mark.all
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before_to_the_same_numbers(run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (out / "checkpoints/step-000003/optimizer.pt").write_bytes(b"")
    config = replace(SMALL, save_rollouts=True, trackers=("tensorboard",))
    with refused("--resume"):
        train(config, out, progress=False)
    train(config, out, resume=True, progress=False)
    assert numbers(out) == numbers(run)


def test_records_that_are_missing_for_the_checkpoint_are_said_before_anything_is_written(run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("\n".join([lines[0], "5", lines[2]]) + "\n")
    before = files(out)
    with refused("metrics.jsonl"):
        train(replace(SMALL, steps=4, save_rollouts=True), out, resume=True, progress=False)
    assert files(out) == before


def test_a_sampler_with_other_weights_is_found_out_before_the_first_update(tmp_path, monkeypatch):
    whole = HFSampler.sample

    def elsewhere(self, prompts, *, temperature, **settings):
        return whole(self, prompts, temperature=temperature * 1.5, **settings)

    monkeypatch.setattr(HFSampler, "sample", elsewhere)
    with pytest.raises(SyncError):
        train(SMALL, tmp_path / "run", progress=False)


@pytest.mark.parametrize("mini_batch_size", [6, 12])  # with a scoring pass, and scored by the only optimizer step
@pytest.mark.parametrize("step", every(2, [2, 1]))
@pytest.mark.parametrize("response", every(2, [0, -1]))
def test_a_sampler_without_finite_log_probabilities_is_found_out(
    response, step, mini_batch_size, tmp_path, monkeypatch
):
    whole, calls = HFSampler.sample, []

    def broken(self, prompts, **settings):
        calls.append(1)
        groups = whole(self, prompts, **settings)
        if len(calls) == step:
            one = groups[response][response]
            groups[response][response] = replace(one, logprobs=[*one.logprobs[:-1], float("nan")])
        return groups

    monkeypatch.setattr(HFSampler, "sample", broken)
    with pytest.raises(SyncError):
        train(replace(SMALL, steps=2, mini_batch_size=mini_batch_size), tmp_path / "run", progress=False)
    assert len(calls) == step


def test_data_are_seen_once_an_epoch_each_epoch_in_another_order(data_folder):
    from gradscope.trainer import Questions

    config = TrainConfig(task="knights-knaves", data=("kk/3ppl/test.parquet",), epochs=2, questions_per_step=10)
    questions = Questions(get_task(config.task), config)
    assert questions.steps == 20
    drawn = [q.prompt for step in range(20) for q in questions.of_step(step)]
    assert len(set(drawn[:100])) == 100
    assert sorted(drawn[:100]) == sorted(drawn[100:])
    assert drawn[:100] != drawn[100:]


@pytest.mark.parametrize(
    "changed",
    every(
        3,
        [
            {"algorithm": "reinforce++"},
            {"lopti_eta": 0.5, "control": "random-split"},
            {"reweight_alpha": 0.3, "control": "matched-norm"},
            {"method": "icepop"},
            {"precision": "bfloat16", "gradient_checkpointing": True},
            {"lora_rank": 4, "learning_rate": 1e-3},
        ],
    ),
    ids=lambda changed: "-".join(map(str, changed.values())),
)
def test_every_method_control_and_precision_runs_and_moves_the_policy(changed, tmp_path):
    last = train(replace(SMALL, steps=1, **changed), tmp_path / "run", progress=False)
    record = records(tmp_path / "run")[-1]
    assert record["optimizer_steps"] == (4 if changed.get("lopti_eta") else 2)
    assert all(norm > 0 for norm in record["grad_norm"])
    before, after = load_policy("embedded"), load_policy(last)
    moved = [not torch.equal(a, b) for a, b in zip(before.model.parameters(), after.model.parameters(), strict=True)]
    assert any(moved)


@contextmanager
def looking_on(step):
    """A callback: whoever looks at a step before its update has its π_old known beforehand."""
    yield


@pytest.mark.parametrize(
    "changed",
    every(3, [{}, {"reweight_alpha": 0.3}, {"algorithm": "reinforce++", "kl_coef": 0.0}]),
    ids=str,
)
def test_a_step_is_the_same_whether_its_only_pass_scores_its_tokens_or_a_pass_before(changed, tmp_path, monkeypatch):
    score, scored = Learner.statistics, []
    monkeypatch.setattr(Learner, "statistics", lambda self, batch: scored.append(len(batch)) or score(self, batch))
    config = replace(SMALL, steps=1, save_rollouts=True, mini_batch_size=12, **changed)
    for name, watch in (("at once", None), ("before", looking_on)):
        train(config, tmp_path / name, on_step=watch, progress=False)
    assert scored == [config.num_responses]
    (ours,), (wanted,) = numbers(tmp_path / "at once"), numbers(tmp_path / "before")
    for name, value in wanted.items():
        # Rounding in float32, which the difference of sampler and trainer is made of; losses are sums that cancel.
        close = {"rel": 1e-4, "abs": 1e-5}
        exact = name == "passes" or value is None
        assert ours[name] == (value if exact else pytest.approx(value, **close)), name
    one, other = (pd.read_parquet(tmp_path / name / "rollouts/step-000001.parquet") for name in ("at once", "before"))
    for column in one:
        if column in ("old_logprobs", "ref_logprobs", "advantage"):
            np.testing.assert_allclose(np.concatenate(one[column]), np.concatenate(other[column]), rtol=1e-4, atol=2e-5)
        else:
            assert one[column].astype(str).equals(other[column].astype(str)), column


@pytest.mark.parametrize(
    "changed",
    every(
        3,
        [
            {"mini_batch_size": 6},
            {"lopti_eta": 0.5},
            {"mask_probs": (0.75, 1.0)},
            {"algorithm": "reinforce++"},
            {"reweight_alpha": 0.3, "control": "permuted-weights"},
            {"method": "icepop"},
            {"old_logprobs": "sampler"},
        ],
    ),
    ids=str,
)
def test_what_needs_the_old_policys_probabilities_before_the_update_has_one_scoring_pass(
    changed, tmp_path, monkeypatch
):
    score, scored = Learner.statistics, []
    monkeypatch.setattr(Learner, "statistics", lambda self, batch: scored.append(len(batch)) or score(self, batch))
    train(replace(SMALL, steps=1, **{"mini_batch_size": 12, **changed}), tmp_path / "run", progress=False)
    assert scored == [SMALL.num_responses]


@pytest.mark.all
def test_training_raises_sampled_accuracy_on_puzzles_it_has_not_seen(tmp_path):
    """Every step has new puzzles, for two; analyses/reproduce.py makes the runs that compare methods."""
    config = replace(SMALL, model="embedded-certain", steps=6, questions_per_step=8, group_size=8)
    train(replace(config, mini_batch_size=32, micro_batch_size=32, save_every=6), tmp_path / "run", progress=False)
    accuracy = [record["accuracy"] for record in records(tmp_path / "run")]
    assert np.mean(accuracy[-2:]) > np.mean(accuracy[:2]) + 0.1


def test_a_resumed_run_may_be_longer_and_its_configuration_older(tmp_path):
    train(replace(SMALL, steps=2), tmp_path / "run", progress=False)
    settings = json.loads((tmp_path / "run/config.json").read_text())
    (tmp_path / "run/config.json").write_text(json.dumps(settings | {"gradients_every": None}))
    train(replace(SMALL, steps=3, save_every=3), tmp_path / "run", resume=True, progress=False)
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_has_more_steps_already_says_so(resume, run):
    config = replace(SMALL, steps=2, save_rollouts=True, trackers=("tensorboard",))
    with refused("step-000003"):
        train(config, run, resume=resume, progress=False)


def test_settings_that_change_numbers_are_refused_on_resume(run):
    with refused("learning_rate"):
        train(replace(SMALL, learning_rate=1e-3), run, resume=True)
