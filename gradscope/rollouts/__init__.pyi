"""What is at the door: a file is loaded when one of its names is first used."""

from .batch import (
    LARGEST as LARGEST,
    Note as Note,
    Response as Response,
    TokenBatch as TokenBatch,
    collate as collate,
)
from .caveats import CAVEATS as CAVEATS
from .checks import check_batch as check_batch
from .dump import Dump as Dump, keep_own_step as keep_own_step
from .files import list_files as list_files, rollouts_hash as rollouts_hash
from .formats.native import write_rollouts as write_rollouts
from .reading import (
    READER as READER,
    READERS as READERS,
    BatchLike as BatchLike,
    read_dump as read_dump,
    read_inputs as read_inputs,
    read_rollouts as read_rollouts,
)
