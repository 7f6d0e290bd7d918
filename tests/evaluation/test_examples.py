"""The text on which a latent fires most."""

from pathlib import Path

import pytest
import torch

from dmsae.activations.splits import Split
from dmsae.activations.store import StoreWriter
from dmsae.disk.layout import shard_file, token_file
from dmsae.errors import StoreError
from dmsae.evaluation.examples import top_examples
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from planted import REQUEST


class Spelling:
    """A tokenizer that writes token 7 as 't7 '."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(f"t{i} " for i in ids)


def test_examples_stand_where_the_latent_fires_most_one_from_each_context(tmp_path: Path) -> None:
    """Latent 0 reads dimension 0, which is largest at position 2 of context 1, then at position 3 of context 0."""
    sae = SAE(SAEConfig(d_model=2, width=2, k=1, prefixes=(2,)))
    with torch.no_grad():
        sae.W_enc_noncore.copy_(torch.eye(2))
    tokens = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1], [8, 9, 10, 11]], dtype=torch.int32)
    x = torch.tensor([[1.0, 0], [2, 0], [3, 0], [4, 0], [9, 0], [-1, 5]])
    context, position = [0, 0, 0, 1, 1, 2], [1, 2, 3, 1, 2, 1]
    writer = StoreWriter(tmp_path / "store", REQUEST)
    writer.add(token_file(Split.HELDOUT), {"tokens": tokens, "starts": tokens == 0}, {})
    columns = {
        "context": torch.tensor(context, dtype=torch.int32),
        "position": torch.tensor(position, dtype=torch.int32),
    }
    writer.add(shard_file(Split.HELDOUT, 0), {"x": x, **columns}, {})

    (first, second), other = top_examples(sae, [0, 1], writer.finish(2), Spelling(), n_examples=3, n_around=2)
    assert first == (9.0, "t4 t5 ", "t6 ", "")
    assert second == (3.0, "t1 t2 ", "t3 ", "")
    assert [(example.activation, example.token) for example in other] == [(5.0, "t9 ")]


def test_a_store_without_held_out_text_is_an_error(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path / "store", REQUEST).finish(2)
    with pytest.raises(StoreError, match="heldout_tokens"):
        top_examples(SAE(SAEConfig(d_model=2, width=2, k=1, prefixes=(2,))), [0], store, Spelling())
