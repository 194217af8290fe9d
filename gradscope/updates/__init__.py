"""What an optimizer step does to every token: movements, directions, first-order influence, screening in `tuning`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "comparison.compare": ["Comparison", "compare", "compare_cost"],
        "comparison.words": ["NO_RECOMMENDATION", "WHAT_STAYS", "describe", "signal_sentence"],
        "directions": [
            "SIGNS",
            "batch_direction_shares",
            "movement_summary",
            "net_weights",
            "over_batches",
            "right_direction_shares",
            "similarity",
            "without_extremes",
        ],
        "first_order": ["BY", "fits_at_once", "influence", "influence_cost", "influence_table", "moved_against"],
        "movement": ["apply_update", "apply_updates", "movement_table", "update_cost"],
        "step": ["SGD", "StepSettings", "read_moments", "state_step"],
        "tuning.counts": ["count_tokens", "tune_batch"],
        "tuning.linear": ["KINDS", "Setting", "linearise_cost", "make_grid"],
        "tuning.report": ["report"],
        "tuning.screen": ["ENOUGH_BATCHES", "MIN_TOKENS", "Screening", "is_held_out", "screen"],
        "variants": ["Variant", "old_intervals"],
    },
)
