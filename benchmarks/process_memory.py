"""The memory of a process: how much it takes, and training in too little of it.

The benchmarks and the tests share this.
"""

import ctypes
import multiprocessing
import os
import pathlib
import sys
import tempfile

import tensorflow as tf


def peak_memory():
    """Returns the peak so far in bytes: of the GPUs, or of this process."""
    if gpus := _gpus():
        info = tf.config.experimental.get_memory_info
        return max(info(gpu)["peak"] for gpu in gpus)
    if sys.platform == "linux":
        # `ru_maxrss` begins with the peak of the process that started this one.
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS


def live_memory():
    """Returns what is held now, and forgets the peak. `None` if it cannot."""
    if gpus := _gpus():
        for gpu in gpus:
            tf.config.experimental.reset_memory_stats(gpu)
    elif sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    else:
        return None
    return peak_memory()


def _gpus():
    count = len(tf.config.list_logical_devices("GPU"))
    return [f"GPU:{i}" for i in range(count)]


def run_limited(limit, function, *arguments):
    """Calls a function of a module in a new process, which may run out of it.

    `limit` are the megabytes that TensorFlow has for its tensors, or `None`.
    Returns what the function returned and `None`, or `None` and the error.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_call, args=(sender, limit, function, arguments), daemon=True
    )
    environment, stderr = dict(os.environ), os.dup(2)
    with tempfile.TemporaryFile() as log:
        # What a process reads when it starts. The limit is one of TensorFlow,
        # which then raises an error, as on a GPU. Where the system refuses
        # memory, convolutions end the process; those of oneDNN always do.
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
        os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = str(int(bool(limit)))
        os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit or 0)
        os.dup2(log.fileno(), 2)  # where it logs what is in memory
        try:
            process.start()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            os.environ.clear()
            os.environ.update(environment)
        sender.close()  # only the process has it now, and closes it at its end
        try:
            return receiver.recv()
        except EOFError:
            process.join()
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            return None, f"exit code {process.exitcode}"
        finally:
            process.kill()
            process.join()


def _call(connection, limit, function, arguments):
    for gpu in tf.config.list_physical_devices("GPU") if limit else []:
        device = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
        tf.config.set_logical_device_configuration(gpu, [device])
    try:
        connection.send((function(*arguments), None))
    except Exception as error:
        connection.send((None, describe_error(error)))
        connection.close()
        os._exit(1)  # with XLA, TensorFlow cannot free what is left


def describe_error(error):
    """Returns the type of an error, and the first line of its message."""
    first, *_ = str(error).strip().split("\n")
    return f"{type(error).__name__}: {first}"
