"""A checkpoint's diagnosis: products that ask J, parts that ask a question each, and the HTML page in `page`."""

from gradscope.diagnosis.diagnose import diagnose, say
from gradscope.diagnosis.findings import Finding, Verdict
from gradscope.diagnosis.measured import Case, Measured
from gradscope.diagnosis.page.contents import TokenViewer, make_report, viewer, write_report
from gradscope.diagnosis.page.first_screen import decide
from gradscope.diagnosis.page.live import make_live_report
from gradscope.diagnosis.page.page import Block, Paragraph
from gradscope.diagnosis.page.sheets import Sheets
from gradscope.diagnosis.page.spike import describe_spike, make_spike_report
from gradscope.diagnosis.page.trend import make_trend_report, trend_changes
from gradscope.diagnosis.parts import PARTS, asked_products, part_file, settle_parts
from gradscope.diagnosis.parts.dominance import CERTAIN, judge_dominance
from gradscope.diagnosis.precision import judge_sample, sampling_error
from gradscope.diagnosis.products import follow, plan_products
from gradscope.diagnosis.result import Diagnosis, Scope
from gradscope.diagnosis.rows import Rows, join_rows, make_rows, one_row
from gradscope.diagnosis.settings import DiagnosisChoices, DiagnosisSettings
from gradscope.diagnosis.shares import PromptSums, group_shares, sum_by_prompt, token_shares
from gradscope.diagnosis.summarize import (
    SUMMARY,
    THEORY,
    add_summary,
    describe_summary,
    summarize,
    theory_words,
)
from gradscope.diagnosis.sums import Pairs, cosine_matrix, gradient_rows
from gradscope.diagnosis.update import supply_of

__all__ = [
    "CERTAIN", "PARTS", "SUMMARY", "THEORY", "Block", "Case", "Diagnosis", "DiagnosisChoices", "DiagnosisSettings",
    "Finding", "Measured", "Pairs", "Paragraph", "PromptSums", "Rows", "Scope", "Sheets", "TokenViewer", "Verdict",
    "add_summary", "asked_products", "cosine_matrix", "decide", "describe_spike", "describe_summary", "diagnose",
    "follow", "gradient_rows", "group_shares", "join_rows", "judge_dominance", "judge_sample", "make_live_report",
    "make_report", "make_rows", "make_spike_report", "make_trend_report", "one_row", "part_file", "plan_products",
    "sampling_error", "say", "settle_parts", "sum_by_prompt", "summarize", "supply_of", "theory_words", "token_shares",
    "trend_changes", "viewer", "write_report",
]  # fmt: skip
