"""Load a policy with its tokenizer, and name the blocks on its residual stream."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradscope.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = Path(__file__).parent / "embedded"
"""The small Knights & Knaves policy that comes with gradscope; `load_policy("embedded")` finds it too."""

BROKEN_FILE = (OSError, EOFError, struct.error, pickle.UnpicklingError, RuntimeError)
BROKEN_FILE += (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What the parsers of checkpoint files raise where the content makes no sense."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Policy:
    """A decoder-only causal language model, its tokenizer and where its blocks are."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    """None where only ids are measured."""
    blocks_name: str
    """The ModuleList of blocks, by its name in model.named_modules()."""
    path: str = ""
    """Where it was loaded from; empty for a model made in memory."""

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.get_submodule(self.blocks_name)

    @property
    def config(self) -> Any:
        """The text part of the configuration."""
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """N of Prop. 4.2: how many logits a position has."""
        return self.config.vocab_size

    @property
    def context(self) -> int | None:
        """Longest sequence (prompt + response) the positions allow; None: no limit is known."""
        return getattr(self.config, "max_position_embeddings", None)

    def encode_prompt(self, prompt: str | list[dict[str, str]]) -> list[int]:
        """Ids of a prompt: a string with special tokens; a chat through the template, its last assistant turn open."""
        tokenizer = self._need_tokenizer()
        check_prompt(prompt)
        if isinstance(prompt, str):
            return list(tokenizer(prompt).input_ids)
        if getattr(tokenizer, "chat_template", None) is None:
            raise InputError(
                "the prompt is a chat but the tokenizer has no chat template; give the prompt as one string"
            )
        prefilled = prompt[-1]["role"] == "assistant"
        try:
            return list(
                tokenizer.apply_chat_template(
                    prompt,
                    tokenize=True,
                    return_dict=False,
                    add_generation_prompt=not prefilled,
                    continue_final_message=prefilled,
                )
            )
        except Exception as error:  # a template is a program of the checkpoint's author: it may raise anything
            raise InputError(
                f"the tokenizer's chat template raised {type(error).__name__} ({_first_line(error)}) on the chat "
                f"{str(prompt)[:60]!r}; mend the chat, or give the prompt as one string"
            ) from error

    def encode_response(self, response: str) -> list[int]:
        """Ids of a response's text; no special token and no EOS is added."""
        _check_text(response, "the response")
        return list(self._need_tokenizer()(response, add_special_tokens=False).input_ids)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; `<id>` where there is no tokenizer."""
        if self.tokenizer is None:
            return "".join(f"<{i}>" for i in ids)
        return self.tokenizer.decode(ids)

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise InputError(
                f"text needs a tokenizer and {self.path or 'this policy'} has none; save one beside the weights, or "
                "give prompt_ids and response_ids"
            )
        return self.tokenizer

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        return (
            f"Policy({type(self.model).__name__}, {size:,} parameters, {len(self.blocks)} blocks at "
            f"{self.blocks_name!r}, vocabulary {self.vocab_size}, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device})"
        )


def check_prompt(prompt: Any, place: str | None = None) -> None:
    """Raise InputError for what is neither a string nor a chat, or cannot be written down; place: where it is from.

    >>> check_prompt("2+2="), check_prompt([{"role": "user", "content": "2+2="}])
    (None, None)
    """
    where = "" if place is None else f"{place}: "
    chat = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    if not (isinstance(prompt, str) or (chat and prompt)):
        raise InputError(
            f"{where}the prompt is neither a string nor a chat but {prompt!r:.60}; give a string or a chat "
            "([{role, content}, …])"
        )
    _check_text(prompt, f"{where}the prompt")


def _check_text(value: Any, name: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:  # of a lone surrogate, UnicodeEncodeError
        raise InputError(f"{name} holds what is no text ({_first_line(error)}); mend it") from error


def load_policy(
    path: str | Path, *, dtype: str | torch.dtype | None = None, device: str | None = None, blocks: str | None = None
) -> Policy:
    """Load a checkpoint folder of transformers, in eval mode.

    path: the folder, or "embedded" for the policy that comes with gradscope.
    dtype: "float32" (default on the CPU), "float64", "bfloat16", "float16"; default on a GPU: the checkpoint's own.
    device: a torch device; default "cuda" where there is one, else "cpu".
    blocks: name of the ModuleList of blocks, where it cannot be found by itself.

    Raises InputError for a folder without configuration or weights, weights that do not fill the model, an
    architecture that is not a causal language model, and a tokenizer that does not round-trip text.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = EMBEDDED if str(path) == "embedded" else Path(path)
    if not os.path.isfile(folder / "config.json"):  # of a name that is too long, Path raises
        raise InputError(
            f"{folder} holds no config.json; give a checkpoint folder saved with save_pretrained, or 'embedded'"
        )
    _refuse_training_run(folder)
    device = find_device(device)
    dtype = _parse_dtype(dtype, device)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (*BROKEN_FILE, StrictDataclassError) as error:
        raise InputError(
            f"{folder}/config.json is not one that transformers reads ({_first_line(error)}); save it anew"
        ) from error
    if getattr(config, "is_encoder_decoder", False) or type(config) not in AutoModelForCausalLM._model_mapping:
        raise InputError(
            f"{folder} is a {config.model_type} model, not a decoder-only causal LM; give a checkpoint that "
            "AutoModelForCausalLM loads"
        )
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are named below.
            # grouped_mm knows neither float64 nor forward mode.
            experts_implementation="eager",
            # sdpa leaves Gemma-2's soft cap on attention scores out.
            attn_implementation="eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None,
        )
    except (*BROKEN_FILE, SafetensorError) as error:
        raise InputError(
            f"no usable weights in {folder} ({_first_line(error)}); save the model there with save_pretrained"
        ) from error
    if mismatched := sorted(info["mismatched_keys"]):
        name, given, wanted = mismatched[0]
        raise InputError(
            f"{folder}: the weight {name} is {tuple(given)}, config.json makes it {tuple(wanted)}; save both together"
        )
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"{folder} lacks weights that the model needs ({', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}); they would be random numbers. Save the whole model there"
        )
    model.eval().to(device)
    if not is_causal(model):
        _check_finite(model, folder)
        raise InputError(
            f"{folder} is a {config.model_type} model, not a decoder-only causal LM (a token sees those after it); "
            "give a checkpoint that AutoModelForCausalLM loads"
        )
    return Policy(model, load_tokenizer(folder), find_blocks(model, blocks), str(folder))


@torch.no_grad()
def is_causal(model: nn.Module) -> bool:
    """Whether the logits of a token stay when the next token changes: encoders load as causal models too."""
    last = len(model.get_input_embeddings().weight) - 1  # of a vocabulary of one, both rows are the same
    first, second = model(input_ids=torch.tensor([[0, 0], [0, last]], device=model.device)).logits[:, 0].double()
    # Two rows of one batch can differ by rounding.
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.05
    return bool((first - second).norm() <= tolerance * first.norm())


@torch.no_grad()
def _check_finite(model: nn.Module, folder: Path) -> None:
    """InputError for weights or logits that are NaN or infinite: nothing can be told from them."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InputError(
                f"{folder}: the weight {name} is not finite (NaN or infinity) in {model.dtype}; give another "
                "checkpoint or --dtype"
            )
    if not model(input_ids=torch.tensor([[0, 0]], device=model.device)).logits.isfinite().all():
        raise InputError(f"{folder}: the logits are not finite in {model.dtype}; give --dtype float32")


def _refuse_training_run(folder: Path) -> None:
    """Its config.json is not a model's: InputError, with the newest checkpoint."""
    checkpoints = sorted(folder.glob("checkpoints/step-*"), key=lambda path: (len(path.name), path.name))
    if checkpoints and not any(folder.glob("*.safetensors")):
        raise InputError(
            f"{folder} is the folder of a training run, not a model; give one of its checkpoints, such as the newest: "
            f"{checkpoints[-1]}"
        )


def find_blocks(model: nn.Module, name: str | None = None) -> str:
    """Name of the one ModuleList of blocks: as long as the configuration says, and inside no other ModuleList."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if name is not None:
        if name not in lists:
            raise InputError(f"the model has no ModuleList {name!r}; it has {', '.join(lists) or 'none'}")
        return name
    outermost = [n for n in lists if not any(n.startswith(other + ".") for other in lists)]
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = [n for n in outermost if len(lists[n]) == depth] or outermost
    if len(found) != 1:
        raise InputError(
            f"{type(model).__name__} has {len(found)} candidates for its blocks "
            f"({', '.join(found) or 'no ModuleList'}); name the right one with --blocks"
        )
    return found[0]


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the weights, tried on a string; None if the folder holds none.

    AutoTokenizer picks a class by model_type and can then encode everything to nothing (a word-level tokenizer.json
    beside a Qwen2 configuration does that), so the class that reads tokenizer.json as it stands is tried next.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder)
    if not any(
        (folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    ):
        return None
    loaders = [AutoTokenizer] + ([PreTrainedTokenizerFast] if (folder / "tokenizer.json").is_file() else [])
    for loader in loaders:
        try:
            tokenizer = loader.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            failure = _first_line(error)
            continue
        if round_trips(tokenizer):
            return tokenizer
        failure = "it does not give back the text that it encodes"
    raise InputError(f"the tokenizer in {folder} cannot be used: {failure}. Save the right one there")


def round_trips(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether decoding gives back the text: tried on words of its own vocabulary, one by one and as one string."""
    special = set(tokenizer.all_special_ids)
    ids = [i for i in range(len(tokenizer)) if i not in special]
    sample = ids[len(ids) // 3 :: max(1, len(ids) // 24)][:16]
    words = [w for w in (tokenizer.decode([i]) for i in sample) if w.strip() and "\ufffd" not in w]
    # One string, too: a wrong class may know every single token and still drop the spaces between them.
    texts = [*words, " ".join(w.strip() for w in words)]
    return bool(words) and all(
        tokenizer.decode(tokenizer(t, add_special_tokens=False).input_ids).strip() == t.strip() for t in texts
    )


def fetch_policy(name: str) -> str:
    """The folder of a model: `name` itself if it is one or "embedded", else what the model hub has of that name.

    A name of the hub is owner/model; what was fetched before is taken from huggingface_hub's cache. Raises InputError
    if it cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if name == "embedded" or os.path.isdir(name) or not _is_hub_name(name):
        return name
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
    except (OSError, HfHubHTTPError) as error:
        raise InputError(
            f"{name} is no folder here and could not be fetched from the model hub ({_first_line(error)}); give the "
            "folder of a checkpoint"
        ) from error


def _is_hub_name(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def weights_hash(path: str | Path) -> str:
    """SHA-256 of the weight files of a checkpoint folder, in the order of their names."""
    files = sorted(Path(path).glob("*.safetensors")) or sorted(Path(path).glob("pytorch_model*.bin"))
    return _hash_files(files)


def configuration_hash(path: str | Path) -> str:
    """SHA-256 of what else decides a policy's numbers: its configuration and its tokenizer's files."""
    kinds = ("config.json", "tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
    return _hash_files(sorted(p for p in Path(path).iterdir() if p.is_file() and p.name.startswith(kinds)))


def _hash_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def find_device(device: str | None) -> str:
    """The device, tried; a GPU where there is one, if none is named."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"device {device!r} cannot be used: {_first_line(error)}; give cpu, or leave it out"
        ) from error
    return device


def _parse_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if torch.device(device).type == "cpu" else "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".!:")
