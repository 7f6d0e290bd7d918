"""How single tokens are written, for lists of tokens and for text whose tokens are coloured one by one."""

from collections.abc import Iterable
from typing import Any

_PART_OF_A_CHARACTER = "\ufffd"
_SPACE = "▁"
"""What SentencePiece writes for a space. Some tokenizers drop it when they decode a token alone."""


def token_texts(tokenizer: Any, tokens: Iterable[int]) -> list[str]:
    """Return the text of each token by itself, its leading space included.

    A token that holds only some bytes of a character has no text of its own: it is given as the tokenizer names it.
    """
    return [_text(tokenizer, token) for token in tokens]


def _text(tokenizer: Any, token: int) -> str:
    name: str = tokenizer.convert_ids_to_tokens(token)
    text: str = tokenizer.decode([token])
    if not text or _PART_OF_A_CHARACTER in text:
        return name.replace(_SPACE, " ")
    return f" {text}" if name.startswith(_SPACE) and not text.startswith(" ") else text
