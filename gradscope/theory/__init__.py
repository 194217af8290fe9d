"""Closed forms: Prop. 4.2 with its bounds, and what norms of real tokens follow."""

from gradscope.theory.bounds import TheoryReport, measured_cones, theory_report
from gradscope.theory.closed_form import logit_grad_bounds, logit_grad_norm, rounding_tolerance
from gradscope.theory.drivers import add_drivers, regress_norms
from gradscope.theory.gains import FLOOR, fit_powers, layer_gains, require_columns

__all__ = [
    "FLOOR", "TheoryReport", "add_drivers", "fit_powers", "layer_gains", "logit_grad_bounds", "logit_grad_norm",
    "measured_cones", "regress_norms", "require_columns", "rounding_tolerance", "theory_report",
]  # fmt: skip
