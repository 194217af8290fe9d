"""Load a policy from a checkpoint, or from an adapter and its base: weights, precision, device, tokenizer."""

from __future__ import annotations

import copy
import ctypes
import inspect
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch
from torch import nn

from gradscope.errors import BROKEN_FILE, InputError, checked, first_line, is_out_of_memory, show, unpickling_reason
from gradscope.policy.adapters import attach_adapter, find_bases
from gradscope.policy.checkpoint import (
    EMBEDDED,
    configuration_home,
    find_checkpoint,
    is_adapter,
    model_weights,
    refuse_training_run,
    shards_of,
    tokenizer_places,
)
from gradscope.policy.dequantizing import dequantized_state
from gradscope.policy.parameters import measure_only
from gradscope.policy.policy import Policy, check_template_kwargs, find_blocks
from gradscope.policy.sharded.layouts import Shards
from gradscope.policy.sharded.reading import read_weights
from gradscope.policy.upcasting import UPCAST, arithmetic_dtype, upcast_on_use
from gradscope.runs import ALONE, Processes, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PolicyLike = Policy | str | Path
"""A policy, or what `load_policy` loads one from."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of `device` for which transformers spreads a policy over several devices."""
GRADIENT_SHARE = 1 / 6
"""Default fraction of free memory for summed gradients."""
MOST_LAYERS = 10_000
"""Most blocks in a configuration; building this many takes seconds."""
MOST_PER_BYTE = 8
"""Most parameters per byte of weight files; quantized files hold up to five."""
SMALL = 1 << 24
"""Number of parameters that is always accepted."""
OTHER_HEAD = re.compile(r"(Classification|QuestionAnswering|MultipleChoice|RewardModel)$")
"""End of the name of an architecture that scores text, such as a reward model's or a critic's."""
NEXT_TOKENS = re.compile(r"(.*\.\d+\.)eh_proj\.weight")
"""The weight that joins a hidden state and the next token's embedding, in a layer behind the last block that predicts
tokens further ahead (DeepSeek-V3, GLM-4.5). log π does not depend on that layer."""
PLAIN_ATTENTION = ("eager", "sdpa", "flex_attention")
"""Implementations of attention that need no further package."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
"""Files of which a folder with a tokenizer has at least one."""
CAUSAL_MASK = re.compile(r"(attn|attention)\.(masked_)?bias$")
"""Causal masks saved by older GPT checkpoints, which are not weights and are rebuilt by the model."""


@checked
def load_policy(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | dict[str, Any] | None = None,
    blocks: str | None = None,
    params: Literal["all", "adapter"] = "all",
    base: str | Path | None = None,
    trust_remote_code: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Policy:
    """Load a checkpoint in eval mode; nothing is downloaded.

    Args:
        path: a transformers model folder, a trainer's `checkpoint-*`, shards saved by FSDP
            (torch.distributed.checkpoint, verl) or DeepSpeed, a peft LoRA adapter, the name (owner/model) of a model in
            the local Hugging Face cache, or a bundled policy: "embedded", as uncertain of its tokens as the paper's 3 B
            model, or "embedded-certain". A missing tokenizer is looked for in the run's folder, then with the adapter's
            base.
        dtype: "float32" (default on the CPU), "float64", "bfloat16" or "float16"; the default on a GPU is the
            checkpoint's. "upcast" keeps the checkpoint's half-precision weights and computes in float32 (`upcasting`).
        device: a torch device; default "cuda" if available, else "cpu". "auto", "balanced", "balanced_low_0",
            "sequential" or a map (module → device) spread the policy over several devices, as in transformers.
        blocks: name of the ModuleList of blocks, if it cannot be found automatically.
        params: "all" measures every parameter, with an adapter merged into its base; "adapter" keeps it separate (in
            float32 or wider) and measures only its parameters.
        base: an adapter's base model, if adapter_config.json does not name a local folder; or the model that provides
            configuration and tokenizer for shards without them.
        trust_remote_code: run Python code from the checkpoint, which is refused otherwise.
        chat_template_kwargs: arguments of the chat template, such as {"enable_thinking": False}.

    Raises:
        InputError: The folder lacks a configuration or weights, weights do not fill the model, the architecture is not
            a causal language model (or cannot be upcast), the tokenizer does not round-trip text, the adapter's base
            is not found, or a device map offloads parameters.
    """
    folder = Path(find_checkpoint(str(path)))
    if params not in ("all", "adapter"):
        raise InputError(f"params is {params!r}; give all or adapter")
    refuse_training_run(folder)
    below: list[Path] = []
    spread = isinstance(device, dict) or device in SPREAD
    place = {"device": None, "device_map": device} if spread else {"device": find_device(device), "device_map": None}
    place |= {"dtype": dtype, "trust_remote_code": trust_remote_code}
    home, shards = folder, None
    if not is_adapter(folder):
        shards = shards_of(folder)
        if params == "adapter" or (base is not None and shards is None):
            given = "params is 'adapter'" if params == "adapter" else f"base is {str(base)!r}"
            raise InputError(f"{given}, but {folder} holds no adapter (adapter_config.json); leave it out")
        home = folder if shards is None else configuration_home(folder, shards, base)
        model, root = _load_model(home, shards, **place), None
    else:
        root, *below = find_bases(folder, base)
        if dtype == UPCAST and (params == "all" or below):
            advice = "give float32" if below else "give float32, or params adapter"
            raise InputError(
                f"dtype is {UPCAST!r}, but merging the adapter {folder if params == 'all' else root} would round the "
                f"sum to half precision; {advice}"
            )
        model = _load_model([root, *below][-1], **place)
        for adapter in [root, *below][-2::-1]:
            model, _ = attach_adapter(model, adapter, merge=True)
        model, trained = attach_adapter(model, folder, merge=params == "all")
        if trained is not None:
            measure_only(model, trained)
    if dtype == UPCAST:
        upcast_on_use(model.eval())
    tokenizer, trouble = _find_tokenizer(folder, root or home, *below, trust_remote_code=trust_remote_code)
    if trouble is not None:
        warnings.warn(f"{trouble}; text is refused, and tokens are shown as their ids", stacklevel=3)
    if trouble is None or chat_template_kwargs:
        check_template_kwargs(tokenizer, chat_template_kwargs or {})
    return Policy(
        model.eval(),
        tokenizer,
        find_blocks(model, blocks),
        str(folder),
        params,
        base=None if root is None else str(root),
        chat_template_kwargs=chat_template_kwargs,
        below=tuple(map(str, below)),
        configured_by=None if home == folder else str(home),
        no_tokenizer=trouble,
    )


def _load_model(
    folder: Path,
    shards: Shards | None = None,
    *,
    dtype: str | torch.dtype | None,
    device: str | None,
    device_map: str | dict[str, Any] | None,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Load a whole model onto its device(s) and check that it is causal. shards: its weights, if sharded."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    config = _read_config(folder, trust_remote_code=trust_remote_code)
    files = model_weights(folder) if shards is None else shards.files
    outline = _check_buildable(folder, config, files, trust_remote_code=trust_remote_code)
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "config": config}
    if shards is not None:
        source = {"pretrained_model_name_or_path": None, "config": outline.config}
        source["state_dict"] = read_weights(shards, outline.state_dict().keys())
    kind = AutoModelForCausalLM if shards is None else type(outline)
    wanted = parse_dtype(dtype, device or _main_device(device_map))
    settings: dict[str, Any] = {
        "dtype": wanted,
        "device_map": device_map,
        "local_files_only": True,
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # reported below
        # grouped_mm supports neither float64 nor forward mode.
        "experts_implementation": "eager",
        # sdpa ignores Gemma-2's soft cap on attention scores.
        "attn_implementation": "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None,
    }
    try:
        model, info = kind.from_pretrained(**source, **settings)
        if hasattr(config, "quantization_config"):
            _check_weights(folder, info, model)
            plain = wanted if isinstance(wanted, torch.dtype) else arithmetic_dtype(model)
            state, config = dequantized_state(model, outline, plain), copy.deepcopy(config)
            del config.quantization_config, model
            model, info = type(outline).from_pretrained(None, config=config, state_dict=state, **settings)
            del state
    except InputError:
        raise
    except ImportError as error:  # from a library that unpacks quantized weights
        raise InputError(f"{folder} needs what is not installed: {first_line(error)}") from error
    except (*BROKEN_FILE, SafetensorError, AssertionError) as error:
        advice = "save the model there with save_pretrained"
        if device_map is not None:
            advice += f", or give another map than {device_map!r:.40}"
        raise InputError(f"no usable weights in {folder} ({unpickling_reason(error)}); {advice}") from error
    source.clear()  # the joined shards are as large as the model
    _check_weights(folder if shards is None else shards.folder, info, model)
    if offloaded := next((name for name, p in model.named_parameters() if p.device.type == "meta"), None):
        raise InputError(
            f"device_map offloads {offloaded} to the CPU or to disk, where it has no gradient; give more or larger "
            "devices, or a smaller --dtype"
        )
    model.eval()
    if device_map is None:
        model.to(device)
    try:
        causal = is_causal(model)
    except Exception as error:  # third-party code may raise anything
        if is_out_of_memory(error):
            raise
        raise _no_model(folder, error) from error
    if not causal:
        _check_finite(model, folder)
        raise InputError(
            f"{folder} is a {config.model_type} model, not a decoder-only causal LM (tokens see later ones); "
            "give a checkpoint that AutoModelForCausalLM loads"
        )
    return model


def outline_policy(
    path: str, *, dtype: str | None = None, blocks: str | None = None, trust_remote_code: bool = False
) -> Policy:
    """Make a policy without weights, its modules on the meta device; dtype: None or "upcast" is the checkpoint's."""
    folder = Path(EMBEDDED.get(path, path))
    config = _read_config(folder, trust_remote_code=trust_remote_code)
    network = _outline(config, DTYPES.get(dtype, config.dtype), trust_remote_code=trust_remote_code).eval()
    return Policy(network, load_tokenizer(folder), find_blocks(network, blocks), path)


def _outline(config: Any, dtype: torch.dtype | None = None, *, trust_remote_code: bool) -> PreTrainedModel:
    """Build the model of a configuration on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype or config.dtype, trust_remote_code=trust_remote_code
        )


def _read_config(folder: Path, *, trust_remote_code: bool) -> Any:
    """Read the configuration of a causal language model, checking that it may be loaded."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not os.path.isfile(folder / "config.json"):  # of a name that is too long, Path raises
        raise InputError(
            f"{folder} holds no config.json; give a checkpoint folder saved with save_pretrained, or 'embedded'"
        )
    try:
        plain, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
        own = {**(plain.get("auto_map") or {})}
        if own and not trust_remote_code and plain.get("model_type") not in CONFIG_MAPPING:
            raise InputError(
                f"{folder} brings its own code ({next(iter(own.values()))}), which would be run; inspect it, then give "
                "--trust-remote-code"
            )
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except InputError:
        raise
    except (*BROKEN_FILE, StrictDataclassError) as error:
        raise InputError(
            f"{folder}/config.json cannot be read by transformers ({first_line(error.__cause__ or error)}); save it "
            "again"
        ) from error
    packed = getattr(config, "quantization_config", None)
    if isinstance(packed, dict) and _can_dequantize(packed.get("quant_method")):
        packed["dequantize"] = True  # kernels for packed weights have no gradients
    named = getattr(config, "architectures", None) or []
    if wrong := [name for name in named if OTHER_HEAD.search(str(name))]:
        raise InputError(f"{folder} is a {wrong[0]}, which scores text and has no log π of tokens; give a policy")
    if getattr(config, "_attn_implementation", None) not in (None, *PLAIN_ATTENTION):
        config._attn_implementation = None  # asked for by config.json, perhaps on another machine
    known = type(config) in AutoModelForCausalLM._model_mapping
    known |= trust_remote_code and "AutoModelForCausalLM" in own
    if getattr(config, "is_encoder_decoder", False) or not known:
        raise InputError(
            f"{folder} is a {config.model_type} model, not a decoder-only causal LM; give a checkpoint that "
            "AutoModelForCausalLM loads"
        )
    return config


def _can_dequantize(method: Any) -> bool:
    """Return whether transformers itself can dequantize weights packed by this method while loading."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    return kind is not None and "dequantize" in inspect.signature(kind).parameters


def _check_buildable(folder: Path, config: Any, files: Sequence[Path], *, trust_remote_code: bool) -> nn.Module:
    """Build the model on the meta device. Raises InputError if it is invalid or far larger than the weight files."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise InputError(f"{folder}/config.json: num_hidden_layers is {show(layers)}; give at most {MOST_LAYERS:,}")
    try:
        model = _outline(config, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise InputError(f"{folder} needs what is not installed: {first_line(error)}") from error
    except (*BROKEN_FILE, AssertionError) as error:
        raise _no_model(folder, error) from error
    size, saved = sum(p.numel() for p in model.parameters()), sum(f.stat().st_size for f in files if f.is_file())
    if saved and size > MOST_PER_BYTE * saved + SMALL:
        raise InputError(
            f"{folder}/config.json describes a model of {size:,} parameters, but its weights have {saved:,} bytes; "
            "save both together"
        )
    return model


def _no_model(folder: Path, error: Exception) -> InputError:
    if sys.flags.optimize > 1:
        return InputError("python runs with -OO, without the docstrings that transformers reads; run it without -OO")
    return InputError(
        f"{folder}/config.json makes no model that runs ({type(error).__name__}: {first_line(error)}); save it again, "
        "give another --dtype, or a model that runs on token ids alone"
    )


def _check_weights(folder: Path, info: dict[str, Any], model: nn.Module) -> None:
    """Raise InputError unless the files fill every weight of the model, with its shape, and hold no other layers."""
    if mismatched := sorted(info["mismatched_keys"]):
        name, given, wanted = mismatched[0]
        raise InputError(
            f"{folder}: the weight {name} is {tuple(given)}, config.json makes it {tuple(wanted)}; save both together"
        )
    if missing := sorted(info["missing_keys"]):
        others = {name.removesuffix(missing[0]) for name in info["unexpected_keys"] if name.endswith(f".{missing[0]}")}
        if others:  # from a wrapper: torch.compile, an older DataParallel, a value-head model, an adapter
            raise InputError(
                f"{folder} holds the weight {missing[0]} as {min(others)}{missing[0]}, and others likewise; save the "
                "model itself there, not the wrapped one"
            )
        named = (getattr(model.config, "architectures", None) or [""])[0]
        bare = named.endswith("Model") and not named.endswith("LMHeadModel")
        mend = (
            f"it holds a {named}, without a language model's head: give a causal LM"
            if bare
            else "save the whole model there"
        )
        raise InputError(
            f"{folder} lacks weights that the model needs ({', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}), which would be random; {mend}"
        )
    # Others, such as a value head or the causal masks of older checkpoints, do not affect the policy.
    layers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    unused = [name for name in info["unexpected_keys"] if not CAUSAL_MASK.search(name)]
    ahead = tuple(found[1] for name in unused if (found := NEXT_TOKENS.fullmatch(name)))
    unused = [name for name in unused if not name.startswith(ahead or "\0")]
    if left_out := sorted(name for name in unused if name.startswith(layers)):
        raise InputError(
            f"{folder} holds weights that config.json does not use ({', '.join(left_out[:3])}"
            f"{', …' if len(left_out) > 3 else ''}), so a different model would be measured; save both together"
        )


@torch.no_grad()
def is_causal(model: nn.Module) -> bool:
    """Return whether a token's logits do not depend on the next token; encoders also load as causal models."""
    last = len(model.get_input_embeddings().weight) - 1  # with a vocabulary of one, both rows are equal
    ids = torch.tensor([[0, 0], [0, last]], device=model.device)
    first, second = model(input_ids=ids, use_cache=False).logits[:, 0].double()
    # Two rows of a batch can differ by rounding.
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.05
    return bool((first - second).norm() <= tolerance * first.norm())


@torch.no_grad()
def _check_finite(model: nn.Module, folder: Path) -> None:
    """Raise InputError for weights or logits that are NaN or infinite."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InputError(
                f"{folder}: the weight {name} is NaN or infinite in {model.dtype}; give another checkpoint or --dtype"
            )
    if not model(input_ids=torch.tensor([[0, 0]], device=model.device)).logits.isfinite().all():
        wider = "another checkpoint" if model.dtype in (torch.float32, torch.float64) else "--dtype float32"
        raise InputError(f"{folder}: the logits are not finite in {model.dtype}; give {wider}")


def _find_tokenizer(
    folder: Path, *bases: Path | None, trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """Return the tokenizer from the weights' folder, the run's folder, or an adapter's base, or why it has no use.

    Rollouts of ids need none, so that one is refused only where text is met.
    """
    for place in (*tokenizer_places(folder), *filter(None, bases)):
        try:
            if (tokenizer := load_tokenizer(place, trust_remote_code=trust_remote_code)) is not None:
                return tokenizer, None
        except InputError as error:
            return None, str(error)
    return None, None


def load_tokenizer(folder: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Load a folder's tokenizer and test it on text; None if there is none.

    AutoTokenizer picks a class by model_type, which may then encode everything to nothing (a word-level tokenizer.json
    with a Qwen2 configuration, say), so the class that reads a bare tokenizer.json is tried next.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    absent = "its tokenizer needs what is not installed: {}; install it, or give rollouts with ids"
    if not any((folder / name).is_file() for name in TOKENIZERS[:-1]) and not find_spec("mistral_common"):
        raise InputError(f"{folder}: {absent.format('mistral-common, which reads tekken.json')}")
    own = ((read_json(folder / "tokenizer_config.json") or {}).get("auto_map") or {}).get("AutoTokenizer")
    if own and not trust_remote_code and not (folder / "tokenizer.json").is_file():
        raise InputError(
            f"the tokenizer in {folder} brings its own code ({show(own)}), which would be run; inspect it, then give "
            "--trust-remote-code, or give rollouts with ids"
        )
    loaders = [AutoTokenizer] + ([PreTrainedTokenizerFast] if (folder / "tokenizer.json").is_file() else [])
    for loader in loaders:
        try:
            tokenizer = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
            if (lost := find_lossy_text(tokenizer)) is None:
                return tokenizer
            failure = f"as a {type(tokenizer).__name__} it makes {lost[1]!r} of {lost[0]!r}"
        except ImportError as error:
            raise InputError(f"{folder}: {absent.format(first_line(error))}") from error
        except Exception as error:  # the tokenizers library raises bare Exceptions
            failure = first_line(error)
    raise InputError(
        f"the tokenizer in {folder} cannot be used: {failure}. Save the right one there. Rollouts with ids need none: "
        "ids are measured as they are"
    )


def find_lossy_text(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """Return a text of the vocabulary's words that encoding changes, with the result; None if none does."""
    special = set(tokenizer.all_special_ids)
    ids = [i for i in range(len(tokenizer)) if i not in special]
    sample = ids[len(ids) // 3 :: max(1, len(ids) // 24)][:16]
    words = [w for w in (tokenizer.decode([i]) for i in sample) if w.strip() and "\ufffd" not in w]
    # Also joined: a wrong class may know every token but drop the spaces between them.
    texts = [*words, " ".join(w.strip() for w in words)]
    for text in texts if words else ["a b"]:
        back = tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids)
        if back.strip() != text.strip():
            return text, back
    return None


def find_device(device: str | None) -> str:
    """Return the named device after a test allocation; by default a GPU if there is one, else the CPU."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {device!r} cannot be used: {first_line(error)}; give cpu, or leave it out") from error
    return device


def _main_device(device_map: str | dict[str, Any] | None) -> str:
    """Return the type of device that determines the default precision of a policy spread over several."""
    if isinstance(device_map, dict):
        return "cpu" if {str(device) for device in device_map.values()} <= {"cpu", "disk"} else "cuda"
    return find_device(None)


def parse_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype | str:
    """Return the named dtype; None, like "upcast", is float32 on a CPU and "auto" (the checkpoint's) elsewhere."""
    if dtype == UPCAST:
        return "auto"
    if dtype is None:
        return torch.float32 if torch.device(device).type == "cpu" else "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join((*DTYPES, UPCAST))}")
    return DTYPES[dtype]


def free_memory(device: torch.device) -> int:
    """Return the free bytes on a GPU, or on the host for any other device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def gradient_budget(device: torch.device, processes: Processes = ALONE) -> int:
    """Return the default bytes for summed gradients in each process, equal for all.

    All processes call it together; on a CPU, they share its memory.
    """
    own = int(GRADIENT_SHARE * free_memory(device) / (processes.count if device.type == "cpu" else 1))
    return min(processes.gather([own]))


def return_freed_memory() -> None:
    """Return freed memory to the system (by glibc's malloc_trim, if available)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
