"""What a newcomer reads of a training step stays short."""

from pathlib import Path

import retrograde

STEP = ("scheme", "momentum", "forward", "replay", "tape")
MOST = 1_000
SCHEMES = ("momentum", "coupling")


def lines(name: str) -> int:
    return len((Path(retrograde.__file__).parent / "reverse" / f"{name}.py").read_text().splitlines())


def test_the_files_of_a_step() -> None:
    found = {name: lines(name) for name in STEP}
    assert sum(found.values()) < MOST, found


def test_a_scheme() -> None:
    assert all(lines(name) < 100 for name in SCHEMES)
