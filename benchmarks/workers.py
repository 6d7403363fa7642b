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
    cluster = {"worker": [f"127.0.0.1:{port}" for port in _free_ports(count)]}
    processes = []
    try:
        for rank in range(count):
            task = {"type": "worker", "index": rank}
            config = json.dumps({"cluster": cluster, "task": task})
            with open(folder / f"log{rank}", "w") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, "TF_CONFIG": config},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        return [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
