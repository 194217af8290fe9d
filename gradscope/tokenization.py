"""The tokenizer of a checkpoint, tried before it is believed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gradscope.errors import InputError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
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
            tokenizer = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
            if round_trips(tokenizer):
                return tokenizer
            failure = "it does not give back the text that it encodes"
        except Exception as error:  # the library of tokenizers raises bare Exceptions for what it cannot read
            failure = first_line(error)
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
