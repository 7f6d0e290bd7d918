"""Every command and every snippet of the documentation runs, or says in the page why it is not run here."""

import re
from pathlib import Path

import pytest

from doc_blocks import DOCS, blocks_of, pages
from doc_reader import Reader, smaller_flags, smaller_recipe

pytestmark = pytest.mark.usefixtures("one_thread")
TUTORIAL = DOCS / "tutorial.md"
NOT_RUN = {
    "distributed.md": 3,  # torchrun; Slurm
    "experiments.md": 1,  # hours
    "findings.md": 1,  # an hour for each seed
    "howto/evaluate.md": 3,  # a model that knows words; minutes; a judge
    "howto/gemma.md": 3,  # a GPU, and the Hub
    "howto/own-model.md": 1,  # the Hub
    "howto/own-text.md": 1,  # the Hub
    "howto/resume.md": 1,  # removes what other pages need
    "howto/saelens.md": 3,  # SAELens; the Hub
    "howto/sweeps.md": 3,  # an installation; an hour; Slurm
    "quickstart.md": 2,  # installs
    "saebench.md": 4,  # an environment of its own; half an hour, twice
}
"""How many blocks of each page are not run."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Someone who has followed the tutorial; the other pages may use what it left."""
    made = Reader(tmp_path_factory.mktemp("reader"))
    made.follow(blocks_of(TUTORIAL))
    return made


@pytest.mark.parametrize(
    "page", [page for page in pages() if page != TUTORIAL and blocks_of(page)], ids=lambda page: page.stem
)
def test_every_block_of_a_page_runs(page: Path, reader: Reader) -> None:
    reader.follow(blocks_of(page))


def test_what_is_not_run_is_counted() -> None:
    counted = {page.relative_to(DOCS).as_posix(): sum(bool(one.not_run) for one in blocks_of(page)) for page in pages()}
    assert {page: count for page, count in counted.items() if count} == NOT_RUN


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_no_command_hides_where_it_would_not_be_run(page: Path) -> None:
    text = page.read_text(encoding="utf8")
    assert text.count("```") == 2 * len(blocks_of(page)), "a fence that is not read as a block"
    assert text.count("*Not run by the tests:") == sum(bool(one.not_run) for one in blocks_of(page))
    assert not re.search(r"^(?: {4}|\t)(?:dmsae|make|pip|python|torchrun|srun|import|from) ", text, flags=re.MULTILINE)


def test_a_command_that_fails_fails_the_page(reader: Reader, tmp_path: Path) -> None:
    (block,) = [one for one in blocks_of(DOCS / "howto" / "resume.md") if "store verify" in one.source]
    with pytest.raises(AssertionError, match="ended with 2"):
        reader.follow([block._replace(source="dmsae core show runs/nowhere\n")])
    with pytest.raises(ZeroDivisionError):
        reader.follow([block._replace(language="python", source="1 / 0\n")])
    with pytest.raises(AssertionError, match="neither run"):
        reader.follow([block._replace(language="sh")])


def test_sizes_are_all_that_is_changed() -> None:
    command = "dmsae transfer --core runs/a --k 20 40 --train.tokens 2_000_000 --cycles 3 --out runs/x2"
    assert smaller_flags(command) == "dmsae transfer --core runs/a --k 3 5 --train.tokens 7680 --cycles 3 --out runs/x2"
    recipe = 'cycles = 4\nk = [20, 40]\nname = "models/mine"\nlr = 1e-3\n'
    assert smaller_recipe(recipe) == 'cycles = 4\nk = [3, 5]\nname = "models/mine"\nlr = 4e-3\n'
