"""What is asked of the Hugging Face Hub, and a clear error when there is no answer."""

from pathlib import Path

from dmsae.errors import CorpusError, DmsaeError, first_line


def download(repo: str, patterns: list[str], error_type: type[DmsaeError], revision: str | None = None) -> Path:
    """Return a local snapshot of the matching files of a Hub repository; failure is an error of `error_type`."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as error:  # what an unreachable host raises depends on the HTTP client in use
        raise error_type(
            f"{repo!r} cannot be downloaded from the Hub: {first_line(error)}. Check the name, the network and (for "
            "gated repositories) 'hf auth login'; or give a local directory."
        ) from error


def dataset_commit(name: str, revision: str = "") -> str | None:
    """Return the commit that a branch or tag of a Hub dataset points to; "" is the default branch."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name, revision=revision or None).sha
    except Exception as error:  # see above
        raise CorpusError(
            f"The Hub dataset {name!r} cannot be reached: {first_line(error)}. Check the name and the network, or give "
            "a local file as text.source."
        ) from error
