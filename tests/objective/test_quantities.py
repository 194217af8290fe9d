"""Quantities of a distribution and their slopes at the logits, against float64 autograd of losses written here."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from gradscope.errors import InputError
from gradscope.objective import Divergence, Outputs, make_quantity

N, TOKENS = 13, 7
CLOSE = {"rtol": 1e-11, "atol": 1e-13}
MODEL = torch.nn.Identity()
"""Stands for a teacher, whose logits are given."""


def draw(seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The policy's logits, the teacher's, sampled tokens, and a temperature for each."""
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = spread * torch.randn(2, TOKENS, N, generator=generator, dtype=torch.float64)
    ids = torch.randint(N, (TOKENS,), generator=generator)
    return logits, teacher, ids, 0.5 + torch.rand(TOKENS, generator=generator, dtype=torch.float64)


def differentiate(loss, logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's loss of its log π [N], and its derivative by logits / T, from autograd."""
    scaled = (logits / temperature[:, None]).requires_grad_(True)
    values = torch.stack([loss(row, t) for t, row in enumerate(scaled.log_softmax(-1))])
    return values.detach(), torch.autograd.grad(values.sum(), scaled)[0]


def generalised_jsd(own: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """As trainers write it: Eq. 1 of arXiv:2306.13649, with the KLs of beta 0 and 1 at its ends."""
    if beta in (0, 1):
        pair = (own, teacher) if beta == 0 else (teacher, own)
        return kl_div(*pair, reduction="sum", log_target=True)
    middle = torch.logsumexp(torch.stack([own + math.log(1 - beta), teacher + math.log(beta)]), 0)
    kls = (kl_div(middle, each, reduction="sum", log_target=True) for each in (teacher, own))
    return sum(weight * kl for weight, kl in zip((beta, 1 - beta), kls, strict=True))


def add_tail(logprobs: Tensor) -> Tensor:
    """As TRL writes it."""
    mass = logprobs.logsumexp(-1).clamp(max=-1e-7)
    return torch.cat([logprobs, (-mass.expm1()).log()[None]])


@pytest.mark.parametrize("beta", [0, 0.3, 0.5, 0.9, 1])
def test_a_divergence_over_the_vocabulary_has_autograds_value_and_slope(beta):
    logits, teacher, ids, at = draw()
    known = (teacher / at[:, None]).log_softmax(-1)
    wanted = differentiate(lambda own, t: generalised_jsd(own, known[t], beta), logits, at)
    found = Divergence(beta, MODEL).evaluate(Outputs(logits, ids, at, (teacher,)))
    for ours, theirs in zip(found, wanted, strict=False):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    assert not found.clamped.any() and found.slope.sum(1).abs().max() < 1e-15


def test_the_slopes_of_kls_entropy_and_log_pi_have_their_closed_forms():
    logits, teacher, ids, at = draw(1)
    own, known = ((values / at[:, None]).log_softmax(-1) for values in (logits, teacher))
    p, difference = own.exp(), own - known
    kl = (p * difference).sum(1, keepdim=True)
    one = torch.nn.functional.one_hot(ids, N)
    wanted = {
        "reverse-kl": (kl[:, 0], p * (difference - kl)),
        "forward-kl": ((known.exp() * -difference).sum(1), p - known.exp()),
        "entropy": (-(p * own).sum(1), -p * (own - (p * own).sum(1, keepdim=True))),
        "logprob": (own.gather(1, ids[:, None])[:, 0], one - p),
    }
    for name, (value, slope) in wanted.items():
        quantity = make_quantity(name)
        quantity = Divergence(quantity.beta, MODEL) if quantity.asks_teacher else quantity
        found = quantity.evaluate(Outputs(logits, ids, at, (teacher,) if quantity.asks_teacher else ()))
        torch.testing.assert_close(found.value, value, **CLOSE)
        torch.testing.assert_close(found.slope, slope, **CLOSE)
    # The sampled estimator's expected gradient is the reverse KL's: E_v [log π/ν (v) (e_v − π)].
    expected = sum(p[:, [v]] * difference[:, [v]] * (torch.eye(N)[v] - p) for v in range(N))
    torch.testing.assert_close(expected, wanted["reverse-kl"][1], **CLOSE)


@pytest.mark.parametrize("rest", ["drop", "tail", "renormalise"])
@pytest.mark.parametrize("beta", [0, 0.4, 1])
@pytest.mark.parametrize("source", ["teacher", "policy", "logged", "all logged"])
def test_a_divergence_over_candidates_has_autograds_value_and_slope(source, beta, rest):
    logits, teacher, ids, at = draw(2)
    top = N if source == "all logged" else 4
    known = (teacher / at[:, None]).log_softmax(-1)
    candidates = (logits if source == "policy" else known).topk(top).indices
    reach = {"drop": lambda own: own, "tail": add_tail, "renormalise": lambda own: own.log_softmax(-1)}[rest]

    def loss(own: Tensor, t: int) -> Tensor:
        return generalised_jsd(*(reach(each[candidates[t]]) for each in (own, known[t])), beta)

    value, slope = differentiate(loss, logits, at)
    if "logged" in source:  # in another order, with places that hold none
        order = torch.randperm(top + 2, generator=torch.Generator().manual_seed(0))
        filled = torch.nn.functional.pad(candidates, (0, 2), value=-1)[:, order]
        given = filled, torch.nn.functional.pad(known.gather(1, candidates), (0, 2), value=-math.inf)[:, order]
        quantity = Divergence(beta, rest=rest)
    else:
        given, quantity = (teacher,), Divergence(beta, MODEL, top, source, rest)
    found = quantity.evaluate(Outputs(logits, ids, at, given))
    torch.testing.assert_close(found.value, value, **CLOSE)
    torch.testing.assert_close(found.slope, slope, **CLOSE)


def test_fewer_candidates_than_were_logged_are_the_likeliest_of_them():
    logits, teacher, ids, at = draw(3)
    known = (teacher / at[:, None]).log_softmax(-1)
    order = torch.stack([torch.randperm(N, generator=torch.Generator().manual_seed(t)) for t in range(TOKENS)])
    some = Divergence(0, top=3).evaluate(Outputs(logits, ids, at, (order, known.gather(1, order))))
    model = Divergence(0, MODEL, top=3).evaluate(Outputs(logits, ids, at, (teacher,)))
    torch.testing.assert_close(some.slope, model.slope, **CLOSE)


@pytest.mark.parametrize("beta", [0, 0.4, 1])
@pytest.mark.parametrize("top", [None, 5])
def test_clamps_of_log_probabilities_and_of_the_loss_are_differentiated_and_counted(top, beta):
    logits, teacher, ids, at = draw(4, spread=4.0)
    logits[0, teacher[0].topk(5).indices] -= 60.0  # every candidate below the clamp
    known = (teacher / at[:, None]).log_softmax(-1)
    candidates = known.topk(top or N).indices
    low, least, most = -6.0, 0.5, 3.0

    def loss(own: Tensor, t: int) -> Tensor:
        own, other = (each[candidates[t]].clamp(min=low) for each in (own, known[t]))
        return generalised_jsd(own, other, beta).clamp(least, most)

    value, slope = differentiate(loss, logits, at)
    quantity = Divergence(beta, MODEL, top, least_logprob=low, least=least, most=most)
    found = quantity.evaluate(Outputs(logits, ids, at, (teacher,)))
    torch.testing.assert_close(found.value, value, **CLOSE)
    torch.testing.assert_close(found.slope, slope, **CLOSE)
    assert torch.equal(found.clamped, (slope == 0).all(1)) and 0 < found.clamped.sum() < TOKENS
    unclamped = Divergence(beta, MODEL, top, least_logprob=low).evaluate(Outputs(logits, ids, at, (teacher,)))
    assert top is None or bool(unclamped.clamped[0])


@pytest.mark.parametrize("name", ["reverse-kl", "forward-kl", "jsd", "entropy", "top"])
def test_slopes_in_float32_keep_their_digits_where_pi_rounds_to_1(name):
    """1 − π is 1e-7 to 1e-14, and so is every slope, up to its logarithm."""
    logits, teacher, ids, at = draw(5)
    logits[:, 3] += 30.0
    teacher[:, 3] += 28.0
    quantity = {"entropy": make_quantity("entropy"), "top": Divergence(1, MODEL, 4, rest="tail")}.get(name)
    quantity = quantity or Divergence(make_quantity(name).beta, MODEL)
    given = (teacher.float(),) if quantity.asks_teacher else ()
    found = quantity.evaluate(Outputs(logits.float(), ids, at.float(), given)).slope.double()
    logits, at = logits.float().double(), at.float().double()
    exact = quantity.evaluate(Outputs(logits, ids, at, tuple(values.double() for values in given))).slope
    assert exact.norm(dim=1).max() < 1e-4 and exact.norm(dim=1).min() < 1e-10
    # A logit of 30 over T of .5 is rounded by 60 · 2⁻²⁴ and so is each log π; errors of the terms add.
    assert ((found - exact).norm(dim=1) / exact.norm(dim=1)).max() < 1e-4


@pytest.mark.parametrize("of", [Divergence(0.5, MODEL), Divergence(0.1, MODEL, 6, rest="tail")])
@pytest.mark.parametrize(("place", "bound"), [("near", 3e-4), ("elsewhere", 2e-6)])
def test_a_jsds_slopes_in_float32_keep_their_digits_wherever_the_teacher_is(of, place, bound):
    """Near: log π and log ν, of up to 20 nats, are rounded by 1e-6 before their difference, of 1e-3 nats, is taken."""
    logits, teacher, ids, at = draw(9)
    teacher = logits + 1e-3 * teacher if place == "near" else teacher.scatter(1, logits.argmin(1, keepdim=True), 20.0)
    single = [values.float() for values in (logits, teacher, at)]
    logits, teacher, at = (values.double() for values in single)
    found = of.evaluate(Outputs(single[0], ids, single[2], single[1:2])).slope.double()
    exact = of.evaluate(Outputs(logits, ids, at, (teacher,))).slope
    assert ((found - exact).norm(dim=1) / exact.norm(dim=1)).max() < bound


# torch itself calls torch.jit.script the first time that forward mode is used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("mode", ["reverse", "forward", "together"])
def test_numbers_have_the_slope_as_their_derivative_in_both_modes(mode):
    logits, teacher, ids, at = draw(6)
    quantities = {"entropy": (), Divergence(0.3, MODEL): (teacher,), Divergence(1, MODEL, 3): (teacher,), "logprob": ()}
    for of, given in quantities.items():
        quantity = make_quantity(of)
        found = quantity.evaluate(Outputs(logits, ids, at, given))
        wanted = found.slope / at[:, None]
        direction = torch.randn(2, *logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

        def numbers(logits, quantity=quantity, given=given):
            return quantity.numbers(Outputs(logits, ids, at, given))

        def along(tangent, numbers=numbers):
            return torch.func.jvp(numbers, (logits,), (tangent,))[1]

        if mode == "reverse":
            leaf = logits.clone().requires_grad_(True)
            values = numbers(leaf)
            torch.testing.assert_close(values.detach(), found.value, **CLOSE)
            torch.testing.assert_close(torch.autograd.grad(values.sum(), leaf)[0], wanted, **CLOSE)
        elif mode == "forward":
            torch.testing.assert_close(along(direction[0]), (wanted * direction[0]).sum(1), **CLOSE)
        else:
            torch.testing.assert_close(torch.vmap(along)(direction), (wanted * direction).sum(2), **CLOSE)


def test_impossible_tokens_add_nothing_and_an_infinite_divergence_is_refused():
    logits, teacher, ids, at = draw(8)
    logits[:, 2] = teacher[:, 2] = -math.inf
    rest = [0, 1, *range(3, N)]
    for beta in (0, 0.5, 1):
        found = Divergence(beta, MODEL).evaluate(Outputs(logits, ids, at, (teacher,)))
        wanted = Divergence(beta, MODEL).evaluate(Outputs(logits[:, rest], ids, at, (teacher[:, rest],)))
        torch.testing.assert_close(found.value, wanted.value, **CLOSE)
        torch.testing.assert_close(found.slope[:, rest], wanted.slope, **CLOSE)
        assert (found.slope[:, 2] == 0).all()
    teacher[:, 3] = -math.inf
    with pytest.raises(InputError):
        Divergence(1, MODEL).evaluate(Outputs(logits, ids, at, (teacher,)))
    Divergence(0, MODEL).evaluate(Outputs(logits, ids, at, (teacher,)))
    nearly = teacher.masked_fill(teacher == -math.inf, -300.0)  # e^−300 is nothing
    for pair, near in (((logits, teacher), (logits, nearly)), ((teacher, logits), (nearly, logits))):
        given = (Outputs(own, ids, at, (other,)) for own, other in (pair, near))
        found, wanted = map(Divergence(0.3, MODEL).evaluate, given)
        torch.testing.assert_close(found.value, wanted.value, **CLOSE)
        torch.testing.assert_close(found.slope, wanted.slope, **CLOSE)


@pytest.mark.parametrize(
    "wrong", [{"beta": 1.5}, {"top": 0}, {"top": 2.5}, {"rest": "some"}, {"top_of": "both"}, {"least_logprob": 1.0}]
)
def test_a_field_out_of_range_is_refused_in_one_line(wrong):
    with pytest.raises(InputError) as caught:
        Divergence(**wrong)
    assert "\n" not in str(caught.value)
