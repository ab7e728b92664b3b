"""The command line. It parses options, calls the library and shows the results.

app      the commands, and those that other distributions add
demo     `retrograde demo`: train one network three ways; show: its progress, table and figure
plan     `retrograde plan`: what would be converted and the memory it takes; models: models by name

It needs packages that the library does not need, so they are imported only when a command runs.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec


def main() -> None:
    """Entry point of the `retrograde` command."""
    if sys.argv[1:] == ["--version"]:  # without the extra, too
        print(version("retrograde"))
        return
    missing = [name for name in ("rich", "typer") if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"the retrograde command needs {' and '.join(missing)}, not found here.\n"
            'Install the cli extra: pip install "retrograde[cli]"'
        )
    from .app import app

    app()
