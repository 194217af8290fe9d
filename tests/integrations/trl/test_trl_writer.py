"""The writer beside TRL: training is the same bit for bit, and what its files say is what was trained."""

from __future__ import annotations

import json
import math
import os
import signal
import warnings
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from support.cli import run
from support.processes import launch
from support.refusals import refused
from support.tiers import every
from support.trl_runs import (
    TEMPERATURE,
    Recorder,
    even_tokens,
    import_trl,
    make_trainer,
    needs_trl,
    own_slopes,
    save_policy,
    train,
)

from gradscope.integrations.trl import RolloutWriter
from gradscope.objective import LossSettings, batch_weights
from gradscope.rollouts import read_dump, read_rollouts

pytestmark = needs_trl

ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
OFF_POLICY = {"num_iterations": 2, "beta": 0.1, "move": 0.02, "epsilon": 0.05, "epsilon_high": 0.1, "delta": 1.5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def write(trainer, **settings):
    writer = RolloutWriter(trainer, **settings)
    trainer.add_callback(writer)
    return writer


def files_of(writer):
    return sorted(path.name for path in writer.folder.iterdir())


# ---- what goes wrong


def test_a_writer_that_dies_is_one_warning(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=6)
    writer = write(trainer)
    own = writer.on_step_end

    def killed(args, state, control, **keywords):
        own(args, state, control, **keywords)
        if state.global_step == 2:
            os.kill(writer._process._process.pid, signal.SIGKILL)
            writer._process._process.wait()

    writer.on_step_end = killed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(trainer)
    assert len([w for w in caught if "gradscope" in str(w.message)]) == 1
    assert trainer.state.global_step == 6


def test_a_folder_that_cannot_be_written_is_one_warning_that_says_so(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=3)
    writer = write(trainer)
    writer.folder.parent.mkdir(parents=True)
    writer.folder.write_text("a file")
    with pytest.warns(UserWarning) as caught:
        train(trainer)
    (said,) = [str(w.message) for w in caught if "gradscope" in str(w.message)]
    assert str(writer.folder) in said and trainer.state.global_step == 3


# ---- what is in the files


LOGPROBS = {
    "old_logprobs": "old_per_token_logps",
    "ref_logprobs": "ref_per_token_logps",
    "sampler_logprobs": "sampling_per_token_logps",
}
LOSSES = {
    "grpo": {"loss_type": "grpo", **OFF_POLICY, **ACCUMULATED},
    "dapo": {"loss_type": "dapo", **OFF_POLICY, **ACCUMULATED},
    "dapo, two steps of a generation": {"loss_type": "dapo", "steps_per_generation": 2, **OFF_POLICY},
    "dr_grpo": {"loss_type": "dr_grpo", **OFF_POLICY, **ACCUMULATED},
    "bnpo": {"loss_type": "bnpo", **OFF_POLICY, **ACCUMULATED, "use_bias_correction_kl": False},
    "luspo": {"loss_type": "luspo", **OFF_POLICY},
    "on-policy": {},
}


@pytest.mark.parametrize("name", every(3, LOSSES))
def test_weights_from_the_log_are_the_slopes_of_trls_loss(checkpoint, tmp_path, name):
    """Of a step whose responses are of different lengths, with tools' tokens and factors for another sampler."""
    settings = {"max_steps": 4, "learning_rate": 1e-3} | LOSSES[name]
    trainer = make_trainer(checkpoint, tmp_path, **settings)
    own, generator = trainer._generate_and_score_completions, torch.Generator().manual_seed(0)

    def generate(batch):
        found = own(batch)
        mask = found["completion_mask"]
        mask *= torch.arange(mask.shape[1]) < torch.randint(3, 11, (len(mask), 1), generator=generator)
        found["tool_mask"] = (torch.rand(mask.shape, generator=generator) < 0.8).long()
        found["num_items_in_batch"] = (mask * found["tool_mask"]).sum()
        found["importance_sampling_ratio"] = 0.5 + torch.rand(mask.shape, generator=generator)
        found["sampling_per_token_logps"] = -torch.rand(mask.shape, generator=generator)
        return found

    trainer._generate_and_score_completions = generate
    writer, recorder = write(trainer), Recorder(trainer)
    train(trainer)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True  # its loss path; nothing is sampled any more
    for number, step in enumerate(recorder.steps, 1):
        trainer.model.load_state_dict(step["weights"], strict=False)
        trainer.current_gradient_accumulation_steps = len(step["window"])
        trainer.model.train()
        dump = read_dump(writer.folder, step=number)
        batch = dump.batch
        rows = [(part, row) for part in step["window"] for row in range(len(part["completion_ids"]))]
        numbers = [n for n, part in enumerate(step["window"]) for _ in part["completion_ids"]]
        assert batch.micro_batch_ids.tolist() == numbers and not batch.process_ids.any()
        slopes = [own_slopes(trainer, part) for part in step["window"]]
        logprobs, slopes = (torch.cat(each).detach() for each in zip(*slopes, strict=True))
        spread = torch.full(batch.input_ids.shape, -1.0)
        wanted = torch.zeros(batch.input_ids.shape)
        for row, (part, own_row) in enumerate(rows):
            seen = part["completion_mask"][own_row].bool()
            kept = seen & part["tool_mask"][own_row].bool()
            start, n = int(batch.response_start[row]), int(seen.sum())
            prompt = part["prompt_ids"][own_row][part["prompt_mask"][own_row].bool()]
            ids = torch.cat([prompt, part["completion_ids"][own_row][seen]])
            assert torch.equal(batch.input_ids[row, : start + n], ids)
            assert torch.equal(batch.response_mask[row, start : start + n], kept[seen])
            assert batch.rewards[row] == pytest.approx(even_tokens([part["completion_ids"][own_row].tolist()])[0])
            factors = part["advantages"][own_row] * part["importance_sampling_ratio"][own_row]
            assert torch.allclose(batch.advantages[row, start : start + n][kept[seen]], factors[kept], rtol=1e-6)
            for column, tensor in LOGPROBS.items():
                values = getattr(batch, column)
                assert (values is not None) == (tensor in part)
                if values is not None:
                    assert torch.equal(values[row, start : start + n][kept[seen]], part[tensor][own_row][kept])
            spread[row, start : start + n] = logprobs[row][seen]
            wanted[row, start : start + n] = slopes[row][seen]
        found = batch_weights(spread, batch, LossSettings.from_log(dump.loss), num_tokens=batch.num_tokens).total
        wanted = -wanted * batch.num_tokens
        assert float((found - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())
        assert (batch.temperature == TEMPERATURE).all() and (batch.steps == number).all()
    assert (dump.batch.old_logprobs is None) == (name == "on-policy")
    assert "on-policy" not in {note.kind for note in dump.notes}
    written = pq.read_table(writer.folder / f"step_{number:06d}.parquet").to_pylist()
    assert all(("trainer_logprobs" in row) == (name == "on-policy") for row in written)
    if name == "on-policy":  # log π of the trainer's own pass, of which no ratio is made
        for row, own in zip(written, logprobs, strict=True):
            assert row["trainer_logprobs"] == pytest.approx(own[: len(row["response_ids"])].tolist(), abs=1e-6)


def test_a_hole_in_the_completion_mask_is_a_masked_token_of_the_response_and_one_warning_counts_them(
    checkpoint, tmp_path
):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=2)
    own, seen = trainer._generate_and_score_completions, []

    def generate(batch):
        found = own(batch)
        found["completion_mask"][:, 0] = 0
        found["completion_mask"][1, 2] = 0
        seen.append(found)
        return found

    trainer._generate_and_score_completions = generate
    writer = write(trainer)
    with pytest.warns(UserWarning) as caught:
        train(trainer)
    assert len([w for w in caught if "8 of 8 responses" in str(w.message)]) == 1
    batch = read_dump(writer.folder, step=1).batch
    wanted = {}
    for part in seen[:1]:
        for ids, mask in zip(part["completion_ids"].tolist(), part["completion_mask"].tolist(), strict=True):
            end = max(place for place, kept in enumerate(mask) if kept) + 1
            wanted[tuple(ids[:end])] = [bool(kept) for kept in mask[:end]]
    for row, start in enumerate(batch.response_start.tolist()):
        real = batch.attention_mask[row, start:]
        ids, mask = (value[row, start:][real] for value in (batch.input_ids, batch.response_mask))
        assert wanted[tuple(ids.tolist())] == mask.tolist() and not mask[0]


def test_each_reward_functions_number_is_written_beside_their_weighted_sum(checkpoint, tmp_path):
    def long(completion_ids, **_):
        return [None if sum(ids) % 3 == 0 else float(len(ids)) for ids in completion_ids]

    class Rewarded(import_trl().GRPOTrainer):
        def __init__(self, *, reward_funcs, **keywords):
            super().__init__(reward_funcs=[reward_funcs, long], **keywords)

    trainer = make_trainer(checkpoint, tmp_path, kind=Rewarded, max_steps=2, reward_weights=[1.0, -0.5])
    writer = write(trainer)
    train(trainer)
    for step in (1, 2):
        batch = read_dump(writer.folder, step=step).batch
        ids = [row[own].tolist() for row, own in zip(batch.input_ids, batch.response_mask, strict=True)]
        even, own = even_tokens(ids), long(ids)
        assert batch.reward_parts["even_tokens"].tolist() == pytest.approx(even)
        assert batch.reward_parts["long"].tolist() == pytest.approx([v or math.nan for v in own], nan_ok=True)
        wanted = [e - 0.5 * (v or 0.0) for e, v in zip(even, own, strict=True)]
        assert batch.rewards.tolist() == pytest.approx(wanted)
    assert any(v is None for v in own) and any(own)


def test_prompts_with_images_are_not_written_and_one_warning_says_so(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=3)
    writer = write(trainer)
    own = trainer._prepare_inputs

    def prepare(batch):
        return Shown(own(batch))

    class Shown(dict):
        """A batch that has images, which a model of text is not shown."""

        def __contains__(self, name):
            return name == "pixel_values" or super().__contains__(name)

    trainer._prepare_inputs = prepare
    with pytest.warns(UserWarning) as caught:
        train(trainer)
    assert len([w for w in caught if "images" in str(w.message)]) == 1
    assert writer.steps == [] and not writer.folder.exists()


@pytest.mark.all
def test_text_is_written_where_it_is_asked_for(checkpoint, tmp_path):
    for text in (False, True):
        trainer = make_trainer(checkpoint, tmp_path / str(text), max_steps=1)
        writer = write(trainer, text=text)
        train(trainer)
        rows = pq.read_table(writer.folder / "step_000001.parquet").to_pylist()
        assert all(("prompt" in row) == ("response" in row) == text for row in rows)
        if text:
            decode = trainer.processing_class.decode
            assert [row["response"] for row in rows] == [decode(row["response_ids"]) for row in rows]
            assert [row["prompt"] for row in rows] == [decode(row["prompt_ids"]) for row in rows]


TOGETHER = """
import os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.trl_runs import import_trl, make_trainer
from gradscope.integrations.trl import RolloutWriter
out, rank = Path(sys.argv[2]), int(os.environ["RANK"])
import_trl()
sizes = {"per_device_train_batch_size": 4, "max_steps": 2, "ddp_backend": "gloo", "loss_type": "grpo"}
trainer = make_trainer(out / "policy", out / "run", **sizes)
own = trainer._generate_and_score_completions
def generate(batch):
    found = own(batch)
    found["completion_mask"][:, 3 + 4 * rank:] = 0
    return found
trainer._generate_and_score_completions = generate
trainer.add_callback(RolloutWriter(trainer, spike=2.0))
trainer.train()
"""


@pytest.mark.all
def test_each_process_writes_its_responses_and_scales_are_of_all(tmp_path):
    save_policy(tmp_path / "policy")
    (code := tmp_path / "together.py").write_text(TOGETHER)
    for ended in launch(code, Path(__file__).parents[2], tmp_path):
        assert ended.status == 0, ended.stderr
    folder = tmp_path / "run" / "gradscope" / "rollouts"
    names = [f"step_{step:06d}{rank}.parquet" for step in (1, 2) for rank in ("-rank_1", "")]
    assert sorted(path.name for path in folder.iterdir()) == names
    batch = read_dump(folder, step=2).batch
    lengths = batch.response_mask.sum(1)
    assert sorted(lengths.tolist()) == [3] * 4 + [7] * 4
    assert sorted(batch.process_ids.tolist()) == [0.0] * 4 + [1.0] * 4
    assert len({*zip(batch.process_ids.tolist(), lengths.tolist(), strict=True)}) == 2
    # TRL's loss of a process is a mean over its 4 responses of means over tokens, and gradients of 2 are averaged.
    assert torch.allclose(batch.loss_scales, batch.num_tokens / (2 * 4 * lengths), rtol=1e-6)


# ---- which steps


@pytest.mark.all
def test_every_third_step_and_a_spike_are_kept(checkpoint, tmp_path):
    factors = [1.0] * 7 + [50.0, 1.0, math.nan]
    base = import_trl().GRPOTrainer

    class Spiky(base):
        def training_step(self, *args):
            loss = super().training_step(*args)
            for parameter in self.model.parameters():
                parameter.grad *= factors[self.state.global_step]
            return loss

    for number, spikes, wanted in ((None, 1, [8]), (3, 10, [1, 4, 7, 8, 10])):
        trainer = make_trainer(checkpoint, tmp_path, kind=Spiky, max_steps=10, learning_rate=1e-6)
        writer = write(trainer, every=number, spike=8.0, spikes=spikes)
        train(trainer)
        assert writer.steps == wanted
        assert files_of(writer) == [f"step_{step:06d}.parquet" for step in wanted]


def test_a_resumed_run_replaces_the_steps_that_it_makes_again(checkpoint, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(checkpoint, tmp_path, max_steps=4, **settings)
    writer = write(trainer)
    train(trainer)
    before = {step: read_rollouts(writer.folder, step=step).digest() for step in (1, 2)}
    (writer.folder / "step_000099.parquet").write_bytes(b"of a run that went further")
    again = make_trainer(checkpoint, tmp_path, max_steps=5, **settings)
    writer = write(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert files_of(writer) == [f"step_{step:06d}.parquet" for step in range(1, 6)]
    assert {step: read_rollouts(writer.folder, step=step).digest() for step in (1, 2)} == before
    new = make_trainer(checkpoint, tmp_path, max_steps=1)
    write(new)
    assert len(files_of(writer)) == 5
    train(new)
    assert files_of(writer) == ["step_000001.parquet"]


# ---- read without a flag


@pytest.mark.all
@pytest.mark.usefixtures("undrawn")
def test_the_log_is_diagnosed_without_a_flag(checkpoint, tmp_path):
    trainer = make_trainer(
        checkpoint, tmp_path, max_steps=2, save_strategy="steps", save_steps=1, loss_type="grpo", **OFF_POLICY
    )
    writer = write(trainer)
    train(trainer)
    out = tmp_path / "report"
    run("diagnose", tmp_path / "checkpoint-1", "--rollouts", writer.folder, "--out", out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["settings"]["loss"] == manifest["rollouts"]["loss"]
    assert manifest["rollouts"]["loss"]["kl_coef"] == 0.1 and not manifest["rollouts"]["other_step"]
    kinds = {note.kind for note in read_dump(writer.folder, step=2).notes}
    assert not kinds & {"temperature", "on-policy", "unknown-values"}
    assert (out / "report.html").is_file()


# ---- who is refused


def test_a_reweighted_trainers_alpha_is_in_the_settings(checkpoint, tmp_path):
    from gradscope.integrations.trl import GradScopeGRPOTrainer

    trainer = make_trainer(
        checkpoint, tmp_path, kind=GradScopeGRPOTrainer, methods={"reweight_alpha": 0.3}, max_steps=1
    )
    writer = write(trainer)
    train(trainer)
    dump = read_dump(writer.folder)
    assert dump.loss["reweight_alpha"] == 0.3 and dump.batch.run.other_loss is None


@pytest.mark.parametrize(
    "settings", [{"every": 0}, {"every": None}, {"spike": 1.0}, {"spike": float("inf")}, {"spikes": 0}]
)
def test_numbers_out_of_range_are_refused_by_name(checkpoint, tmp_path, settings):
    with refused(*settings):
        RolloutWriter(make_trainer(checkpoint, tmp_path), **settings)
