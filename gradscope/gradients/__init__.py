"""The instrument: every token's own gradient, as a table; summed gradients of intervals and prompts; what they cost."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "columns": ["ADAMW", "LAYER", "LOGITS", "PARAMETERS", "refuse_endless_weights"],
        "cost.machine": ["Rates", "describe_seconds", "gpu_rates"],
        "cost.measuring": ["Response", "floor_flops", "measure_flops"],
        "cost.outline": ["config_of", "outline_policy", "shape_of"],
        "cost.pilot": ["make_pilot"],
        "cost.plan": ["plan_batch"],
        "cost.shape": ["BYTES", "Dtype", "ModelShape", "block_activation_bytes"],
        "engine.meter": ["TokenGradientMeter"],
        "engine.products": ["Precision"],
        "engine.results": ["SelfCheck", "TokenGradients"],
        "engine.self_check": ["check_engine"],
        "engine.stack": ["SequenceTokens"],
        "estimates": ["SUMS", "interval_norms"],
        "hooks": ["capture_activations", "capture_gradients", "first_tensor", "forward_hooks", "measuring"],
        "rounds": ["PILOT", "Round", "Stopwatch", "join_rounds", "measure_rounds"],
        "sample": ["sampling_probabilities", "sampling_weights", "stands_for", "weighted_quantiles"],
        "settings": ["AFTERWARDS", "BUDGET", "MeasureSettings", "check_batch", "settle_minutes"],
        "summed.intervals": ["IntervalGradients", "gram", "interval_gradients", "interval_gradients_over"],
        "summed.plan": ["Index", "SumsPlan", "Way", "largest_share", "own_rows", "plan_batch_sums"],
        "summed.prompts": ["PromptGradients", "fixed_cotangents"],
        "summed.sketches": ["Sketcher"],
        "summed.weighted": [
            "BACKWARD",
            "Derivative",
            "FORWARD_MODE",
            "predict_changes",
            "refuse_narrow_arithmetic",
            "refuse_narrow_weights",
            "vector_bytes",
            "vectors_within",
            "weighted_gradients",
            "zero_vectors",
        ],
        "table": ["TableMeasurement", "join_responses", "measure"],
    },
)
