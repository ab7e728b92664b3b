"""The `retrograde` command: what works without its extra, and commands from other distributions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import retrograde as rg
from retrograde import cli
from retrograde.cli.app import app


def test_without_the_extra_the_version_is_printed_and_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("rich", "typer"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.setattr("sys.argv", ["retrograde", "--version"])
    cli.main()
    assert capsys.readouterr().out.strip() == rg.__version__
    monkeypatch.setattr("sys.argv", ["retrograde", "demo"])
    with pytest.raises(SystemExit, match=r"(?s)needs rich and typer.*pip install \"retrograde\[cli\]\""):
        cli.main()


def test_the_version_and_the_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == rg.__version__
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "demo" in shown
    assert "retrograde-experiments" in shown


def test_importing_the_library_and_the_entry_point_imports_none_of_the_extra() -> None:
    code = (
        "import sys, retrograde.cli; print([m for m in ('typer', 'rich', 'matplotlib', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def main(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """`retrograde` in a process of its own, with one more folder of packages."""
    search = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", "from retrograde.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": search})


def test_another_distribution_adds_a_command(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "__init__.py").write_text(
        "def greet(app):\n    @app.command()\n    def greet(name: str) -> None:\n        print('hello', name)\n"
    )
    (tmp_path / "more-1.dist-info").mkdir()
    (tmp_path / "more-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: more\nVersion: 1\n")
    (tmp_path / "more-1.dist-info" / "entry_points.txt").write_text("[retrograde.commands]\ngreet = more:greet\n")
    assert main("greet", "you", path=tmp_path).stdout.strip() == "hello you"


@pytest.mark.parametrize("name", ["train", "reproduce", "report", "bench"])
def test_a_command_that_is_not_installed_says_what_to_install(name: str) -> None:
    group = type(typer.main.get_command(app))()  # without any command
    assert group.get_command(None, "other") is None
    with pytest.raises(SystemExit, match=f"retrograde {name} comes with .* pip install retrograde-experiments"):
        group.get_command(None, name)
