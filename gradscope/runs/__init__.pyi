"""What is at the door: a file is loaded when one of its names is first used."""

from .ending import (
    end_at_once as end_at_once,
    go_on_unread as go_on_unread,
    noting_interruption as noting_interruption,
)
from .files import (
    file_hash as file_hash,
    plain_json as plain_json,
    replacing as replacing,
    write_json as write_json,
    write_parquet as write_parquet,
    write_parquet_parts as write_parquet_parts,
    write_text as write_text,
)
from .folder import (
    MANIFEST as MANIFEST,
    RunFolder as RunFolder,
    check_is_folder as check_is_folder,
    check_results as check_results,
    check_writable as check_writable,
    library_versions as library_versions,
    provenance as provenance,
    refusal as refusal,
)
from .foreign import (
    MOST_COLUMNS as MOST_COLUMNS,
    PACKED as PACKED,
    load_tensors as load_tensors,
    numbers_of as numbers_of,
    parse_json as parse_json,
    parse_json_file as parse_json_file,
    read_json as read_json,
    read_lines as read_lines,
    read_parquet as read_parquet,
)
from .inert import Inert as Inert
from .lock import locked as locked
from .processes import (
    ALONE as ALONE,
    Processes as Processes,
    deal_by_cost as deal_by_cost,
    worker_context as worker_context,
)
from .progress import (
    SILENT as SILENT,
    Advance as Advance,
    Progress as Progress,
    Reporter as Reporter,
    settle_progress as settle_progress,
    track as track,
)
from .scratch import check_room as check_room, scratch_zeros as scratch_zeros
from .user_code import RAISED as RAISED, in_words as in_words, run_file as run_file
