"""Compiles `cpu.c` with the machine's own C compiler, once, and calls it.

The library is built at first use and kept in the user's cache directory under a name made of the source, the flags and the
kind of processor. Where there is no compiler, or RETROGRADE_NATIVE=0 is set, `function` returns None and the torch bodies are
used: slower, the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

_SOURCE = Path(__file__).with_name("cpu.c")
_FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")


class Job(ctypes.Structure):
    """One step over a whole tensor; the fields are those of `job` in cpu.c."""

    _fields_ = [
        ("x", ctypes.c_void_p), ("v", ctypes.c_void_p), ("i", ctypes.c_void_p), ("y", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("size", ctypes.c_int64), ("width", ctypes.c_int32), ("n", ctypes.c_int32), ("d", ctypes.c_int32),
        ("guard", ctypes.c_int32), ("scale", ctypes.c_float), ("unit", ctypes.c_float), ("form", ctypes.c_int32),
        ("what", ctypes.c_int32), ("peak", ctypes.c_void_p), ("bad", ctypes.c_int32), ("mask", ctypes.c_void_p),
        ("before", ctypes.c_void_p), ("over", ctypes.c_int32),
    ]  # fmt: skip


ADVANCE, PULL, RETREAT = range(3)
SIGNATURES = {
    "run": "p i",  # job, threads
    "carry": "p p p p p p p p l f f f f i i",  # p, h, d, out, gy, cast, mask, after, size, c, e, e1, gain, form, threads
    "digest": "p l l l p i",  # memory, bytes, seed, sign, into, threads
}
"""The arguments of the compiled functions: p a pointer, l and i integers of 64 and 32 bits, f a float."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or sys.platform == "win32" or os.environ.get("RETROGRADE_NATIVE") == "0":
        return None
    for machine in (("-march=native",), ()):
        try:
            return ctypes.CDLL(str(_build(compiler, (*_FLAGS, *machine))))
        except (OSError, RuntimeError, subprocess.SubprocessError):
            continue
    return None


@functools.cache
def function(name: str) -> Callable[..., None] | None:
    """A compiled function by its name in `SIGNATURES`; None where nothing could be compiled."""
    library = _library()
    if library is None:
        return None
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}
    found = getattr(library, f"retrograde_{name}")
    found.argtypes = [kinds[c] for c in SIGNATURES[name].split()]
    found.restype = None
    return cast(Callable[..., None], found)


def _build(compiler: str, flags: tuple[str, ...]) -> Path:
    """The library for this source, these flags and this processor, from the cache or newly made."""
    key = hashlib.sha256(
        "\0".join((_SOURCE.read_text(), compiler, *flags, *_openmp(), _processor())).encode()
    ).hexdigest()[:20]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retrograde"
    library = cache / f"cpu-{key}{sysconfig.get_config_var('SHLIB_SUFFIX') or '.so'}"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:  # a rename makes it whole or absent
            made = Path(scratch) / library.name
            command = [compiler, *flags, str(_SOURCE), "-o", str(made), "-Wl,--as-needed", *_openmp(), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            os.replace(made, library)
    return library


def _openmp() -> list[str]:
    """Flags to share the threads of the OpenMP library that torch has loaded; none if there is none to share."""
    try:
        mapped = Path("/proc/self/maps").read_text().split()
    except OSError:
        return []
    loaded = sorted({path for path in mapped if "/libgomp" in path})
    return ["-fopenmp", loaded[0]] if len(loaded) == 1 else []


def _processor() -> str:
    """What decides which instructions may be used."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()
