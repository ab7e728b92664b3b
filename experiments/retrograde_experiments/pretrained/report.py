"""`docs/pretrained.md` from the metrics alone: what stands between two markers is replaced, the rest of the page is left as it is.

    <!-- cifar -->   tables made from results/pretrained/cifar.jsonl   <!-- /cifar -->

An experiment that has not been run says so. The figure is drawn beside the page, in `img/pretrained.png`.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

from ..config import from_json
from ..errors import ExperimentError
from ..findings import spread
from ..markup import between, grid
from ..metrics import Record, write_atomic, writing
from ..style import canvas, styled
from .run import EXPERIMENTS, experiment
from .store import read
from .transfer import DEPLOYED, kept

Records = list[Record]
FIGURE = "img/pretrained.png"
DEPLOY_FIGURE = "img/deploy.svg"
LOOKS = {
    "converted": ("right after conversion", "#9ca3af", "o"), "statistics": ("BatchNorm statistics anew", "#2563eb", "s"),
    "refit": ("refitted at the final γ", "#0d9488", "v"), "warmup": ("refitted with γ warm-up", "#ea580c", "^"),
}  # fmt: skip
START = {"zero": "v₀ = 0", "first": "v₀ = f(x₀)"}


def write(results: Path, page: Path) -> list[str]:
    """Fill the page in and draw the figure; what was written.

    Raises:
        ExperimentError: if the page or a marker in it is missing, or metrics are damaged.
    """
    runs = {name: read(results / f"{name}.jsonl") for name in EXPERIMENTS if (results / f"{name}.jsonl").exists()}
    try:
        text = page.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ExperimentError(
            f"{page} does not exist: run this in the repository, or name the page with --page."
        ) from None
    for name, table in TABLES.items():
        text = between(text, name, section(name, runs.get(name), table), page)
    text = between(text, "shares", shares(), page)
    made = [str(page)]
    with writing(page):
        write_atomic(page, text.encode())
        if {"cifar", "language"} & runs.keys():
            (page.parent / FIGURE).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(page.parent / FIGURE, drawn({name: records for name, (_, records) in runs.items()}))
            made.append(str(page.parent / FIGURE))
        if "deploy" in runs:
            measured = runs["cost"][1] if "cost" in runs else []
            write_atomic(page.parent / DEPLOY_FIGURE, drawn_deploy(runs["deploy"][1], measured))
            made.append(str(page.parent / DEPLOY_FIGURE))
    return made


def sections(results: Path) -> dict[str, str]:
    """What was run, by experiment, in Markdown."""
    runs = {name: read(results / f"{name}.jsonl") for name in TABLES if (results / f"{name}.jsonl").exists()}
    return {name: section(name, run, TABLES[name]) for name, run in runs.items()}


def section(name: str, found: tuple[dict[str, Any], Records] | None, table: Callable[[Records], str]) -> str:
    """The setting in a sentence, then the tables."""
    if found is None or not found[1]:
        return f"Not run: `python -m retrograde_experiments.pretrained {name}`."
    header, records = found
    module = experiment(name)
    config = from_json(module.Config, header["config"])
    done, planned = len(records), len(module.units(config))
    where = "; ".join(sorted({f"{r.run['hardware']}, torch {r.run['torch']}" for r in records}))
    part = "" if done == planned else f" {done} of {planned} units were run."
    setting = config.setting()
    return f"{setting[:1].upper()}{setting[1:]} {where}.{part}\n\n{table(records)}"


def shares() -> str:
    """The mean weight of f at the end of a stage, for the stages of the networks here."""
    stages = {"ResNet-20: 3, 2, 2": (3, 2, 2), "ResNet-56: 9, 8, 8": (9, 8, 8), "ResNet-50: 2, 3, 5, 2": (2, 3, 5, 2),
              "MiniLM: 6": (6,), "SmolLM2: 30": (30,)}  # fmt: skip
    gammas = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
    rows = [
        [name, *(f"{100 * mean(s for blocks in sizes for s in kept(g, blocks)):.0f} %" for g in gammas)]
        for name, sizes in stages.items()
    ]
    return grid(["network: blocks of its stages", *(f"γ = {g:g}" for g in gammas)], rows)


def _cifar(records: Records) -> str:
    columns = [(way, v) for way in ("converted", "statistics") for v in START] + [("refit", "zero"), ("warmup", "zero")]
    names = ["γ", *(f"{way}, {START[v]}" if way in ("converted", "statistics") else way for way, v in columns)]
    out = []
    for net in sorted({r["net"] for r in records}, key=lambda net: int(net.partition("-")[2])):
        mine = [r for r in records if r["net"] == net]
        rows = [
            [f"{g:g}", *(_value(mine, "accuracy", "{:.2f}", way=w, velocity=v, gamma=g) for w, v in columns)]
            for g in _gammas(mine)
        ]
        out += [f"**{net}**, test accuracy in %", grid(names, rows)]
    return "\n\n".join(out)


def _language(records: Records) -> str:
    columns = [("converted", "zero"), ("converted", "first"), ("refit", "zero"), ("warmup", "zero")]
    names = ["γ", "converted, v₀ = 0", "converted, v₀ = f(x₀)", "refit", "warmup"]
    rows = [
        [f"{g:g}", *(_value(records, "perplexity", _short, way=w, velocity=v, gamma=g) for w, v in columns)]
        for g in _gammas(records)
    ]
    return "Perplexity\n\n" + grid(names, rows)


def _sentence(records: Records) -> str:
    columns = [("converted", "zero"), ("converted", "first"), ("refit", "zero"), ("warmup", "zero")]
    names = ["γ", "converted, v₀ = 0", "converted, v₀ = f(x₀)", "distilled", "with warmup"]

    def cell(**key: Any) -> str:
        found = _one(records, **key)
        return (
            "–"
            if found is None
            else f"{found['cosine']:.3f} · {found['partners']}/{found['pairs']} · {found['order']:.2f}"
        )

    rows = [[f"{g:g}", *(cell(way=w, velocity=v, gamma=g) for w, v in columns)] for g in _gammas(records)]
    head = (
        "Cosine to the plain network's vector · sentences that find their partner · rank correlation of the similarities with "
        "the plain network's"
    )
    return f"{head}\n\n{grid(names, rows)}"


def _imagenet(records: Records) -> str:
    photos = sorted((r for r in records if r["task"] == "photos"), key=lambda r: (r["velocity"] != "zero", r["gamma"]))
    tuned = [r for r in records if r["task"] == "hymenoptera"]
    out = []
    if photos:
        names = list(photos[0]["photos"])
        shown = [
            [
                f"{r['gamma']:g}",
                START[r["velocity"]] if r["gamma"] else "",
                f"{r['top1']:.0f}, {r['top5']:.0f} of {r['count']}",
            ]
            + [f"{r['photos'][n]['says']} {100 * r['photos'][n]['probability']:.0f} %" for n in names]
            for r in photos
        ]
        out += [
            "Photographs: the plain network's class first, among the first five; and what is seen in each",
            grid(["γ", "", "kept", *names], shown),
        ]
    if tuned:
        rows = []
        for key in dict.fromkeys((r["gamma"], r["velocity"], r["way"]) for r in tuned):
            mine = [r for r in tuned if (r["gamma"], r["velocity"], r["way"]) == key]
            curves = [r["curve"] for r in mine]
            curve = ", ".join(f"{mean(values):.0f}" for values in zip(*curves, strict=False))
            name = "plain" if not key[0] else f"γ = {key[0]:g}, {START[key[1]]}{', warm-up' * (key[2] == 'warmup')}"
            rows.append(
                [name, f"{mean(r['accuracy'] for r in mine):.1f}", f"{mean(r['running'] for r in mine):.1f}", curve]
            )
        out += [
            "Hymenoptera, test accuracy in %",
            grid(["fine-tuned", "accuracy", "with running statistics", "after each epoch"], rows),
        ]
    return "\n\n".join(out)


def _deploy(records: Records) -> str:
    out = []
    for task, name, what, form in (
        ("language", "SmolLM2, every parameter", "perplexity", ".2f"),
        ("lora", "SmolLM2, LoRA", "perplexity", ".2f"),
        ("sentences", "MiniLM, which play a sentence is from", "accuracy", ".1f"),
    ):
        mine = [r for r in records if r["task"] == task]
        for steps in dict.fromkeys(r.key.get("steps") for r in mine):
            length = f", {steps} steps" if steps else ""
            found = [r for r in mine if r.key.get("steps") == steps]
            out += [f"**{name}**{length}: {what}, {OVER_SEEDS}", _tuned(found, what, form)]
    return "\n\n".join(
        [*out, f"![Perplexity after fine-tuning over γ, and over the memory of a step]({DEPLOY_FIGURE})"]
    )


OVER_SEEDS = "mean ± standard deviation over the seeds"
NETS = {
    "smollm2": "SmolLM2-135M, 8 × 1024 tokens", "smollm2-lora": "SmolLM2-135M with LoRA, 8 × 1024 tokens",
    "smollm2-long": "SmolLM2-135M, 1 × 8192 tokens", "llama": "Llama's form, 32 layers of width 2048, random weights, 4 × 2048 tokens",
    "resnet50": "ResNet-50, 64 images of 224²", "resnet56": "ResNet-56, 1024 images of 32²",
    "minilm": "MiniLM, 256 sentences of 48 tokens",
}  # fmt: skip
METHODS = {
    "plain": "plain", "checkpoint": "plain, checkpointed block by block", "to-host": "the same, block inputs in host memory",
    "offload": "plain, all of it in host memory", "reverse": "in reverse, γ = {}", "split": "in reverse, γ = {}, `split=True`",
}  # fmt: skip


def _cost(records: Records) -> str:
    out = []
    for net, dtype in dict.fromkeys((r["net"], r["dtype"]) for r in records):
        mine = [r for r in records if (r["net"], r["dtype"]) == (net, dtype)]
        base = next((r for r in mine if r["method"] == "checkpoint"), None)
        rows = [
            [
                METHODS[r["method"]].format(_fraction(r["gamma"])),
                "–" if r["peak"] is None else f"{r['peak'] / 1e6:.0f} MB",
                _times(r["peak"], None if base is None else base["peak"]),
                f"{1e3 * r['seconds']:.0f} ms",
                _times(r["seconds"], None if base is None else base["seconds"]),
            ]
            for r in sorted(mine, key=lambda r: (list(METHODS).index(r["method"]), r["gamma"]))
        ]
        table = grid(["", "peak", "× checkpointed", "time", "× checkpointed"], rows)
        out += [f"**{NETS[net]}**, {dtype}", table]
    return "\n\n".join(out)


def _deploy_images(records: Records) -> str:
    out = []
    for task, name in (
        ("hymenoptera", "ResNet-50, hymenoptera"),
        ("cifar", "ResNet-56, CIFAR-10"),
        ("scratch", "ResNet-20, CIFAR-10, from random weights"),
    ):
        mine = [r for r in records if r["task"] == task]
        out += [f"**{name}**: test accuracy in %, {OVER_SEEDS}", _tuned(mine, "accuracy", ".2f")] if mine else []
    return "\n\n".join(out)


def _characters(records: Records) -> str:
    out = []
    for task, name in (("poem", "Fine-tuned on the poem"), ("scratch", "Trained on the plays, from random weights")):
        mine = [r for r in records if r["task"] == task]
        out += [f"**{name}**: nats a character, {OVER_SEEDS}", _tuned(mine, "loss", ".4f")] if mine else []
    return "\n\n".join(out)


def _tuned(records: Records, what: str, form: str) -> str:
    """Before fine-tuning, after it as itself and as the plain network, and how far the latter is from plain fine-tuning, by seed."""
    plain = {r["seed"]: r["plain"] for r in records if not r["gamma"]}
    rows = []
    for way, gamma in [(w, g) for w in DEPLOYED for g in _gammas(_by_way(records, w))]:
        mine = [r for r in _by_way(records, way) if r["gamma"] == gamma]
        before = [r["before"] for r in mine if r.values.get("before") is not None]
        apart = [r["plain"] - plain[r["seed"]] for r in mine if r["seed"] in plain]
        rows.append(
            [
                WAY_NAMES[way].format(_fraction(gamma)) if gamma else "0, plain",
                _before(before, form),
                spread([r["own"] for r in mine], form),
                spread([r["plain"] for r in mine], form),
                _signed(spread(apart, form)) if gamma and apart else "",
            ]
        )
    head = [
        "γ",
        f"{what} before",
        "fine-tuned, as itself",
        "fine-tuned, reverted to the plain network",
        "less plain fine-tuning",
    ]
    return grid(head, rows)


def _before(values: list[float], form: str) -> str:
    if not values:
        return "–"
    return f"{median(values):{form}}" if form == ".4f" else _short(median(values))


WAY_NAMES = {"kept": "{}", "split": "{}, split", "falling": "{}, falling to 0", "sign": "± {}"}


def _by_way(records: Records, way: str) -> Records:
    return [r for r in records if r.key.get("way", "kept") == way]


def _signed(text: str) -> str:
    """
    >>> _signed("0.12 ± 0.05"), _signed("-0.1")
    ('+0.12 ± 0.05', '-0.1')
    """
    return text if text.startswith("-") else f"+{text}"


def _times(value: float | None, base: float | None) -> str:
    return "–" if value is None or not base else f"{value / base:.2f}"


def _fraction(gamma: float) -> str:
    """
    >>> _fraction(0.125), _fraction(0.9)
    ('1/8', '0.9')
    """
    return f"1/{round(1 / gamma)}" if gamma and (1 / gamma).is_integer() else f"{gamma:g}"


TABLES: dict[str, Callable[[Records], str]] = {
    "cifar": _cifar, "imagenet": _imagenet, "language": _language, "sentence": _sentence,
    "deploy": _deploy, "deploy-images": _deploy_images, "cost": _cost, "characters": _characters,
}  # fmt: skip


def _gammas(records: Records) -> list[float]:
    return sorted({r["gamma"] for r in records})


def _one(records: Records, **key: Any) -> Record | None:
    """The unit with these parts of the key. At γ = 0 there is no velocity, and nothing to warm up."""
    if not key["gamma"]:
        key = {**key, "velocity": "zero", "way": "refit" if key["way"] == "warmup" else key["way"]}
    return next((r for r in records if all(r.key.get(name) == value for name, value in key.items())), None)


def _value(records: Records, name: str, form: str | Callable[[float], str], **key: Any) -> str:
    found = _one(records, **key)
    if found is None or found[name] is None:
        return "–"
    shown = form(found[name]) if callable(form) else form.format(found[name])
    return shown if found.values.get("stopped") is None else f"{shown} (stopped at step {found['stopped']})"


def _short(value: float) -> str:
    """
    >>> _short(19.234), _short(123456.0)
    ('19.2', '1.2e+05')
    """
    return f"{value:.1f}" if value < 1e4 else f"{value:.1e}"


def drawn(runs: dict[str, Records]) -> bytes:
    """The figure, as PNG: accuracy of the CIFAR networks and perplexity of the language model over γ."""
    cifar, language = runs.get("cifar", []), runs.get("language", [])
    nets = sorted({r["net"] for r in cifar}, key=lambda net: int(net.partition("-")[2]))
    count = len(nets) + bool(language)
    data = io.BytesIO()
    with styled():
        picture, axes = canvas(4.2 * count, 3.6, 1, count, squeeze=False)
        for axis, net in zip(axes[0], nets, strict=False):
            _curves(axis, [r for r in cifar if r["net"] == net], "accuracy")
            axis.set(title=f"{net}, CIFAR-10", ylabel="test accuracy, %", ylim=(0, 100))
        if language:
            _curves(axes[0][-1], language, "perplexity")
            axes[0][-1].set(title="SmolLM2-135M, held-out Shakespeare", ylabel="perplexity", yscale="log")
        for axis in axes[0]:
            axis.set(xlabel="γ", xlim=(-0.02, 1.02))
        handles = {
            label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        picture.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4 if count > 2 else 2)
        picture.savefig(data, dpi=150, format="png", metadata={"Software": None})
    return data.getvalue()


def _curves(axis: Any, records: Records, value: str) -> None:
    for way, (label, colour, marker) in LOOKS.items():
        mine = sorted(
            (r["gamma"], r[value])
            for r in records
            if r["way"] == way and r["velocity"] == "zero" and r[value] is not None
        )
        if mine and way == "warmup":
            mine = sorted(
                {(r["gamma"], r[value]) for r in records if r["way"] == "refit" and not r["gamma"]} | set(mine)
            )
        if mine:
            axis.plot(*zip(*mine, strict=True), color=colour, marker=marker, markersize=4, label=label)


def drawn_deploy(tuned: Records, measured: Records) -> bytes:
    """The figure, as SVG: perplexity after fine-tuning over γ, and over the peak memory of a step."""
    tuned = [r for r in tuned if r["task"] == "language" and "steps" not in r.key]
    measured = [r for r in measured if (r["net"], r["dtype"]) == ("smollm2", "bfloat16") and r["peak"] is not None]
    data = io.BytesIO()
    with styled():
        picture, (left, right) = canvas(9.5, 3.8, 1, 2)
        _draw_over_gamma(left, tuned)
        _draw_over_memory(right, tuned, measured)
        picture.savefig(data, format="svg", metadata={"Date": None, "Creator": None})
    return data.getvalue()


LINES = (
    ("own", "kept", "as itself", "#ea580c", "o"), ("plain", "kept", "then reverted", "#2563eb", "s"),
    ("plain", "falling", "γ falling to 0", "#0d9488", "v"), ("plain", "sign", "random sign", "#7c3aed", "D"),
)  # fmt: skip
"""What a fine-tuned network is used as: the value, the way, its name, colour and marker."""


def _draw_over_gamma(axis: Any, records: Records) -> None:
    plain, gammas = [r["plain"] for r in records if not r["gamma"]], [g for g in _gammas(records) if g]
    if plain:
        axis.axhspan(min(plain), max(plain), color="#d1d5db", label="plain fine-tuning, all seeds")
    for key, way, name, colour, marker in LINES:
        points = {g: [r[key] for r in _by_way(records, way) if r["gamma"] == g] for g in gammas}
        points = {g: values for g, values in points.items() if values}
        axis.plot(
            list(points), [mean(v) for v in points.values()], f"{marker}-", color=colour, markersize=4, label=name
        )
        for g, values in points.items():
            axis.plot([g] * len(values), values, ".", color=colour, markersize=3, alpha=0.5)
    axis.set(xlabel="γ of the fine-tuning", ylabel="perplexity on held-out plays", xscale="log", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_xticks(gammas, [_fraction(g) for g in gammas])
    axis.set_xticks([], minor=True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _draw_over_memory(axis: Any, tuned: Records, measured: Records) -> None:
    """A point for each γ. Plain fine-tuning has one quality, and a memory by the way its activations are remembered."""
    peaks = {(r["method"], r["gamma"]): r["peak"] / 1e9 for r in measured}
    ours = _by_way(tuned, "kept")
    quality = {g: mean(r["own"] for r in ours if r["gamma"] == g) for g in _gammas(ours)}
    for method, name, marker in (
        ("plain", "plain", "X"),
        ("checkpoint", "plain, checkpointed", "P"),
        ("to-host", "the same, inputs in host memory", "H"),
    ):
        if (method, 0.0) in peaks and 0.0 in quality:
            axis.plot(peaks[method, 0.0], quality[0.0], marker, color="#374151", markersize=8, label=name)
    points = {g: (peaks["reverse", g], quality[g]) for g in quality if ("reverse", g) in peaks}
    if points:
        axis.plot(*zip(*points.values(), strict=True), "o-", color="#ea580c", markersize=5, label="in reverse, by γ")
    for g, point in points.items():
        beside = {1 / 8: (-15, -10), 1 / 16: (4, 6)}.get(g, (7, 3))  # two that are near each other
        axis.annotate(_fraction(g), point, xytext=beside, textcoords="offset points", fontsize=8)
    axis.set(xlabel="peak memory of a step, GB", ylabel="perplexity on held-out plays", xscale="log", yscale="log")
    axis.set_xticks([0.3, 0.4, 0.6, 1, 2, 4, 6], ["0.3", "0.4", "0.6", "1", "2", "4", "6"])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
