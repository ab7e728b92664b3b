"""What a newcomer reads of a training step stays short."""

from pathlib import Path

import retrograde

STEP = ("scheme", "momentum", "nodes", "forward", "replay", "tape")
MOST = 1_200


def test_the_files_of_a_step() -> None:
    folder = Path(retrograde.__file__).parent / "reverse"
    lines = {name: len((folder / f"{name}.py").read_text().splitlines()) for name in STEP}
    assert sum(lines.values()) <= MOST, lines
