"""The report: every experiment with the paper's numbers beside ours, as one HTML page that needs nothing else, and as Markdown.

The paper's column comes from `paper.toml`, ours from metrics files alone. What was not run says so.
"""

from __future__ import annotations

import base64
import datetime
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from .config import from_json
from .errors import ExperimentError
from .findings import Finding
from .metrics import CONFIG, Record, read_config, read_metrics, write_atomic, writing
from .registry import MODULES, load
from .run import FIGURE, complete, missing

NOT_RUN = "not run"
FEW = 4  # missing units are named up to so many
MARKS = {True: "met", False: "not met", None: ""}


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
    done: int = 0
    total: int = 0
    missing: tuple[str, ...] = ()
    figure: Path | None = None

    @property
    def ran(self) -> bool:
        return self.done > 0

    @property
    def status(self) -> str:
        if not self.ran:
            return NOT_RUN
        if self.done < self.total:
            return f"{self.done} of {self.total} units run"
        asked = [found.met for *_, found in self.numbers if found is not None and found.met is not None]
        if not asked:
            return "run"
        return f"{sum(asked)} of {len(asked)} targets met"


def paper() -> dict[str, dict[str, Any]]:
    """`paper.toml`, by experiment."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef,import-not-found]
    return tomllib.loads(files(__package__).joinpath("paper.toml").read_text(encoding="utf-8"))


def found_results() -> list[Path]:
    """Where runs are: those that `retrograde reproduce` wrote below this folder, then those kept in the repository."""
    own = [Path("out") / "results" / preset for preset in ("paper", "default", "smoke")]
    return [*filter(Path.is_dir, own), default_results()]


def default_results() -> Path:
    """The runs kept in the repository, beside this package."""
    return Path(__file__).parents[1] / "results"


def rows(*results: Path) -> list[Row]:
    """All experiments, in the paper's order. A run of NAME is the folder NAME in the first of `results` that has it."""
    for folder in results:
        if not folder.is_dir():
            raise ExperimentError(
                f"there is no folder {folder}. Give the folder that holds a folder of each run: --results DIR."
            )
    said = paper()
    ran = {name: [folder / name for folder in results if (folder / name / CONFIG).exists()] for name in MODULES}
    return [_row(name, said[name], (ran[name] or [results[0] / name])[0]) for name in MODULES]


def _row(name: str, said: dict[str, Any], folder: Path) -> Row:
    told: dict[str, str] = said.get("numbers", {})
    command = f"retrograde reproduce {name} --preset paper"
    absent = Row(name, said, command, tuple((what, number, None) for what, number in told.items()))
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
    figure = folder / FIGURE
    return Row(
        name, said, stored.get("command") or command, tuple(numbers), config.setting(), stored.get("preset", ""),
        _dates(records), _hardware(records), _time(sum(r.run.get("seconds", 0) for r in records)), done, total,
        missing(experiment, config, records),
        figure if figure.is_file() and not figure.is_symlink() else None,  # a link may lead to anything of the reader's
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


def write(out: Path, *results: Path) -> tuple[Path, Path]:
    """Write the page to `out` and the Markdown beside it. Figures of the Markdown are referred to where they are."""
    table = rows(*results)
    text = out.with_suffix(".md")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, html(table).encode())
        write_atomic(text, markdown(table, text.parent).encode())
    return out, text


def _lead(table: list[Row]) -> str:
    run = sum(row.ran for row in table)
    return (
        f"{run} of {len(table)} experiments run. The paper's column is what it states; ours is computed from the metrics "
        f"files. Page made {datetime.date.today().isoformat()}."
    )


# Markdown


def markdown(table: list[Row], base: Path) -> str:
    """The report as Markdown, with figures relative to the folder `base`."""
    lines = ["# The paper, reproduced", "", _lead(table), "", "| experiment | in the paper | state |", "|---|---|---|"]
    lines += [f"| [{row.name}](#{row.name}) | {row.paper['where']} | {row.status} |" for row in table]
    for row in table:
        lines += [
            "",
            f"## {row.name}",
            "",
            f"{row.paper['title']} ({row.paper['where']}). In the paper: {row.paper['shows']}",
            "",
        ]
        if row.numbers or row.ran:
            lines += ["| | paper | ours | should be | |", "|---|---|---|---|---|"]
            lines += ["| " + " | ".join(_cell(c) for c in cells) + " |" for cells in _cells(row)]
            lines.append("")
        lines += [f"- {label}: {_inert(value) if label == 'run' else value}" for label, value in _facts(row)]
        lines.append(f"- command: `{' '.join(row.command.replace('`', '').split())}`")
        if row.figure is not None:
            lines += ["", f"![{row.paper['title']}]({_relative(row.figure, base)})"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _relative(path: Path, base: Path) -> str:
    import os

    return Path(os.path.relpath(path.resolve(), base.resolve())).as_posix()


def _cells(row: Row) -> list[tuple[str, str, str, str, str]]:
    missing = NOT_RUN if not row.ran else "not measured"
    return [
        (what, said or "–", missing if found is None else found.ours, found.target if found else "", MARKS[found.met] if found else "")
        for what, said, found in row.numbers
    ]  # fmt: skip


def _facts(row: Row) -> list[tuple[str, str]]:
    facts = [("the paper's setting", row.paper["setting"])]
    if not row.ran:
        return [*facts, ("ours", NOT_RUN)]
    if row.done < row.total:
        few = f" (missing: {'; '.join(row.missing)})" if len(row.missing) <= FEW else ""
        facts.append(("state", row.status + few))
    facts.append(("our setting", row.setting + (f" (preset {row.preset})" if row.preset else "")))
    if "differs" in row.paper:
        facts.append(("what differs", row.paper["differs"]))
    return [*facts, ("run", f"{row.when}, {row.where}, {row.took}")]


def _inert(text: str) -> str:
    """What a file says, without meaning to Markdown: no tags, links or lines of its own."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("[", "\\[").split())


# HTML


def html(table: list[Row]) -> str:
    """The report as one page, figures and style inside."""
    links = "".join(
        f'<li><a href="#{row.name}"><span>{escape(row.name)}</span> '
        f'<span class="badge {_class(row)}">{escape(row.status)}</span></a></li>'
        for row in table
    )
    sections = "".join(_section(row) for row in table)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>The paper, reproduced · Retrograde</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<p class="kicker">Retrograde</p>
<h1>The paper, reproduced</h1>
<p class="lead">Sander, Ablin, Blondel, Peyré: <i>Momentum Residual Neural Networks</i>, ICML 2021. {escape(_lead(table))}</p>
<nav><ul>{links}</ul></nav>
</header>
<main>{sections}</main>
</body>
</html>
"""


def _class(row: Row) -> str:
    if not row.ran:
        return "none"
    asked = [found.met for *_, found in row.numbers if found is not None and found.met is not None]
    return "part" if row.done < row.total or not all(asked) else "full"


def _section(row: Row) -> str:
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in _facts(row))
    picture = ""
    if row.figure is not None:
        data = base64.b64encode(row.figure.read_bytes()).decode()
        picture = f'<figure><img alt="{escape(row.paper["title"])}" src="data:image/png;base64,{data}"></figure>'
    return f"""<section id="{row.name}">
<h2>{escape(row.paper["title"])} <span class="badge {_class(row)}">{escape(row.status)}</span></h2>
<p class="where"><code>{escape(row.name)}</code> · {escape(row.paper["where"])}</p>
<p>In the paper: {escape(row.paper["shows"])}</p>
{picture}{_table(row)}
<dl>{facts}<dt>command</dt><dd><code>{escape(row.command)}</code></dd></dl>
</section>
"""


def _table(row: Row) -> str:
    if not row.numbers:
        return ""
    heads = ("", "paper", "ours", "should be", "")
    body = ""
    for cells in _cells(row):
        mark = {"met": "yes", "not met": "no"}.get(cells[4], "")
        kinds = ("what", "num void" if cells[1] == "–" else "num", "num", "num", f"mark {mark}")
        tagged = zip(heads, kinds, cells, strict=True)
        body += (
            "<tr>"
            + "".join(
                f'<td class="{kind}"' + (f' data-head="{head}"' if head else "") + f">{escape(cell)}</td>"
                for head, kind, cell in tagged
            )
            + "</tr>"
        )
    return (
        f"<table><thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead><tbody>{body}</tbody></table>"
    )


STYLE = """
:root { --ink: #16181d; --soft: #5b6270; --line: #e2e5ea; --page: #f6f7f9; --card: #fff; --link: #1d4ed8;
  --good: #116932; --good-bg: #dcf5e4; --bad: #9a3412; --bad-bg: #fdecdc; --none-bg: #eceef2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ee; --soft: #9aa3b2; --line: #2b303b; --page: #0f1115; --card: #171a21;
  --link: #8ab4ff; --good: #7ee2a0; --good-bg: #12331f; --bad: #ffb27a; --bad-bg: #3a2412; --none-bg: #262b35; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: anywhere; }
header, main { max-width: 62rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.5rem; }
.kicker { margin: 0; color: var(--soft); font-size: .8rem; letter-spacing: .09em; text-transform: uppercase; }
h1 { margin: .1rem 0 .6rem; font-size: clamp(1.7rem, 5vw, 2.4rem); line-height: 1.15; letter-spacing: -.015em; }
h2 { margin: 0; font-size: 1.3rem; line-height: 1.3; display: flex; flex-wrap: wrap; gap: .4rem .7rem; align-items: center; }
.lead { color: var(--soft); max-width: 46rem; }
a { color: var(--link); text-decoration: none; }
nav ul { list-style: none; margin: 1.4rem 0 2rem; padding: 0; display: grid; gap: .5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 18.5rem), 1fr)); }
nav a { display: flex; justify-content: space-between; align-items: center; gap: .6rem; padding: .5rem .8rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .6rem; font-weight: 550; }
nav a:hover { border-color: var(--link); }
.badge { font-size: .74rem; font-weight: 600; line-height: 1.3; padding: .18rem .55rem; border-radius: 1rem; letter-spacing: 0;
  background: var(--none-bg); color: var(--soft); }
.badge.full { background: var(--good-bg); color: var(--good); }
.badge.part { background: var(--bad-bg); color: var(--bad); }
section { background: var(--card); border: 1px solid var(--line); border-radius: .9rem; padding: 1.4rem 1.5rem; margin-bottom: 1.4rem;
  scroll-margin-top: 1rem; }
section p { margin: .5rem 0; }
.where { color: var(--soft); font-size: .92rem; }
code { font: .88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--none-bg);
  padding: .1em .35em; border-radius: .3em; }
figure { margin: 1rem 0; background: #fff; border: 1px solid var(--line); border-radius: .6rem; padding: .5rem; }
img { display: block; width: 100%; height: auto; }
table { width: 100%; border-collapse: collapse; margin: .9rem 0; font-size: .95rem; }
th { text-align: left; font-size: .8rem; font-weight: 600; color: var(--soft); }
th, td { padding: .45rem .6rem .45rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.num { font-variant-numeric: tabular-nums; }
.mark { white-space: nowrap; font-weight: 600; font-size: .85rem; }
.mark.yes { color: var(--good); } .mark.no { color: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.1rem; margin: 1rem 0 0; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; }
@media (max-width: 640px) {
  header, main { padding-left: .8rem; padding-right: .8rem; }
  section { padding: 1.1rem 1rem; }
  thead { display: none; }
  tr { display: block; padding: .55rem 0; border-bottom: 1px solid var(--line); }
  td { display: block; border: 0; padding: .05rem 0; }
  td.what { font-weight: 550; }
  td.num[data-head]::before { content: attr(data-head) ": "; color: var(--soft); }
  td:empty, td.void { display: none; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; }
}
"""
