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
    """Makes heads of the first cells of rows, which screen readers repeat.

    And lets long names in tables break after an underscore, on phones.
    """
    first = r"(<tr>\s*)<td([^>]*)>(.*?)</td>"
    output = re.sub(first, r'\1<th scope="row"\2>\3</th>', output, flags=re.S)
    cell = r"<(td|th scope).*?</t[dh]>"
    return re.sub(cell, _break_names, output, flags=re.S)


def _break_names(cell):
    return re.sub("_(?=[^<>]*</code>)", "_<wbr>", cell[0])
