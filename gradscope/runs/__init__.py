"""Run folders written atomically, resumed and locked; untrusted files; processes; progress; how numbers are written."""

from gradscope.runs.files import (
    file_hash,
    plain_json,
    replacing,
    write_json,
    write_parquet,
    write_parquet_parts,
    write_text,
)
from gradscope.runs.folder import (
    MANIFEST,
    RunFolder,
    changed_settings,
    check_is_folder,
    check_writable,
    describe_changes,
    library_versions,
    provenance,
    refusal,
)
from gradscope.runs.foreign import (
    PACKED,
    load_tensors,
    parquet_metadata,
    parquet_values,
    parse_json,
    parse_json_file,
    read_arrow,
    read_json,
    read_lines,
    read_parquet,
)
from gradscope.runs.inert import Inert
from gradscope.runs.journal import Journal, scalars, writing
from gradscope.runs.lock import locked
from gradscope.runs.processes import (
    ALONE,
    ALONE_AGAIN,
    Processes,
    deal_by_cost,
    is_first,
    join_processes,
    launched,
    leave_launch,
    worker_context,
)
from gradscope.runs.progress import SILENT, Advance, Progress, Reporter, settle_progress, track
from gradscope.runs.scratch import check_room, scratch_zeros
from gradscope.runs.user_code import RAISED, in_words, run_file
from gradscope.runs.wording import counted, digits

__all__ = [
    "ALONE", "ALONE_AGAIN", "MANIFEST", "PACKED", "RAISED", "SILENT", "Advance", "Inert", "Journal", "Processes",
    "Progress", "Reporter", "RunFolder", "changed_settings", "check_is_folder", "check_room", "check_writable",
    "counted", "deal_by_cost", "describe_changes", "digits", "file_hash", "in_words", "is_first", "join_processes",
    "launched", "leave_launch", "library_versions", "load_tensors", "locked", "parquet_metadata",
    "parquet_values", "parse_json", "parse_json_file", "plain_json", "provenance", "read_arrow", "read_json",
    "read_lines", "read_parquet", "refusal", "replacing", "run_file", "scalars", "scratch_zeros",
    "settle_progress", "track", "worker_context", "write_json", "write_parquet", "write_parquet_parts",
    "write_text", "writing",
]  # fmt: skip
