"""What verl's own trainers train on, written by themselves; without verl all of this is skipped (test_verl_writer.py is
not)."""

import os
import subprocess
import sys
import uuid
import warnings
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest

with warnings.catch_warnings():
    # OTHERS: verl names the engines that are not installed, and what its dependencies deprecate.
    warnings.simplefilter("ignore")
    pytest.importorskip("verl.trainer.ppo.ray_trainer", reason="verl is not installed: it needs its own environment")

import torch
from hydra import compose, initialize_config_module
from support.refusals import refused
from support.tiers import every
from support.words import make_tokenizer
from verl import DataProto
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import DistillationConfig
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss

from gradscope.integrations.verl.batch_writer import ESTIMATED, VerlWriter, WriterSettings, put_into, verl_loss
from gradscope.objective import Divergence, LossSettings, batch_weights, settle_loss
from gradscope.objective.quantities import Outputs
from gradscope.rollouts import read_dump

# OTHERS: what hydra, verl's engines and TransferQueue warn of.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, PROMPT, LENGTH, REPEATS = 16, 4, 7, 4
ACTOR = ["strategy=fsdp", "ppo_micro_batch_size_per_gpu=2", "clip_ratio_low=0.1", "clip_ratio_high=0.15"]
CORRECTED = ["rollout_is=token", "rollout_is_threshold=1.1", "rollout_rs=token_k1", "rollout_rs_threshold=0.8_1.3"]


def make_config(folder, *, actor=(), algorithm=(), corrected=CORRECTED, distillation=()):
    """verl's own configuration of its trainer."""
    given = [f"actor_rollout_ref.actor.{value}" for value in (*ACTOR, *actor)]
    given += [f"algorithm.{value}" for value in ("adv_estimator=grpo", *algorithm)]
    given += [f"algorithm.rollout_correction.{value}" for value in corrected]
    given += [f"distillation.{value}" for value in distillation]
    given += [f"actor_rollout_ref.rollout.n={REPEATS}", "actor_rollout_ref.rollout.temperature=0.7"]
    given += [f"trainer.default_local_dir={folder}", f"data.train_batch_size={ROWS // REPEATS}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=given)


def make_rows():
    """Ids, masks and log-probabilities [B, ...] as the older trainer has them before advantages."""
    generator = torch.Generator().manual_seed(0)
    before = torch.arange(PROMPT) >= torch.randint(0, PROMPT, (ROWS // REPEATS,), generator=generator)[:, None]
    before = before.repeat_interleave(REPEATS, 0)
    lengths = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator)
    after = torch.arange(LENGTH) < lengths[:, None]
    tool = torch.rand(ROWS, LENGTH, generator=generator) < 0.15
    tool[:, 0] = False
    prompts = torch.randint(4, 96, (ROWS // REPEATS, PROMPT), generator=generator).repeat_interleave(REPEATS, 0)
    responses = torch.randint(4, 96, (ROWS, LENGTH), generator=generator) * after
    attention = torch.cat([before, after], 1).long()
    old = torch.rand(ROWS, LENGTH, generator=generator).clamp(min=0.02).log()
    noise = torch.randn(3, ROWS, LENGTH, generator=generator)
    scores = torch.zeros(ROWS, LENGTH).scatter(1, lengths[:, None] - 1, torch.rand(ROWS, 1, generator=generator))
    return {
        "prompts": prompts * before,
        "responses": responses,
        "input_ids": torch.cat([prompts * before, responses], 1),
        "attention_mask": attention,
        "position_ids": attention.cumsum(1) - 1,
        "response_mask": (after & ~tool).long(),
        "old_log_probs": old,
        "rollout_log_probs": (old + 0.15 * noise[0]).clamp(max=0.0),
        "ref_log_prob": (old + 0.3 * noise[1]).clamp(max=0.0),
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "new": (old + 0.15 * noise[2]).clamp(max=0.0),
        "uid": np.array([f"prompt {row // REPEATS}" for row in range(ROWS)], dtype=object),
    }


class Workers:
    """Stand-in for verl's worker group: trains nothing, but takes the slope of verl's own loss at log π, `new`."""

    def __init__(self, config, processes):
        self.loss = partial(ppo_loss, config=omega_conf_to_dataclass(config.actor_rollout_ref.actor))
        self.processes, self._dispatch_info = processes, {"actor": [*range(processes)]}
        self.slopes = {}
        """−∂loss/∂ log π by row, of the mean over mini-batches."""
        self.places = {}
        """Process and its micro-batch, by row."""

    def update_actor(self, data):
        data["row"] = torch.arange(len(data))
        size = tu.get_non_tensor_data(data, "mini_batch_size", None)
        ranks = tu.chunk_tensordict(data, self.processes)
        steps = [[*tu.make_iterator(rank, size // self.processes, 1, seed=0)] for rank in ranks]
        for parts in zip(*steps, strict=True):
            masks = [part["loss_mask"] for part in parts]
            known = {"dp_size": self.processes, "global_batch_size": size}
            known["batch_num_tokens"] = sum(int((m.values() if m.is_nested else m).sum()) for m in masks)
            for self.rank, part in enumerate(parts):
                self._backward(part, known, 1 / (len(steps[0]) * self.processes))
        metrics = tu.get_tensordict({}, {"metrics": {"grad_norm": [0.5], "mfu": [0.0]}})
        return metrics

    def _backward(self, part, known, share):
        tu.assign_non_tensor(part, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
        for micro in prepare_micro_batches(part)[0]:
            tu.assign_non_tensor(micro, **known)
            number = len({place for place in self.places.values() if place[0] == self.rank})
            self.places |= {row: (self.rank, number) for row in micro["row"].tolist()}
            lengths = micro["input_ids"].offsets().diff().tolist()
            of_response = [int(n) for n in self._response_lengths(micro)]
            values = torch.zeros(sum(lengths))
            ends = np.cumsum(lengths)
            new = micro["new"].unbind() if micro["new"].is_nested else [*micro["new"]]
            for end, n, row in zip(ends, of_response, new, strict=True):
                values[end - n - 1 : end - 1] = row[:n]
            leaf = values.requires_grad_(True)
            (slope,) = torch.autograd.grad(self._loss_of(micro, leaf), leaf)
            for row, end, n in zip(micro["row"].tolist(), ends, of_response, strict=True):
                self.slopes[row] = -share * slope[end - n - 1 : end - 1]

    def _loss_of(self, micro, values):
        nested = torch.nested.nested_tensor_from_jagged(values, offsets=micro["input_ids"].offsets())
        return self.loss(model_output={"log_probs": nested}, data=micro)[0]

    @staticmethod
    def _response_lengths(micro):
        if micro["responses"].is_nested:
            return micro["responses"].offsets().diff()
        return micro["attention_mask"][:, micro["prompts"].shape[1] :].sum(1)


class BigramWorkers(Workers):
    """Stand-in that trains a table of logits by SGD on verl's own loss, a step per mini-batch."""

    def __init__(self, config):
        super().__init__(config, 1)
        self.table = torch.randn(96, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def logprobs(self, ids):
        return self.table[ids].log_softmax(-1).gather(-1, ids.roll(-1, -1)[..., None])[..., 0]

    def _backward(self, part, known, share):
        tu.assign_non_tensor(part, **known)
        loss = self._loss_of(part, self.logprobs(part["input_ids"].values()))
        self.table.data -= 100.0 * torch.autograd.grad(loss, self.table)[0]


@pytest.fixture
def watched():
    """Puts a writer into a trainer of verl's, and takes it out again."""
    put = []

    def give(kind, **settings):
        put.append((kind, kind._update_actor, kind._shutdown_dump_executor))
        writer = VerlWriter(WriterSettings(**settings))
        put_into(kind, writer)
        return writer

    yield give
    for kind, update_actor, shutdown in put:
        kind._update_actor, kind._shutdown_dump_executor = update_actor, shutdown


LOSSES = {
    "token-mean": (),
    "two mini-batches": ("ppo_mini_batch_size=2",),
    "token-sum": ("loss_agg_mode=token-sum", "use_kl_loss=true", "kl_loss_coef=0.1"),
    "seq-mean-token-sum": ("loss_agg_mode=seq-mean-token-sum", "ppo_mini_batch_size=2"),
    "seq-mean-token-mean": ("loss_agg_mode=seq-mean-token-mean", "use_kl_loss=true", "kl_loss_coef=0.1"),
    "a constant": ("loss_agg_mode=seq-mean-token-sum-norm", "loss_scale_factor=9", "clip_ratio_c=1.1"),
}


def compare(folder, workers, rows, order, *, step=1):
    """Hold the log against what verl's loss was given, and its weights against the slopes. order: rows of the log."""
    dump = read_dump(folder, step=step)
    batch = dump.batch
    new, wanted = torch.full(batch.input_ids.shape, -1.0), torch.zeros(batch.input_ids.shape)
    for place, row in enumerate(order):
        prompt = rows["prompts"][row][rows["attention_mask"][row, :PROMPT].bool()]
        n, start = int(rows["attention_mask"][row, PROMPT:].sum()), len(prompt)
        assert torch.equal(batch.input_ids[place, : start + n], torch.cat([prompt, rows["responses"][row, :n]]))
        kept = rows["response_mask"][row, :n].bool()
        assert torch.equal(batch.response_mask[place, start : start + n], kept)
        names = {
            "old_logprobs": "old_log_probs",
            "ref_logprobs": "ref_log_prob",
            "sampler_logprobs": "rollout_log_probs",
        }
        for column, name in names.items():
            assert torch.equal(getattr(batch, column)[place, start : start + n][kept], rows[name][row, :n][kept])
        factors = (rows["advantages"] * rows["rollout_is_weights"])[row, :n]
        assert torch.allclose(batch.advantages[place, start : start + n][kept], factors[kept], rtol=1e-6)
        assert (int(batch.process_ids[place]), int(batch.micro_batch_ids[place])) == workers.places[row]
        assert float(batch.rewards[place]) == pytest.approx(float(rows["token_level_scores"][row].sum()))
        new[place, start : start + n] = rows["new"][row, :n]
        wanted[place, start : start + n] = workers.slopes[row]
    uids = [rows["uid"][row] for row in order]
    same = torch.tensor([[a == b for a in uids] for b in uids])
    assert torch.equal(batch.group_ids[:, None] == batch.group_ids, same)
    found = batch_weights(new, batch, LossSettings.from_log(dump.loss), num_tokens=batch.num_tokens)
    wanted = wanted * batch.num_tokens
    assert found.clipped.any() and (found.kl.any() == (LossSettings.from_log(dump.loss).kl_coef > 0))
    assert float((found.total - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())
    return dump


def distilled(mode, policy_gradient, rewarded, clamp):
    """verl's settings of a distillation."""
    loss = {"loss_mode": mode, "use_policy_gradient": policy_gradient, "use_task_rewards": rewarded}
    loss |= {"loss_max_clamp": clamp, "distillation_loss_coef": 0.7, "clip_ratio_low": 0.1, "clip_ratio_high": 0.05}
    words = {None: "null", True: "true", False: "false"}
    return ["enabled=true", *(f"distillation_loss.{name}={words.get(v, v)}" for name, v in loss.items())]


def distilling_trainer(config, workers, **changed):
    """verl's older trainer and its workers, whose loss is verl's distillation. changed: settings that hydra lacks."""
    trainer = object.__new__(RayPPOTrainer)
    trainer.config, trainer.tokenizer, trainer.global_steps = config, make_tokenizer(), 1
    trainer.actor_rollout_wg = workers
    loss = replace(omega_conf_to_dataclass(config.distillation.distillation_loss), **changed)
    trainer.distillation_config = DistillationConfig(distillation_loss=loss)
    workers.loss = partial(
        distillation_ppo_loss,
        config=omega_conf_to_dataclass(config.actor_rollout_ref.actor),
        distillation_config=trainer.distillation_config,
    )
    trainer._init_dump_executor()
    return trainer, workers


# verl itself refuses k1 as a loss, not by its other name.
DISTILLED = [own for own in product(ESTIMATED, (True, False), (False, True), (None, 0.3)) if own[:2] != ("k1", False)]


@pytest.mark.parametrize(("mode", "policy_gradient", "rewarded", "clamp"), every(4, DISTILLED))
def test_weights_of_a_distillation_are_the_slopes_of_verls_loss(
    watched, tmp_path, mode, policy_gradient, rewarded, clamp
):
    known = distilled(mode, policy_gradient, rewarded, clamp)
    config = make_config(tmp_path, actor=("ppo_mini_batch_size=4",), corrected=(), distillation=known)
    watched(RayPPOTrainer)
    trainer, workers = distilling_trainer(config, Workers(config, 2))
    rows = make_rows()
    noise = torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(3))
    teacher = (rows["new"] + noise).clamp(max=0.0)
    # verl keeps the teacher's log-probability of a token one place before it, and numbers of other tokens beside.
    whole = torch.full((ROWS, PROMPT + LENGTH, 1), -9.0)
    whole[:, PROMPT - 1 : -1, 0] = teacher
    rows |= {"teacher_logprobs": whole, "teacher_ids": torch.zeros(whole.shape, dtype=torch.int32)}
    data = DataProto.from_single_dict(rows)
    data = compute_advantage(data, adv_estimator="grpo", num_repeat=REPEATS, config=config.algorithm)
    trainer._update_actor(data)
    trainer._shutdown_dump_executor()
    dump = read_dump(tmp_path / "gradscope" / "rollouts")
    settings = LossSettings.from_log(dump.loss)
    assert settings.is_whole != rewarded
    batch = settle_loss(dump.batch, settings)
    order = [row for row in range(ROWS) if rows["response_mask"][row].any()]
    new, wanted = torch.full(batch.input_ids.shape, -1.0), torch.zeros(batch.input_ids.shape)
    for place, row in enumerate(order):
        start, n = int(batch.response_start[place]), len(workers.slopes[row])
        new[place, start : start + n], wanted[place, start : start + n] = rows["new"][row, :n], workers.slopes[row]
        kept = rows["response_mask"][row, :n].bool()
        assert torch.equal(batch.teacher_logprobs[place, start : start + n][kept], teacher[row, :n][kept])
    found = batch_weights(new, batch, settings, num_tokens=batch.num_tokens).total
    wanted = wanted * batch.num_tokens
    assert float((found - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())
    assert len(wanted[batch.response_mask].unique()) > 3 or mode in ("abs", "kl")


class CandidateWorkers(Workers):
    """Stand-in that takes the slope of verl's loss at the logits / T, where its engine compares candidates."""

    def _backward(self, part, known, share):
        tu.assign_non_tensor(part, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
        for micro in prepare_micro_batches(part)[0]:
            tu.assign_non_tensor(micro, **known)
            ends = micro["input_ids"].offsets()[1:].tolist()
            leaf = torch.zeros(ends[-1], 96)
            for row, end, n in zip(micro["row"].tolist(), ends, self._response_lengths(micro), strict=True):
                leaf[end - n - 1 : end - 1] = self.logits[row, :n]
            leaf.requires_grad_(True)
            found = self.loss(student_logits=leaf[None], data=micro, data_format="thd")
            offsets = micro["input_ids"].offsets()
            found = {
                name: torch.nested.nested_tensor_from_jagged(own[0], offsets=offsets) for name, own in found.items()
            }
            (slope,) = torch.autograd.grad(self.loss(model_output=found, data=micro)[0], leaf)
            for row, end, n in zip(micro["row"].tolist(), ends, self._response_lengths(micro), strict=True):
                self.slopes[row] = share * slope[end - n - 1 : end - 1]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("average", ["token-mean", "seq-mean-token-mean"])
def test_a_divergence_over_candidates_has_the_slope_of_verls_at_every_logit(watched, tmp_path, average, chunked):
    """From the candidates in the log alone, both clamps binding; in float32, in which verl computes it."""
    known = distilled("forward_kl_topk", False, False, 0.5)
    known += ["distillation_loss.log_prob_min_clamp=-6", "distillation_loss.topk=5"]
    actor = ("ppo_mini_batch_size=4", f"loss_agg_mode={average}")
    config = make_config(tmp_path, actor=actor, corrected=(), distillation=known)
    watched(RayPPOTrainer)
    trainer, workers = distilling_trainer(config, CandidateWorkers(config, 2), use_chunked_topk=chunked)
    rows, draw = make_rows(), torch.Generator().manual_seed(4)
    workers.logits = 2 * torch.randn(ROWS, LENGTH, 96, generator=draw)
    teacher = (workers.logits + torch.randn(ROWS, LENGTH, 96, generator=draw)).log_softmax(-1).topk(5)
    whole = {"teacher_logprobs": teacher.values, "teacher_ids": teacher.indices.int()}
    for name, own in whole.items():
        rows[name] = own.new_zeros(ROWS, PROMPT + LENGTH, 5)
        rows[name][:, PROMPT - 1 : -1] = own
    data = DataProto.from_single_dict(rows)
    data = compute_advantage(data, adv_estimator="grpo", num_repeat=REPEATS, config=config.algorithm)
    trainer._update_actor(data)
    trainer._shutdown_dump_executor()
    batch = read_dump(tmp_path / "gradscope" / "rollouts").batch
    divergence = Divergence(0, least_logprob=-6, least=0, most=0.5)
    clamped = []
    order = [row for row in range(ROWS) if rows["response_mask"][row].any()]
    for place, row in enumerate(order):
        start, kept = int(batch.response_start[place]), rows["response_mask"][row, : len(workers.slopes[row])].bool()
        own = slice(start, start + len(kept))
        given = tuple(values[place, own][kept] for values in batch.candidates)
        logits, ids = workers.logits[row, : len(kept)][kept], rows["responses"][row, : len(kept)][kept]
        found = divergence.evaluate(Outputs(logits, ids, 1.0, given))
        wanted = workers.slopes[row][kept] * batch.num_tokens / float(batch.loss_scales[place])
        assert float((found.slope - wanted).abs().max()) <= 1e-6
        clamped.append(found.clamped)
    clamped = torch.cat(clamped)
    assert 0 < int(clamped.sum()) < len(clamped)


def test_a_distillation_over_more_than_sampled_tokens_has_no_weights_and_beside_rewards_is_refused(tmp_path):
    with refused("forward_kl_topk"):
        verl_loss(make_config(tmp_path, distillation=distilled("forward_kl_topk", False, True, None)))
    with refused("rollout_is"):
        verl_loss(make_config(tmp_path, distillation=distilled("k1", True, True, None)))
    assert verl_loss(make_config(tmp_path, distillation=distilled("k3", False, True, None))).weighting
    assert verl_loss(make_config(tmp_path, distillation=distilled("forward_kl_topk", False, False, None))) is None


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("processes", [1, 2])
def test_weights_from_the_older_trainers_log_are_the_slopes_of_verls_loss(watched, tmp_path, name, processes):
    config = make_config(tmp_path, actor=("ppo_mini_batch_size=4", *LOSSES[name]))
    writer = watched(RayPPOTrainer)
    trainer = object.__new__(RayPPOTrainer)
    trainer.config, trainer.tokenizer, trainer.global_steps = config, make_tokenizer(), 1
    trainer.actor_rollout_wg = Workers(config, processes)
    trainer._init_dump_executor()
    data = DataProto.from_single_dict(make_rows())
    data, _ = compute_rollout_correction_and_add_to_batch(data, config.algorithm.rollout_correction)
    data = compute_advantage(data, adv_estimator="grpo", num_repeat=REPEATS, config=config.algorithm)
    kept = {key: tensor.clone() for key, tensor in data.batch.items()}
    trainer._update_actor(data)
    assert all(torch.equal(data.batch[key], tensor) for key, tensor in kept.items())
    trainer._shutdown_dump_executor()
    rejected = (make_rows()["response_mask"] - kept["response_mask"]).sum()
    assert rejected > 0 and writer.steps == [1]
    order = [row for row in range(ROWS) if kept["response_mask"][row].any()]
    rows = kept | {"uid": data.non_tensor_batch["uid"]}
    dump = compare(tmp_path / "gradscope" / "rollouts", trainer.actor_rollout_wg, rows, order)
    assert (dump.batch.temperature == np.float32(0.7)).all()


def test_ten_steps_end_with_the_same_weights_bit_for_bit(watched, tmp_path):
    config, ends = make_config(tmp_path, actor=("ppo_mini_batch_size=2",)), []
    for name in ("without", "with"):
        writer = watched(RayPPOTrainer) if name == "with" else None
        trainer = object.__new__(RayPPOTrainer)
        trainer.config, trainer.tokenizer = config, make_tokenizer()
        trainer.actor_rollout_wg = workers = BigramWorkers(config)
        trainer._init_dump_executor()
        start = workers.table.detach().clone()
        for trainer.global_steps in range(1, 11):
            data = DataProto.from_single_dict(make_rows())
            with torch.no_grad():
                data.batch["old_log_probs"] = workers.logprobs(data.batch["input_ids"])[:, PROMPT - 1 : -1]
            data = compute_advantage(data, adv_estimator="grpo", num_repeat=REPEATS, config=config.algorithm)
            trainer._update_actor(data)
        trainer._shutdown_dump_executor()
        ends.append(workers.table.detach())
    assert torch.equal(*ends) and not torch.equal(ends[0], start)
    assert writer.steps == [*range(1, 11)]
    files = [read_dump(tmp_path / "gradscope" / "rollouts", step=step).batch for step in (1, 10)]
    assert not torch.equal(files[0].old_logprobs, files[1].old_logprobs)


# ---- the default trainer, whose batches are in TransferQueue


@pytest.fixture(scope="module")
def store():
    pytest.importorskip("transfer_queue", reason="TransferQueue, the default trainer's store, is not installed")
    import ray
    import transfer_queue as tq

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is left in the home folder
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        tq.init()
        yield tq
        tq.close()
        ray.shutdown()


@pytest.mark.all
def test_weights_from_the_default_trainers_log_are_the_slopes_of_verls_loss(store, watched, tmp_path):
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainer, PPOTrainerSync

    class StoredWorkers(Workers):
        def update_actor(self, batch):
            data = store.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
            tu.assign_non_tensor(data, mini_batch_size=batch.extra_info["mini_batch_size"])
            return super().update_actor(data)

    writer, rows = watched(PPOTrainer), make_rows()
    for step, name in enumerate(LOSSES, 1):
        config = make_config(tmp_path, actor=("ppo_mini_batch_size=4", *LOSSES[name]))
        trainer = object.__new__(PPOTrainerSync)
        trainer.config, trainer.tokenizer, trainer.global_steps = config, make_tokenizer(), step
        trainer.parameter_sync_step, trainer.actor_rollout_wg = 1, StoredWorkers(config, 2)
        trainer._init_dump_executor()
        uids = [str(uuid.UUID(int=row // REPEATS, version=4)) for row in range(ROWS)]
        used = range(ROWS - 2)  # two rows fill the batch up
        keys = [f"{uids[row]}_{row % REPEATS}_0" for row in used]
        lengths = {
            "prompts": rows["attention_mask"][:, :PROMPT].sum(1),
            "responses": rows["attention_mask"][:, PROMPT:].sum(1),
        }
        starts = PROMPT - lengths["prompts"]

        def nested(name, rows=rows, lengths=lengths, starts=starts, used=used):
            if name == "prompts":
                parts = [rows[name][row, starts[row] :] for row in used]
            elif name == "input_ids":
                parts = [rows[name][row, starts[row] : PROMPT + lengths["responses"][row]] for row in used]
            else:
                parts = [rows[name][row, : lengths["responses"][row]] for row in used]
            return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

        names = ("prompts", "responses", "input_ids", "response_mask", "old_log_probs", "rollout_log_probs")
        fields = {name: nested(name) for name in (*names, "ref_log_prob", "new")}
        fields |= {"rm_scores": nested("token_level_scores"), "loss_mask": nested("response_mask")}
        fields["uid"] = [uids[row] for row in used]
        tags = [{"is_padding": False, "seq_len": 1, "prompt_len": 1, "response_len": 1} for _ in used]
        store.kv_batch_put(keys=keys, partition_id="train", fields=tu.get_tensordict(fields), tags=tags)
        batch = store.KVBatchMeta(keys=keys, tags=tags, partition_id="train", fields=None, extra_info={})
        batch = upsample_batch_to_divisible_size(batch, ROWS, 2)
        all_keys, all_tags = batch.keys, batch.tags
        trainer._compute_advantage(batch, metrics={})
        again = store.KVBatchMeta(keys=all_keys, tags=all_tags, partition_id="train", fields=None, extra_info={})
        trainer._update_actor(again, metrics={})
        trainer._shutdown_dump_executor()
        trained = store.kv_batch_get(
            keys=keys, partition_id="train", select_fields=["advantages", "rollout_is_weights", "response_mask"]
        )
        known = {
            name: trained[name].to_padded_tensor(0) for name in ("advantages", "rollout_is_weights", "response_mask")
        }
        known = {name: torch.nn.functional.pad(v, (0, LENGTH - v.shape[1])) for name, v in known.items()}
        order = [row for row in used if known["response_mask"][row].any()]
        compare(tmp_path / "gradscope" / "rollouts", trainer.actor_rollout_wg, rows | known, order, step=step)
        assert writer.steps == [*range(1, step + 1)]
        store.kv_clear(keys=all_keys, partition_id="train")
        writer.folder = None


# ---- put into verl by its environment variable


def start(code, tmp_path, **environment):
    modules = {"VERL_USE_EXTERNAL_MODULES": "gradscope.integrations.verl_rollouts"}
    environment = os.environ | modules | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.run([sys.executable, *code], env=environment, capture_output=True, text=True, cwd=tmp_path)


def test_verl_loads_the_module_and_its_trainers_have_the_writer(tmp_path):
    trainers = ["verl.trainer.ppo.ray_trainer.RayPPOTrainer"]
    if find_spec("transfer_queue") is not None:
        trainers.append("verl.trainer.ppo.v1.trainer_base.PPOTrainer")
    lines = ["import verl, sys, pkgutil", "assert 'verl.trainer.ppo.ray_trainer' not in sys.modules"]
    lines += [f"assert pkgutil.resolve_name('{name}')._update_actor.__wrapped__" for name in trainers]
    done = start(["-c", "\n".join(lines)], tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_bad_setting_is_one_line_when_verl_starts(tmp_path):
    done = start(["-c", "import verl"], tmp_path, GRADSCOPE_ROLLOUTS_EVERY="0")
    (said,) = [line for line in done.stderr.splitlines() if "gradscope" in line]
    assert done.returncode == 2 and "GRADSCOPE_ROLLOUTS_EVERY" in said and "Traceback" not in done.stderr


def test_a_loss_that_rows_cannot_say_is_one_line_when_verl_starts(tmp_path):
    given = ["policy_loss.loss_mode=gspo", "ppo_micro_batch_size_per_gpu=1"]
    given = [f"actor_rollout_ref.actor.{value}" for value in given]
    given += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "algorithm.adv_estimator=grpo"]
    done = start(["-m", "verl.trainer.main_ppo", *given], tmp_path)
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("gradscope")]
    assert done.returncode == 2 and "gspo" in said, done.stderr
