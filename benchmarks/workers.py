"""Starts the workers of a `MultiWorkerMirroredStrategy` on this machine."""

import contextlib
import json
import os
import socket
import subprocess


def run_workers(count, command, folder, seconds):
    """Runs one command in several processes that find each other.

    Args:
        count: Int. Number of workers.
        command: List of strings, the command and its arguments.
        folder: `pathlib.Path` of the folder for what they print: `log0`, ...
        seconds: Float. How long each may take.

    Returns:
        List of their exit codes. None of them outlives the call.

    Raises:
        subprocess.TimeoutExpired: If one of them takes longer.
    """
    environments = tf_configs([("worker", rank) for rank in range(count)])
    return run_tasks(environments, command, folder, seconds)


def tf_configs(tasks):
    """Returns the variables of the environment of each task of a cluster.

    Args:
        tasks: List of pairs of a type, such as `"worker"`, and an index.
    """
    cluster: dict = {}
    for (kind, _), port in zip(tasks, free_ports(len(tasks)), strict=True):
        cluster.setdefault(kind, []).append(f"127.0.0.1:{port}")
    return [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": cluster, "task": {"type": kind, "index": index}}
            )
        }
        for kind, index in tasks
    ]


def run_tasks(environments, command, folder, seconds):
    """Runs one command in a process for each dict of variables.

    Other arguments, result and errors are those of `run_workers`.
    """
    processes = []
    try:
        for rank, variables in enumerate(environments):
            with open(folder / f"log{rank}", "w") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **variables},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        return [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
