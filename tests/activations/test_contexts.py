"""Documents belong to one split, no document fills one, and only losses inside a document make g."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import WORDS, Recorder
from dmsae.activations.base_model import BaseModel
from dmsae.activations.contexts import Contexts, collect_contexts, countable, counted_losses, split_of
from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.splits import Split
from dmsae.errors import CorpusError
from dmsae.text.corpus import Document, TextConfig
from dmsae.text.tokens import PAD, Context

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., HarvestConfig]


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    """Sixty documents of 400 words, each a rotation of the words with its own step."""
    documents = [" ".join(WORDS[(i + j * (i // 20 + 1)) % 60] for j in range(400)) for i in range(60)]
    path = tmp_path / "long.txt"
    path.write_text("\n".join(documents))
    return path


def collect(config: HarvestConfig, root: Path) -> dict[Split, Contexts]:
    job = Harvest(config, root)
    return collect_contexts(config, job.corpus, job.tokenizer)


def test_the_split_is_the_documents_place() -> None:
    config = TextConfig(heldout_fraction=0.1, pairs_fraction=0.2)
    places = {0.0: Split.HELDOUT, 0.099: Split.HELDOUT, 0.1: Split.PAIRS, 0.29: Split.PAIRS, 0.31: Split.TRAIN}
    assert {place: split_of(Document("", place), config) for place in places} == places


def test_long_documents_do_not_fill_pairs_and_held_out_text(
    tiny_config: MakeConfig, long_text: Path, tmp_path: Path
) -> None:
    text = TextConfig(source=str(long_text), txt_documents="line", heldout_fraction=0.3, pairs_fraction=0.3)
    capped = collect(tiny_config(text=text, max_contexts_per_document=2), tmp_path)
    whole = collect(tiny_config(text=text, max_contexts_per_document=100), tmp_path)
    for split in (Split.PAIRS, Split.HELDOUT):
        # 200 and 300 rows at 32 tokens and an end of text each; one document would have been enough.
        assert capped[split].n_documents >= 6
        assert whole[split].n_documents == 1
    assert capped[Split.TRAIN].n_documents == whole[Split.TRAIN].n_documents
    assert torch.equal(capped[Split.TRAIN].tokens_NL, whole[Split.TRAIN].tokens_NL), "training text is not limited"


def test_too_few_documents_are_warned_of(tiny_config: MakeConfig, long_text: Path, tmp_path: Path) -> None:
    text = TextConfig(source=str(long_text), txt_documents="line", heldout_fraction=0.3, pairs_fraction=0.3)
    recorder = Recorder()
    Harvest(tiny_config(text=text, heldout_tokens=0, max_contexts_per_document=1), tmp_path, recorder).dry_run()
    (warning,) = recorder.warnings
    assert warning.startswith("The pairs come from 1")
    assert "raise pair_tokens (200), or give text in shorter documents" in warning  # a cap of 1 cannot be lowered
    recorder = Recorder()
    config = tiny_config(text=text, pair_tokens=0, max_contexts_per_document=9, train_tokens=0)
    store = harvest(config, tmp_path, recorder)
    (warning,) = recorder.warnings
    assert warning.startswith(f"The held-out text comes from {store.n_documents(Split.HELDOUT)} documents,")


def test_many_documents_are_not_warned_of(tiny_config: MakeConfig, tmp_path: Path) -> None:
    recorder = Recorder()
    Harvest(tiny_config(pair_tokens=800, heldout_tokens=800), tmp_path, recorder).dry_run()
    assert not recorder.warnings


def test_too_small_a_corpus_names_every_way_out(tiny_config: MakeConfig, long_text: Path, tmp_path: Path) -> None:
    text = TextConfig(source=str(long_text), txt_documents="line", heldout_fraction=0.1, pairs_fraction=0.1)
    with pytest.raises(CorpusError, match=r"text\.pairs_fraction, or .* raise max_contexts_per_document"):
        collect(tiny_config(text=text, pair_tokens=5000, max_contexts_per_document=1), tmp_path)


def contexts_of(rows: list[list[int]], starts: list[tuple[int, int]]) -> Contexts:
    tokens = np.array(rows, np.int32)
    begins = np.zeros(tokens.shape, np.bool_)
    begins[tuple(np.array(starts).T)] = True
    return Contexts.of([Context(*one) for one in zip(tokens, begins, strict=True)], tokens.shape[1])


# </s> is 1. The second row ends in a document that is cut by the context, the third in padding.
EXAMPLE = contexts_of(
    [[5, 6, 7, 1, 8, 9, 1], [1, 5, 6, 1, 7, 8, 9], [5, 6, 1, 7, PAD, PAD, PAD]],
    [(0, 0), (0, 4), (1, 1), (1, 4), (2, 0), (2, 3)],
)


def test_losses_across_documents_and_on_special_tokens_are_left_out(tiny_config: MakeConfig) -> None:
    mask = BaseModel.load(tiny_config().model).keep_mask
    counted = counted_losses(True, mask, EXAMPLE)
    assert [row.nonzero().flatten().tolist() for row in counted] == [[0, 1, 4], [1, 4, 5], [0]]
    every = counted_losses(False, mask, EXAMPLE)
    assert [row.nonzero().flatten().tolist() for row in every] == [[*range(6)], [*range(6)], [0, 1, 2]]


def test_pairs_are_positions_that_a_counted_loss_depends_on(tiny_config: MakeConfig) -> None:
    config = tiny_config()
    model = BaseModel.load(config.model)
    pairs = countable(config, Split.PAIRS, model.keep_mask, EXAMPLE)
    assert [row.nonzero().flatten().tolist() for row in pairs] == [[1, 2, 4], [1, 2, 4, 5], []]
    g_NLD = model.gradients(EXAMPLE.tokens_NL, counted_losses(True, model.keep_mask, EXAMPLE)).g_NLD
    has_g = g_NLD.abs().amax(-1) > 0
    assert torch.equal(pairs, has_g & model.keep_mask(EXAMPLE.tokens_NL))


def test_what_a_skipped_target_is_has_no_influence_on_g(tiny_config: MakeConfig) -> None:
    """The last target of a context is seen by no position: changing it changes g only if its loss is counted."""
    model = BaseModel.load(tiny_config().model)
    tokens, starts = torch.tensor([[5, 6, 7, 8, 9]], dtype=torch.int32), torch.zeros(1, 5, dtype=torch.bool)
    starts[0, 4] = True
    for skipped in (True, False):
        gradients = []
        for target in (9, 30):
            contexts = Contexts(torch.cat([tokens[:, :4], torch.tensor([[target]], dtype=torch.int32)], 1), starts)
            counted = counted_losses(skipped, model.keep_mask, contexts)
            gradients.append(model.gradients(contexts.tokens_NL, counted).g_NLD)
        assert torch.equal(*gradients) == skipped
