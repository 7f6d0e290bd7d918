"""Text from strangers, made safe to show: token text, names of models and files, what a checkpoint says of itself.

Characters that would be invisible, would move the cursor or would change how the rest is shown, are shown themselves.
"""

import unicodedata

_NAMES = {"\n": "⏎", "\r": "␍", "\t": "⇥"}
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories: controls, direction marks, halves of surrogate pairs, private use, line and paragraph ends."""


def visible(text: str, keep: str = "") -> str:
    """Return text with everything invisible spelled out, except the characters to `keep`: it stays on its line."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if character in keep else _shown(character) for character in text)


def _shown(character: str) -> str:
    if character in _NAMES:
        return _NAMES[character]
    if unicodedata.category(character) in _INVISIBLE:
        return f"⟨{ord(character):X}⟩"
    return character
