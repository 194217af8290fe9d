"""Divergences from a teacher are those of TRL's own functions, value and gradient."""

import pytest
import torch
from support.tiers import every
from torch import Tensor

from gradscope.objective import Divergence, Outputs

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore:.*trl.experimental")

N, TOKENS, TOP = 17, 5, 4
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def differentiate(loss, logits: Tensor, at: float) -> tuple[Tensor, Tensor]:
    """TRL's per-token losses of logits [k, N] / T, and their gradient there."""
    scaled = (logits / at).requires_grad_(True)
    values = loss(scaled)
    return values.detach(), torch.autograd.grad(values.sum(), scaled)[0]


def assert_same(quantity: Divergence, wanted: tuple[Tensor, Tensor], logits: Tensor, at: float, given) -> None:
    found = quantity.evaluate(Outputs(logits, torch.zeros(TOKENS, dtype=torch.long), at, given))
    torch.testing.assert_close(found.value, wanted[0], **CLOSE)
    torch.testing.assert_close(found.slope, wanted[1], **CLOSE)


@pytest.fixture
def logits() -> Tensor:
    return 2 * torch.randn(2, TOKENS, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("beta", every(2, [0.0, 0.3, 1.0]))
def test_gkds_and_the_distillation_trainers_generalised_jsd(logits, beta):
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.server_distillation.server_distillation_trainer import _jsd_divergence

    own, teacher, at = *logits, 0.7
    gkd = differentiate(
        lambda z: GKDTrainer.generalized_jsd_loss(z, teacher / at, beta=beta, reduction="none").sum(-1), own, at
    )
    base = differentiate(
        lambda z: _jsd_divergence(z.log_softmax(-1), (teacher / at).log_softmax(-1), beta).sum(-1), own, at
    )
    for wanted in (gkd, base):
        assert_same(Divergence(beta, torch.nn.Identity()), wanted, own, at, (teacher,))


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("alpha", every(2, [0.0, 0.4, 1.0]))
def test_self_distillation_over_the_students_likeliest_tokens(logits, alpha, tail):
    from trl.experimental.sdft.loss_utils import compute_topk_self_distillation_loss as loss

    own, teacher, at = *logits, 0.7
    how = {"distillation_topk": TOP, "distillation_alpha": alpha, "distillation_add_tail": tail}
    wanted = differentiate(lambda z: loss(z, teacher / at, **how), own, at)
    quantity = Divergence(alpha, torch.nn.Identity(), TOP, "policy", "tail" if tail else "renormalise")
    assert_same(quantity, wanted, own, at, (teacher,))


@pytest.mark.parametrize("tail", [True, False])
def test_forward_kl_over_what_a_server_logged(logits, tail):
    from trl.experimental.server_distillation.server_distillation_trainer import ServerDistillationTrainer

    own, teacher, at = *logits, 0.7
    known, ids = (teacher / at).log_softmax(-1).topk(TOP)
    known[0, 2:], ids[0, 2:] = -torch.inf, 0  # fewer candidates there
    result = {"topk_logprobs": known, "topk_token_ids": ids}

    class Trainer:
        loss_add_tail = tail

        @staticmethod
        def _reduce_divergence_loss(jsd: Tensor, **_: object) -> Tensor:
            return jsd.sum(-1)

    def loss(z: Tensor) -> Tensor:
        compute = ServerDistillationTrainer._compute_server_forward_kl_loss
        return compute(Trainer(), result, z.log_softmax(-1), torch.zeros(TOKENS, dtype=torch.long))

    quantity = Divergence(0, rest="tail" if tail else "renormalise")
    assert_same(quantity, differentiate(loss, own, at), own, at, (ids, known))


@pytest.mark.parametrize("beta", every(2, [0.0, 0.3, 1.0]))
def test_the_distillation_trainers_own_loss(logits, beta):
    """Its heads are identities, so that hidden states are logits; it computes in float32, for a mean over tokens."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss as loss

    own, teacher, at = *logits, 0.7
    hidden = own.float()[None].requires_grad_(True)
    head, mask = torch.eye(N), torch.ones(1, TOKENS)
    made, _, _ = loss(hidden, teacher.float()[None], head, head, mask, beta, temperature=at)
    (gradient,) = torch.autograd.grad(TOKENS * made, hidden)
    quantity = Divergence(beta, torch.nn.Identity())
    found = quantity.evaluate(Outputs(own, torch.zeros(TOKENS, dtype=torch.long), at, (teacher,)))
    torch.testing.assert_close(found.value.mean().float(), made.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.slope.float() / at, gradient[0], rtol=1e-4, atol=2e-6)
