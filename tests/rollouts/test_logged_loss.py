"""Rollouts that say the loss which they were trained with: its settings, its denominators, its corrections."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from support.cli import run
from support.policies import make_batch, make_policy, save_checkpoint
from support.refusals import refused
from support.tiers import every

from gradscope import compare, diagnose, load_policy, measure
from gradscope.objective import LossSettings, batch_loss, batch_weights, make_weighting
from gradscope.rollouts import list_steps, read_dump, read_rollouts, rollouts_hash, write_rollouts
from gradscope.updates import ComparisonSettings, audit

TRAINED = LossSettings(0.1, 0.15, 3.0, 0.2, None, True)
SUFFIXES = ["jsonl", "parquet"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("policy"), "qwen2", sharpness=5.0)


@pytest.fixture(scope="module")
def batch():
    """Off-policy responses, whose terms a trainer divides by different numbers."""
    plain = make_batch(make_policy("qwen2", sharpness=5.0))
    noise = torch.randn(2, *plain.input_ids.shape, generator=torch.Generator().manual_seed(0))
    known = {"advantages": noise[0], "old_logprobs": -noise[1].abs(), "ref_logprobs": -noise[0].abs() - 0.1}
    scales = torch.linspace(0.3, 2.0, len(plain))
    known |= {"process_ids": torch.arange(len(plain)) % 2.0, "micro_batch_ids": torch.arange(len(plain)) // 2.0}
    known["grad_norms"] = torch.full_like(scales, 0.25)
    return replace(plain, rewards=None, notes=(), **known, loss_scales=scales)


def rows_of(batch):
    return [dict(row) for row in batch.rows()]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_written_of_a_loss_is_read_again(batch, tmp_path, suffix):
    path = write_rollouts(tmp_path / f"rollouts.{suffix}", batch, loss=asdict(TRAINED))
    dump = read_dump(path)
    assert LossSettings.from_log(dump.loss) == TRAINED
    for name in ("loss_scales", "process_ids", "micro_batch_ids", "grad_norms"):
        assert torch.equal(getattr(dump.batch, name), getattr(batch, name))
    assert [note.kind for note in dump.notes].count("loss") == 1
    write_rollouts(path, batch)  # other rows in its place, of which no loss is known
    assert read_dump(path).loss is None and not [note for note in read_dump(path).notes if note.kind == "loss"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_steps_of_different_losses_are_read_one_at_a_time(batch, tmp_path, suffix):
    other = replace(TRAINED, kl_coef=0.0)
    for step, loss in ((1, TRAINED), (2, other)):
        rows = [row | {"step": step} for row in rows_of(batch)]
        write_rollouts(tmp_path / f"step_{step}.{suffix}", rows, loss=asdict(loss))
    with refused(tmp_path):
        read_rollouts(tmp_path, step="all")
    for step, loss in ((1, TRAINED), (2, other)):
        assert LossSettings.from_log(read_dump(tmp_path, step=step).loss) == loss


def test_of_a_log_of_files_by_step_only_the_one_that_is_asked_for_is_read(batch, tmp_path):
    """Rows of step 2 have a column that is refused where they are read."""
    for step in (1, 2, 3):
        write_rollouts(tmp_path / f"step_{step}.parquet", [row | {"step": step} for row in rows_of(batch)])
    assert list_steps(tmp_path).known == (1, 2, 3)
    with refused(tmp_path, 4):
        read_dump(tmp_path, step=4)
    rows = [{n.removesuffix("s") if n == "old_logprobs" else n: v for n, v in r.items()} for r in rows_of(batch)]
    write_rollouts(tmp_path / "step_2.parquet", [row | {"step": 2} for row in rows])
    assert list_steps(tmp_path).known == (1, 2, 3)
    assert len(read_dump(tmp_path, step=3).batch) == len(batch)
    with refused("step_2.parquet", "old_logprob"):
        read_dump(tmp_path, step=2)
    write_rollouts(tmp_path / "both.parquet", [row | {"step": 5 + i % 2} for i, row in enumerate(rows_of(batch))])
    assert list_steps(tmp_path / "both.parquet").known == (5, 6)
    assert (read_dump(tmp_path / "both.parquet", step=6).steps == 6).all()


@pytest.mark.parametrize("told", [b"{", b"[1]"])
def test_settings_that_are_no_object_are_refused_by_file(batch, tmp_path, told):
    path = write_rollouts(tmp_path / "rollouts.jsonl", batch, loss={})
    path.with_name("rollouts.jsonl.loss").write_bytes(told)
    with refused("rollouts.jsonl.loss"):
        read_rollouts(path)
    path = write_rollouts(tmp_path / "rollouts.parquet", batch)
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"gradscope.loss": told}), path)
    with refused("rollouts.parquet"):
        read_rollouts(path)


OTHER = {"other_loss": "Mine._compute_loss", "left_out": ["the entropies"]}


@pytest.mark.parametrize("told", [OTHER, {}])
def test_weights_of_another_loss_are_a_note_and_not_bound_as_advantages_are(batch, tmp_path, told):
    rows = [row | {"advantage": 1e3} for row in rows_of(batch)]
    path = write_rollouts(tmp_path / "rollouts.parquet", rows)
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"gradscope.run": json.dumps(told)}), path)
    found = read_dump(path).batch
    notes = [note for note in found.notes if note.kind == "loss"]
    known = told.get("other_loss") == OTHER["other_loss"]
    assert len(notes) == known == ("impossible-advantages" not in {note.kind for note in found.notes})
    assert found.run.left_out == (("the entropies",) if told == OTHER else ())
    assert found.run.other_loss == (OTHER["other_loss"] if known else None)


@pytest.mark.parametrize("told", [{"epsilon": 0.2}, {"kl_coef": "none"}, {"kl_corrected": 1}, {"kl_coef": -1.0}])
def test_settings_that_are_no_loss_are_refused_by_name(told):
    with refused(*told):
        LossSettings.from_log(told)


@pytest.mark.parametrize("scale", [0.0, -1.0, None, "one"])
def test_a_scale_that_is_no_number_above_0_is_refused_by_row(batch, tmp_path, scale):
    rows = rows_of(batch)
    rows[1]["loss_scale"] = scale
    with refused("row 1", "loss_scale"):
        read_rollouts(write_rollouts(tmp_path / "rollouts.jsonl", rows))


def test_a_correction_multiplies_the_advantage_that_it_needs(batch, tmp_path):
    rows = rows_of(batch)
    factors = [np.linspace(0.5, 2.0, len(row["response_ids"])).tolist() for row in rows]
    corrected = [row | {"sampler_correction": f} for row, f in zip(rows, factors, strict=True)]
    found = read_rollouts(write_rollouts(tmp_path / "rollouts.parquet", corrected))
    for row, start, own, f in zip(range(len(rows)), found.response_start.tolist(), rows, factors, strict=True):
        wanted = np.float32(np.array(own["advantage"]) * np.array(f))
        kept = np.array(own.get("response_mask", [True] * len(f)))
        assert (found.advantages[row, start : start + len(f)].numpy()[kept] == wanted[kept]).all()
    assert found.uncorrected_advantages is None
    masked = [corrected[0] | {"sampler_correction": [0.0] * len(factors[0])}, *corrected[1:]]
    found = read_rollouts(write_rollouts(tmp_path / "masked.parquet", masked))
    kept, before = found.response_mask, found.uncorrected_advantages
    assert not found.advantages[0][kept[0]].any() and before[1:].isnan().all()
    plain = read_rollouts(write_rollouts(tmp_path / "plain.parquet", rows)).advantages
    assert (before[0][kept[0]] == plain[0][kept[0]]).all()
    with refused("row 0", "sampler_correction"):
        alone = [{n: v for n, v in row.items() if n != "advantage"} | {"reward": 1.0} for row in corrected]
        read_rollouts(write_rollouts(tmp_path / "alone.jsonl", alone))


def test_scaled_weights_are_the_slopes_of_the_scaled_loss(batch):
    logprobs = (batch.old_logprobs.double() + 0.1 * batch.advantages).clamp(max=0.0).requires_grad_(True)
    loss = batch_loss(logprobs, batch, TRAINED, num_tokens=7)
    (slopes,) = torch.autograd.grad(loss, logprobs)
    weights = batch_weights(logprobs.detach(), batch, TRAINED, num_tokens=7)
    torch.testing.assert_close(-7 * slopes, weights.total, rtol=1e-12, atol=0.0)
    plain = batch_weights(logprobs.detach(), replace(batch, loss_scales=None), TRAINED, num_tokens=7)
    for row, scale in enumerate(batch.loss_scales.tolist()):
        assert torch.allclose(weights.total[row], scale * plain.total[row], rtol=1e-12)
    assert plain.kl.any() and plain.clipped.any()


def test_a_weighting_has_the_losses_scale_once(batch, checkpoint):
    policy, known = load_policy(checkpoint), {"loss": TRAINED, "self_check": False}
    batch = replace(batch, old_logprobs=None)
    scaled, plain = measure(policy, batch, **known), measure(policy, replace(batch, loss_scales=None), **known)
    scale = batch.loss_scales.numpy()[scaled["response"]]
    np.testing.assert_allclose(scaled["weight"], plain["weight"] * scale, rtol=1e-6)
    for name in ("grpo", "cispo", "delightful", "reweight"):
        own, wanted = (make_weighting(name).weights(table)["all"] for table in (scaled, plain))
        np.testing.assert_allclose(own, wanted * scale, rtol=1e-5, atol=1e-7)
        own, wanted = (make_weighting(name).weights(t, aggregation="sequence")["all"] for t in (scaled, plain))
        np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-7)


def test_the_command_measures_with_the_logs_loss_and_flags_win(batch, checkpoint, tmp_path, capsys):
    near = replace(batch, old_logprobs=None)
    log = write_rollouts(tmp_path / "rollouts.parquet", near, loss=asdict(TRAINED))
    policy, read = load_policy(checkpoint), read_rollouts(log)
    asked = ["measure", checkpoint, log, "--no-figures", "--no-self-check"]
    cases = {"log": ([], TRAINED), "flag": (["--kl-coef", "0.001"], replace(TRAINED, kl_coef=0.001))}
    for name, (flags, loss) in cases.items():
        run(*asked, *flags, "--out", tmp_path / name)
        wanted = measure(policy, read, loss=loss, self_check=False)
        found = pd.read_parquet(tmp_path / name / "tokens.parquet")
        assert np.array_equal(found["weight"], wanted["weight"])
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        assert manifest["rollouts"]["loss"] == asdict(TRAINED)
        assert manifest["settings"]["loss"] == asdict(loss)
        assert ("kl_coef" in capsys.readouterr().out.partition("flags")[2]) == bool(flags)


@pytest.mark.filterwarnings("ignore::gradscope.gradients.ContradictionWarning")  # planted, far off
@pytest.mark.parametrize("suffix", every(2, SUFFIXES))
def test_of_a_path_python_takes_the_logs_loss_too_unless_one_is_given(batch, checkpoint, tmp_path, suffix):
    policy, near = load_policy(checkpoint), replace(batch, old_logprobs=None)
    own = torch.tensor(measure(policy, near, self_check=False)["logprob"].tolist())
    moved = own - 0.165  # a ratio of 1.18, which only the log's loss clips
    near = replace(near, old_logprobs=own.new_zeros(near.response_mask.shape).masked_scatter(near.response_mask, moved))
    log = write_rollouts(tmp_path / f"rollouts.{suffix}", near, loss=asdict(TRAINED))
    read, other = read_rollouts(log), LossSettings(kl_coef=0.05)
    tables = {loss: measure(policy, read, loss=loss, self_check=False) for loss in (TRAINED, other)}
    assert not np.array_equal(tables[TRAINED]["weight"], tables[other]["weight"])
    for given, loss in (({}, TRAINED), ({"loss": other}, other)):
        found = measure(policy, log, self_check=False, **given)
        assert np.array_equal(found["weight"], tables[loss]["weight"])
        assert diagnose(policy, log, found, **given).scope.settings.loss == loss
        own = [audit(policy, one, 1.0, **known) for one, known in ((log, given), (read, {"loss": loss}))]
        assert own[0].readings.equals(own[1].readings)
    settings = {"log": (log, None), "given": (read, ComparisonSettings(loss=TRAINED)), "paper": (read, None)}
    weights = {n: compare(policy, one, "grpo", settings=s).weights for n, (one, s) in settings.items()}
    assert weights["log"].equals(weights["given"]) and not weights["log"].equals(weights["paper"])


def test_the_hash_of_a_log_changes_with_what_it_says_of_its_loss(batch, tmp_path):
    for path in (tmp_path / "alone.jsonl", tmp_path / "folder"):
        path.parent.mkdir(exist_ok=True)
        file = path if path.suffix else path / "step_1.jsonl"
        file.parent.mkdir(exist_ok=True)
        found = []
        for loss in (None, asdict(TRAINED), asdict(replace(TRAINED, kl_coef=0.0))):
            write_rollouts(file, batch, loss=loss)
            found.append(rollouts_hash(path))
        assert len({*found}) == 3
        write_rollouts(file, batch)
        assert rollouts_hash(path) == found[0]


@pytest.mark.parametrize("told", ["[]", "{", '{"trained": 3}', '{"frozen": [3]}', '{"precision": "int8"}'])
def test_facts_of_a_run_that_nobody_writes_are_refused_in_a_line(batch, tmp_path, told):
    path = write_rollouts(tmp_path / "rollouts.parquet", batch)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), b"gradscope.run": told}), path)
    with refused(path):
        read_dump(path)
