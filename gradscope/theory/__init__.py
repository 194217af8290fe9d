"""Prop. 4.2 in closed form, its bounds, and what norms of real tokens follow."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "bounds": ["TheoryReport", "theory_report"],
        "closed_form": ["logit_grad_bounds", "logit_grad_norm", "rounding_tolerance"],
        "constants": ["layer_constants", "token_contexts"],
        "drivers": ["add_drivers", "regress_norms"],
        "gains": ["FLOOR"],
        "proxies": ["judge_proxies"],
    },
)
