"""What the report says of each experiment, in one of four words, from the paper's numbers and the metrics of kept runs.

    not run        there are no metrics of it
    reproduced     every target is met, in the paper's setting
    contradicted   targets are missed and none is met, in the paper's setting
    partly         anything else: some targets are met and others not, or not decided; or the setting is smaller than the paper's

A run is in the paper's setting if the settings that its config calls decisive are the paper's, and all of its units are finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from .config import from_json
from .errors import ExperimentError
from .findings import Finding
from .metrics import CONFIG, Record, read_config, read_metrics
from .registry import MODULES, load
from .run import FIGURE, complete, missing

VERDICTS = ("reproduced", "partly", "contradicted", "not run")
NOT_RUN = VERDICTS[-1]


@dataclass(frozen=True)
class Row:
    """One experiment: what the paper says, and what a run of ours found, if there is one."""

    name: str
    paper: dict[str, Any]
    command: str
    numbers: tuple[tuple[str, str, Finding | None], ...]  # name, the paper's, ours
    setting: str = ""
    preset: str = ""
    when: str = ""
    where: str = ""
    took: str = ""
    commit: str = ""
    seeds: int = 0
    done: int = 0
    total: int = 0
    missing: tuple[str, ...] = ()
    departs: tuple[str, ...] = ()
    figure: Path | None = None
    beside: tuple[Row, ...] = ()
    """Other runs of the experiment, in other settings."""

    @property
    def ran(self) -> bool:
        return self.done > 0

    @property
    def asked(self) -> list[Finding]:
        return [found for *_, found in self.numbers if found is not None and found.target]

    @property
    def verdict(self) -> str:
        if not self.ran:
            return NOT_RUN
        met = [found.met for found in self.asked]
        if self.departs or self.done < self.total or not met:
            return "partly"
        if all(met):
            return "reproduced"
        return "contradicted" if False in met and True not in met else "partly"

    @property
    def evidence(self) -> str:
        """Why this word."""
        if not self.ran:
            return ""
        met = [found.met for found in self.asked]
        parts = [f"{met.count(True)} of {len(met)} targets met"]
        parts += [f"{met.count(False)} missed"] if False in met else []
        parts += [f"{met.count(None)} undecided"] if None in met else []
        parts += [f"{self.done} of {self.total} units run"] if self.done < self.total else []
        parts += [f"not the paper's: {', '.join(self.departs)}"] if self.departs else []
        return "; ".join(parts)


def paper() -> dict[str, dict[str, Any]]:
    """`paper.toml`, by experiment."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef,import-not-found]
    return tomllib.loads(files(__package__).joinpath("paper.toml").read_text(encoding="utf-8"))


def default_results() -> Path:
    """The runs kept in the repository, beside this package."""
    return Path(__file__).parents[1] / "results"


def found_results() -> list[Path]:
    """Where runs are: those that `retrograde reproduce` wrote below this folder, then those kept in the repository."""
    own = [Path("out") / "results" / preset for preset in ("paper", "default", "smoke")]
    return [*filter(Path.is_dir, own), default_results()]


def rows(*results: Path) -> list[Row]:
    """All experiments, in the paper's order.

    A run of NAME is the folder NAME in the first of `results` that has it; folders NAME-… beside it are further runs.
    """
    for folder in results:
        if not folder.is_dir():
            raise ExperimentError(
                f"there is no folder {folder}. Give the folder that holds a folder of each run: --results DIR."
            )
    said = paper()
    found = []
    for name in MODULES:
        base = next((folder for folder in results if (folder / name / CONFIG).exists()), results[-1])
        others = sorted(p for p in base.glob(f"{name}-*") if p.name not in MODULES and (p / CONFIG).exists())
        beside = tuple(row(name, said[name], folder) for folder in others)
        found.append(row(name, said[name], base / name, beside))
    return found


def row(name: str, said: dict[str, Any], folder: Path, beside: tuple[Row, ...] = ()) -> Row:
    """What a folder holds of an experiment."""
    told: dict[str, str] = said.get("numbers", {})
    command = f"retrograde reproduce {name} --preset paper"
    absent = Row(
        folder.name, said, command, tuple((what, number, None) for what, number in told.items()), beside=beside
    )
    if not (folder / CONFIG).exists():
        return absent
    stored, records = read_config(folder), read_metrics(folder)
    if stored["experiment"] != name:
        raise ExperimentError(
            f"{folder} holds a run of {stored['experiment']!r}. Name the folder after its experiment."
        )
    if not records:
        return absent
    experiment = load(name)
    config = from_json(experiment.Config, stored["config"])
    found = experiment.findings(config, records)
    reported = {each.what for each in found}
    numbers: list[tuple[str, str, Finding | None]] = [(each.what, told.get(each.what, ""), each) for each in found]
    numbers += [(what, number, None) for what, number in told.items() if what not in reported]
    done, total = complete(experiment, config, records)
    figure: Path | None = folder / FIGURE
    if figure is not None and (
        figure.is_symlink() or not figure.is_file()
    ):  # a link may lead to anything of the reader's
        figure = None
    return Row(
        folder.name, said, stored.get("command") or command, tuple(numbers), config.setting(), stored.get("preset", ""),
        _dates(records), _hardware(records), _time(sum(r.run.get("seconds", 0) for r in records)),
        ", ".join(dict.fromkeys(str(c)[:9] for r in records if (c := r.run.get("commit")))),
        len({r.key["seed"] for r in records if "seed" in r.key}) or getattr(config, "repeats", 1), done, total,
        missing(experiment, config, records), tuple(config.departs()), figure, beside,
    )  # fmt: skip


def _dates(records: list[Record]) -> str:
    days = sorted({str(r.run.get("date", "")) for r in records} - {""})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""


def _hardware(records: list[Record]) -> str:
    kinds = dict.fromkeys(
        f"{r.run.get('hardware', '')}, PyTorch {str(r.run.get('torch', '')).split('+')[0]}" for r in records
    )
    return "; ".join(kinds)


def _time(seconds: float) -> str:
    """
    >>> _time(42), _time(600), _time(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
