"""The memory of this process, for the demonstration, the check, benchmarks."""

import ctypes
import pathlib
import sys


def peak_memory():
    """Returns the peak memory of this process so far, in bytes."""
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
    """Returns what this process holds, and forgets its peak. On Linux only."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()
