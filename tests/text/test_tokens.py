"""Packing loses and invents nothing, and the mask's counts add up."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from conftest import WORDS, build_tokenizer
from dmsae.errors import ConfigError
from dmsae.text.tokens import PAD, Context, KeepMask, Packer, TokenConfig, Window, has_target

BOS, EOS = 0, 1
tokenizer = functools.cache(build_tokenizer)
documents = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=30).map(" ".join), max_size=12)


def pack(texts: list[str], config: TokenConfig, n_calls: int = 1) -> list[Context]:
    packer = Packer(tokenizer(), config)
    size = max(1, -(-len(texts) // n_calls))
    contexts = [c for at in range(0, len(texts), size) for c in packer.add(texts[at : at + size])]
    return contexts + list(packer.flush())


@given(documents, st.integers(2, 12), st.booleans(), st.integers(1, 4))
def test_packing_loses_and_invents_nothing(texts: list[str], length: int, bos: bool, n_calls: int) -> None:
    contexts = pack(texts, TokenConfig(length, prepend_bos=bos), n_calls)
    expected = [[*tokenizer()(text).input_ids, EOS] for text in texts]
    body = [c.tokens_L[int(bos) :] for c in contexts]
    starts = [c.starts_L[int(bos) :] for c in contexts]
    flat = np.concatenate([*body, np.zeros(0, np.int32)])
    real = flat != PAD
    assert flat[real].tolist() == [token for ids in expected for token in ids]
    assert all(len(c.tokens_L) == len(c.starts_L) == length for c in contexts)
    assert all(c.tokens_L[0] == BOS and not c.starts_L[0] for c in contexts if bos)
    # Padding stands only at the end of the last context.
    assert real.all() or not real[int(real.sum()) :].any()
    assert all((c.tokens_L != PAD).all() for c in contexts[:-1])
    # Document starts are exactly where documents begin.
    lengths = [len(ids) for ids in expected]
    begins = np.cumsum([0, *lengths[:-1]]).tolist() if lengths else []
    assert np.flatnonzero(np.concatenate([*starts, np.zeros(0, bool)])).tolist() == begins


@given(documents.filter(bool), st.integers(2, 12))
def test_keep_mask_and_drop_counts_are_consistent(texts: list[str], length: int) -> None:
    tokens_NL = torch.stack([torch.from_numpy(c.tokens_L) for c in pack(texts, TokenConfig(length))])
    mask = KeepMask.of(tokenizer())
    keep_NL, dropped = mask(tokens_NL), mask.drop_counts(tokens_NL)
    assert int(keep_NL.sum()) + sum(dropped.values()) == tokens_NL.numel()
    assert not keep_NL[:, 0].any()
    kept = set(tokens_NL[keep_NL].tolist())
    assert kept.isdisjoint({PAD, *mask.special_ids})
    assert dropped["padding"] == int((tokens_NL == PAD).sum())
    assert dropped["first_position"] == len(tokens_NL)
    follows_NL = has_target(tokens_NL)
    assert not follows_NL[:, -1].any()
    assert torch.equal(follows_NL[:, :-1], tokens_NL[:, 1:] != PAD)


@given(documents.filter(bool), st.integers(2, 12), st.booleans())
def test_targets_that_count_are_ordinary_tokens_of_the_same_document(texts: list[str], length: int, bos: bool) -> None:
    contexts = pack(texts, TokenConfig(length, prepend_bos=bos))
    tokens_NL, starts_NL = (torch.from_numpy(np.stack(parts)) for parts in zip(*contexts, strict=True))
    counts_NL = KeepMask.of(tokenizer()).targets(tokens_NL, starts_NL)
    for tokens, starts, counts in zip(tokens_NL.tolist(), starts_NL.tolist(), counts_NL.tolist(), strict=True):
        expected = [
            at + 1 < length and tokens[at + 1] not in (PAD, 0, 1, 2) and not starts[at + 1] for at in range(length)
        ]
        assert counts == expected


def excerpts(texts: list[str], n_tokens: int, seed: int) -> dict[str, list[int]]:
    """What a window takes of each document, by its first word, which is unique."""
    packer = Packer(tokenizer(), TokenConfig(7), Window(n_tokens, seed))
    contexts = [*packer.add(texts), *packer.flush()]
    tokens = [token for c in contexts for token in c.tokens_L.tolist() if token != PAD]
    ends = [at for at, token in enumerate(tokens) if token == EOS]
    pieces = [tokens[a + 1 : b] for a, b in zip([-1, *ends], ends, strict=False)]
    return dict(zip((text.split()[0] for text in texts), pieces, strict=True))


def test_a_window_is_a_stretch_of_its_document_and_depends_on_nothing_else() -> None:
    texts = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(40)] + [" ".join(WORDS[50:55])]
    first = excerpts(texts, 10, seed=0)
    assert excerpts(texts[::-1], 10, seed=0) == first
    assert excerpts(texts[3:9], 10, seed=0).items() <= first.items()
    assert excerpts(texts, 10, seed=1) != first
    starts = set()
    for text in texts[:-1]:
        whole, taken = tokenizer()(text).input_ids, first[text.split()[0]]
        assert len(taken) == 10
        starts.add(whole.index(taken[0]))
        assert taken == whole[whole.index(taken[0]) :][:10]
    assert len(starts) > 10, "windows start anywhere"
    assert max(starts) <= 50
    assert first["w50"] == tokenizer()(texts[-1]).input_ids, "a short document is taken whole"


def test_a_window_starts_its_document() -> None:
    packer = Packer(tokenizer(), TokenConfig(8), Window(3, seed=0))
    (context,) = packer.add([" ".join(WORDS[:20]), " ".join(WORDS[20:40])])
    assert np.flatnonzero(context.starts_L).tolist() == [0, 4]
    assert np.flatnonzero(context.tokens_L == EOS).tolist() == [3, 7]


def test_mask_knows_all_special_tokens() -> None:
    assert KeepMask.of(tokenizer()).special_ids == (0, 1, 2)


def test_bos_is_prepended_when_the_tokenizer_does_so_itself() -> None:
    assert pack(["w1 w2"], TokenConfig(4))[0].tokens_L[0] != BOS
    with_bos = build_tokenizer()
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    packer = Packer(with_bos, TokenConfig(4))
    contexts = [*packer.add(["w1 w2"]), *packer.flush()]
    assert contexts[0].tokens_L.tolist() == [BOS, *tokenizer()("w1 w2").input_ids, EOS]


def test_prepending_a_bos_that_does_not_exist_is_refused() -> None:
    without = build_tokenizer()
    without.bos_token = None
    with pytest.raises(ConfigError, match=r"tokens\.prepend_bos = True; it must be off\. .* has no BOS token"):
        Packer(without, TokenConfig(4, prepend_bos=True))


@pytest.mark.parametrize("length", [1, 2.5])
def test_a_context_needs_a_position_that_counts(length: Any) -> None:
    with pytest.raises(ConfigError, match=f"tokens.context_length = {length}; it must be a whole number of at least 2"):
        TokenConfig(length)


def test_packing_copies_every_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long document is not copied again for every context that it fills."""

    class Counted(list[int]):
        copied = 0

        def __getitem__(self, which: Any) -> Any:
            part = super().__getitem__(which)
            Counted.copied += len(part) if isinstance(which, slice) else 0
            return part

    packer = Packer(tokenizer(), TokenConfig(8))
    monkeypatch.setattr(Packer, "_document", lambda self, ids: Counted([*ids, *self._suffix]))
    n_contexts = len(list(packer.add([" ".join(WORDS * 50)])))
    assert Counted.copied <= 60 * 50 + 1
    assert n_contexts == (60 * 50 + 1) // 8
