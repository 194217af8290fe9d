"""Weights of losses without a reward, against the slopes of TRL's own: its trainers get log π from a leaf tensor."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from gradscope.objective import WEIGHTINGS, LossSettings, batch_weights, settle_loss
from gradscope.rollouts import Response, collate

PROMPT, LENGTHS = 3, (4, 9, 6, 2, 7, 7)
WIDTH = PROMPT + max(LENGTHS)
OWN = {"TRL's SFT", "TRL's DPO", "TRL's KTO", "TRL's CPO", "TRL's ORPO"}


class Case:
    """Six sequences padded on the right: TRL's layout [B, S] with log π [B, S − 1] of the completions, 0 elsewhere."""

    def __init__(self, chosen: list[bool], pairs: list[int]) -> None:
        draw = torch.Generator().manual_seed(0)
        self.chosen, self.pairs = chosen, pairs
        self.ids = torch.randint(1, 20, (6, WIDTH), generator=draw)
        columns = torch.arange(WIDTH)
        self.real = columns < PROMPT + torch.tensor(LENGTHS)[:, None]
        self.mask = self.real & (columns >= PROMPT)
        self.own, self.reference = (
            torch.where(self.mask[:, 1:], -torch.rand(6, WIDTH - 1, generator=draw, dtype=torch.float64) * 2, 0.0)
            for _ in range(2)
        )
        self.leaf = self.own.clone().requires_grad_(True)

    def outputs(self, log_probs: Tensor) -> SimpleNamespace:
        numbers = torch.zeros(6, WIDTH - 1)
        return SimpleNamespace(
            log_probs=log_probs, entropy=numbers, mean_logits=numbers, is_top1=numbers > 0, label_mask=self.mask[:, 1:]
        )

    def model(self, **_: object) -> SimpleNamespace:
        return self.outputs(self.leaf * self.mask[:, 1:])

    def ref_model(self, **_: object) -> SimpleNamespace:
        return self.outputs(self.reference)

    def slopes(self, loss: Tensor) -> np.ndarray:
        """−N · ∂loss/∂ log π of the completions' tokens."""
        (found,) = torch.autograd.grad(loss, self.leaf)
        return (-self.mask.sum() * found)[self.mask[:, 1:]].numpy()

    def weights(self, name: str) -> np.ndarray:
        """w_t of gradscope, from native rows."""
        rows = [
            Response(
                self.ids[i, :PROMPT].tolist(),
                self.ids[i, PROMPT : PROMPT + n].tolist(),
                ref_logprobs=self.reference[i, PROMPT - 1 : PROMPT - 1 + n].tolist(),
                pair=self.pairs[i],
                chosen=float(self.chosen[i]),
            )
            for i, n in enumerate(LENGTHS)
        ]
        loss = LossSettings(weighting=name)
        batch = settle_loss(collate(rows), loss)
        logprobs = torch.nn.functional.pad(self.own, (1, 0))
        return batch_weights(logprobs, batch, loss, num_tokens=batch.num_tokens).total[batch.response_mask].numpy()


def trainer_of(kind: type, case: Case, **settings: object) -> object:
    """A trainer of TRL without a model, a dataset or a device."""
    made = kind.__new__(kind)
    everything = SimpleNamespace(
        gather_for_metrics=lambda values: values,
        device=torch.device("cpu"),
        num_processes=1,
        unwrap_model=lambda model: model,
        gather=lambda values: values,
    )
    known = {"model": torch.nn.Identity(), "ref_model": case.ref_model, "accelerator": everything}
    known |= {"aux_loss_enabled": False, "precompute_ref_logps": False, "ld_alpha": None, "use_weighting": False}
    known |= {"_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1}
    known |= {"compute_loss_func": None, "label_smoother": None, "label_smoothing": 0.0, "is_encoder_decoder": False}
    vars(made).update(known | settings)
    return made


@pytest.fixture
def pairs() -> Case:
    return Case([True] * 3 + [False] * 3, [0, 1, 2, 0, 1, 2])


@pytest.fixture(autouse=True)
def without_checkpointing(monkeypatch):
    from trl.trainer import dpo_trainer, kto_trainer

    for module in (dpo_trainer, kto_trainer):
        monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *_: nullcontext())


def sft(case: Case, name: str) -> Tensor:
    from trl import SFTTrainer

    args = SimpleNamespace(loss_type={"sft": "nll"}.get(name, name), average_tokens_across_devices=False)
    made = trainer_of(SFTTrainer, case, args=args)
    labels = case.ids.masked_fill(~case.mask, -100)
    made.accelerator.parallelism_config = None
    return made.compute_loss(case.model, {"input_ids": case.ids, "labels": labels, "attention_mask": case.real})


def dpo(case: Case, name: str) -> Tensor:
    from trl import DPOTrainer

    kind, _, beta = name.partition(":beta=")
    known = {"loss_types": [{"dpo": "sigmoid"}.get(kind, kind)], "loss_weights": [1.0]}
    known |= {"f_divergence_type": "reverse_kl"}
    args = SimpleNamespace(gradient_checkpointing_kwargs=None)
    made = trainer_of(DPOTrainer, case, args=args, beta=float(beta or 0.1), **known)
    inputs = {"input_ids": case.ids, "attention_mask": case.real.long(), "completion_mask": case.mask.long()}
    return made._compute_loss(case.model, inputs, False)


def kto(case: Case, name: str) -> Tensor:
    from trl import KTOTrainer

    args = SimpleNamespace(gradient_checkpointing_kwargs=None)
    known = {"desirable_weight": 0.5, "undesirable_weight": 2.0, "calculate_KL": True, "loss_type": "kto"}
    made = trainer_of(KTOTrainer, case, args=args, beta=0.3, **known)
    made._compute_kl_logps = lambda model, batch: torch.full((6,), 0.7 if model == case.model else 0.2)
    inputs = {"input_ids": case.ids, "attention_mask": case.real.long(), "completion_mask": case.mask.long()}
    return made._compute_loss(case.model, inputs | {"label": torch.tensor(case.chosen)}, False)


def cpo(case: Case, name: str) -> Tensor:
    from trl.experimental.cpo import CPOTrainer

    made = trainer_of(CPOTrainer, case, beta=0.4, simpo_gamma=1.2, alpha=0.0, loss_type="simpo")
    losses, *_ = made.cpo_loss(*means(case))
    return losses.mean()


def orpo(case: Case, name: str) -> Tensor:
    from trl.experimental.orpo import ORPOTrainer

    # TRL rounds log π to float32 before it takes the odds: 1e-5 of a weight, which is not the formula's.
    with patch.object(Tensor, "float", Tensor.double):
        losses, *_ = trainer_of(ORPOTrainer, case, beta=0.4).odds_ratio_loss(*means(case))
    return -losses.mean()


def means(case: Case) -> tuple[Tensor, Tensor]:
    """Mean log π of chosen and rejected completions, which these trainers take of logits."""
    return tuple(((case.leaf * case.mask[:, 1:]).sum(1) / torch.tensor(LENGTHS)).chunk(2))


CASES = [
    *[("sft", sft, 1e-12), ("dft", sft, 1e-12)],
    *[("dpo", dpo, 1e-6), ("dpo:beta=0.7", dpo, 1e-6), ("ipo", dpo, 1e-6), ("ipo:beta=0.7", dpo, 1e-6)],
    ("kto:beta=0.3,z0=0.5,desirable=0.5,undesirable=2", kto, 1e-6),
    ("simpo:beta=0.4,gamma=1.2", cpo, 1e-6),
    ("orpo:beta=0.4", orpo, 1e-6),
]


@pytest.mark.parametrize(("name", "loss", "tolerance"), CASES)
def test_weights_are_the_slopes_of_trls_own_loss(pairs, name, loss, tolerance):
    """Native rows keep the reference's log π in float32: 6e-8 of up to 2 nats, summed over at most 9 tokens."""
    case = pairs
    if loss is kto:
        case = Case([True, False, False, True, True, False], [0] * 6)
    expected = case.slopes(loss(case, name))
    np.testing.assert_allclose(case.weights(name), expected, rtol=tolerance, atol=1e-12)


def test_all_whose_own_loss_is_said_to_be_differentiated_are():
    looked = {name.partition(":")[0] for name, *_ in CASES}
    assert looked == {name for name, kind in WEIGHTINGS.items() if OWN & {*kind.OWN_LOSSES}}
