"""What is at the door: a file is loaded when one of its names is first used."""

from .bounds import TheoryReport as TheoryReport, theory_report as theory_report
from .closed_form import (
    logit_grad_bounds as logit_grad_bounds,
    logit_grad_norm as logit_grad_norm,
    rounding_tolerance as rounding_tolerance,
)
from .constants import layer_constants as layer_constants, token_contexts as token_contexts
from .drivers import add_drivers as add_drivers, regress_norms as regress_norms
from .gains import FLOOR as FLOOR
from .proxies import judge_proxies as judge_proxies
