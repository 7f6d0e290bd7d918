"""What MkDocs calls while it builds the site: pages made from the code and from the notebooks."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from notebooks import read_notebook, to_markdown
from pages import api_page, cli_page

_GENERATED = {"reference/cli.md": cli_page, "reference/api.md": api_page}


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the generated pages; a notebook becomes a page of the same name."""
    for path, page in _GENERATED.items():
        files.append(File.generated(config, path, content=page()))
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            assert file.abs_src_path is not None
            text = to_markdown(read_notebook(Path(file.abs_src_path)), Path(file.src_uri).name)
            files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=text))
    return files
