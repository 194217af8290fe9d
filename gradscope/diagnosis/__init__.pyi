"""What is at the door: a file is loaded when one of its names is first used."""

from .checkpoint import diagnose as diagnose
from .cost import (
    SUMS as SUMS,
    Minutes as Minutes,
    fit_parts as fit_parts,
    part_costs as part_costs,
    stage_costs as stage_costs,
)
from .dump_alone import logit_notes as logit_notes, logit_shares as logit_shares, logit_table as logit_table
from .gradients import (
    Gram as Gram,
    Products as Products,
    block_products as block_products,
    cosine_matrix as cosine_matrix,
    gradient_rows as gradient_rows,
    prompt_vectors as prompt_vectors,
)
from .page.contents import (
    TokenViewer as TokenViewer,
    make_logit_report as make_logit_report,
    make_report as make_report,
    viewer as viewer,
    write_report as write_report,
)
from .page.first_screen import decide as decide
from .page.trend import Change as Change, make_trend_report as make_trend_report, trend_changes as trend_changes
from .plots import plot_dominance as plot_dominance
from .precision import sampling_error as sampling_error
from .result import (
    PARTS as PARTS,
    Diagnosis as Diagnosis,
    DiagnosisSettings as DiagnosisSettings,
    Finding as Finding,
    Verdict as Verdict,
    join_rows as join_rows,
    one_row as one_row,
)
from .steps import direction_rows as direction_rows, influence_rows as influence_rows
from .summary import (
    PAPER_NORMS as PAPER_NORMS,
    Summary as Summary,
    interval_summary as interval_summary,
    measured_cones as measured_cones,
    summarize_measurement as summarize_measurement,
    write_figures as write_figures,
)
from .tokens import (
    PromptSums as PromptSums,
    shares_by as shares_by,
    sum_by_prompt as sum_by_prompt,
    token_shares as token_shares,
)
from .words import CERTAIN as CERTAIN, findings as findings
