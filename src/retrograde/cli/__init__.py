"""The command line: `retrograde demo`. Thin: it parses, calls the library and shows what came back.

It needs packages that the library does not, so nothing of it is imported before it is used.
"""

from __future__ import annotations

from importlib.util import find_spec

_NEEDED = ("matplotlib", "numpy", "rich", "sklearn", "typer")


def main() -> None:
    """Entry point of the `retrograde` command."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"the retrograde command needs {', '.join(missing)}, not found here.\n"
            'Install the cli extra: pip install "retrograde[cli]"'
        )
    from .app import app

    app()
