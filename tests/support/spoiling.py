"""How files are spoiled: their bytes, the values of their JSON, the columns of their parquet, what torch pickled."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st

from support.hostile import REFUSED, SOUND, Case

DEEP = 10_000
"""Levels of what is nested deeply."""

# --- bytes


def bytes_of(file: str, content: bytes) -> st.SearchStrategy[Case]:
    """The file cut off, patched, with bytes put in or taken out, in another encoding, twice, or empty."""
    place = st.integers(0, max(len(content) - 1, 0))

    def patch(at: int, new: bytes, gone: int) -> bytes:
        return content[:at] + new + content[at + gone :]

    text = content.decode("utf-8", "replace")
    others = [
        b"",
        b"\0",
        b"\n",
        b"\0" * 4096,
        content + content,
        content[::-1],
        b"\xff\xfe" + content,
        b"PAR1",
        b"PK\3\4",
    ]
    others += [text.encode(name, "replace") for name in ("utf-16", "utf-16-le", "utf-32", "utf-7", "latin-1", "cp037")]
    others += [content + b"\0" * 100, content.rstrip() + b"\x1a", content.replace(b" ", b"\0"), b"[" * 100_000]
    return st.one_of(
        place.map(lambda at: Case("cut", content[:at], file=file)),
        st.builds(patch, place, st.binary(min_size=1, max_size=9), st.integers(0, 9)).map(
            lambda new: Case("patched", new, file=file)
        ),
        st.builds(patch, place, st.just(b""), st.integers(1, 400)).map(
            lambda new: Case("a piece gone", new, file=file)
        ),
        st.sampled_from(others).map(lambda new: Case("another encoding or none", new, file=file)),
    )


# --- JSON


class Pairs(list):
    """A JSON object as a list of (name, value): names may stand there twice, and values may be Raw."""


class Raw(str):
    """Text that stands in the file as it is, JSON or not."""


NUMBERS = [Raw(word) for word in ("1e400", "-1e400", "1" + "0" * 400, "9" * 5000, "-" + "9" * 5000, "1e-400", "-0.0")]
NUMBERS += [Raw(word) for word in ("NaN", "Infinity", "-Infinity", "1E2", "1e39", "-1e39", "1e12", "1.0000001e12")]
NUMBERS += [0, 1, -1, 2, 3, 0.5, 1.5, -0.25, 1e-30, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 95, 96, 1e-4, 0.9]
NO_NUMBERS = [Raw(word) for word in ("nan", "inf", "-inf", "+1", "01", "1.", ".5", "0x10", "1_000", "-", "1e", "NaN1")]
NO_NUMBERS += [
    Raw(word) for word in ("undefined", "'a'", '"a', '"a\tb"', "[1,]", "[1 2]", "{1:2}", "{'a':1}", "{,}", '"\\x"')
]
NO_NUMBERS += [
    Raw('"\\u12"'),
    Raw("[" * DEEP),
    Raw("tru"),
    Raw(""),
    Raw("1 2"),
    Raw("[1]]"),
    Raw('{"a" 1}'),
    Raw("\ufeff1"),
]
"""Tokens that are no JSON."""
TEXTS = ["", " ", "w4", "w4 w5", "nan", "1", "\u202ew4\u202c", "w4\u200bw5", "\ufeffw4", "w4\0w5", "w4\x85w5\u2028w6"]
TEXTS += ["é", "w4 é", "<unk>", "<bos> w4", "😀" * 50, "w4 " * 100, "../../../etc/passwd", "{{ 7*7 }}", "\n", "²", "١"]
TEXTS += [Raw('"\\ud800"'), Raw('"\\udc00\\ud800 w4"'), Raw('"w\\u0034"'), "step", "x" * 3000]
NESTED = [Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP), Raw('{"a": 1, "a": 2}')]
NESTED += [
    Raw("[" * 500 + "]" * 500),
    Raw('{"a":' * 500 + "1" + "}" * 500),
    [],
    [[]],
    [None],
    {},
    {"a": 1},
    [[1]],
    [{}],
]
NESTED += [[1, 2], [1.5, "a"], ["w4"], [True], [0] * 2000, {"role": "user", "content": "w4"}]
NESTED += [[{"role": "user", "content": "w4"}], [{"role": 1, "content": ["w4"]}], {"score": "a" * 99, "weight": 10**12}]
HOSTILE = [None, True, False, *NUMBERS, *NO_NUMBERS, *TEXTS, *NESTED]


def encode(value: Any) -> str:
    """JSON, but for what is Raw."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs | dict):
        pairs = value.items() if isinstance(value, dict) else value
        return "{" + ", ".join(f"{encode(name)}: {encode(own)}" for name, own in pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(encode, value)) + "]"
    return json.dumps(value)


@dataclass(frozen=True)
class Change:
    """One value of a row of JSON that was changed."""

    row: int
    path: tuple[int | str, ...]
    how: str
    """put, gone, twice, added, longer, shorter"""
    value: Any = None


def json_lines(
    file: str, content: bytes, *, truth: Callable[[list[str], Change], Any] = lambda lines, change: None
) -> st.SearchStrategy[Case]:
    """A value at any depth of one row changed, a line broken, or all of it written otherwise and as true as before.

    truth: what is to be read of the lines, one of which was changed so.
    """
    lines = content.decode().splitlines()
    trees = [json.loads(line, object_pairs_hook=Pairs) for line in lines]
    places = [(row, path) for row, tree in enumerate(trees) for path in _paths(tree)]

    def change(place: tuple[int, tuple[int | str, ...]], how: str, value: Any) -> Case:
        row, path = place
        tree = json.loads(lines[row], object_pairs_hook=Pairs)
        new = [*lines]
        new[row] = encode(_changed(tree, path, how, value))
        said = Change(row, path, how, value)
        text = "\n".join(new) + "\n"
        return Case(
            how, text.encode("utf-8", "surrogatepass"), REFUSED if _is_broken(new[row]) else truth(new, said), file
        )

    hows = st.sampled_from(("put", "put", "put", "put", "gone", "twice", "longer", "shorter", "added"))
    return st.one_of(
        st.builds(change, st.sampled_from(places), hows, st.sampled_from(HOSTILE)),
        st.builds(change, st.sampled_from(places), hows, st.sampled_from(HOSTILE)),
        cut_lines(file, lines, truth),
        st.sampled_from(_as_true(lines)).map(lambda text: Case("otherwise", text, SOUND, file)),
    )


def _is_broken(line: str) -> bool:
    """Whether a line is no JSON, or has a name twice; a blank one says nothing."""
    try:
        json.loads(line if line.strip() else "0", object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return True
    return False


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands there twice")
    return dict(pairs)


def cut_lines(file: str, lines: list[str], truth: Callable[[list[str], Change], Any]) -> st.SearchStrategy[Case]:
    """The file cut off anywhere; within a line nothing may be read."""
    content = ("\n".join(lines) + "\n").encode()

    def cut(at: int) -> Case:
        whole, _, rest = content[:at].rpartition(b"\n")
        kept = whole.decode().splitlines()
        try:
            torn = bool(rest.strip()) and not isinstance(json.loads(rest), dict)
        except ValueError:
            torn = True
        kept += [] if torn or not rest.strip() else [rest.decode()]
        what = Change(len(kept), (), "torn" if torn else "cut")
        return Case(what.how, content[:at], truth(kept, what), file)

    return st.integers(0, len(content)).map(cut)


def _as_true(lines: list[str]) -> list[bytes]:
    """The same rows, otherwise written."""
    rows = [json.loads(line) for line in lines]
    ways = [lines, [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]]
    ways += [[json.dumps(dict(reversed(row.items()))) for row in rows], [f" \t{line} \t" for line in lines]]
    ways += [["", line, "", "  ", "\t"][i % 5 :][:1] for line in lines for i in (1, 2, 3)]
    ways[-3 * len(lines) :] = [[text for line in lines for text in (line, "", " \t")]]
    ways += [["".join(f"\\u{ord(c):04x}" if c == "w" else c for c in line) for line in lines]]
    ways += [[json.dumps(row | {"zz_unknown": "\u202e\0\u2028", "": [[], {}], "\ufeff": None}) for row in rows]]
    ways += [[json.dumps(row | {"zz_unknown": "\x85\u2028\u2029\x0b"}, ensure_ascii=False) for row in rows]]
    found = [("\n".join(way) + "\n").encode() for way in ways]
    found += ["\n".join(lines).encode(), "\r\n".join(lines).encode(), b"\xef\xbb\xbf" + found[0], b"\n\n" + found[0]]
    return found


def _paths(tree: Any, depth: int = 0) -> list[tuple[int | str, ...]]:
    """Where values stand in a tree, its own place too; of a long list the first, second and last."""
    found: list[tuple[int | str, ...]] = [()]
    if isinstance(tree, Pairs):
        inner = [(name, own) for name, own in tree]
    else:
        inner = list(enumerate(tree)) if isinstance(tree, list) else []
        inner = inner if len(inner) <= 3 else [inner[0], inner[1], inner[-1]]
    return found + [(name, *path) for name, own in inner for path in _paths(own, depth + 1)]


def _at(tree: Any, path: tuple[int | str, ...]) -> Any:
    for step in path:
        tree = dict(tree)[step] if isinstance(tree, Pairs) else tree[step]
    return tree


def _changed(tree: Any, path: tuple[int | str, ...], how: str, value: Any) -> Any:
    """The tree with one value changed."""
    if not path:
        if how in ("longer", "added") and isinstance(tree, Pairs):
            return Pairs([*tree, ("zz_unknown", value)])
        return tree if how in ("gone", "twice", "shorter") else value
    name, parent = path[-1], _at(tree, path[:-1])
    if isinstance(parent, Pairs):
        at = [own for own, _ in parent].index(name)
        old = parent[at][1]
    else:
        at, old = name, parent[name]
    if how == "gone":
        del parent[at]
    elif how == "twice":
        parent.insert(0, (name, old) if isinstance(parent, Pairs) else old)
    elif how in ("longer", "shorter") and isinstance(old, list) and not isinstance(old, Pairs):
        old[:] = [*old, value] if how == "longer" else old[:-1]
    elif how == "added" and isinstance(parent, Pairs):
        parent.append(("zz_unknown", value))
    else:
        parent[at] = (name, value) if isinstance(parent, Pairs) else value
    return tree


# --- parquet


def columns_of(rows: int) -> dict[str, pa.Array]:
    """Columns of every type, most of which no reader knows."""
    whole, half = range(rows), [None if i % 2 else i for i in range(rows)]
    lists, texts = [[i, i + 1] for i in whole], [f"w{i + 4}" for i in whole]
    found = {
        "null": pa.nulls(rows),
        "bool": pa.array([i % 2 == 0 for i in whole]),
        "uint64": pa.array([2**64 - 1] * rows, pa.uint64()),
        "int8": pa.array([5] * rows, pa.int8()),
        "negative": pa.array([-1] * rows),
        "nullable": pa.array(half),
        "nan": pa.array([math.nan] * rows),
        "inf": pa.array([-math.inf] * rows),
        "half": pa.array([1.5] * rows).cast(pa.float16()),
        "decimal": pa.array([1] * rows).cast(pa.decimal128(38, 3)),
        "binary": pa.array([b"\xff\0w4"] * rows),
        "fixed": pa.array([b"abcd"] * rows, pa.binary(4)),
        "date": pa.array([0] * rows, pa.date32()),
        "time": pa.array([2**62] * rows, pa.timestamp("ns", "UTC")),
        "duration": pa.array([2**62] * rows, pa.duration("us")),
        "text": pa.array(texts),
        "large text": pa.array(texts, pa.large_string()),
        "dictionary": pa.array(texts).dictionary_encode(),
        "lists": pa.array(lists),
        "large lists": pa.array(lists, pa.large_list(pa.int16())),
        "fixed lists": pa.array(lists, pa.list_(pa.int32(), 2)),
        "lists of lists": pa.array([[one] for one in lists]),
        "lists of nothing": pa.array([[] for _ in whole], pa.list_(pa.null())),
        "lists with holes": pa.array([[5, None] for _ in whole]),
        "lists of nan": pa.array([[math.nan, -1.0] for _ in whole]),
        "lists of texts": pa.array([[text] for text in texts]),
        "structs": pa.array([{"role": "user", "content": text} for text in texts]),
        "chats": pa.array([[{"role": "user", "content": text}] for text in texts]),
        "map": pa.array([[(text, 1)] for text in texts], pa.map_(pa.string(), pa.int8())),
    }
    deep: pa.Array = pa.array(list(whole))
    for _ in range(200):
        deep = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), deep)
    return found | {"deep": deep}


def parquet(file: str, content: bytes) -> st.SearchStrategy[Case]:
    """Columns of other types, gone, twice, renamed; no rows; other codecs; a footer that lies; and `bytes_of`."""
    table = pq.read_table(io.BytesIO(content))
    odd = columns_of(len(table))
    places = st.integers(0, table.num_columns - 1)
    end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")

    def put(at: int, kind: str) -> Case:
        return Case(
            f"a column of {kind}", _parquet_bytes(table.set_column(at, table.column_names[at], odd[kind])), None, file
        )

    def named(at: int, name: str) -> Case:
        names = [name if i == at else own for i, own in enumerate(table.column_names)]
        return Case("renamed", _parquet_bytes(table.rename_columns(names)), None, file)

    def lie(at: int, new: bytes) -> Case:
        return Case("a footer that lies", content[:at] + new + content[at + len(new) :], None, file)

    varints = [
        b"\xff" * 9 + b"\x01",
        b"\xff\xff\xff\xff\x0f",
        b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\0",
        b"\x80",
    ]
    sound = [_parquet_bytes(table, **how) for how in PARQUET_WAYS]
    others = [table.slice(0, 0), table.select([]), pa.table({}), table.slice(0, 1)]
    others += [table.append_column(table.column_names[0], table.column(0)), pa.concat_tables([table] * 300)]
    return st.one_of(
        bytes_of(file, content),
        st.builds(put, places, st.sampled_from(sorted(odd))),
        st.builds(named, places, st.sampled_from(["", "advantages", "\u202e", "x" * 70_000, "a\nb", "\0", "prompt"])),
        st.builds(
            lie, st.integers(end, len(content) - 1), st.sampled_from(varints) | st.binary(min_size=1, max_size=3)
        ),
        st.sampled_from(sound).map(lambda new: Case("otherwise", new, SOUND, file)),
        st.sampled_from([_parquet_bytes(one) for one in others]).map(lambda new: Case("other rows", new, None, file)),
    )


PARQUET_WAYS = [{"compression": name} for name in ("none", "gzip", "zstd", "brotli", "lz4")]
PARQUET_WAYS += [{"row_group_size": 1}, {"use_dictionary": False}, {"version": "1.0"}, {"data_page_version": "2.0"}]
PARQUET_WAYS += [{"write_statistics": False}, {"data_page_size": 1}, {"write_page_checksum": True}]


def _parquet_bytes(table: pa.Table, **how: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **how)
    return out.getvalue()


# --- torch


class Evil:
    """What touches a file where it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


def odd_values(witness: Path) -> list[Any]:
    """What torch pickles and no log or optimizer holds."""
    laughs: Any = [1]
    for _ in range(64):
        laughs = [laughs, laughs]
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    numbers = [10**400, 10**6000, -1, 2**63, 2**64, True, 1.5, math.nan, math.inf, -math.inf, 1j, 0]
    tensors = [
        torch.zeros(()),
        torch.tensor([1, 2]),
        torch.zeros(0),
        torch.zeros(2, 2),
        torch.zeros(3, dtype=torch.bool),
        torch.tensor([math.nan, 1.0]),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(3).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(1).expand(10**9),
        torch.zeros(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor([-(2**62)]),
    ]
    others = [
        None,
        "w4",
        "\ud800",
        "",
        b"\xff",
        [],
        {},
        [None],
        [1, 2],
        ["w4"],
        {1: 2},
        [[1]],
        {"a": 1},
        (1, 2),
        {1, 2},
    ]
    others += [torch.Size([2]), torch.device("cpu"), torch.float32, [torch.tensor([1, 2])], [torch.tensor(1)] * 2]
    return [*numbers, *tensors, *others, laughs, loop, deep, Evil(witness), [Evil(witness)]]


def torch_file(file: str, content: bytes, witness: Path) -> st.SearchStrategy[Case]:
    """A value at any depth changed, the pickle within patched, the archive deflated, and `bytes_of`."""
    values = odd_values(witness)

    def load() -> Any:
        return torch.load(io.BytesIO(content), weights_only=False)

    places = [path for path in _object_paths(load()) if path]

    def put(path: tuple[Any, ...], at: int, how: str) -> Case:
        tree = load()
        parent = tree
        for step in path[:-1]:
            parent = parent[step]
        if how == "gone":
            del parent[path[-1]]
        elif how == "key" and isinstance(parent, dict) and values[at].__hash__ is not None:
            parent[values[at]] = parent.pop(path[-1])
        else:
            parent[path[-1]] = values[at]
        return Case(f"{how} value {at} at {path}", _torch_bytes(tree), None, file)

    pickled = _entries(content)
    name = next(name for name in pickled if name.endswith("data.pkl"))

    def patch(at: int, new: bytes, gone: int) -> Case:
        inner = pickled[name][:at] + new + pickled[name][at + gone :]
        return Case("a patched pickle", _zip_bytes(pickled | {name: inner}), None, file)

    whole = [
        [],
        {},
        1,
        "a",
        torch.zeros(3),
        None,
        {"samples": []},
        {"samples": 1},
        {1: 2},
        Evil(witness),
        {"samples": [1]},
    ]
    others = [_torch_bytes(one) for one in whole] + [_torch_bytes(load(), _use_new_zipfile_serialization=False)[:-30]]
    others += [
        _zip_bytes({}),
        _zip_bytes({"archive/data.pkl": pickled[name]}),
        _zip_bytes(pickled, zipfile.ZIP_DEFLATED),
    ]
    old = Case("the old format", _torch_bytes(load(), _use_new_zipfile_serialization=False), SOUND, file)
    return st.one_of(
        bytes_of(file, content),
        st.builds(
            put,
            st.sampled_from(places),
            st.integers(0, len(values) - 1),
            st.sampled_from(("put", "put", "gone", "key")),
        ),
        st.builds(patch, st.integers(0, len(pickled[name]) - 1), st.binary(max_size=6), st.integers(0, 6)),
        st.sampled_from(others).map(lambda new: Case("other content", new, None, file)),
        st.just(old),
    )


def _torch_bytes(value: Any, **how: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **how)
    return out.getvalue()


def _entries(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zip_bytes(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return out.getvalue()


def _object_paths(tree: Any) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [()] + [(name, *path) for name, own in inner for path in _object_paths(own)]
