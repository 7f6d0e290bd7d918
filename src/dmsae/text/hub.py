"""Files from the Hugging Face Hub, and a clear word when they cannot be had."""

from pathlib import Path

from dmsae.errors import DmsaeError


def download(repo: str, patterns: list[str], error_type: type[DmsaeError], revision: str | None = None) -> Path:
    """Return a local snapshot of the files of a Hub repository that match; `error_type` says why there is none."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as error:  # what an unreachable host raises depends on the HTTP client of the day
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise error_type(
            f"{repo!r} cannot be downloaded from the Hub: {reason}. Check the name, the network and (for gated "
            "repositories) 'hf auth login'; or give a local directory."
        ) from error
