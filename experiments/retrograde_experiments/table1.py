"""Table 1: which networks invert in closed form, take a ResNet's parameters and train freely, each checked on a built network.

`table1_checks` builds each network, inverts a batch and counts evaluations, loads a residual network's state_dict, takes
a plain SGD step and inverts again. Here: once per seed, beside the paper's table. ResNet, Hamiltonian and second-order ODE are
not in the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import table1_checks as checks
from .config import Settings
from .findings import Finding
from .metrics import Key, Record
from .run import Context, one_thread
from .style import canvas

COLUMNS = ("closed-form inversion", "same parameters", "unconstrained training")
MARKS = {True: "yes", False: "no", None: "–"}


@dataclass(frozen=True)
class Config(Settings):
    networks: tuple[str, ...] = tuple(checks.CASES)
    repeats: int = 5

    def __post_init__(self) -> None:
        unknown = [name for name in self.networks if name not in checks.CASES]
        if unknown:
            raise ValueError(f"no network is called {unknown[0]!r}; there are {', '.join(checks.CASES)}.")

    @classmethod
    def smoke(cls) -> Config:
        return cls(repeats=1)

    def setting(self) -> str:
        return (
            f"{checks.DEPTH} blocks of width {checks.WIDTH}, float64, batch {checks.BATCH}; ODEs with 20 steps of RK4; "
            f"{self.repeats} seed{'s' if self.repeats > 1 else ''}."
        )


def units(config: Config) -> list[Key]:
    return [{"network": network, "seed": seed} for network in config.networks for seed in range(config.repeats)]


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    with one_thread():
        row = checks.table1((unit["network"],), unit["seed"])[0]
    return {
        "inverse": row.declared.inverse, "error": row.error, "evaluations": row.evaluations, "found": list(row.found),
        "paper": None if row.paper is None else list(row.paper), "agrees": row.agrees,
    }  # fmt: skip


def figure(config: Config, records: list[Record]) -> Any:
    """The table: what was found, the paper's in brackets."""
    rows = _rows(config, records)
    picture, axes = canvas(10, 0.42 * (len(rows) + 1.6))
    axes.axis("off")
    heads = [
        "",
        "largest error of\nthe inverse",
        "evaluations of f\nper evaluation",
        *(c.replace(" ", "\n", 1) for c in COLUMNS),
    ]
    table = axes.table([row[:6] for row in rows], colLabels=heads, loc="center", cellLoc="center", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(10)
    table.auto_set_column_width(list(range(6)))
    for (i, j), cell in table.get_celld().items():
        cell.set(height=1 / (len(rows) + 1.6) * (1.6 if i == 0 else 1), edgecolor="#d1d5db")
        if i == 0:
            cell.set_text_props(weight="bold", color="#374151")
        elif j == 0:
            cell.set_text_props(ha="left", weight="bold")
            cell.PAD = 0.02
        elif j >= 3 and i:
            mark = cell.get_text().get_text().split()[0]
            cell.set_text_props(color={"yes": "#15803d", "no": "#b91c1c"}.get(mark, "#6b7280"))
    axes.text(
        0.5,
        -0.02,
        "found on built networks (the paper's in brackets)",
        ha="center",
        va="top",
        color="#6b7280",
        transform=axes.transAxes,
    )
    return picture


def _rows(config: Config, records: list[Record]) -> list[list[str]]:
    rows = []
    for network in config.networks:
        of = [r for r in records if r["network"] == network]
        if not of:
            continue
        errors = [r["error"] for r in of if r["error"] is not None]
        evaluations = [r["evaluations"] for r in of if r["evaluations"] is not None]
        paper = of[0]["paper"]
        marks = []
        for k in range(3):
            found = {r["found"][k] for r in of}
            mark = MARKS[found.pop()] if len(found) == 1 else "depends on the seed"
            marks.append(mark + (f" ({MARKS[paper[k]]})" if paper else ""))
        worst = max(errors, default=None)
        shown = "–" if worst is None else "0 (exact)" if worst == 0 else f"{worst:.0e}"
        rows.append([network, shown, f"{max(evaluations):.3g}" if evaluations else "–", *marks])
    return rows


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    for network in config.networks:
        of = [r for r in records if r["network"] == network]
        if not of:
            continue
        agree = all(r["agrees"] for r in of)
        marks = [MARKS[of[0]["found"][k]] if len({r["found"][k] for r in of}) == 1 else "varies" for k in range(3)]
        target = "as the paper's" if of[0]["paper"] else "as declared"
        found.append(Finding(f"{network}: inversion / parameters / training", " / ".join(marks), target, agree))
    return found
