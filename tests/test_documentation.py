"""What users read runs: docstrings, the README, the notebooks."""

import dataclasses
import doctest
import functools
import importlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock

import cases
import keras
import nbclient
import nbformat
import numpy as np
import pytest
import tensorflow as tf
from cases import Case
from helpers import check_weights, datasets, train_big, train_case
from markdown.extensions.toc import slugify

import accumodel
from accumodel import callbacks, model
from accumodel._update import accumulator
from benchmarks import exactness, memory, speed
from benchmarks.peers import __main__ as peers
from benchmarks.peers import keras_3, run

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("docs/**/*.md"))


LONG_PAGES = (
    "batch-normalization.md",
    "contrastive.md",
    "padding.md",
    "remainders-and-masks.md",
)


def find_programs():
    """Yields what stands under a heading of the README, and on a page."""
    texts = {
        section.split("\n", 1)[0]: section
        for section in re.split(
            r"^##? ", (ROOT / "README.md").read_text(), flags=re.M
        )
    }
    pages = {page.name: page.read_text() for page in PAGES}
    for name, text in {**texts, **pages}.items():
        snippets = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
        if snippets:
            marks = [pytest.mark.slow] if name in pages else []
            marks += [pytest.mark.weekly] if name in LONG_PAGES else []
            yield pytest.param("\n".join(snippets), id=name, marks=marks)


@pytest.mark.table
@pytest.mark.parametrize("module", [accumulator, callbacks, model])
def test_examples_in_docstrings_run(module):
    names = {
        "accumodel": accumodel,
        "keras": keras,
        "np": np,
        "tempfile": tempfile,
        "tf": tf,
    }
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0


def public_members():
    """Yields the public classes, and what they have next to Keras's classes.

    By its first name: an older name of the same is in no page.
    """
    for class_name in accumodel.__all__:
        public_class = getattr(accumodel, class_name)
        yield pytest.param(public_class, id=class_name)
        members = vars(public_class)
        first = {id(members[name]): name for name in reversed(members)}
        for name, member in members.items():
            known = any(name in dir(base) for base in public_class.__bases__)
            known |= first[id(member)] != name
            if not name.startswith("_") and not known:
                yield pytest.param(member, id=f"{class_name}.{name}")


@pytest.mark.parametrize("name", accumodel.__all__)
def test_public_classes_have_an_example(name):
    assert ">>> " in getattr(accumodel, name).__doc__


@pytest.mark.parametrize("member", list(public_members()))
def test_public_names_have_a_docstring(member):
    if isinstance(member, classmethod):
        member = member.__func__
    assert member.__doc__


@pytest.mark.filterwarnings("ignore:Out of memory")  # which a page shows
@pytest.mark.filterwarnings(
    "ignore::accumodel.InexactWarning"
)  # which pages show
@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed")  # Keras's
@pytest.mark.filterwarnings("ignore:`model` is compiled")  # by keras-hub
@pytest.mark.filterwarnings("ignore:Layer InputLayer does not")  # `quantize`
@pytest.mark.parametrize("program", list(find_programs()))
def test_snippets_run_as_they_stand(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some save files
    exec(compile(program, "snippets", "exec"), {})


def trains(**kwargs):
    return lambda: keras.optimizers.AdamW(0.01, **kwargs)


def vectors(samples, rng):
    x, _ = cases.classes(samples, rng)
    return x, x[:, : cases.CLASSES] ** 2


VECTORS = {"make": cases.linear, "data": vectors}

# The plain trainings that the class on the page `idea.md` claims.
IDEA = {
    "full cycles": Case(sizes=cases.WHOLE),
    "short batches": Case(),
    "masks": Case(make=cases.recurrent, data=cases.tokens),
    "sample weights": Case(data=cases.weighted_classes),
    "sample weights that divide, under a mask": Case(
        **cases.TAGS | {"data": cases.weighted_tokens},
        loss=cases.sparse_crossentropy("mean_with_sample_weight"),
    ),
    "sums": Case(loss=cases.sparse_crossentropy("sum"), optimizer=trains()),
    "one number": Case(**VECTORS, loss=lambda: cases.squared_error_as_scalar),
    "one for each class": Case(
        **VECTORS, loss=lambda: lambda y, p: tf.reduce_mean((y - p) ** 2, 0)
    ),
    "two outputs": Case(**cases.HEADS, loss=lambda: cases.BOTH_LOSSES),
    "regularizers": Case(
        make=functools.partial(cases.dense, kernel_regularizer="l2")
    ),
    "a schedule": Case(
        optimizer=lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(0.01, 9)
        )
    ),
    "averages": Case(optimizer=trains(use_ema=True, ema_overwrite_frequency=2)),
    "a global norm": Case(optimizer=trains(global_clipnorm=0.01)),
    "mixed precision": Case(policy="mixed_float16", tolerance=1e-3),
    "validation": Case(
        fit={"validation_data": cases.classes(8, np.random.default_rng(0))}
    ),
    "eager": Case(compile={"run_eagerly": True}),
    "steps_per_execution": Case(compile={"steps_per_execution": 2}),
}


@pytest.mark.table
@pytest.mark.parametrize("case", IDEA.values(), ids=IDEA)
def test_the_idea_in_one_file_ends_with_the_weights_of_keras(case):
    page, names = ROOT / "docs" / "idea.md", {}
    (code,) = re.findall(
        r"^```python\n(.*?)^```", page.read_text(), re.M | re.S
    )
    exec(compile(code, "idea", "exec"), names)
    reference, _ = train_big(case, keras.Model)
    ours, (_, micro) = names["AccumulatingModel"], datasets(case)
    steps = max(map(len, case.sizes))
    fed, _ = train_case(case, ours, micro, accum_steps=steps)
    cut, _ = train_big(case, ours, micro_batch_size=case.micro_batch_size)
    for each in (fed, cut):
        check_weights(each, reference, case)


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *PAGES], ids=lambda page: page.name
)
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)  # also of pictures
    targets += re.findall(r"^ *\[[^\]]+\]: *<?([^>\s]+)", text, re.M)
    for target in targets:
        # Nobody owns an address of this name yet: whoever did would speak for
        # the project.
        assert not re.search("(github|pypi).*/accumodel", target), target
        if target.startswith("https://"):
            continue  # another machine's
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", linked.read_text(), re.M)
            slugs = [slugify(heading, "-") for heading in headings]
            assert anchor in slugs, target


def test_llms_txt_links_to_pages():
    text = (ROOT / "docs" / "llms.txt").read_text()
    for target in re.findall(r"\]\((.*?)/\)", text):
        assert ROOT / "docs" / f"{target}.md" in PAGES, target


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path],
        cwd=ROOT,
        timeout=300,
        check=True,
    )
    limits = (tmp_path / "limits/index.html").read_text()
    assert '<th scope="row">batch normalization</th>' in limits
    reference = (tmp_path / "reference/index.html").read_text()
    for member in public_members():
        assert f'id="accumodel.{member.id}"' in reference


NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_hold_the_outputs_of_one_run(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [
        i + 1 for i in range(len(code))
    ]


@pytest.mark.weekly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600).execute()


def run_benchmark(command):
    """Does what `python -m benchmarks.NAME ARGUMENTS` does, in this process.

    To import TensorFlow in a new one takes longer than some benchmarks. The
    paths in the command have no spaces.
    """
    name, *arguments = command.split()
    with (
        mock.patch.object(sys, "argv", [name, *arguments]),
        mock.patch.dict(os.environ),
    ):
        importlib.import_module(f"benchmarks.{name}").main()


def figures_of(command, tmp_path):
    """Runs a benchmark, and returns the figures that it writes."""
    path = tmp_path / "figures.json"
    run_benchmark(f"{command} --json={path}")
    return json.loads(path.read_text())


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("command", "rows"),
    [
        ("speed --models embedding --steps 2 --jit on --rounds=1 --calls=2", 1),
        ("memory --sizes 16", 4),
        ("noise_scale --epochs=4", 4),
        ("batch_norm --epochs=1 --seeds=1", 3),
    ],
)
def test_benchmarks_run_and_write_figures_and_picture(
    command, rows, tmp_path, monkeypatch
):
    # Not each way in a process: one benchmark that has them shows that it can.
    monkeypatch.setattr(memory, "run_each", itertools.starmap)
    paths = tmp_path / "figures.json", tmp_path / "picture.png"
    outputs = [f"--json={paths[0]}", f"--plot={paths[1]}"]
    run_benchmark(f"{command} {' '.join(outputs)}")
    assert len(json.loads(paths[0].read_text())) == rows
    assert paths[1].stat().st_size > 10_000


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("size", "arguments"), [(128, "--limit 250"), (64, "--limit 300 --jit")]
)
def test_the_benchmark_of_memory_lets_it_run_out(size, arguments, tmp_path):
    command = f"memory --sizes {size} {arguments}"
    _, plain, auto = figures_of(command, tmp_path)
    assert plain["ended"] == "ResourceExhaustedError"
    assert auto["ended"] == "trained"
    assert auto["size found"] < size
    assert auto["difference"] < 1e-6


@pytest.mark.weekly
@pytest.mark.skipif(sys.platform != "linux", reason="resets a peak")
def test_the_benchmark_of_memory_counts_copies(tmp_path, monkeypatch):
    # Neither a process each nor a large model: the figures mean nothing.
    monkeypatch.setattr(memory, "run_each", itertools.starmap)
    monkeypatch.setattr(memory, "LARGE", {"tiny": speed.tiny})
    for row in figures_of("memory --parameters", tmp_path):
        assert all(np.isfinite(row[way]) for way in memory.COPIES)


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore:`accum_steps` is 8")  # of so few samples
def test_other_benchmarks_compare_what_they_say(tmp_path):
    command = "features --models tiny --jit off --rounds=1 --calls=8"
    (row,) = figures_of(command, tmp_path)
    for name in ("cache", "norm", "hook", "auto"):
        assert row[f"{name} / alone"] == pytest.approx(row[name] / row["alone"])
    row, *_ = figures_of("divisors --rounds=1 --calls=8", tmp_path)
    assert all(row[f"{name}, MB"] > 0 for name in ("own", "samples", "cache"))
    figures = figures_of("padding --samples 32 --rounds 1 --units 8", tmp_path)
    ways = ["plain", "micro_batch_size", "trim_padding", "buckets"]
    assert [list(row) for row in figures.values()] == [ways, ways]
    command = "distributed --models embedding --steps 2 --rounds=1"
    (row,) = figures_of(command, tmp_path)
    assert row["one a cycle"]["reductions"] == 0.5
    assert row["one a micro-batch"]["reductions"] == 1.5


@pytest.mark.weekly
def test_the_comparison_with_keras_finds_accumodel_exact(tmp_path, monkeypatch):
    *_, long = exactness.ROUNDING
    short = dataclasses.replace(long, samples=320)
    monkeypatch.setattr(exactness, "ROUNDING", [short])
    figures = figures_of("exactness", tmp_path)
    assert len(figures) == 8 + 1 + 1 + 1
    assert figures.pop("contrastive")["gradient_cache"] < 1e-6
    assert figures.pop("batch normalization")["sync_batch_norm"] < 1e-6
    for row in figures.values():
        if "accum_steps" in row:
            assert row["accum_steps"] < 1e-6
            assert row["micro_batch_size"] < 1e-6
        else:  # longer trainings magnify rounding, as much as in Keras
            assert row["micro_batch_size"] < 30 * row["reversed"]


def test_the_support_matrix_is_that_of_the_workflows():
    program = [sys.executable, ROOT / ".ci" / "support_matrix.py"]
    table = subprocess.run(program, check=True, stdout=subprocess.PIPE).stdout
    assert table.decode() in (ROOT / "docs" / "reference.md").read_text()


def test_the_comparison_has_a_row_for_each_peer_with_its_versions():
    page = (ROOT / "docs" / "how-it-compares.md").read_text()
    for name, peer in peers.PEERS.items():
        rows = re.findall(rf"^\| {name} \| (.*) \|$", page, re.M)
        figures, versions = (row.split(" | ") for row in rows)
        assert len(figures) == len(run.CASES)
        assert versions[0] == ", ".join(peer.requirements)


def test_the_comparison_says_what_was_not_installed_or_does_not_exist():
    def train(case, batch_size, steps):
        if case.layer:
            raise NotImplementedError
        return [np.zeros(2), np.full(3, float(batch_size))]

    distances = run.compare(train)
    assert distances["full cycles"] == 24  # 32 at once, or 8
    assert distances["batch norm"] is None
    failed = subprocess.CalledProcessError(1, "pip", stderr="a\nno such one")
    with mock.patch.object(peers, "measure", side_effect=[distances, failed]):
        figures = peers.measure_all(["optax", "lightning"])
    assert list(peers.make_table(figures).columns[0].cells) == ["optax"]
    assert list(peers.make_version_table(figures).columns[1].cells) == [
        "optax==0.2.8, jax==0.10.2",
        "not installed: no such one",
    ]


@pytest.mark.weekly
def test_the_comparison_finds_accumodel_exact_in_all_cases():
    assert max(run.compare(keras_3.train).values()) < 1e-6
