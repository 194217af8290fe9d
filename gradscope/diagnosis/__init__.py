"""A checkpoint's diagnosis: results, findings in words, figures, and the HTML page in `page`."""

from gradscope.diagnosis.diagnose import diagnose
from gradscope.diagnosis.gradients import Pairs, cosine_matrix, gradient_rows
from gradscope.diagnosis.minutes import SUMS, Minutes, compare_cost, part_costs, stage_costs
from gradscope.diagnosis.notes import supply_of
from gradscope.diagnosis.page.contents import TokenViewer, make_report, viewer, write_report
from gradscope.diagnosis.page.first_screen import decide
from gradscope.diagnosis.page.live import make_live_report
from gradscope.diagnosis.page.trend import make_trend_report, trend_changes
from gradscope.diagnosis.precision import judge_sample, sampling_error
from gradscope.diagnosis.result import (
    PARTS,
    VERDICT_PROMPTS,
    Diagnosis,
    DiagnosisSettings,
    Finding,
    Shares,
    Verdict,
    join_rows,
    one_row,
)
from gradscope.diagnosis.steps import direction_rows, influence_rows
from gradscope.diagnosis.summary import (
    PAPER_NORMS,
    SUMMARY,
    THEORY,
    Summary,
    add_summary,
    interval_summary,
    summarize_measurement,
    write_figures,
)
from gradscope.diagnosis.tokens import PromptSums, shares_by, sum_by_prompt, token_shares
from gradscope.diagnosis.words import CERTAIN, dominance_words, findings

__all__ = [
    "CERTAIN", "PAPER_NORMS", "PARTS", "SUMMARY", "SUMS", "THEORY", "VERDICT_PROMPTS", "Diagnosis",
    "DiagnosisSettings", "Finding", "Minutes", "Pairs", "PromptSums", "Shares", "Summary", "TokenViewer", "Verdict",
    "add_summary", "compare_cost", "cosine_matrix", "decide", "diagnose", "direction_rows", "dominance_words",
    "findings", "gradient_rows", "influence_rows", "interval_summary", "join_rows", "judge_sample",
    "make_live_report", "make_report", "make_trend_report", "one_row", "part_costs", "sampling_error", "shares_by",
    "stage_costs", "sum_by_prompt", "summarize_measurement", "supply_of", "token_shares", "trend_changes", "viewer",
    "write_figures", "write_report",
]  # fmt: skip
