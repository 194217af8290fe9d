"""A question of the report is one module here, in the order of the page and of the findings.

    TITLE           the section's title
    ASKS            the products that it needs, of `products.PRODUCTS`: it is made if one of them was, or with the table
    rows(m)         its numbers, from a `Measured`: `Rows`
    say(found)      findings about any rows of a `Diagnosis`, and what to do because of them
    show(found, sheets)   blocks of the page: figures with their CSV, tables, definitions
    FOLDED          the section is folded
    FOLLOWED        (statistic, metric) that are followed over training: title, sentence, interval (0: the lowest)
    LABELS          statistic or column → its words in tables
    DEFINITIONS     term → definition

Only TITLE, ASKS and rows are required. A part never asks J or the clock, and imports no other part.

`m` has policy, batch (its row r is the table's response r; `batch.steps` are steps as the log numbers them), whole (the
batch with the prompts that minutes left out), table, rewards (of responses), labels (of the intervals), settings, step
(the optimizer's settings), supply (prompts), weighted (whether there is an update; without one return `Rows()` if you
need weights), made (the products by name), note(kind, text), and draws(name), a statistic's own random numbers. `found`
has pick(statistic, metric, interval), frames, table, labels and scope; any may lack what another part makes. Say
nothing of weighted numbers where `found.scope.supply.too_few`, nor of any whose bounds are NaN. Since norms may be of a
sample of tokens, sum them by `shares.group_shares` (any groups; a negative code is no group), `terms.scaled_squares` or
`shares.token_shares` (intervals).

`Rows(rows, frames, unweighted, kept)`: `rows` are headline numbers, by `rows.make_rows` from values with bounds [3, k]
and joined by `rows.join_rows`, which `pick` and `Finding.about` find; `frames` are further tables by name; `unweighted`
names those whose bounds rest on all prompts, while the others' are struck where prompts are too few; `kept` is for
`say` and `show`. Statistics and frames have names of their own. `Finding.next` is what to do, `about` the numbers that
diagnosis.json puts beside it. A part's place in PARTS is its place on the page; `docs/report.md` lists them.

For a test, `support.planted.plant_table` plants a table; `rows` takes any object with the attributes that it asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from gradscope.diagnosis.parts import (
    directions,
    dominance,
    drivers,
    entropy,
    influence,
    kl,
    largest,
    layers,
    mismatch,
    modules,
    off_policy,
    preferences,
    signal,
    summed,
    temperatures,
    theory,
    wanted,
    weightings,
    where,
)
from gradscope.diagnosis.products import PRODUCTS
from gradscope.errors import InputError
from gradscope.runs import run_file

PARTS: dict[str, ModuleType] = {
    part.__name__.rpartition(".")[2]: part
    for part in (
        *(wanted, dominance, preferences, summed, signal, influence, directions, entropy, where, largest, kl, mismatch),
        *(off_policy, temperatures, weightings, theory, layers, modules, drivers),
    )
}


def gather(parts: Iterable[ModuleType], name: str) -> dict:
    """Return a mapping of all parts together: LABELS, DEFINITIONS or FOLLOWED."""
    return {key: value for part in parts for key, value in getattr(part, name, {}).items()}


def asked_products(parts: Mapping[str, ModuleType]) -> set[str]:
    """Return the names of the products that some part needs."""
    return {product for part in parts.values() for product in part.ASKS}


def settle_parts(own: Sequence[str | ModuleType]) -> dict[str, ModuleType]:
    """Return the parts, and these of a user beside them: modules, or "FILE.py" or "FILE.py:NAME".

    NAME is what the file holds under that name or, if nothing, what to call the file. Raises InputError for a file that
    is not there or is no part, and for a name that is taken.
    """
    parts = dict(PARTS)
    for given in own:
        name, part = ("", given) if isinstance(given, ModuleType) else _read_part(given)
        name = name or part.__name__.rpartition(".")[2]
        if lacking := [each for each in ("TITLE", "ASKS", "rows") if not hasattr(part, each)]:
            raise InputError(f"the part {name} has no {lacking[0]}; see gradscope.diagnosis.parts")
        if unknown := {*part.ASKS} - {*PRODUCTS}:
            raise InputError(f"the part {name} asks for {unknown.pop()!r}; there are {', '.join(PRODUCTS)}")
        if name in parts:
            raise InputError(f"there is a part {name} already; give yours another name")
        parts[name] = part
    return parts


def part_file(given: str) -> Path:
    """Return the file of "FILE.py" or "FILE.py:NAME"."""
    return Path(given.rpartition(":")[0] if ".py:" in given else given)


def _read_part(given: str) -> tuple[str, ModuleType]:
    file = part_file(given)
    name, module = given.removeprefix(str(file)).removeprefix(":"), run_file(file, "part")
    return name or file.stem, getattr(module, name, module) if name else module
