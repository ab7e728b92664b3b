"""`retrograde` with the commands of both distributions, as their entry points register them."""

from importlib.metadata import EntryPoint
from pathlib import Path

import tomllib
import typer

from retrograde.cli.app import app

PROJECT = Path(__file__).parents[1] / "experiments" / "pyproject.toml"
COMMANDS: dict[str, str] = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["retrograde.commands"]


def registered(app: typer.Typer) -> list[str]:
    """Names of the commands and groups of an app."""
    return [
        str(command.name or command.callback.__name__) for command in app.registered_commands if command.callback
    ] + [str(group.name) for group in app.registered_groups]


for name, value in COMMANDS.items():
    if name not in registered(app):  # where the distribution is not installed
        EntryPoint(name, value, "retrograde.commands").load()(app)
