"""Every reader of files that gradscope has, with a sound log of its own; `python -m support.hostile_readers --out FILE`
counts what each makes of thousands of spoiled ones."""

from __future__ import annotations

import argparse
import csv
import json
import math
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st

from gradscope.cli.flags import quiet_transformers
from gradscope.cli.sample import read_prompts
from gradscope.policy import Policy, checkpoint_step, load_policy, load_tokenizer, read_adamw_state
from gradscope.policy.adapters import find_base
from gradscope.rollouts import Dump, read_dump, write_rollouts
from gradscope.runs import RunFolder
from gradscope.tasks import get_task
from support import dumps
from support.hostile import REFUSED, Bench, Case, Reader, Says
from support.policies import CONTEXT, VOCAB, make_policy, make_tokenizer, save_checkpoint
from support.spoiling import Change, bytes_of, json_lines, parquet, torch_file
from support.writers.write_slime import write_slime

NAN = "nan"
"""What NaN is in plain values, so that they can be compared."""


@cache
def policy() -> Policy:
    model = make_policy("llama")
    return Policy(model.model, make_tokenizer(chat=True), model.blocks_name)


# --- rollouts


def rows_of(dump: Dump) -> list[dict[str, Any]]:
    """What was read of each response, as plain values."""
    batch, found = dump.batch, []
    groups = batch.group_ids.tolist()
    for row in range(len(batch)):
        start, real = int(batch.response_start[row]), batch.attention_mask[row]
        own = slice(start, int(real.nonzero().max()) + 1)

        def plain(values: Any, own: slice = own, row: int = row) -> Any:
            return None if values is None else [NAN if v != v else v for v in values[row, own].tolist()]

        reward = None if batch.rewards is None else float(batch.rewards[row])
        found.append(
            {
                "prompt": batch.input_ids[row, int(real.int().argmax()) : start].tolist(),
                "response": batch.input_ids[row, own].tolist(),
                "kept": batch.response_mask[row, own].tolist(),
                "group": groups.index(groups[row]),
                "temperature": float(batch.temperature[row]),
                "reward": NAN if reward != reward else reward,
                "step": None if dump.steps is None else int(dump.steps[row]),
                "advantages": plain(batch.advantages),
                **{name: plain(getattr(batch, name)) for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs")},
                **{name: plain(getattr(dump, name)) for name in ("logprobs", "entropy", "clipped")},
            }
        )
    return found


LOGPROBS = ("old_logprobs", "ref_logprobs", "sampler_logprobs", "logprobs")


def check_rows(rows: list[dict[str, Any]]) -> None:
    """What no reader may give, whatever the file says."""
    assert rows
    for row in rows:
        assert row["prompt"] and row["response"] and any(row["kept"])
        assert len(row["prompt"] + row["response"]) <= CONTEXT
        assert all(0 <= token < VOCAB for token in row["prompt"] + row["response"])
        assert 0 < row["temperature"] < math.inf and (row["reward"] in (None, NAN) or abs(row["reward"]) <= 1.1e12)
        for name in (*LOGPROBS, "advantages"):
            kept = [v for v, keep in zip(row[name] or [], row["kept"], strict=False) if keep]
            known = [v for v in kept if v != NAN]
            assert all(abs(v) <= 1.1e12 and (v <= 0 or name == "advantages") for v in known), (name, kept)
            assert name != "advantages" or len(known) == len(kept)


def numbers_of(content: str) -> set[float]:
    """All that a file of JSON says as a number or as a word of the tokenizer's, in float32."""
    found: set[float] = {0.0, 1.0, 2.0, 3.0}  # masks, default temperature, special tokens

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            for one in value:
                walk(one)
        elif isinstance(value, str):
            found.update(float(i) for i in re.findall(r"w([0-9]{1,3})", value))
            if value[:1] == "{":
                walk(json.loads(value))
        elif isinstance(value, int | float) and abs(value) < 1e300:
            found.add(float(np.float32(value)))

    for line in filter(str.strip, content.splitlines()):
        try:
            walk(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return found


def nothing_new(content: bytes, more: str, derived: bool) -> Callable[[Any, Any], None]:
    """Complains of a number that no file of the log holds. derived: rewards are sums, advantages may be filled up."""

    def check(found: list[dict[str, Any]], _sound: Any) -> None:
        with np.errstate(over="ignore"):
            known = numbers_of(content.decode("utf-8", "replace")) | numbers_of(more)
        for row in found:
            given = [*row["prompt"], *row["response"], row["temperature"], *([] if derived else [row["reward"]])]
            for name in (*LOGPROBS, "advantages", "entropy"):
                given += row[name] or []
            strange = [v for v in given if v not in (None, NAN) and v not in known and v + 0.0 not in known]
            assert not strange, f"WRONG: {strange} stand nowhere in the file"

    return check


def spoil_lines(files: dict[str, bytes], _witness: Path, *, one_row_each: bool, derived: bool = False) -> Any:
    """Of a log of JSON lines."""
    more = "\n".join(content.decode() for name, content in files.items() if name.endswith("jsonl"))

    def truth(lines: list[str], change: Change) -> Any:
        if change.how == "torn":
            return REFUSED
        made_up = nothing_new("\n".join(lines).encode("utf-8", "surrogatepass"), more, derived)

        def check(found: list[dict[str, Any]], sound: list[dict[str, Any]]) -> None:
            made_up(found, sound)
            if not one_row_each or change.how == "cut":
                wanted = sound[: len(lines)] if one_row_each else sound
                assert change.how != "cut" or _alike(found, wanted), f"WRONG: {found} for {wanted}"
                return
            others = [row for at, row in enumerate(sound) if at != change.row]
            if len(found) == len(sound):
                found = [row for at, row in enumerate(found) if at != change.row]
            assert _alike(found, others), f"WRONG: other rows than the changed one are {found}, not {others}"

        return check

    parts = []
    for name, content in files.items():
        if name.endswith("jsonl") and content:
            parts += [json_lines(name, content, truth=truth)] * 3 + [bytes_of(name, content)]
    return st.one_of(parts)


def _alike(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> bool:
    """Equal but for the groups' numbers, and for columns that the others lack too."""
    return [{n: v for n, v in row.items() if n != "group"} for row in found] == [
        {n: v for n, v in row.items() if n != "group"} for row in wanted
    ]


def log(name: str, write: Callable[[Path], Path], *, share: float = 1.0, **spoil: Any) -> Reader:
    """The reader of a format of rollouts in JSON lines."""
    read = lambda path: rows_of(read_dump(path, policy()))  # noqa: E731
    return Reader(name, write, read, partial(spoil_lines, **spoil), check_rows, share=share)


def copy_traces(folder: Path) -> Path:
    """traces/ of prime-rl as verifiers' own code wrote it."""
    fixtures = Path(__file__).parents[1] / "rollouts" / "fixtures"
    return shutil.copytree(fixtures / "traces" / "traces", folder / "traces", dirs_exist_ok=True)


NATIVE_ROWS = [
    {
        "prompt_ids": s.prompt,
        "response_ids": s.response,
        "advantage": s.advantage if s.group else [s.advantage] * len(s.response),
        "reward": s.reward,
        "group": f"q{s.group}",
        "old_logprobs": s.sampler,
        "ref_logprobs": s.trainer,
        "sampler_logprobs": s.sampler,
        "response_mask": s.mask,
        "temperature": 0.5,
    }
    for s in dumps.SAMPLES
]
KNOWN = frozenset(NATIVE_ROWS[0]) | {"prompt", "response", "zz_unknown", "", "\ufeff"}


def native_truth(lines: list[str]) -> list[dict[str, Any]] | None:
    """By hand, what native rows of ids say; None where they are to be refused."""
    rows = [{n: v for n, v in json.loads(line).items() if v is not None} for line in lines if line.strip()]
    found, groups = [], []
    for row in rows:
        prompt, response = row.get("prompt_ids"), row.get("response_ids")
        for ids in (prompt, response):
            if type(ids) is not list or any(type(i) is not int or not 0 <= i < VOCAB for i in ids):
                return None
        kept = row.get("response_mask", [1] * len(response))
        if type(kept) is not list or len(kept) != len(response) or not all(_number(k) and k in (0, 1) for k in kept):
            return None
        group = row.get("group", tuple(prompt))
        if not isinstance(group, str | int | float | tuple) or (isinstance(group, float) and not math.isfinite(group)):
            return None
        told = {"prompt": prompt, "response": response, "step": None}
        for name in ("advantage", *LOGPROBS[:3]):
            values = row.get(name)
            if name == "advantage" and any(kept) and values is not None and type(values) is not list:
                number = _finite(values)
                if number is None:
                    return None
                values = None if number == NAN else [number] * len(response)
            if values is not None and any(kept):
                values = _per_token(values, kept, most=math.inf if name == "advantage" else 1e-3)
                if values is None:
                    return None
            told["advantages" if name == "advantage" else name] = values
        known = _known(told["advantages"], kept)
        reward = _reward_of(row.get("reward"), needed=any(kept) and not known)
        if reward is None:
            return None
        if not any(kept):
            continue
        if not prompt or len(prompt + response) > CONTEXT or row.get("temperature", 1.0) is None:
            return None
        if not _number(row.get("temperature", 1.0)) or not 1e-12 <= row.get("temperature", 1.0) <= 1e12:
            return None
        if told["advantages"] and known:
            kept = [k and v != NAN for k, v in zip(kept, told["advantages"], strict=True)]
        told |= {"kept": [bool(k) for k in kept], "temperature": _single(row.get("temperature", 1.0)), "reward": reward}
        told |= {"advantages": told["advantages"] if known else None}
        found.append((told | dict.fromkeys(("logprobs", "entropy", "clipped")), group, set(row)))
    if any(len({name in names for _, _, names in found}) > 1 for name in ("group", "temperature")):
        return None
    weights = [[said["advantages"] is not None, said["reward"] != NAN] for said, _, _ in found]
    place = 0 if any(has for has, _ in weights) else 1
    if any(pair[place] for pair in weights):
        found = [one for one, pair in zip(found, weights, strict=True) if pair[place]]
    if not found:
        return None
    for name in ("advantages", *LOGPROBS[:3]):
        if not any(_known(said[name], said["kept"]) for said, _, _ in found):
            [said.update({name: None}) for said, _, _ in found]
        else:
            [said.update({name: said[name] or [NAN] * len(said["response"])}) for said, _, _ in found]
    if all(said["reward"] == NAN for said, _, _ in found):
        [said.update(reward=None) for said, _, _ in found]
    groups = [group for _, group, _ in found]
    return [said | {"group": groups.index(group)} for said, group, _ in found]


def _reward_of(value: Any, *, needed: bool) -> Any:
    """The number, NAN where it is unknown, None where the row is to be refused."""
    if isinstance(value, dict):
        entries = [v for v in value.values() if v is not None]
        if len(entries) != 1:
            return None if needed else NAN
        value = entries[0]
    return NAN if value is None else _finite(value)


def _finite(value: Any) -> Any:
    """The number, NAN where it is NaN or infinite, None for what is no number or too large a one."""
    if isinstance(value, float) and not math.isfinite(value):
        return NAN
    return _single(value) if _number(value) and abs(value) <= 1e12 else None


def _known(values: list[Any] | None, kept: list[Any]) -> bool:
    return values is not None and any(keep and value != NAN for value, keep in zip(values, kept, strict=True))


def _per_token(values: Any, kept: list[Any], *, most: float) -> list[Any] | None:
    if type(values) is not list or len(values) != len(kept):
        return None
    found = []
    for value, keep in zip(values, kept, strict=True):
        if not (value is None or _number(value)):
            return None
        unknown = value is None or value != value or value in (math.inf, -math.inf)
        beyond = not unknown and (abs(value) > 1e12 or value > most)
        if keep and beyond:
            return None
        found.append(NAN if unknown or beyond else _single(min(value, 0.0) if most < 1 else value))
    return found


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def _single(value: Any) -> Any:
    return None if value is None else float(np.float32(value))


def spoil_native(files: dict[str, bytes], _witness: Path) -> Any:
    def truth(lines: list[str], change: Change) -> Any:
        if change.how == "torn":
            return REFUSED
        rows = [json.loads(line) for line in lines if line.strip()] if change.how == "cut" else None
        try:
            rows = rows or [json.loads(line) for line in lines if line.strip()]
            if not all(isinstance(row, dict) for row in rows):
                return REFUSED
            wanted = native_truth(lines)
        except (ValueError, RecursionError):
            return REFUSED
        return REFUSED if wanted is None else Says(wanted)

    [(name, content)] = files.items()
    return st.one_of(
        json_lines(name, content, truth=truth), json_lines(name, content, truth=truth), bytes_of(name, content)
    )


def write_native(folder: Path, *, suffix: str = ".jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    each = {} if suffix == ".jsonl" else {"advantage": 0.5}  # a column of parquet is of one kind
    return write_rollouts(folder / f"rollouts{suffix}", [row | each for row in NATIVE_ROWS])


def write_traces(folder: Path) -> Path:
    path = dumps.write_prime_rl_traces(folder)
    shutil.rmtree(folder / "of")  # of which they were made
    return path


def spoil_traces(files: dict[str, bytes], _witness: Path) -> Any:
    """Of the stream, a last line that was cut off is left out, as prime-rl's own loader does."""
    more, parts = "\n".join(content.decode() for content in files.values()), []

    def truth(lines: list[str], change: Change, file: str) -> Any:
        made_up = nothing_new("\n".join(lines).encode("utf-8", "surrogatepass"), more, derived=True)

        def check(found: list[dict[str, Any]], sound: list[dict[str, Any]]) -> None:
            made_up(found, sound)
            if file == "traces/stream.jsonl" and change.how in ("cut", "torn"):
                assert _alike(found, sound[: len(lines)]), f"WRONG: {found} for {sound[: len(lines)]}"

        return check

    for name, content in files.items():
        parts += [json_lines(name, content, truth=partial(truth, file=name))] * 3 + [bytes_of(name, content)]
    return st.one_of(parts)


# --- what is not rollouts


def read_texts(path: Path) -> list[Any]:
    return [question.prompt for question in read_prompts(path)]


PROMPTS = ["w4 w5", 'say "w6"', "w7 ", "é😀"]


def write_prompts(folder: Path, *, suffix: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = PROMPTS if suffix == ".txt" else [json.dumps({"prompt": p}) for p in (*PROMPTS, dumps.chat([4, 5]))]
    (folder / f"prompts{suffix}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder / f"prompts{suffix}"


def spoil_prompts(files: dict[str, bytes], _witness: Path) -> Any:
    [(name, content)] = files.items()

    def truth(lines: list[str], change: Change) -> Any:
        if change.how == "torn":
            return REFUSED
        try:
            rows = [json.loads(line) for line in lines if line.strip()]
        except (ValueError, RecursionError):
            return REFUSED
        wanted = []
        for row in rows:
            prompt = row.get("prompt") if isinstance(row, dict) else None
            chat = isinstance(prompt, list) and all(
                isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt
            )
            if not (isinstance(prompt, str) or (chat and prompt)):
                return REFUSED
            try:
                json.dumps(prompt, ensure_ascii=False).encode()
            except (ValueError, RecursionError):
                return REFUSED
            wanted.append(prompt)

        return Says(wanted) if wanted else REFUSED

    return st.one_of(json_lines(name, content, truth=truth), bytes_of(name, content))


def spoil_texts(files: dict[str, bytes], _witness: Path) -> Any:
    """Lines of any text are prompts, whatever characters they hold."""
    [(name, content)] = files.items()

    def plain(lines: list[str], ending: str, bom: str) -> Case:
        wanted = [line for line in lines if line.strip()]
        text = bom + ending.join(lines) + ending
        return Case("texts", text.encode("utf-8", "surrogatepass"), Says(wanted) if wanted else REFUSED, name)

    lines = st.lists(st.text(st.characters(exclude_characters="\n\r\ufeff", exclude_categories=["Cs"])), max_size=5)
    odd = st.sampled_from(["w4\x85w5", "w4\u2028w5", "w4\x0bw5\x0c", "\u202e", "w4\0", "\u200b", "x" * 10_000])
    lines = lines | st.lists(odd, min_size=1, max_size=3)
    return st.one_of(
        st.builds(plain, lines, st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "", "\ufeff"])),
        bytes_of(name, content),
    )


MATH_ROWS = [
    {"data_source": "x", "prompt": dumps.chat([4, 5]), "reward_model": {"style": "rule", "ground_truth": truth}}
    for truth in ("2", '["1/2", "0.5"]', "x^2")
]
PUZZLES = [
    {
        "quiz": "A very special island is inhabited only by knights and knaves.",
        "names": ["Zoey", "Oliver"],
        "statements": "(('lying', 1), ('telling-truth', 0))",
        "solution": [True, False],
    }
] * 3


def write_parquet(folder: Path, *, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    return folder / "data.parquet"


def ask(path: Path, *, task: str) -> list[Any]:
    questions = get_task(task).questions(None, seed=0, files=(path,))
    return [(q.prompt, q.answer, q.level) for q in questions]


def spoil_parquet(files: dict[str, bytes], _witness: Path) -> Any:
    [(name, content)] = files.items()
    return parquet(name, content)


def spoil_torch(files: dict[str, bytes], witness: Path) -> Any:
    return st.one_of([torch_file(name, content, witness) for name, content in files.items()])


def spoil_bytes(files: dict[str, bytes], _witness: Path) -> Any:
    return st.one_of([bytes_of(name, content) for name, content in files.items()])


KEY = {"model": "0" * 64, "settings": {"seed": 0, "loss": {"kl_coef": 0.001}}}


def write_run(folder: Path) -> Path:
    """A finished run, and another one under way in the same folder."""
    RunFolder(folder, KEY).begin()
    (folder / ".partial" / "staged" / "tokens.parquet").write_text("x")
    RunFolder(folder, KEY).publish({"seed": 0})
    RunFolder(folder, KEY).begin()
    (folder / ".partial" / "part-000000.parquet").write_text("x")
    return folder


def read_run(folder: Path) -> str:
    """How far it has come; and it is overwritten, in a copy, by one that takes nothing away but its own."""
    return RunFolder(folder, KEY).status()


def spoil_run(files: dict[str, bytes], _witness: Path) -> Any:
    parts = []
    for name, content in files.items():
        if name.endswith(".json"):
            one = json.dumps(json.loads(content)).encode()
            parts += [spoil_file({name: one}, _witness, file=name)]
    return st.one_of(parts)


# --- checkpoints

IDS = torch.arange(4, 24)[None]


def logits_of(path: Path) -> list[float]:
    """The last logits of the policy that was loaded."""
    quiet_transformers()
    with torch.no_grad():
        return load_policy(path, device="cpu").model(input_ids=IDS).logits[0, -1].tolist()


def write_checkpoint(folder: Path) -> Path:
    return save_checkpoint(folder, "llama", chat=True)


def spoil_file(files: dict[str, bytes], _witness: Path, *, file: str) -> Any:
    """One file of JSON."""
    one = json.dumps(json.loads(files[file])).encode()
    lines = json_lines(file, one).map(
        lambda case: replace(case, truth=None)
    )  # what other libraries read is their affair
    return st.one_of(lines, lines, bytes_of(file, files[file]))


def spoil_weights(files: dict[str, bytes], _witness: Path) -> Any:
    """The header of safetensors is JSON behind its length."""
    content = files["model.safetensors"]
    size = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + size], content[8 + size :]

    def framed(case: Case) -> Case:
        return Case(case.kind, len(case.content).to_bytes(8, "little") + case.content + body, None, "model.safetensors")

    return st.one_of(
        json_lines("", header).map(framed),
        bytes_of("model.safetensors", content[:4000]).map(
            lambda case: Case(case.kind, case.content + content[4000:], None, "model.safetensors")
        ),
    )


def write_adapter(folder: Path) -> Path:
    from support.adapters import save_adapter

    base = save_checkpoint(folder / "base", "llama")
    out = save_adapter(folder / "adapter", base, r=2, target_modules=["q_proj", "down_proj"])
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "../base"}))
    return out


def write_optimizer(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model = policy().model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=IDS).logits.sum().backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder / "optimizer.pt"


def read_optimizer(path: Path) -> Any:
    state = read_adamw_state(policy(), path)
    sums = {name: float(moment.double().sum()) for name, moment in state.exp_avg_sq.items()}
    return sums, state.step, state.beta2, state.eps


def read_step(path: Path) -> Any:
    return checkpoint_step(path)


def write_state(folder: Path) -> Path:
    folder = folder / "checkpoint-7"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7, "log_history": [{"loss": 1.0}]}))
    return folder


def read_tokenizer(path: Path) -> Any:
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        return None
    own = Policy(policy().model, tokenizer, policy().blocks_name)
    chat = own.encode_prompt([{"role": "user", "content": "w4"}]) if tokenizer.chat_template else None
    return own.encode_prompt("w4 w5"), chat


def spoil_tokenizer(files: dict[str, bytes], witness: Path) -> Any:
    """And a template that would run a command."""
    config = json.loads(files["tokenizer_config.json"])
    reach = f"{{{{ cycler.__init__.__globals__.os.mkdir('{witness}') }}}}"
    payloads = [reach, "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% for i in range(10**9) %}x{% endfor %}"]
    name = "chat_template.jinja"
    parts = [st.sampled_from(payloads).map(lambda text: Case("a template", text.encode(), None, name))]
    own = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "chat_template": reach}
    parts += [st.just(Case("own code", json.dumps(config | own).encode(), None, "tokenizer_config.json"))]
    for name in ("tokenizer_config.json", "tokenizer.json"):
        parts += [spoil_file(files, witness, file=name)] * 4
    return st.one_of(parts)


READERS = [
    Reader(
        "native", write_native, lambda path: rows_of(read_dump(path, policy())), spoil_native, check_rows, share=3.0
    ),
    Reader(
        "native, parquet",
        partial(write_native, suffix=".parquet"),
        lambda path: rows_of(read_dump(path, policy())),
        spoil_parquet,
        check_rows,
        share=2.0,
    ),
    Reader("trl", dumps.write_trl, lambda path: rows_of(read_dump(path, policy())), spoil_parquet, check_rows),
    log("verl", dumps.write_verl, one_row_each=True),
    log("prime_rl", dumps.write_prime_rl, one_row_each=True),
    Reader(
        "prime_rl_traces",
        write_traces,
        lambda path: rows_of(read_dump(path, policy())),
        spoil_traces,
        check_rows,
        share=2.0,
    ),
    log("nemo_rl", dumps.write_nemo_rl, one_row_each=True),
    log("open_instruct", dumps.write_open_instruct, one_row_each=True),
    Reader(
        "slime",
        partial(dumps.write_slime, train=True),
        lambda path: rows_of(read_dump(path, policy())),
        spoil_torch,
        check_rows,
        share=2.0,
    ),
    Reader("miles", dumps.write_miles, lambda path: rows_of(read_dump(path, policy())), spoil_torch, check_rows),
    Reader("skyrl", dumps.write_skyrl, lambda path: rows_of(read_dump(path, policy())), spoil_bytes, check_rows),
    Reader(
        "slime, --dump-details",
        write_slime,
        lambda path: rows_of(read_dump(path, policy())),
        spoil_torch,
        check_rows,
        share=0.5,
    ),
    Reader(
        "prime_rl_traces, by step",
        copy_traces,
        lambda path: rows_of(read_dump(path, policy())),
        spoil_traces,
        check_rows,
        share=0.5,
    ),
    log("ms_swift", dumps.write_ms_swift, one_row_each=False),
    log("roll", dumps.write_roll, one_row_each=False),
    log("verifiers", dumps.write_verifiers, one_row_each=True),
    log("verifiers_graph", dumps.write_verifiers_graph, one_row_each=True, derived=True),
    Reader("prompts, JSONL", partial(write_prompts, suffix=".jsonl"), read_texts, spoil_prompts),
    Reader("prompts, text", partial(write_prompts, suffix=".txt"), read_texts, spoil_texts),
    Reader("task math", partial(write_parquet, rows=MATH_ROWS), partial(ask, task="math"), spoil_parquet),
    Reader(
        "task knights-knaves", partial(write_parquet, rows=PUZZLES), partial(ask, task="knights-knaves"), spoil_parquet
    ),
    Reader("manifest.json, key.json", write_run, read_run, spoil_run, cut=False),
    Reader(
        "trainer_state.json",
        write_state,
        read_step,
        partial(spoil_file, file="checkpoint-7/trainer_state.json"),
        cut=False,
        share=0.3,
    ),
    Reader("optimizer.pt", write_optimizer, read_optimizer, spoil_torch),
    Reader(
        "adapter_config.json",
        write_adapter,
        lambda path: str(find_base(path)),
        partial(spoil_file, file="adapter/adapter_config.json"),
        share=0.5,
    ),
    Reader(
        "adapter",
        write_adapter,
        logits_of,
        partial(spoil_file, file="adapter/adapter_config.json"),
        cut=False,
        share=0.1,
    ),
    Reader(
        "config.json",
        write_checkpoint,
        logits_of,
        partial(spoil_file, file="config.json"),
        names="config",
        cut=False,
        share=0.3,
    ),
    Reader("model.safetensors", write_checkpoint, logits_of, spoil_weights, cut=False, share=0.1),
    Reader("tokenizer", write_checkpoint, read_tokenizer, spoil_tokenizer, cut=False, share=0.3),
]


CUTS = 4000


def every_cut(bench: Bench) -> Iterator[Case]:
    """Each file of the log, cut off at every place, of a large one at CUTS; what ends within a value is not read."""
    for name, content in bench.files.items():
        if not name.endswith(("jsonl", ".parquet", ".pt", ".txt", "adapter_config.json")):
            continue
        lines, stream = name.endswith("jsonl"), name.startswith("traces/")
        for at in range(0, len(content), -(-len(content) // CUTS) or 1):
            rest = content[:at].rpartition(b"\n")[2] if lines else content[:at]
            try:
                whole = name.endswith(".txt") or (lines and (not rest.strip() or isinstance(json.loads(rest), dict)))
            except ValueError:
                whole = False
            yield Case("cut", content[:at], None if whole or stream or not at else REFUSED, name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--cuts", action="store_true", help="and every file cut off at every place")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    quiet_transformers()
    made_with = {"seed": given.seed, "date": date.today().isoformat(), "python": platform.python_version()}
    made_with |= {name: version(name) for name in ("pyarrow", "torch", "transformers", "hypothesis")}
    shares, rows = sum(reader.share for reader in READERS), []
    for reader in READERS:
        if given.only and reader.name not in given.only:
            continue
        kinds: dict[str, str] = {}

        def tell(case: Case, words: str, kinds: dict[str, str] = kinds) -> None:
            kinds.setdefault(re.sub(r"\d+", "#", words)[:120], f"{words[:700]}\n    {case!r:.600}")

        with tempfile.TemporaryDirectory() as folder:
            cases, bench = round(given.cases * reader.share / shares), Bench(reader, Path(folder))
            if given.cuts and reader.cut:
                for case in every_cut(bench):
                    bench.count(case, on_wrong=tell)
            tally = bench.run(cases, given.seed, on_wrong=tell)
        rows.append(
            {"reader": reader.name, "cases": tally.total(), **{n: tally[n] for n in ("parsed", "refused", "wrong")}}
        )
        print(rows[-1], flush=True)
        for words in kinds.values():
            print("   ", words, flush=True)
    if given.out is not None:
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *made_with], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | made_with for row in rows)


if __name__ == "__main__":
    main()
