"""Which code of ours is running: what several processes do together has to be done by one version of it."""

import hashlib
from functools import cache
from pathlib import Path


@cache
def code_digest() -> str:
    """Return a hash of the package's source files, as they were when this process first asked."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
