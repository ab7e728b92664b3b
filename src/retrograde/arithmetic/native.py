"""Compiles `cpu.c` with the machine's own C compiler, once, and calls it.

The library is built at first use and kept in the user's cache directory under a name made of the source, the flags, the kind
of processor, and a digest of the library itself. Only a file of the user's own, in a directory that nobody else can write to,
with that digest is loaded: a damaged one is built again, and where there is no such directory, it is built for this process
alone. Where there is no compiler, or RETROGRADE_NATIVE=0 is set, `function` returns None and the torch bodies are used: slower,
the same bits. A compiler that was asked for (CC) and fails is warned of.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

_SOURCE = Path(__file__).with_name("cpu.c")
_FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")


_TYPES = {
    "t": ctypes.py_object, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float
}  # fmt: skip
SIGNATURES = {
    "advance": "t t t t t i i f f i i t t t t i",
    "pull": "t t f i t",
    "retreat": "t t t t t i i f f i i t t i",
    "encode": "t f t t i",
    "decode": "t f t",
    "carry": "t t t f f f f i t t t t t",
    "digest": "t t l l",
    "sample": "t l l t l l",
}
"""The arguments of the compiled functions: t a tensor, a dtype or None, i and l integers of 32 and 64 bits, f a float."""
_PYTHON = ("Object_CallMethodObjArgs", "Object_GetAttr", "Long_AsVoidPtr", "_DecRef", "Eval_SaveThread",
           "Eval_RestoreThread", "Err_SetString")  # fmt: skip
_OBJECTS = (TypeError, None, "data_ptr", "numel", "nbytes", "itemsize", "dtype")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int16, torch.int32)


@functools.cache
def _library() -> ctypes.PyDLL | None:
    asked = shlex.split(os.environ.get("CC", ""))
    compiler = asked or [found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))][:1]
    if not compiler or sys.platform == "win32" or os.environ.get("RETROGRADE_NATIVE") == "0":
        return None
    error: Exception | None = None
    for machine in (("-march=native",), ()):
        try:
            return _loaded(compiler, (*_FLAGS, *machine))
        except (OSError, subprocess.SubprocessError) as failed:
            error = failed
    if asked:
        warnings.warn(
            f"CC={shlex.join(asked)} did not compile the CPU kernels ({error}): slower ones are used.", stacklevel=2
        )
    return None


@functools.cache
def function(name: str) -> Callable[..., None] | None:
    """A compiled kernel by its name; None where nothing could be compiled."""
    library = _library()
    return None if library is None else cast(Callable[..., None], getattr(library, f"retrograde_{name}"))


def _loaded(compiler: list[str], flags: tuple[str, ...]) -> ctypes.PyDLL:
    """The library for this source, these flags and this processor, from the cache or newly made."""
    parts = (_SOURCE.read_text(), *compiler, *flags, *_openmp(), _processor())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    cache = _private_cache()
    suffix = sysconfig.get_config_var("SHLIB_SUFFIX") or ".so"
    for library in () if cache is None else sorted(cache.glob(f"cpu-{key}-*{suffix}")):
        if _own(library) and library.name == f"cpu-{key}-{_digest(library)}{suffix}":
            return _with_functions(library)
        library.unlink()
    with tempfile.TemporaryDirectory(dir=cache) as scratch:  # a rename makes it whole or absent
        made = Path(scratch) / f"cpu{suffix}"
        command = [*compiler, *flags, str(_SOURCE), "-o", str(made), "-Wl,--as-needed", *_openmp(), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        loaded = _with_functions(made)
        if cache is not None:
            os.replace(made, cache / f"cpu-{key}-{_digest(made)}{suffix}")
        return loaded


def _with_functions(library: Path) -> ctypes.PyDLL:
    """The library, connected with Python: see `python` in cpu.c."""
    loaded = ctypes.PyDLL(str(library))
    missing = [name for name in (*SIGNATURES, "connect") if not hasattr(loaded, f"retrograde_{name}")]
    if missing:
        raise OSError(f"{library} has no function retrograde_{missing[0]}")
    functions = [ctypes.cast(getattr(ctypes.pythonapi, f"Py{name}"), ctypes.c_void_p).value for name in _PYTHON]
    pointers = [*functions, *map(id, (*_OBJECTS, *_DTYPES))]
    loaded.retrograde_connect((ctypes.c_void_p * len(pointers))(*pointers))
    for name, types in SIGNATURES.items():
        kernel = getattr(loaded, f"retrograde_{name}")
        kernel.argtypes = [_TYPES[c] for c in types.split()]
        kernel.restype = None
    return loaded


def _cache_home() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"


def _private_cache() -> Path | None:
    """The cache directory, made if need be and closed to others; None where that cannot be had."""
    try:
        folder = _cache_home() / "retrograde"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _own(folder):
            return None
        folder.chmod(0o700)
        return folder if os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # no home
        return None


def _own(path: Path) -> bool:
    """Whether it is the user's own, and itself rather than a link to something."""
    return not path.is_symlink() and path.stat().st_uid == os.getuid()


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:32]


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
