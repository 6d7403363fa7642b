"""Called by `mkdocs`: puts the notebooks next to the pages.

They stand outside of `docs/`, where links of pages lead in the repository.
"""

import pathlib
import re

from mkdocs.structure.files import File


def on_files(files, config):
    folder = pathlib.Path(config.config_file_path).parent / "notebooks"
    for path in sorted(folder.glob("*.ipynb")):
        uri = f"notebooks/{path.name}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    return markdown.replace("](../notebooks/", "](notebooks/")


def on_post_page(output, page, config):
    """Lets long names in tables break after an underscore, on phones."""
    return re.sub(r"<td.*?</td>", _break_names, output, flags=re.S)


def _break_names(cell):
    return re.sub("_(?=[^<>]*</code>)", "_<wbr>", cell[0])
