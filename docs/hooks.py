"""Called by `mkdocs`: puts the notebooks next to the pages.

They stand outside of `docs/`, where links of pages lead in the repository.
"""

import pathlib

from mkdocs.structure.files import File


def on_files(files, config):
    folder = pathlib.Path(config.config_file_path).parent / "notebooks"
    for path in sorted(folder.glob("*.ipynb")):
        uri = f"notebooks/{path.name}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    return markdown.replace("](../notebooks/", "](notebooks/")
