"""What PyPI shows and holds: the description, the README, the sdist."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib

import pytest
import yaml

import accumodel

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(TEXT)["project"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The files of the sdist, by their paths."""
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run(
        [sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT],
        timeout=300,
        check=True,
    )
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        yield {
            member.name.partition("/")[2]: archive.extractfile(member).read()
            for member in archive.getmembers()
            if member.isfile()
        }


def test_sdist_holds_what_the_tests_need(sdist):
    for pattern in (
        "*.md",
        ".ci/*",
        "CITATION.cff",
        "LICENSE",
        "accumodel/**/*.py",
        "benchmarks/**/*.py",
        "docs/**/*.*",
        "examples/*.py",
        "mkdocs.yml",
        "notebooks/*.ipynb",
        "pyproject.toml",
        "tests/*.py",
    ):
        needed = {
            path.relative_to(ROOT).as_posix()
            for path in ROOT.glob(pattern)
            if "__pycache__" not in path.parts
        }
        assert needed, pattern
        assert needed <= set(sdist)


def test_an_index_shows_no_link_that_leads_nowhere(sdist):
    # It shows the README without the files around it.
    text = sdist["PKG-INFO"].decode()
    assert "Two lines change" in text
    assert "Project-URL" not in text  # the project has no address yet
    assert re.findall(r"\]\((?!https:|#)|^\[.+\]:|(?:src|href)=", text) == []


def test_description_has_the_words_that_people_search_for():
    assert "gradient accumulation" in PROJECT["description"].lower()
    assert "gradient accumulation" in PROJECT["keywords"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert PROJECT["description"] in citation
    zenodo = json.loads((ROOT / ".zenodo.json").read_text(encoding="utf-8"))
    assert zenodo["description"] == PROJECT["description"]
    assert set(zenodo["keywords"]) <= set(re.findall("- (.*)", citation))


def test_the_recipe_needs_what_the_package_needs():
    text = (ROOT / ".ci" / "recipe.yaml").read_text(encoding="utf-8")
    recipe = yaml.safe_load(text)
    assert recipe["context"]["version"] == accumodel.__version__
    python, *others = recipe["requirements"]["run"]
    assert python == "python >=${{ python_min }}"
    assert PROJECT["requires-python"] == f">={recipe['context']['python_min']}"
    assert [each.replace(" ", "") for each in others] == PROJECT["dependencies"]


PROGRAM = """
import accumodel
import keras

class Classifier(accumodel.AccumulatingModel):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.head = keras.layers.Dense(units)

model = Classifier(3)
model.compile("adam", "mse", micro_batch_size="auto", accum_steps=2)
model.fit([1.0], [1.0], batch_size=8, class_weight=None, verbose=0)
model.evaluate([1.0], [1.0], batch_size=2)
model.train_on_batch([1.0], [1.0])
model.micro_batch_size = 8
other: int | None = accumodel.AccumulatingModel.from_model(model).accum_steps
"""


# What a type checker says of further lines.
TOLD = {
    'model.micro_batch_size = "atuo"': "Literal['atuo']",
    'model.compile(micro_batch_size="atuo")': "Literal['atuo']",
    "reveal_type(model.fit)": 'type is "Any"',  # that of Keras
}


def test_a_type_checker_reads_what_a_user_writes(tmp_path):
    (tmp_path / "program.py").write_text("\n".join([PROGRAM, *TOLD, ""]))
    options = "--strict --ignore-missing-imports --follow-imports=silent"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options.split(), "program.py"],
        env=os.environ | {"MYPYPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    *told, _ = done.stdout.splitlines()
    assert len(told) == len(TOLD), done.stdout
    for line, text in zip(told, TOLD.values(), strict=True):
        assert text in line
