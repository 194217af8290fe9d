"""TRL's trainers on given text, watched: training is the same bit for bit, and rows have the trainer's own gradient."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from support.processes import launch
from support.refusals import refused
from support.tiers import every
from support.trl_runs import gradients, import_trl, needs_trl, save_policy, train, weights
from support.trl_texts import make_text_trainer, make_texts
from transformers import TrainerCallback

from gradscope import diagnose, load_policy
from gradscope.gradients import Resources, TokenJacobian
from gradscope.integrations.trl import GradScopeCallback, RolloutWriter, SpikeRecorder, TokenMonitor
from gradscope.integrations.trl.texts import lay_out, place
from gradscope.objective import LossSettings, batch_weights
from gradscope.policy import flat_slices
from gradscope.rollouts import read_dump

pytestmark = needs_trl

EXACT = 1e-5
"""‖Σ w_t g_t − G‖/‖G‖ of two programs' float32 gradients."""
IDS = [[7, 12, 30, 9, 41, 22], [50, 8, 77], [33, 5, 61, 14, 90], [21, 60, 11, 19], [13, 88, 40], [70, 71, 9, 10, 15]]
WITH_HOLES = {"input_ids": IDS, "labels": [[-100, -100, *ids[2:]] for ids in IDS]}
WITH_HOLES["labels"][0][3] = WITH_HOLES["labels"][4][2] = -100  # inside a text, and all that one has
LOSSES = {
    "sft": ("SFTTrainer", {}),
    "dft": ("SFTTrainer", {"loss_type": "dft"}),
    "dpo:beta=0.3": ("DPOTrainer", {"beta": 0.3}),
    "ipo:beta=0.1": ("DPOTrainer", {"loss_type": ["ipo"]}),
    "kto:beta=0.3,desirable=1.0,undesirable=1.5": ("KTOTrainer", {"beta": 0.3, "undesirable_weight": 1.5}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class Steps(TrainerCallback):
    """Weights and gradient before each step."""

    def __init__(self, trainer):
        self.trainer, self.seen = trainer, []
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, *_, **__):
        self.seen.append((weights(self.trainer.model), gradients(self.trainer.model)))


def watch(trainer, *kinds):
    settings = {GradScopeCallback: {"every": 1, "progress": False}, TokenMonitor: {"edges": (0, 1e-6, 0.01, 1)}}
    watching = [kind(trainer, **settings.get(kind, {})) for kind in kinds]
    for each in watching:
        trainer.add_callback(each)
    return watching


def sum_rows(checkpoint, path, before, gradient):
    """What is read of a step's rows, their gradient −Σ w_t g_t/N at the weights before it, and the trainer's, flat."""
    policy = load_policy(checkpoint)
    policy.model.load_state_dict(before, strict=False)
    dump = read_dump(path, policy)
    J, num_tokens = TokenJacobian(policy, dump.batch, Resources()), dump.batch.num_tokens
    found = batch_weights(
        J.statistics.logprob, dump.batch, LossSettings.from_log(dump.loss), num_tokens=num_tokens
    ).total
    ours = J.vjp(J.kept(-found / num_tokens)[None]).rows[0]
    theirs = torch.cat([gradient[own].flatten() for own in flat_slices(policy.model)])
    return dump, ours.double(), theirs.double()


def check_rows(checkpoint, trainer, writer, steps):
    """Compare the gradient of each step's rows with the trainer's own; return what was read."""
    norms, dumps = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry], []
    for number, seen in enumerate(steps.seen, 1):
        dump, ours, theirs = sum_rows(checkpoint, writer.folder / f"step_{number:06d}.parquet", *seen)
        assert float((ours - theirs).norm()) < EXACT * float(theirs.norm())
        assert float(ours.norm()) == pytest.approx(norms[number - 1], rel=EXACT)
        assert dump.batch.grad_norms.unique().tolist() == pytest.approx([norms[number - 1]])
        dumps.append(dump)
    return dumps


@pytest.mark.parametrize("name", LOSSES)
def test_training_is_the_same_bit_for_bit_and_rows_have_the_trainers_gradient(checkpoint, tmp_path, name):
    kind, settings = LOSSES[name]
    ends = []
    for folder in ("without", "with"):
        trainer = make_text_trainer(checkpoint, tmp_path / folder, kind, **settings)
        kinds = (RolloutWriter, GradScopeCallback, TokenMonitor) if folder == "with" else ()
        watching, steps = watch(trainer, *kinds), Steps(trainer)
        train(trainer)
        ends.append(weights(trainer.model))
    assert all(torch.equal(ends[0][name], weight) for name, weight in ends[1].items())
    writer, callback, monitor = watching
    assert writer.steps == [row["step"] for row in callback.rows] == [row["step"] for row in monitor.rows] == [1, 2]
    assert all(row["grad_norm_ratio"] == pytest.approx(1, abs=EXACT) for row in callback.rows)
    dumps = check_rows(checkpoint, trainer, writer, steps)
    assert all(dump.loss == {"weighting": name} and dump.batch.advantages is None for dump in dumps)
    if kind == "SFTTrainer":
        assert all(len(dump.batch.group_ids.unique()) == len(dump.batch) for dump in dumps)
    if kind == "DPOTrainer":
        assert dumps[0].batch.pair_ids.unique(return_counts=True)[1].tolist() == [2] * 6
    if kind == "KTOTrainer":  # each micro-batch has its own
        assert max(len(dump.batch.z0s.unique()) for dump in dumps) == 2


@pytest.mark.parametrize(
    "texts", [{"text": make_texts("SFTTrainer")["completion"]}, WITH_HOLES], ids=["whole", "holes"]
)
def test_texts_without_a_prompt_and_with_labels_of_their_own_are_written(checkpoint, tmp_path, texts):
    trainer = make_text_trainer(checkpoint, tmp_path, "SFTTrainer", texts=texts, max_steps=1)
    (writer,), steps = watch(trainer, RolloutWriter), Steps(trainer)
    train(trainer)
    check_rows(checkpoint, trainer, writer, steps)


def test_all_steps_together_have_pairs_of_their_own(checkpoint, tmp_path):
    trainer = make_text_trainer(checkpoint, tmp_path, "DPOTrainer")
    (writer,) = watch(trainer, RolloutWriter)
    train(trainer)
    batch = read_dump(writer.folder, load_policy(checkpoint)).batch
    assert batch.pair_ids.unique(return_counts=True)[1].tolist() == [2] * 11
    found = diagnose(checkpoint, writer.folder / "step_000001.parquet", resamples=50)
    assert {"chosen_change", "rejected_change"} <= {*found.statistics["statistic"]}


def test_the_monitors_shares_are_those_of_slopes_and_logits(checkpoint, tmp_path):
    """Of DPO's first step, by autograd of the pairs' loss in float64, in place of TRL's float32."""
    trainer = make_text_trainer(checkpoint, tmp_path, "DPOTrainer", max_steps=1, gradient_accumulation_steps=1)
    own, seen = trainer.compute_loss, []
    trainer.compute_loss = lambda model, inputs, *args, **given: (
        seen.append(inputs),
        own(model, inputs, *args, **given),
    )[1]
    before = weights(trainer.model)
    (monitor,) = watch(trainer, TokenMonitor)
    train(trainer)
    policy, reference = load_policy(checkpoint).model.double(), load_policy(checkpoint).model.double()
    policy.load_state_dict(before, strict=False)
    (inputs,), both = seen, []
    for model in (policy, reference):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        both.append(logits.log_softmax(-1))
    targets, mask = inputs["input_ids"][:, 1:, None], inputs["completion_mask"][:, 1:].bool()
    ours, theirs = (each.gather(-1, targets)[..., 0] for each in both)
    leaf = ours.detach().requires_grad_(True)
    chosen, rejected = (((leaf - theirs.detach()) * mask).sum(1)).chunk(2)
    (slope,) = torch.autograd.grad(-torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean(), leaf)
    far = (torch.nn.functional.one_hot(targets[..., 0], both[0].shape[-1]) - both[0].exp()).norm(dim=-1)
    amounts, probs = (slope.abs() * far)[mask].detach().numpy(), ours.exp()[mask].detach().numpy()
    for low, high, name in ((0, 1e-6, "p0-0.0001"), (1e-6, 0.01, "p0.0001-1"), (0.01, 1, "p1-100")):
        inside = (probs >= low) & (probs < high)
        assert inside.any()
        assert monitor.rows[0][f"token_share/{name}"] == pytest.approx(inside.mean())
        assert monitor.rows[0][f"logit_grad_share/{name}"] == pytest.approx(
            amounts[inside].sum() / amounts.sum(), rel=EXACT
        )
    assert not [
        name for name in trainer.state.log_history[0] if any(of in name for of in ("clipped", "masked", "mismatch"))
    ]


@pytest.mark.parametrize("settings", every(2, [{"loss_type": ["hinge"], "beta": 0.01}, {"ld_alpha": 0.5}]))
def test_monitor_and_callback_take_any_loss_that_the_writer_refuses(checkpoint, tmp_path, settings):
    trainer = make_text_trainer(checkpoint, tmp_path, "DPOTrainer", max_steps=1, **settings)
    with refused(*(name for name in settings if name != "beta")):
        RolloutWriter(trainer)
    callback, monitor = watch(trainer, GradScopeCallback, TokenMonitor)
    train(trainer)
    assert callback.rows[0]["grad_norm_ratio"] == pytest.approx(1, abs=EXACT)
    assert monitor.rows[0]["logit_grad_share/p0-0.0001"] > 0


TOGETHER = """
import os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from transformers import TrainerCallback
from support.trl_runs import gradients, train, weights
from support.trl_texts import make_text_trainer
from gradscope.integrations.trl import GradScopeCallback, RolloutWriter
out, rank = Path(sys.argv[2]), int(os.environ["RANK"])
class Keep(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **_):
        if rank == 0:
            torch.save((weights(trainer.model), gradients(trainer.model)), folder / "step.pt")
for kind in ("SFTTrainer", "DPOTrainer", "KTOTrainer"):
    folder = out / kind
    trainer = make_text_trainer(out / "policy", folder, kind, max_steps=1, ddp_backend="gloo")
    for each in (RolloutWriter(trainer), callback := GradScopeCallback(trainer, every=1, progress=False), Keep()):
        trainer.add_callback(each)
    train(trainer)
    if rank == 0:
        (folder / "ratio.txt").write_text(str(callback.rows[0]["grad_norm_ratio"]))
"""


@pytest.mark.all
def test_rows_of_two_processes_have_the_gradient_of_both(tmp_path):
    save_policy(tmp_path / "policy")
    (code := tmp_path / "together.py").write_text(TOGETHER)
    for ended in launch(code, Path(__file__).parents[2], tmp_path):
        assert ended.status == 0, ended.stderr
    for kind in ("SFTTrainer", "DPOTrainer", "KTOTrainer"):
        before, gradient = torch.load(tmp_path / kind / "step.pt", weights_only=True)
        dump, ours, theirs = sum_rows(tmp_path / "policy", tmp_path / kind / "gradscope" / "rollouts", before, gradient)
        assert sorted(dump.batch.process_ids.unique().tolist()) == [0, 1]
        assert float((ours - theirs).norm()) < EXACT * float(theirs.norm())
        assert float((tmp_path / kind / "ratio.txt").read_text()) == pytest.approx(1, abs=EXACT)


@pytest.mark.all
@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
def test_an_adapters_reference_is_its_base(checkpoint, tmp_path, kind):
    from peft import LoraConfig

    peft = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    trainer = make_text_trainer(checkpoint, tmp_path, kind, peft=peft, max_steps=1)
    writer, callback = watch(trainer, RolloutWriter, GradScopeCallback)
    train(trainer)
    assert callback.rows[0]["grad_norm_ratio"] == pytest.approx(1, abs=EXACT)
    policy = load_policy(checkpoint)
    batch = read_dump(writer.folder, policy).batch
    own = TokenJacobian(policy, batch, Resources()).statistics.logprob
    kept = batch.response_mask
    np.testing.assert_allclose(batch.ref_logprobs[kept].numpy(), own[kept].numpy(), atol=1e-4)  # of −log π up to 20


def test_batches_of_texts_are_laid_out_row_by_row():
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 90, (7, 9), generator=draw)
    lengths = torch.tensor([9, 5, 7, 2, 6, 3, 9])
    real = torch.arange(9) < lengths[:, None]
    labels = torch.where(real & (torch.rand(7, 9, generator=draw) < 0.6), ids, -100)
    labels[5] = -100
    values = torch.rand(7, 8, generator=draw)
    laid = lay_out({"input_ids": ids, "attention_mask": real.long(), "labels": labels})
    found = place(laid, values)
    for row in range(7):
        kept = [column for column in range(1, int(lengths[row])) if labels[row, column] != -100]
        start, end = (kept[0], kept[-1] + 1) if kept else (int(lengths[row]), int(lengths[row]))
        assert laid["prompt_ids"][row][laid["prompt_mask"][row] > 0].tolist() == ids[row, :start].tolist()
        assert laid["completion_ids"][row][laid["completion_mask"][row] > 0].tolist() == ids[row, start:end].tolist()
        own = [column for column, keep in zip(range(start, end), laid["tool_mask"][row].tolist(), strict=False) if keep]
        assert own == kept and int(laid["tool_mask"][row].sum()) == len(kept)
        expected = [float(values[row, column - 1]) if column in kept else 0.0 for column in range(start, end)]
        assert found[row, : end - start].tolist() == expected and not found[row, end - start :].any()


REFUSED = [
    ("DPOTrainer", {"use_weighting": True}, ("use_weighting",)),
    ("DPOTrainer", {"loss_type": ["aot"]}, ("loss_type", "aot")),
    ("DPOTrainer", {"loss_type": ["sigmoid", "ipo"]}, ("loss_type", "sigmoid", "ipo")),
    ("DPOTrainer", {"loss_weights": [0.5]}, ("loss_weights",)),
    ("DPOTrainer", {"f_divergence_type": "js_divergence"}, ("f_divergence_type", "js_divergence")),
    ("DPOTrainer", {"precompute_ref_log_probs": True}, ("precompute_ref_log_probs",)),
    ("KTOTrainer", {"loss_type": "apo_zero_unpaired"}, ("loss_type", "apo_zero_unpaired")),
]


@pytest.mark.parametrize(("kind", "settings", "named"), every(3, REFUSED))
def test_a_loss_that_is_no_weighting_is_refused_by_the_writer_by_name(checkpoint, tmp_path, kind, settings, named):
    trainer = make_text_trainer(checkpoint, tmp_path, kind, **settings)
    with refused(*named):
        RolloutWriter(trainer)
    TokenMonitor(trainer)


def test_a_loss_of_ones_own_is_refused_by_the_writer(checkpoint, tmp_path):
    class Mine(import_trl().SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return -model(**inputs, fused_lm_head=True).log_probs.clamp(min=-15).mean()

    trainer = make_text_trainer(checkpoint, tmp_path, "SFTTrainer", made=Mine, max_steps=1)
    with refused("Mine.compute_loss"):
        RolloutWriter(trainer)
    (callback,) = watch(trainer, GradScopeCallback)
    train(trainer)
    assert callback.rows[0]["grad_norm_ratio"] == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"padding_free": True, "max_length": None}, "padding_free"),
    ],
)
def test_tokens_that_cannot_be_seen_are_refused_by_all_by_name(checkpoint, tmp_path, settings, named):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own, of these settings
        trainer = make_text_trainer(checkpoint, tmp_path, "SFTTrainer", **settings)
    for kind in (RolloutWriter, TokenMonitor, GradScopeCallback):
        with refused(named):
            kind(trainer)


def test_trainers_without_log_probabilities_of_tokens_are_refused_by_name():
    trl = import_trl()
    for name, said in (("DistillationTrainer", "divergence"), ("RewardTrainer", "SFTTrainer")):
        trainer = object.__new__(getattr(trl, name))
        for kind in (RolloutWriter, TokenMonitor, GradScopeCallback):
            with refused(name, said):
                kind(trainer)


def test_spikes_and_passes_of_ones_own_are_of_sampled_responses(checkpoint, tmp_path):
    trainer = make_text_trainer(checkpoint, tmp_path, "SFTTrainer")
    with refused("SFTTrainer", "GRPOTrainer"):
        SpikeRecorder(trainer)
    with refused("forward_every"):
        TokenMonitor(trainer, forward_every=2)
