"""`retrograde train`: hands its options to the trainer, whose settings they are."""

from __future__ import annotations


def main(arguments: list[str]) -> None:
    """Parse the options, train, and say what came out."""
    from retrograde_experiments.train.run import main as run

    run(arguments)
