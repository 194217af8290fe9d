"""The tests' tokenizer of words, which other environments can import too: transformers alone is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import transformers

VOCAB = 96
PAD, BOS, EOS, UNK = 0, 1, 2, 3


def make_tokenizer(*, chat: bool = False, others: Sequence[str] = ()) -> transformers.PreTrainedTokenizerFast:
    """A word-level tokenizer of the words w4 … w95, split at spaces; nothing is added to a text.

    others: words that stand for the last ones.
    """
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<bos>", "<eos>", "<unk>"] + [f"w{i}" for i in range(4, VOCAB - len(others))] + [*others]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    if chat:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ '<bos> ' + m['content'] + ' ' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<bos>' }}{% endif %}"
        )
    return tokenizer


def make_merging_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of eight letters that merges pairs, then pairs of pairs; most sequences of its ids are not those that
    it makes of their text."""
    import transformers
    from tokenizers import Tokenizer, decoders, models

    letters = "abcdefgh"
    merges = [(a, b) for a in letters for b in letters]
    merges += [(letters[i] + letters[j], letters[j] + letters[i]) for i in range(4) for j in range(5)]
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *letters, *(a + b for a, b in merges)]
    assert len(words) == VOCAB
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
