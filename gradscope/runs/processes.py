"""How several processes share the work of one run; a single process is the default."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import BaseContext
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from gradscope.errors import InputError, NanLogitsError, SelfCheckError, first_line

KINDS = (NanLogitsError, InputError, SelfCheckError, OSError)
"""Errors that are shared with the other processes; any other error ends the process, and the launcher ends the rest."""
EXCHANGED = 1 << 26
"""Entries of a host tensor that GPUs sum at a time."""
PRELOADED = ["gradscope.policy.loading", "transformers.models.auto.modeling_auto", "transformers.modeling_utils"]
"""Modules that take seconds to import and every worker needs."""
PATIENCE = timedelta(hours=12)
"""Time to wait for the slowest process; a failed one ends them all at once."""
JOINING = timedelta(minutes=5)
"""Time to wait for all processes to join."""
SILENCE = 10.0
"""Seconds after which a process says that it waits for others."""
ALONE_AGAIN = "run alone, without a launcher's variables: env -u WORLD_SIZE -u RANK gradscope …"
T = TypeVar("T")
_joined: list[int] = []


def worker_context() -> BaseContext:
    """Return the multiprocessing context for workers, forked from a server that has imported what they need.

    Without forks (Windows), each worker imports it itself.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@dataclass(frozen=True)
class Processes:
    """This process's rank among those that `accelerate launch` (or torchrun) has started."""

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """True in the process that writes files."""
        return self.rank == 0

    def deal(self, items: Sequence[T], filler: T) -> list[T]:
        """Return every count-th item; `filler` makes shares equally long, so that all processes exchange equally often.

        >>> [Processes(rank, 2).deal("abc", "-") for rank in (0, 1)]
        [['a', 'c'], ['b', '-']]
        """
        mine = list(items[self.rank :: self.count])
        return mine + [filler] * (-(-len(items) // self.count) - len(mine))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place, in each of them; GPUs also sum host tensors."""
        if self.count == 1:
            return tensor
        if tensor.device.type == "cpu" and dist.get_backend() == dist.Backend.NCCL:
            for part in tensor.view(-1).split(EXCHANGED):
                there = part.cuda()
                dist.all_reduce(there)
                part.copy_(there)
        else:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, items: list[T]) -> list[T]:
        """Return all processes' items by rank, in each process."""
        if self.count == 1:
            return items
        shares: list[list[T]] = [[] for _ in range(self.count)]
        dist.all_gather_object(shares, items)
        return [item for share in shares for item in share]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Barrier: leave the block together. If one process raises an error in KINDS, every process raises it."""
        failure = None
        try:
            yield
        except KINDS as error:
            failure = error
        mine = [] if failure is None else [(next(kind for kind in KINDS if isinstance(failure, kind)), str(failure))]
        if failures := self.gather(mine):
            kind, message = failures[0]
            raise failure or kind(message)


ALONE = Processes()


def deal_by_cost(items: Sequence[int], costs: Sequence[float], count: int) -> list[list[int]]:
    """Return `count` shares of the items, in ascending order, assigning the most expensive first to the smallest share.

    >>> deal_by_cost([0, 1, 2, 3], [9.0, 1.0, 5.0, 4.0], 2)
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for cost, item in sorted(zip(costs, items, strict=True), key=lambda pair: (-pair[0], pair[1])):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += cost
    return [sorted(share) for share in shares]


def launched() -> int:
    """Return how many processes were launched, by the variable WORLD_SIZE; 1 if it is unset or empty."""
    return _whole("WORLD_SIZE", 1)


def is_first() -> bool:
    """Return whether this is the first process of a launch, or alone."""
    return launched() == 1 or _whole("RANK", 0) == 0


def _whole(variable: str, default: int) -> int:
    given = os.environ.get(variable, "").strip()
    if given and not (given.isascii() and given.isdecimal() and int(given) >= (variable == "WORLD_SIZE")):
        kind = "a number of processes" if variable == "WORLD_SIZE" else "a process's number, from 0"
        raise InputError(f"the environment variable {variable} is {given!r}, not {kind}; {ALONE_AGAIN}")
    return int(given or default)


def join_processes(backend: str) -> None:
    """Form the process group of a launch. Raises InputError, with how many have joined, after JOINING."""
    count, rank = launched(), _whole("RANK", 0)
    told = f"gradscope: waiting up to {JOINING.seconds // 60} minutes for {count} processes (WORLD_SIZE); {ALONE_AGAIN}"
    patience = threading.Timer(SILENCE, print, [told], {"file": sys.stderr, "flush": True})
    patience.daemon = True
    patience.start()
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, count, timeout=JOINING))
        store.set_timeout(PATIENCE)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)
        _joined.append(count)
    except (ValueError, RuntimeError) as error:  # a variable is missing; somebody has not come
        raise InputError(
            f"WORLD_SIZE={count} announces {count} processes, but they did not come together ({first_line(error)}); "
            f"{ALONE_AGAIN}"
        ) from error
    finally:
        patience.cancel()


def has_joined() -> bool:
    """Return whether this process has formed a group with others."""
    return bool(_joined)


def leave_launch() -> None:
    """Leave the process group, if any: Python aborts if it exits while gloo's threads free a tensor."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
