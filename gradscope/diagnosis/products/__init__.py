"""Whatever asks J: six products, each made once, in this order, if a part asks for it and the clock allows.

A product is a module with

    TITLE       its name in sentences
    STAGE       its name in the progress and in a plan
    asked(m)    whether the settings want it; may leave it out, with a reason
    cost(m)     the seconds that it takes at least
    make(m)     the product, on every process; None if nothing came of it

and, if a plan counts it, `passes(case)`, its price in forward passes over the batch. Without an update, none is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import ModuleType

from gradscope.diagnosis.measured import Case, Measured
from gradscope.diagnosis.products import comparison, contributions, predicted_step, real_step, sums, table
from gradscope.diagnosis.settings import DiagnosisSettings
from gradscope.gradients import Afterwards, Resources, SumsPlan, plan_sums
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.updates import StepSettings

PRODUCTS: dict[str, ModuleType] = {
    "table": table,
    "contributions": contributions,
    "sums": sums,
    "predicted_step": predicted_step,
    "real_step": real_step,
    "comparison": comparison,
}

ESSENTIAL = ("contributions", "sums")
"""Products that belong to a verdict beside the table, for which minutes are kept first."""


def make_products(m: Measured, names: Iterable[str]) -> None:
    """Make the products of these names that fit into the time, into `m.made`; all processes call this together."""
    wanted, progress = {*names}, m.jacobian.resources.progress
    for name, product in PRODUCTS.items():
        if name not in wanted or not m.weighted or not product.asked(m):
            continue
        price = m.attempt(name, product.TITLE, lambda product=product: product.cost(m))
        if price is None or not m.fits(name, product.TITLE, price):
            continue
        with progress.stage(product.STAGE):
            made = m.attempt(name, product.TITLE, lambda product=product: product.make(m))
        if made is not None:
            m.made[name] = made


def follow_table(
    policy: Policy,
    batch: TokenBatch,
    settings: DiagnosisSettings,
    step: StepSettings,
    *,
    metric: bool,
    names: Iterable[str],
) -> Afterwards:
    """Return what these products take after a table; nothing if the batch gives no weights."""
    memory = Resources(settings.gradient_memory).settle(policy.device).vectors
    plan = plan_sums(policy, batch, memory, loss=settings.loss, metric=metric)
    if plan is None:
        return Afterwards()
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    case = Case(settings, step, size, plan.forward_passes, metric)
    return follow(case, names, plan)


def follow(case: Case, names: Collection[str], plan: SumsPlan, processes: int = 1) -> Afterwards:
    """Return what these products take after a table, on processes that share those of ESSENTIAL."""
    shared = [PRODUCTS[name].passes(case) / processes for name in ESSENTIAL if name in names]
    others = plan_products(case, {*names} - {*ESSENTIAL}).values()
    return Afterwards((*shared, *others), len(shared), plan.groups)


def plan_products(case: Case, names: Iterable[str]) -> dict[str, float]:
    """Return the price of these products by stage, in forward passes over the batch, in order of a run."""
    known = ((name, product) for name, product in PRODUCTS.items() if name in {*names} and hasattr(product, "passes"))
    return {product.STAGE: price for _, product in known if (price := product.passes(case))}
