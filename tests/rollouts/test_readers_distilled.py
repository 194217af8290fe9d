"""What logs say of a distillation: prime-rl's, and Tinker's by a recipe, of the four responses of their other logs."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from support import dumps
from support.dumps import SAMPLES
from support.policies import write_jsonl
from support.refusals import refused

from gradscope.objective import LossSettings, batch_weights, settle_loss
from gradscope.rollouts import Dump, read_dump, write_rollouts

TEACHER = [[-0.25 * (1 + row + place) for place in range(len(s.response))] for row, s in enumerate(SAMPLES)]


def write_traces(folder, *, distilled: range = range(4), weight: float = 1.0, advantages: bool = False):
    """Traces in which a reference model scored some responses, and those alone have a weight in the distillation."""
    out = dumps.write_prime_rl_traces(folder)
    episodes = [json.loads(line) for line in (out / "stream.jsonl").read_text().splitlines()]
    for row in distilled:
        asked, told = episodes[row]["traces"][0]["nodes"]
        told["reference_logprobs"] = [v for v, keep in zip(TEACHER[row], SAMPLES[row].mask, strict=True) if keep]
        for node, sampled in ((asked, 0.0), (told, weight)):
            zeros = [0.0] * len(node["mask"])
            node["loss_weights"] = {"rl": zeros, "ref_kl": [sampled * keep for keep in node["mask"]]}
    write_jsonl(out / "stream.jsonl", episodes)
    credited = [json.loads(line) for line in (out / "annotations/orchestrator.jsonl").read_text().splitlines()]
    kept = [line for row, line in enumerate(credited) if advantages or row not in distilled]
    (out / "annotations/orchestrator.jsonl").unlink() if not kept else write_jsonl(
        out / "annotations/orchestrator.jsonl", kept
    )
    return out


def teachers(dump: Dump, row: int) -> list[float]:
    start = int(dump.batch.response_start[row])
    return dump.batch.teacher_logprobs[row, start : start + len(SAMPLES[row].response)].tolist()


@pytest.mark.parametrize("advantages", [False, True])
def test_of_distilled_traces_the_reference_is_the_teacher(tmp_path, advantages):
    dump = read_dump(write_traces(tmp_path, advantages=advantages))
    plain = read_dump(dumps.write_prime_rl_traces(tmp_path / "plain"))
    assert dump.format == "prime_rl_traces"
    assert torch.equal(dump.batch.response_mask, plain.batch.response_mask)
    assert torch.equal(dump.batch.old_logprobs.nan_to_num(), plain.batch.old_logprobs.nan_to_num())
    assert dump.batch.advantages is None and dump.batch.ref_logprobs is None
    for row, sample in enumerate(SAMPLES):
        kept = [value for value, keep in zip(teachers(dump, row), sample.mask, strict=True) if keep]
        assert kept == [value for value, keep in zip(TEACHER[row], sample.mask, strict=True) if keep]
    loss = LossSettings.from_log(dump.loss)
    assert loss.weighting == "opd:fall=0.2" and settle_loss(dump.batch, loss).loss_scales is None


def test_beside_a_policy_gradient_only_distilled_traces_are_left_out_and_counted(tmp_path):
    dump = read_dump(write_traces(tmp_path, distilled=range(2, 4)))
    assert len(dump.batch) == 2 and dump.loss is None and dump.batch.teacher_logprobs is None
    assert [int(note.split()[0]) for note in dump.notes if note.kind == "left-out"] == [2]


def test_weights_of_a_distillation_other_than_one_are_counted(tmp_path):
    told = [
        sum("other numbers than 1" in note for note in read_dump(write_traces(tmp_path / f"{w}", weight=w)).notes)
        for w in (1.0, 0.5)
    ]
    assert told == [0, 1]


def test_distilled_exports_are_read_without_a_teacher_whom_they_do_not_hold(tmp_path):
    path = dumps.write_prime_rl(tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["rl_weights"], row["ref_kl_weights"] = [0.0] * len(row["token_ids"]), [float(m) for m in row["loss_mask"]]
    plain = read_dump(path)
    write_jsonl(path, rows)
    dump = read_dump(path)
    assert torch.equal(dump.batch.response_mask, plain.batch.response_mask) and dump.batch.teacher_logprobs is None
    loss = LossSettings.from_log(dump.loss)
    assert loss.is_whole
    with refused("teacher_logprobs"):
        settle_loss(dump.batch, loss)
    for row in rows[:2]:  # as the trainer writes a sample of the policy gradient beside others
        row["rl_weights"], row["ref_kl_weights"] = None, [0.0] * len(row["token_ids"])
    write_jsonl(path, rows)
    assert len(read_dump(path).batch) == 2 and read_dump(path).loss is None


def test_tinkers_recipe_gives_the_weights_of_its_loss(repository, tmp_path):
    """Its penalty adds coef·(log ν − log π_old) to the advantage, and importance sampling multiplies it by π/π_old."""
    page = (repository / "docs/formats/native.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    space = {"write_rollouts": write_rollouts}
    exec(next(block for block in blocks if "def write_distilled" in block), space)
    data, teachers = [], []
    for row, sample in enumerate(SAMPLES):
        before, ids = [0.0] * len(sample.prompt), sample.prompt + sample.response
        lists = {"logprobs": sample.sampler, "mask": [float(keep) for keep in sample.mask]}
        lists["advantages"] = [sample.advantage] * len(sample.response)
        inputs = {name: SimpleNamespace(data=(before + values)[1:]) for name, values in lists.items()}
        inputs["target_tokens"] = SimpleNamespace(data=ids[1:])
        told = SimpleNamespace(to_ints=lambda ids=ids: ids[:-1])
        data.append(SimpleNamespace(model_input=told, loss_fn_inputs=inputs))
        teachers.append([None, *before[1:], *TEACHER[row]])
    space["write_distilled"](path := tmp_path / "step_1.jsonl", data, teachers, 1, coef=0.5)
    dump = read_dump(path)
    loss, batch = LossSettings.from_log(dump.loss), dump.batch
    new = (batch.old_logprobs.nan_to_num(-1.0) - 0.125).clamp(max=0.0)
    found = batch_weights(new, settle_loss(batch, loss), loss, num_tokens=1).policy
    for row, sample in enumerate(SAMPLES):
        start = int(batch.response_start[row])
        for place, keep in enumerate(sample.mask):
            apart = TEACHER[row][place] - sample.sampler[place]
            ratio = math.exp(float(new[row, start + place]) - sample.sampler[place])
            wanted = ratio * (sample.advantage + 0.5 * apart) * keep
            assert float(found[row, start + place]) == pytest.approx(wanted, rel=1e-6, abs=1e-7)
