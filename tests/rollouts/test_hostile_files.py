"""A damaged file is read as a batch that can be measured or refused in one line, and nothing of any file is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from support import dumps
from support.adapters import save_adapter
from support.given_text import write_kto_dataset, write_preferences, write_sft_dataset
from support.policies import make_policy, make_tokenizer, save_checkpoint, write_jsonl

from gradscope.cli.sample import read_prompts
from gradscope.errors import InputError
from gradscope.policy import Policy, checkpoint_step, load_policy, load_tokenizer, read_adamw_state
from gradscope.policy.adapters import find_base
from gradscope.rollouts import check_batch, read_dump
from gradscope.tasks import get_task

CORPUS = Path(__file__).with_name("hostile")
ODD = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1e400,
        -1e400,
        float("nan"),
        2**70,
        10**9,
        "",
        "x",
        "\ud800",
        [],
        {},
        [[]],
        [None],
        [1e308],
        {"": 0},
    ]
)


@cache
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


# ---- sound files, and who reads them


def read_log(path: Path) -> None:
    check_batch(policy(), read_dump(path, policy()).batch)


def write_native(folder: Path) -> Path:
    columns = {"reward": 1.0, "group": 0, "old_logprobs": [-0.5, -0.25], "response_mask": [True, False]}
    rows = [{"prompt_ids": [4, 5], "response_ids": [6, 7 + row], "step": 3, **columns} for row in range(3)]
    return write_jsonl(folder / "rollouts.jsonl", rows)


def write_table(folder: Path, *, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    return folder / "data.parquet"


def write_prompts(folder: Path) -> Path:
    return write_jsonl(folder / "prompts.jsonl", [{"prompt": "w4 w5"}, {"prompt": [{"role": "user", "content": "w6"}]}])


def write_optimizer(folder: Path) -> Path:
    model = policy().model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.arange(4, 9)[None]).logits.sum().backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder / "optimizer.pt"


def write_checkpoint(folder: Path) -> Path:
    return save_checkpoint(folder / "checkpoint-7", "llama", chat=True)


def write_adapter(folder: Path) -> Path:
    pytest.importorskip("peft")
    base = save_checkpoint(folder / "base", "llama")
    return save_adapter(folder / "adapter", base, r=2, target_modules=["q_proj", "down_proj"])


def ask(path: Path) -> None:
    get_task("math").questions(2, seed=0, files=(str(path),))


MATH = [
    {"data_source": "x", "prompt": dumps.chat([4, 5]), "reward_model": {"style": "rule", "ground_truth": truth}}
    for truth in ("2", "x^2")
]
LOGS = ("trl", "verl", "prime_rl", "nemo_rl", "open_instruct", "slime", "miles", "ms_swift", "roll", "skyrl")
LOGS += ("verifiers", "verifiers_graph", "prime_rl_traces")
READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any], int]] = {
    "native": (write_native, read_log, 400),
    **{name: (getattr(dumps, f"write_{name}"), read_log, 150) for name in LOGS},
    "trl_sft": (lambda folder: write_sft_dataset(folder / "sft.jsonl"), read_log, 150),
    "trl_kto": (lambda folder: write_kto_dataset(folder / "kto.jsonl"), read_log, 150),
    "trl_preference": (lambda folder: write_preferences(folder / "pairs"), read_log, 100),
    "prompts": (write_prompts, read_prompts, 150),
    "task math": (partial(write_table, rows=MATH), ask, 60),
    "optimizer": (write_optimizer, lambda path: read_adamw_state(policy(), path), 100),
    "adapter": (write_adapter, find_base, 60),
    "checkpoint": (write_checkpoint, partial(load_policy, device="cpu"), 40),
    "tokenizer": (write_checkpoint, load_tokenizer, 60),
    "step": (write_checkpoint, checkpoint_step, 40),
}
"""What writes a sound file or folder, what reads it, and of how many damages."""


# ---- how they are damaged


def paths_of(tree: Any) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a JSON value."""
    yield ()
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        for rest in paths_of(value):
            yield name, *rest


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = changed(tree[path[0]], path[1:], value)
    return copy


@st.composite
def another_value(draw: st.DrawFn, text: str) -> str:
    """A JSON text with another value at one of its places."""
    tree = json.loads(text)
    return json.dumps(changed(tree, draw(st.sampled_from([*paths_of(tree)])), draw(ODD)))


def packed_rows(rows: Any) -> bytes | None:
    """A parquet file of these rows; None where they are none."""
    with io.BytesIO() as file, suppress(ValueError, TypeError, AttributeError, OverflowError, pa.ArrowException):
        pq.write_table(pa.Table.from_pylist(rows), file)
        return file.getvalue()
    return None


@st.composite
def damaged(draw: st.DrawFn, name: str, content: bytes) -> bytes:
    """What a crash, a full disk, a bug or an enemy makes of a file."""
    kinds = ["cut"]
    # pyarrow and the mapped weights trust their own footers
    if not name.endswith((".parquet", ".arrow", ".safetensors")):
        kinds += ["byte", "noise"]
    if name.endswith((".json", ".jsonl", ".parquet")) and content:
        kinds += ["value"] * 6
    kind, at = draw(st.sampled_from(kinds)), draw(st.integers(0, max(0, len(content) - 1)))
    if kind == "cut":
        return content[:at]
    if kind == "value" and name.endswith(".json"):
        return draw(another_value(content.decode())).encode()
    if kind == "value" and name.endswith(".parquet"):
        rows = draw(another_value(json.dumps(pq.read_table(io.BytesIO(content)).to_pylist())))
        return packed_rows(json.loads(rows)) or content[:at]
    if kind == "value":
        lines = content.decode().splitlines()
        row = draw(st.integers(0, len(lines) - 1))
        lines[row] = draw(another_value(lines[row]))
        return ("\n".join(lines) + "\n").encode()
    return content[:at] + draw(st.binary(min_size=1, max_size=1 if kind == "byte" else 30)) + content[at + 1 :]


def attempt(read: Callable[[Path], Any], path: Path) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(path)
    except InputError as error:
        assert "\n" not in str(error) and str(error).isprintable()
        return "refused"
    return "parsed"


@pytest.mark.all
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_one_line(name, tmp_path):
    write, read, cases = READERS[name]
    (folder := tmp_path / "log").mkdir()
    path = write(folder)
    files = {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
    assert attempt(read, path) == "parsed"

    @settings(max_examples=cases, database=None, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from([*files]))
        file.write_bytes(data.draw(damaged(file.name, files[file])))
        try:
            attempt(read, path)
        finally:
            file.write_bytes(files[file])

    check()


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*")), ids=lambda file: file.name)
def test_files_that_were_once_read_wrongly(file):
    """Their names say how they end."""
    assert attempt(read_dump, file) == file.name.split("-")[0]


# ---- nothing is run


class Evil:
    """What makes a folder where it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_of_a_file_is_run(zipped, tmp_path):
    evil, save = Evil(tmp_path / "witness"), partial(torch.save, _use_new_zipfile_serialization=zipped)
    log, state = tmp_path / "0.pt", tmp_path / "optimizer.pt"
    save({"samples": [{"tokens": evil}]}, log)
    save({"state": evil, "param_groups": []}, state)
    (tmp_path / "3.pkl").write_bytes(pickle.dumps(evil))
    model = save_checkpoint(tmp_path / "model", "llama")
    (model / "model.safetensors").unlink()
    save({"lm_head.weight": evil}, model / "pytorch_model.bin")
    assert attempt(read_log, log) == attempt(read_log, tmp_path / "3.pkl") == "refused"
    assert attempt(partial(read_adamw_state, policy()), state) == attempt(load_policy, model) == "refused"
    assert not evil.witness.exists()


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "link.jsonl").symlink_to("nothing")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("folder", "link", "loop", "pipe", "x" * 5000):
        assert attempt(read_log, tmp_path / f"{name}.jsonl") == "refused"


# ---- what is known of a format


def test_a_stream_that_grows_is_read_up_to_a_line_that_is_cut_off(tmp_path):
    for chunked, name in ((False, "stream.jsonl"), (True, "stream/00001.jsonl")):
        folder = dumps.write_prime_rl_traces(tmp_path / name.replace("/", "-"), chunked=chunked)
        whole = read_dump(folder)
        with (folder / name).open("a") as file:
            file.write('{"id": "e9", "traces": [{"nod')
        dump = read_dump(folder)
        assert torch.equal(dump.batch.input_ids, whole.batch.input_ids)
        assert len(dump.notes) == len(whole.notes) + 1
        (folder / name).write_text('{"id": \n' + (folder / name).read_text())
        with pytest.raises(InputError):
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
    assert attempt(read_log, path) == "refused"
