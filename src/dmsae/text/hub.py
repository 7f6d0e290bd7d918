"""What is asked of the Hugging Face Hub, and a clear error when there is no answer."""

import os
from pathlib import Path

from dmsae.errors import CorpusError, DmsaeError, first_line

_ANSWER_SECONDS = 10.0
"""How long the Hub has to answer. Its own client would wait for ever."""


def download(repo: str, patterns: list[str], error_type: type[DmsaeError], revision: str | None = None) -> Path:
    """Return a local snapshot of the matching files of a Hub repository; failure is an error of `error_type`."""
    from huggingface_hub import snapshot_download

    problem = _problem(repo, revision)
    try:
        offline = problem is not None  # what was downloaded earlier may still do
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=offline))
    except Exception as error:  # what an unreachable host raises depends on the HTTP client in use
        raise error_type(
            f"{repo!r}: no such directory; not found on the Hub either: {first_line(problem or error)}. Check the "
            "name, the network and (for gated repositories) 'hf auth login'; or give a local directory."
        ) from error


def dataset_commit(name: str, revision: str = "") -> str | None:
    """Return the commit that a branch or tag of a Hub dataset points to; "" is the default branch."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name, revision=revision or None, timeout=_ANSWER_SECONDS).sha
    except Exception as error:  # see above
        raise CorpusError(
            f"The Hub dataset {name!r} cannot be reached: {first_line(error)}. Check the name and the network, or give "
            "a local file as text.source."
        ) from error


def file_sizes(repo: str, revision: str | None = None) -> dict[str, int] | None:
    """Return the size of each file in a model repository, as the Hub states it; None when the Hub does not answer."""
    from huggingface_hub import HfApi

    if os.environ.get("DMSAE_OFFLINE"):
        return None
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=_ANSWER_SECONDS, files_metadata=True)
    except Exception:  # see above
        return None
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _problem(repo: str, revision: str | None) -> Exception | None:
    """Return what keeps the Hub from giving a repository; None if it says that it has it."""
    from huggingface_hub import HfApi

    if os.environ.get("DMSAE_OFFLINE"):
        return ConnectionError("DMSAE_OFFLINE is set")
    try:
        HfApi().model_info(repo, revision=revision, timeout=_ANSWER_SECONDS)
    except Exception as error:  # see above
        return error
    return None
