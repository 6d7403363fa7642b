"""What PyPI shows and holds: the description, the README, the sdist."""

import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def test_sdist_holds_what_the_tests_need(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path, ROOT],
        timeout=300,
        check=True,
    )
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    for pattern in (
        "*.md",
        ".ci/*",
        "CITATION.cff",
        "LICENSE",
        "accumodel/*.py",
        "benchmarks/*.py",
        "docs/**/*.*",
        "mkdocs.yml",
        "notebooks/*.ipynb",
        "pyproject.toml",
        "tests/*.py",
    ):
        needed = {
            path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)
        }
        assert needed, pattern
        assert needed <= held


def test_links_of_the_readme_are_absolute():
    # PyPI shows the README without the files around it.
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(
        r"(?m)(?:\]\(|^\[.+\]: |src=\"|href=\")([^)\"\s]+)", readme
    )
    assert links
    assert [link for link in links if not re.match("https://|#", link)] == []


def test_description_has_the_words_that_people_search_for():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    assert "gradient accumulation" in project["description"].lower()
    assert "gradient accumulation" in project["keywords"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert project["description"] in citation
