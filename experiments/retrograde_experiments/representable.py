"""Fig. 4: λ_ε over ε, and the eigenvalues (λ₁, λ₂) of 2×2 matrices that a second-order linear model can represent.

    ε ẍ + ẋ = θx, v₀ = 0: D is representable iff every real eigenvalue below λ_ε has even multiplicity [Theorem 1]

Left: λ_ε = min G_ε. Right: `is_representable(diag(λ₁, λ₂), ε)` on a grid, for several ε; ε = 0 is the first-order model. Wherever the
theorem says yes, θ is also constructed (`represent`) at some points of the grid and Ψ_ε(θ) compared with the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from retrograde import theory

from .config import Settings
from .findings import Finding
from .metrics import Key, Record
from .run import Context
from .style import canvas


@dataclass(frozen=True)
class Config(Settings):
    points: int = 200  # of ε, evenly on a logarithmic scale
    eps_low: float = 1e-3
    eps_high: float = 1e3
    eps: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 50.0)
    grid: int = 81  # values of each eigenvalue; odd, so that 0 is among them
    reach: float = 2.0
    constructed: int = 200  # matrices per ε for which θ is constructed

    @classmethod
    def smoke(cls) -> Config:
        return cls(points=20, grid=9, eps=(0.0, 1.0), constructed=10)

    def setting(self) -> str:
        return (
            f"λ_ε at {self.points} values of ε from {self.eps_low:g} to {self.eps_high:g}; "
            f"{self.grid}×{self.grid} eigenvalue pairs in [−{self.reach:g}, {self.reach:g}]² for ε = "
            f"{', '.join(f'{e:g}' for e in self.eps)}; θ constructed for up to {self.constructed} of them each."
        )


def units(config: Config) -> list[Key]:
    return [{"panel": "lambda"}, *({"panel": "region", "eps": eps} for eps in config.eps)]


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    if unit["panel"] == "lambda":
        eps = np.geomspace(config.eps_low, config.eps_high, config.points)
        return {"eps": eps.tolist(), "lambda": [float(theory.lambda_min(e)) for e in eps]}
    eps, values = unit["eps"], np.linspace(-config.reach, config.reach, config.grid)
    representable = np.zeros((config.grid, config.grid), bool)
    context.progress.steps(config.grid)
    for i, first in enumerate(values):
        for j, second in enumerate(values):
            representable[i, j] = theory.is_representable(np.diag([first, second]), eps)
        context.progress.step()
    return {
        "share": float(representable.mean()), "rows": ["".join(map(str, row.astype(int))) for row in representable],
        **_constructed(config, eps, values, representable),
    }  # fmt: skip


def _constructed(config: Config, eps: float, values: Any, representable: Any) -> dict[str, Any]:
    """‖Ψ_ε(θ) − D‖ / ‖D‖ at worst over some representable D, θ constructed; and how many of some others are refused."""
    chosen = np.random.default_rng(0)
    inside, outside = np.argwhere(representable), np.argwhere(~representable)
    worst, refused = 0.0, 0
    inside = inside[chosen.permutation(len(inside))[: config.constructed]]
    outside = outside[chosen.permutation(len(outside))[: config.constructed]]
    for i, j in inside:
        D = np.diag([values[i], values[j]])
        error = np.linalg.norm(theory.psi(theory.represent(D, eps), eps) - D) / (np.linalg.norm(D) or 1.0)
        worst = max(worst, float(error))
    for i, j in outside:
        try:
            theory.represent(np.diag([values[i], values[j]]), eps)
        except ValueError:
            refused += 1
    return {"constructed": len(inside), "worst": worst, "refused": refused, "others": len(outside)}


def figure(config: Config, records: list[Record]) -> Any:
    regions = [r for r in records if r["panel"] == "region"]
    rows = -(-(1 + len(config.eps)) // 3)
    picture, axes = canvas(9.6, 3.2 * rows, rows, 3, squeeze=False)
    first, *panels = axes.flatten()
    for record in records:
        if record["panel"] == "lambda":
            first.semilogx(record["eps"], record["lambda"], color="#ea580c", lw=2.2)
            value = min(zip(record["eps"], record["lambda"], strict=True), key=lambda p: abs(p[0] - 2))
            first.plot(*value, "o", color="#0072b2")
            first.annotate(f"{value[1]:.2f} at ε = 2", value, (6, 4), textcoords="offset points", fontsize=9)
    for level in (0, -1):
        first.axhline(level, color="#9ca3af", lw=0.8, ls=":")
    first.set(title=r"$\lambda_\varepsilon$ over $\varepsilon$", xlabel=r"$\varepsilon$", ylim=(-1.08, 0.08))
    ends = (-config.reach, config.reach)
    for panel in panels[len(regions) :]:
        panel.axis("off")
    for panel, record in zip(panels, regions, strict=False):
        cells = np.array([[int(c) for c in row] for row in record["rows"]])
        panel.imshow(
            1 - 0.42 * cells.T,
            cmap="gray",
            vmin=0,
            vmax=1,
            origin="lower",
            extent=(*ends, *ends),
            interpolation="nearest",
        )
        panel.axhline(0, color="#6b7280", lw=0.6)
        panel.axvline(0, color="#6b7280", lw=0.6)
        # The pairs λ₁ = λ₂ are a line without area, on the grid's diagonal.
        panel.plot(ends, ends, color="#949494", lw=1.6)
        ticks = (-config.reach, 0, config.reach)
        panel.set(title=rf"representable, $\varepsilon = {record['eps']:g}$", xticks=ticks, yticks=ticks)
        panel.set(xlabel=r"$\lambda_1$", ylabel=r"$\lambda_2$")
    return picture


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    curve = next((r for r in records if r["panel"] == "lambda"), None)
    if curve is not None:
        values = curve["lambda"]
        falling = all(later <= earlier for earlier, later in pairwise(values))
        found.append(Finding("λ_ε decreasing in ε", "yes" if falling else "no", "non-increasing", falling))
        # the paper: "close to 0 when ε ≪ 1 and close to −1 when ε ≥ 2"
        for eps, target, met in ((0.1, "≥ −0.1", lambda v: v >= -0.1), (2.0, "≤ −0.9", lambda v: v <= -0.9)):
            near, value = min(zip(curve["eps"], values, strict=True), key=lambda p: abs(p[0] - eps))
            found.append(Finding(f"λ_ε at ε = {eps:g}", f"{value:.3f} (at {near:.2f})", target, met(value)))
    regions = [r for r in records if r["panel"] == "region"]
    if regions:
        shares = [r["share"] for r in sorted(regions, key=lambda r: r["eps"])]
        growing = all(a <= b for a, b in pairwise(shares))
        text = ", ".join(f"{share:.0%}" for share in shares)
        found.append(Finding("share of the square representable, by ε", text, "growing with ε", growing))
        worst = max(r["worst"] for r in regions)
        count = sum(r["constructed"] for r in regions)
        found.append(Finding("error of constructed θ, worst", f"{worst:.0e} of {count}", "≤ 1e-8", worst <= 1e-8))
        refused, others = sum(r["refused"] for r in regions), sum(r["others"] for r in regions)
        found.append(Finding("refused where not representable", f"{refused} of {others}", "all", refused == others))
    return found
