"""Every token weighting on this batch, compared with the plain loss."""

from __future__ import annotations

from gradscope.diagnosis.measured import Case, Measured
from gradscope.diagnosis.settings import LARGE
from gradscope.updates import Comparison, ComparisonSettings, compare_cost, compare_rows, distinct_rows

TITLE = "what each weighting would change"
STAGE = "comparing token weightings"


def asked(m: Measured) -> bool:
    """Whether it is wanted; a large policy's is left out unless the settings force it."""
    if m.settings.compare is None and m.case.size >= LARGE:
        why = f"because the policy has {m.case.size:,} parameters; --compare forces it"
        m.leave_out("comparison", TITLE, "large", why)
        return False
    return m.settings.compare is not False


def passes(case: Case) -> float:
    wanted = case.size < LARGE if case.settings.compare is None else case.settings.compare
    return compare_cost(metric=case.metric) if wanted else 0.0


def cost(m: Measured) -> float:
    settings = _settings(m)
    settings.check()
    return m.seconds(compare_cost(distinct_rows(m.table, settings=settings), metric=m.metric is not None))


def make(m: Measured) -> Comparison | None:
    if not m.processes.is_main:
        return None
    step = m.made.get("predicted_step")
    known = {"saved": m.saved, "metric": m.metric, "slopes": None if step is None else step.slopes}
    return compare_rows(m.jacobian.alone().until(m.clock.deadline), m.table, settings=_settings(m), **known)


def _settings(m: Measured) -> ComparisonSettings:
    s = m.settings
    return ComparisonSettings(loss=s.loss, edges=s.edges, step=m.step, seed=s.seed, resamples=s.resamples)
