"""Texts of words that count, and a tokenizer that knows them."""

from __future__ import annotations

import random

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

_NUM_WORDS = 250
_SPECIAL = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]"}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    words = [*_SPECIAL.values(), *(f"w{number}" for number in range(_NUM_WORDS))]
    known = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=_SPECIAL["unk_token"]))
    known.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, **_SPECIAL)


def some(num_texts: int, *, shortest: int, longest: int) -> list[str]:
    """Texts of so many words each."""
    texts = []
    for _ in range(num_texts):
        first, length = random.randrange(_NUM_WORDS), random.randint(shortest, longest)
        texts.append(" ".join(f"w{(first + offset) % _NUM_WORDS}" for offset in range(length)))
    return texts
