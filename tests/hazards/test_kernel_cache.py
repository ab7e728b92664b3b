"""The cache of compiled kernels: damaged, planted and foreign files are not loaded; what is asked of the compiler is done."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from retrograde.arithmetic import native

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one, and nothing loaded. The flags are for speed of compilation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O0"))
    for name in ("CC", "RETROGRADE_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    native._library.cache_clear(), native.function.cache_clear()
    yield tmp_path / "retrograde"
    native._library.cache_clear(), native.function.cache_clear()


def fresh() -> ctypes.PyDLL | None:
    """As the next process loads it."""
    native._library.cache_clear()
    return native._library()


def truncated(library: Path) -> None:
    start = library.read_bytes()[:5000]
    library.unlink()  # the one that is loaded stays whole
    library.write_bytes(start)


def another(library: Path) -> None:
    """A library that runs, put in its place: that of Python's own ctypes."""
    import _ctypes

    library.unlink()
    shutil.copy(_ctypes.__file__, library)


def linked(library: Path) -> None:
    moved = library.rename(library.parents[1] / "elsewhere.so")
    library.symlink_to(moved)


@pytest.mark.parametrize("damage", [truncated, another, linked])
def test_a_library_that_is_not_the_one_made_is_built_again(cache: Path, damage: Callable[[Path], None]) -> None:
    assert fresh() is not None
    (library,) = cache.glob("*.so")
    made = library.read_bytes()
    damage(library)
    assert fresh() is not None
    (library,) = cache.glob("*.so")
    assert not library.is_symlink()
    assert library.read_bytes()[:4] == made[:4]
    assert native._digest(library) in library.name
    before = library.stat().st_mtime_ns
    assert fresh() is not None
    assert library.stat().st_mtime_ns == before  # loaded, not built


def test_the_directory_is_closed_to_others_whatever_the_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        assert fresh() is not None
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        cache.chmod(0o777)  # as earlier versions made it
        assert fresh() is not None
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_a_directory_of_another_user_is_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    monkeypatch.setattr(native, "_own", lambda path: False)
    assert fresh() is not None  # for this process alone
    assert not list(cache.iterdir())


def test_a_user_without_a_home_has_kernels_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers run whoever they are told to."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    assert fresh() is not None


def test_a_relative_cache_directory_is_not_obeyed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert fresh() is not None
    assert list((tmp_path / "home/.cache/retrograde").glob("*.so"))
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("compiler", ["cc", "env cc -DUNUSED='a b'"])
def test_a_compiler_with_arguments(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    assert fresh() is not None


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler -x"])
def test_a_compiler_that_was_asked_for_and_fails_is_warned_of(
    cache: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.warns(UserWarning, match=f"CC={compiler} did not compile"):
        assert fresh() is None
    assert native.function("digest") is None
    assert not list(cache.iterdir())


def test_a_library_without_the_functions_is_not_used(tmp_path: Path) -> None:
    import _ctypes

    with pytest.raises(OSError, match="has no function retrograde_advance"):
        native._with_functions(Path(_ctypes.__file__))
