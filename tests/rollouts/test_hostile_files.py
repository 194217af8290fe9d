"""Whatever a file holds, it is read as it says or refused in one line: nothing hangs, nothing is run, all is bounded.

tests/rollouts/hostile.csv is the table of `PYTHONPATH=.:tests python -m support.hostile_readers --cases 21000 --seed 7
--out tests/rollouts/hostile.csv`, which takes a few minutes.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import strategies as st
from support import dumps
from support.cli import outcome_of
from support.hostile import Bench, Case, Reader, attempt, bounded
from support.hostile_readers import READERS, every_cut, policy, spoil_native, write_native
from support.policies import save_checkpoint, write_jsonl
from support.spoiling import Evil, columns_of
from support.tiers import every

from gradscope.errors import InputError
from gradscope.objective import make_weighting
from gradscope.policy import load_policy, weights_hash
from gradscope.rollouts import read_dump
from gradscope.runs.footer import count_values
from gradscope.tasks import get_task

CASES = 2000
"""Of all readers, in the default tests; the table has ten times as many."""
SHARES = sum(reader.share for reader in READERS)
CORPUS = Path(__file__).with_name("hostile")


@pytest.fixture(params=READERS, ids=lambda reader: reader.name)
def reader(request) -> Reader:
    if request.param.name == "adapter":
        pytest.importorskip("peft")
    return request.param


def test_a_spoiled_file_is_read_as_it_says_or_refused_in_one_line(reader, tmp_path):
    tally = Bench(reader, tmp_path).run(round(CASES * reader.share / SHARES), seed=0)
    assert tally["parsed"] + tally["refused"] >= 6 and not tally["wrong"]


def test_the_table_holds_every_reader_and_nothing_wrong():
    table = pd.read_csv(Path(__file__).with_name("hostile.csv"))
    assert list(table["reader"]) == [reader.name for reader in READERS]
    assert table["cases"].sum() > 20_000 and (table["wrong"] == 0).all()
    assert (table["cases"] == table["parsed"] + table["refused"]).all()


@pytest.mark.all
def test_ten_times_as_many_and_every_file_cut_off_at_every_place(reader, tmp_path):
    bench = Bench(reader, tmp_path)
    for case in every_cut(bench) if reader.cut else ():
        bench.count(case)
    assert not bench.run(round(10 * CASES * reader.share / SHARES), seed=1)["wrong"]


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*")), ids=lambda file: file.name)
def test_files_that_were_once_read_wrongly(file):
    """Their names say how they end."""
    ended, _ = attempt(read_dump, file)
    assert ended == file.name.split("-")[0]


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def put_nothing(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 36)  # which takes no room on the disk


ODD = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": put_socket,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a device without an end": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: None,
    "gigabytes of nothing": put_nothing,
}
FEW = ("native", "trl", "miles", "prompts, text", "task math", "optimizer.pt", "adapter_config.json", "config.json")
"""Readers that get gigabytes: of lines, one is read before they are refused."""


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.all] if what == "gigabytes of nothing" else ()) for what in ODD]
)
def test_what_is_no_file_does_not_hang_a_reader(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, reader in enumerate(READERS):
        if reader.share < 0.3 or (what == "gigabytes of nothing" and reader.name not in FEW):
            continue
        bench = Bench(reader, tmp_path / str(number))
        for name in list(bench.files)[:3]:
            path = bench.folder / "log" / name
            path.unlink()
            ODD[what](path)
            attempt(reader.read, bench.path)
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            path.write_bytes(bench.files[name])


NAMES = ["a\nb", "\u202egnp", "\u200b", "-o", "*?[x]", " ", "x" * 200, "\udcff", "é\u0301", "%s{0}"]


def test_a_name_of_any_characters_is_a_name(tmp_path):
    for reader in READERS:
        if reader.name.startswith(("native", "trl", "verl", "prompts", "task", "optimizer")):
            bench = Bench(reader, tmp_path / reader.name.replace(" ", "-"))
            for name in NAMES:
                path = Path(shutil.copy(bench.path, bench.path.with_name(name + bench.path.suffix)))
                ended, found = attempt(reader.read, path)
                assert (ended, found) == ("parsed", bench.sound) or "\udcff" in name, (reader.name, name, found)
                path.write_bytes(b"\xff{")
                assert attempt(reader.read, path)[0] == "refused" or path.suffix == ".txt"
            for name in ("x" * 5000, "a\0b"):
                assert attempt(reader.read, bench.path.with_name(name + bench.path.suffix))[0] == "refused"


@pytest.mark.all
def test_a_spoiled_file_is_one_line_of_the_command_and_status_2(tmp_path, capsys):
    model = save_checkpoint(tmp_path / "model", "llama")

    def measure(path: Path) -> str:
        out = tmp_path / "out"
        outcome = outcome_of(capsys, "measure", model, path, "--out", out, "--no-figures", "--no-self-check")
        if outcome.status == 0:
            shutil.rmtree(out)
            return "measured"
        assert outcome.status == 2 and not out.exists(), outcome
        assert outcome.err.startswith("gradscope: ") and outcome.err.endswith("\n")
        raise InputError(outcome.err.removesuffix("\n"))

    bench = Bench(Reader("command", write_native, measure, _any_truth), tmp_path)
    tally = bench.run(40, seed=0)
    assert tally["parsed"] > 2 and tally["refused"] > 20


def _any_truth(files: dict[str, bytes], witness: Path) -> st.SearchStrategy[Case]:
    return spoil_native(files, witness).map(lambda case: replace(case, truth=None))


ODD_NAMES = [
    "",
    ":",
    ".py:a",
    "a.py:",
    "a.py:b:c=1",
    "x\ny.py:a",
    "\0.py:a",
    "\udcff.py:a",
    "\u202e.py:a",
    "x" * 5000 + ".py:a",
]
ODD_NAMES += [
    "loop.py:a",
    "pipe.py:a",
    "folder.py:a",
    "nul.py:a",
    "deep.py:a",
    "empty.py:__name__",
    "empty.py:os.system",
]
ODD_NAMES += [
    "reweight:alpha=1e400",
    "reweight:alpha=nan",
    "reweight:alpha=0.1,alpha=0.2",
    "reweight:=1",
    "lopti:eta=" + "9" * 5000,
]


@pytest.mark.parametrize("find", [make_weighting, get_task])
def test_names_of_methods_and_tasks_that_are_none_are_refused(find, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").symlink_to("loop.py")
    Path("folder.py").mkdir()
    os.mkfifo("pipe.py")
    for name, content in {"empty": b"", "nul": b"\xff\0", "deep": b"(" * 1000}.items():
        Path(f"{name}.py").write_bytes(content)
    assert {name for name in ODD_NAMES if attempt(find, name)[0] != "refused"} == set()


def test_weights_that_would_run_something_are_refused_and_a_pipe_beside_them_is_no_weights(tmp_path):
    folder = save_checkpoint(tmp_path / "model", "llama")
    known = weights_hash(folder)
    os.mkfifo(folder / "more.safetensors")
    with bounded():
        assert weights_hash(folder) == known
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Evil(tmp_path / "witness")}, folder / "pytorch_model.bin")
    assert attempt(load_policy, folder)[0] == "refused" and not (tmp_path / "witness").exists()


# --- bombs


def pack(path: Path, part: bytes, times: int) -> Path:
    with pa.output_stream(str(path), compression="zstd") as sealed:
        for _ in range(times):
            sealed.write(part)
    return path


def deflated(path: Path) -> Path:
    content = io.BytesIO()
    torch.save({"samples": [{"tokens": torch.zeros(10**7)}]}, content)
    with zipfile.ZipFile(content) as stored, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    return path


def overlapping(path: Path) -> Path:
    """Many names of one part."""
    torch.save({"samples": [{"tokens": torch.zeros(1000)}]}, path)
    with zipfile.ZipFile(path, "a") as archive:
        entry = max(archive.infolist(), key=lambda entry: entry.file_size)
        for number in range(100):
            archive.filelist.append(other := zipfile.ZipInfo(f"archive/data/{number + 1}"))
            for name in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(other, name, getattr(entry, name))
        archive._didModify = True
    return path


def one_value(path: Path, *, in_lists: bool) -> Path:
    """Forty million numbers in a few bytes."""
    many = pa.array(np.full(4 * 10**7, 5, np.int32))
    if in_lists:
        many = pa.ListArray.from_arrays(pa.array([0, len(many)], pa.int32()), many)
    pq.write_table(pa.table({"prompt_ids": many}), path, compression="zstd", row_group_size=10**8)
    return path


BOMBS = {
    "a line": lambda d: pack(d / "a.jsonl.zst", b" " * 10**6, 100),
    "lines": lambda d: pack(d / "a.jsonl.zst", b"\n" * 10**6, 30),
    "a deflated archive": lambda d: deflated(d / "a.pt"),
    "one part by many names": lambda d: overlapping(d / "a.pt"),
    "rows of one value": lambda d: one_value(d / "a.parquet", in_lists=False),
    "a list of one value": lambda d: one_value(d / "a.parquet", in_lists=True),
    "columns": lambda d: write_jsonl(d / "a.jsonl", [{f"advantage{i}": 0 for i in range(10**5)}]),
    "columns of parquet": lambda d: write_wide(d / "a.parquet"),
}


def write_wide(path: Path) -> Path:
    pq.write_table(pa.table({f"advantage{i}": [0] for i in range(11_000)}), path)
    return path


def test_values_are_counted_as_pyarrow_counts_them(tmp_path):
    table = pa.table({name: column for name, column in columns_of(100).items() if name != "deep"})
    for way in ({}, {"row_group_size": 70}, {"use_dictionary": False, "compression": "none"}):
        pq.write_table(table, tmp_path / "a.parquet", **way)
        metadata = pq.read_metadata(tmp_path / "a.parquet")
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        columns = [group.column(index) for group in groups for index in range(group.num_columns)]
        known = sum(c.num_values for c in columns), sum(c.total_uncompressed_size for c in columns)
        assert count_values(tmp_path / "a.parquet") == known and known[0] > 100 * 25


@pytest.mark.parametrize("what", every(2, BOMBS))
def test_a_bomb_is_refused_by_its_size(what, tmp_path):
    path = BOMBS[what](tmp_path)
    ended, line = attempt(read_dump, path)
    assert ended == "refused" and any(words in line for words in ("unpacks to", "columns")), line


@pytest.mark.all
def test_a_row_of_a_hundred_megabytes_is_read_or_refused(tmp_path):
    for name, value in {"a text": '"' + "w4 " * 33_000_000 + '"', "numbers": "[" + "7," * 50_000_000 + "7]"}.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(f'{{"prompt_ids": [4], "response_ids": [5], "more": {value}}}\n')
        ended, dump = attempt(read_dump, path)
        assert ended == "parsed" and dump.batch.input_ids.tolist() == [[4, 5]], name


# --- what is known of a format


def test_a_stream_that_grows_is_read_up_to_a_line_that_is_cut_off(tmp_path):
    for chunked, name in ((False, "stream.jsonl"), (True, "stream/00001.jsonl")):
        folder = dumps.write_prime_rl_traces(tmp_path / name.replace("/", "-"), chunked=chunked)
        whole = read_dump(folder)
        with (folder / name).open("a") as file:
            file.write('{"id": "e9", "traces": [{"nod')
        dump = read_dump(folder)
        assert torch.equal(dump.batch.input_ids, whole.batch.input_ids)
        [note] = [note for note in dump.notes if note not in whole.notes]
        assert note.startswith("1 of 5 rows left out: the last line")
        (folder / name).write_text('{"id": \n' + (folder / name).read_text())
        with pytest.raises(InputError, match=r"line 1\): not JSON"):
            read_dump(folder)


def test_a_file_of_a_stream_that_was_being_packed_is_read_once(tmp_path):
    folder = dumps.write_prime_rl_traces(tmp_path, chunked=True)
    whole = read_dump(folder)
    packed = folder / "stream" / "00000.jsonl.zst"
    packed.with_suffix("").write_bytes(pa.input_stream(str(packed), compression="zstd").read())
    packed.write_bytes(packed.read_bytes()[:50])  # its run died meanwhile
    assert torch.equal(read_dump(folder).batch.input_ids, whole.batch.input_ids)


@pytest.mark.parametrize("name", ["verl", "open_instruct", "prime_rl"])
def test_a_step_that_some_rows_lack_is_refused(name, tmp_path):
    path = getattr(dumps, f"write_{name}")(tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_jsonl(path, [rows[0], *({n: v for n, v in row.items() if n != "step"} for row in rows[1:])])
    with pytest.raises(InputError, match="no 'step', which 1 of the 4 rows have"):
        read_dump(path, policy())
