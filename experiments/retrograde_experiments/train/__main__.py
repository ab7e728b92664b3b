"""`python -m retrograde_experiments.train`, for torchrun and for machines without typer."""

from .run import main

if __name__ == "__main__":
    main(prog="python -m retrograde_experiments.train")
