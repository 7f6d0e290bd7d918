"""Single tokens are written with their spaces, and so that each can be told from every other."""

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dmsae.text.token_text import token_texts


def byte_level() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of single bytes, as GPT-2 names them, and two words."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġthe", "<end>"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def sentence_pieces() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that, like Llama's, drops the leading space of whatever it decodes."""
    pieces = {"▁the": 0, "the": 1, "▁": 2, "<0xE2>": 3, "<unk>": 4}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_words_bytes_and_special_tokens() -> None:
    tokenizer = byte_level()
    vocabulary = tokenizer.get_vocab()
    assert token_texts(tokenizer, [vocabulary[name] for name in ("Ġthe", "a", "Ġ", "Ċ", "<end>")]) == [
        " the",
        "a",
        " ",
        "\n",
        "<end>",
    ]
    parts_of_a_character = ["â", "Ģ"]
    assert token_texts(tokenizer, [vocabulary[name] for name in parts_of_a_character]) == parts_of_a_character


def test_a_leading_space_that_decoding_drops_is_kept() -> None:
    assert token_texts(sentence_pieces(), range(5)) == [" the", "the", " ", "<0xE2>", "<unk>"]


def test_no_tokens() -> None:
    assert token_texts(byte_level(), []) == []
