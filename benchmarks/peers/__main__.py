import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import venv

import rich.table

from benchmarks import peers
from benchmarks.peers.data import CASES
from benchmarks.report import make_parser, report

ROOT = pathlib.Path(__file__).parent.parent.parent
ENVIRONMENTS = ROOT / "build" / "peers"
KERAS, TORCH, JAX = "keras==3.15.1", "torch==2.13.0", "jax==0.10.2"
TENSORFLOW = "tensorflow==2.21.0"


@dataclasses.dataclass(frozen=True)
class Peer:
    """A module of this folder that trains, and what it needs."""

    module: str
    requirements: tuple[str, ...]
    backend: str = "tensorflow"  # of Keras


PEERS = {
    "accumodel": Peer("keras_3", (KERAS, TENSORFLOW)),
    "keras-tensorflow": Peer("keras_own", (KERAS, TENSORFLOW)),
    "keras-jax": Peer("keras_own", (KERAS, JAX), "jax"),
    "keras-torch": Peer("keras_own", (KERAS, TORCH), "torch"),
    "gradient-accumulator": Peer(
        "keras_2", ("gradient-accumulator==0.5.2", "tensorflow==2.12.0")
    ),
    "optax": Peer("optax_multi_steps", ("optax==0.2.8", JAX)),
    "pytorch": Peer("torch_loop", (TORCH,)),
    "accelerate": Peer("torch_accelerate", ("accelerate==1.15.0", TORCH)),
    "transformers": Peer(
        "torch_transformers",
        ("transformers==5.24.0", "accelerate==1.15.0", TORCH),
    ),
    "lightning": Peer("torch_lightning", ("lightning==2.6.6", TORCH)),
}

# The arguments of accumodel's row, by the names of cases.
SWITCHED_ON = {
    "batch norm": "(`sync_batch_norm`)",
    "in-batch loss": "(`gradient_cache`)",
}


def make_environment(name, requirements):
    """Returns its Python, or raises `CalledProcessError` of pip."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    done = folder / "installed.txt"
    wanted = "\n".join(requirements)
    if not done.exists() or done.read_text() != wanted:
        what = ", ".join(requirements)
        print(f"installing {what} into {folder}", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "numpy", *requirements],
            check=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        done.write_text(wanted)
    return python


def measure(name):
    """Returns the distances of a peer by the case."""
    peer = PEERS[name]
    python = make_environment(name, peer.requirements)
    path = ENVIRONMENTS / f"{name}.json"
    subprocess.run(
        [python, "-m", "benchmarks.peers.run", peer.module, path],
        cwd=ROOT,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "-1",
            "KERAS_BACKEND": peer.backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        check=True,
        stdout=sys.stderr,
    )
    return json.loads(path.read_text())


def measure_all(names):
    """Returns the distances of the peers, or why one was not installed."""
    figures = {}
    for name in names:
        try:
            figures[name] = measure(name)
        except subprocess.CalledProcessError as error:
            if not error.stderr:
                raise  # it was installed, and does not run
            figures[name] = error.stderr.splitlines()[-1]
    return figures


def make_table(figures):
    table = rich.table.Table(title="From each framework's own large batch")
    table.add_column("peer", no_wrap=True)
    for case in CASES:
        header = f"{case.name} {SWITCHED_ON.get(case.name, '')}".rstrip()
        table.add_column(header, justify="right", overflow="fold")
    for name, distances in figures.items():
        if isinstance(distances, dict):
            table.add_row(name, *map(as_text, distances.values()))
    return table


def as_text(distance):
    if distance is None:
        return "-"
    return f"{distance:.0e}".replace("e-0", "e-").replace("e+00", "")


def make_version_table(figures):
    table = rich.table.Table(title="Versions")
    for header in ("peer", "installed"):
        table.add_column(header)
    for name, distances in figures.items():
        installed = ", ".join(PEERS[name].requirements)
        if isinstance(distances, str):
            installed = f"not installed: {distances}"
        table.add_row(name, installed)
    return table


def main():
    parser = make_parser(peers.__doc__, plot=False)
    parser.add_argument(
        "--only", nargs="+", choices=PEERS, default=PEERS, metavar="NAME"
    )
    arguments = parser.parse_args()
    figures = measure_all(arguments.only)
    tables = [make_table(figures), make_version_table(figures)]
    report(arguments, figures, tables)


if __name__ == "__main__":
    main()
