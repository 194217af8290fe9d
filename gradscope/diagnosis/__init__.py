"""A checkpoint's diagnosis: results, findings in words, figures, and the HTML page in `page`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "checkpoint": ["diagnose"],
        "dump_alone": ["logit_notes", "logit_shares", "logit_table"],
        "gradients": ["Gram", "Products", "block_products", "cosine_matrix", "gradient_rows", "prompt_vectors"],
        "page.contents": ["make_logit_report", "make_report", "write_report"],
        "page.trend": ["make_trend_report"],
        "plots": ["plot_dominance"],
        "precision": ["sampling_error"],
        "result": ["Diagnosis", "DiagnosisSettings", "Finding", "Verdict"],
        "summary": [
            "PAPER_NORMS",
            "Summary",
            "interval_summary",
            "measured_cones",
            "summarize_measurement",
            "write_figures",
        ],
        "tokens": ["PromptSums", "token_shares"],
        "words": ["findings"],
    },
)
