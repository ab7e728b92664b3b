"""The report: every experiment with the paper's numbers beside ours, as one HTML page that needs nothing else, and as Markdown.

It leads with a verdict for each row in one of four words (`rows`). The paper's column comes from `paper.toml`, ours from metrics alone.
`fill` writes the same sections between markers of `docs/reproduce.md`, so that no number of that page is typed.
"""

from __future__ import annotations

import base64
import datetime
import os
from collections import Counter
from html import escape
from pathlib import Path

from .markup import as_html, between, grid
from .metrics import write_atomic, writing
from .rows import NOT_RUN, VERDICTS, Row, rows

FEW = 4  # missing units are named up to so many
MARKS = {True: "met", False: "missed", None: "undecided"}


def write(out: Path, *results: Path) -> tuple[Path, Path]:
    """Write the page to `out` and the Markdown beside it. Figures of the Markdown are referred to where they are."""
    table, text = rows(*results), out.with_suffix(".md")
    pretrained = _pretrained(results[-1])
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, html(table, pretrained).encode())
        write_atomic(text, markdown(table, text.parent, pretrained).encode())
    return out, text


def fill(page: Path, results: Path) -> None:
    """Write the verdicts and every section between the markers of a page."""
    text, table = page.read_text(encoding="utf-8"), rows(results)
    text = between(text, "verdicts", f"{counted(table)}\n\n{_verdicts(table, '')}", page)
    for row in (each for one in table for each in (one, *one.beside)):
        text = between(text, row.name, "\n".join(_body(row, page.parent)).strip("\n"), page)
    with writing(page):
        write_atomic(page, text.encode())


def counted(table: list[Row]) -> str:
    """The verdicts, counted."""
    count = Counter(row.verdict for row in table)
    return "Of {} rows: {}.".format(len(table), ", ".join(f"{count[word]} {word}" for word in VERDICTS))


def _pretrained(results: Path) -> dict[str, str]:
    """The sections about pretrained networks, in Markdown, by name."""
    from .pretrained.report import sections

    return sections(results / "pretrained")


# Markdown


def markdown(table: list[Row], base: Path, pretrained: dict[str, str]) -> str:
    """The report as Markdown, with figures relative to the folder `base`."""
    lines = ["# The paper, reproduced", "", counted(table), "", _made(), "", _verdicts(table, "#")]
    for row in (each for one in table for each in (one, *one.beside)):
        title = f"{row.paper['title']} ({row.paper['where']})"
        lines += ["", f"## {row.name}", "", f"{title}. In the paper: {row.paper['shows']}", "", *_body(row, base)]
    lines += ["", "## pretrained", ""]
    for name, text in pretrained.items():
        lines += [f"### {name}", "", text, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _made() -> str:
    today = datetime.date.today().isoformat()
    return f"The paper's column is what it states; ours is computed from the metrics files. Page made {today}."


def _verdicts(table: list[Row], link: str) -> str:
    head = ["in the paper", "experiment", "verdict", "evidence", "seeds", "command"]
    return grid(head, [_verdict_cells(row, f"[{row.name}](#{row.name})" if link else row.name) for row in table])


def _verdict_cells(row: Row, name: str) -> list[str]:
    seeds = str(row.seeds) if row.ran else ""
    return [row.paper["where"], name, row.verdict, row.evidence, seeds, _code(row.command)]


def _body(row: Row, base: Path) -> list[str]:
    lines = [
        f"Verdict: {row.verdict}." + (f" {row.evidence[:1].upper()}{row.evidence[1:]}." if row.evidence else ""),
        "",
    ]
    if row.numbers:
        lines += [grid(["", "paper", "ours", "should be", ""], [list(cells) for cells in _cells(row)]), ""]
    lines += [f"- {label}: {_inert(value) if label == 'run' else value}" for label, value in _facts(row)]
    lines.append(f"- command: {_code(row.command)}")
    if row.figure is not None:
        place = Path(os.path.relpath(row.figure.resolve(), base.resolve())).as_posix()
        lines += ["", f"![{row.paper['title']}]({place})"]
    return lines


def _code(command: str) -> str:
    return f"`{' '.join(command.replace('`', '').split())}`"


def _inert(text: str) -> str:
    """What a file says, without meaning to Markdown: no tags, links or lines of its own."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("[", "\\[").split())


def _cells(row: Row) -> list[tuple[str, str, str, str, str]]:
    absent = NOT_RUN if not row.ran else "not measured"
    return [
        (what, said or "–", absent if found is None else found.ours, found.target if found else "",
         MARKS[found.met] if found and found.target else "")
        for what, said, found in row.numbers
    ]  # fmt: skip


def _facts(row: Row) -> list[tuple[str, str]]:
    facts = [("the paper's setting", row.paper["setting"])]
    if not row.ran:
        return [*facts, ("ours", NOT_RUN)]
    if row.done < row.total:
        few = f" (missing: {'; '.join(row.missing)})" if len(row.missing) <= FEW else ""
        facts.append(("state", f"{row.done} of {row.total} units run{few}"))
    facts.append(("our setting", row.setting + (f" (preset {row.preset})" if row.preset else "")))
    if "differs" in row.paper:
        facts.append(("what is ours", row.paper["differs"]))
    commit = f", commit {row.commit}" if row.commit else ""
    return [*facts, ("run", f"{row.when}, {row.where}, {row.took}{commit}")]


# HTML


def html(table: list[Row], pretrained: dict[str, str]) -> str:
    """The report as one page, figures and style inside."""
    sections = "".join(_section(row) for one in table for row in (one, *one.beside))
    rest = "".join(f"<h3>{escape(name)}</h3>{as_html(text)}" for name, text in pretrained.items())
    counts = Counter(row.verdict for row in table)
    chips = "".join(f'<li class="badge {_class(word)}"><b>{counts[word]}</b> {word}</li>' for word in VERDICTS)
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
<p class="lead">Sander, Ablin, Blondel, Peyré: <i>Momentum Residual Neural Networks</i>, ICML 2021. {escape(_made())}</p>
<ul class="counts">{chips}</ul>
{_lead_table(table)}
</header>
<main>{sections}<section id="pretrained">
<h2>Pretrained networks</h2>
<p class="where">converted with the same weights; the paper's own transfer, on ImageNet, is the row of Figure 8</p>
{rest}</section></main>
</body>
</html>
"""


def _class(verdict: str) -> str:
    return {"reproduced": "full", "partly": "part", "contradicted": "against", NOT_RUN: "none"}[verdict]


def _badge(row: Row) -> str:
    return f'<span class="badge {_class(row.verdict)}">{escape(row.verdict)}</span>'


def _lead_table(table: list[Row]) -> str:
    body = "".join(
        f'<tr><td class="what"><a href="#{row.name}">{escape(row.paper["title"])}</a><small>{escape(row.paper["where"])}</small></td>'
        f"<td>{_badge(row)}</td><td>{escape(row.evidence)}</td><td>{row.seeds if row.ran else ''}</td></tr>"
        for row in table
    )
    return (
        '<table class="verdicts"><thead><tr><th>row</th><th>verdict</th><th>evidence</th><th>seeds</th></tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def _section(row: Row) -> str:
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in _facts(row))
    return f"""<section id="{row.name}">
<h2>{escape(row.paper["title"])} {_badge(row)}</h2>
<p class="where"><code>{escape(row.name)}</code> · {escape(row.paper["where"])}{" · " if row.ran else ""}{escape(row.evidence)}</p>
<p>In the paper: {escape(row.paper["shows"])}</p>
{_picture(row)}{_table(row)}
<dl>{facts}<dt>command</dt><dd><code>{escape(row.command)}</code></dd></dl>
</section>
"""


def _picture(row: Row) -> str:
    """The figure, which a click (or the space bar) opens over the whole window and closes again."""
    if row.figure is None:
        return ""
    vector = row.figure.with_suffix(".svg")
    path, kind = (vector, "svg+xml") if vector.exists() else (row.figure, "png")
    data = base64.b64encode(path.read_bytes()).decode()
    alt = escape(row.paper["title"])
    return (
        f'<figure><label><input type="checkbox" aria-label="show {alt} large"><img alt="{alt}" '
        f'src="data:image/{kind};base64,{data}"></label></figure>'
    )


def _table(row: Row) -> str:
    if not row.numbers:
        return ""
    heads = ("", "paper", "ours", "should be", "")
    body = ""
    for cells in _cells(row):
        mark = {"met": "yes", "missed": "no"}.get(cells[4], "")
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
  --good: #116932; --good-bg: #dcf5e4; --bad: #8a4b08; --bad-bg: #fdf0d5; --no: #9f1239; --no-bg: #fde2e7; --none-bg: #eceef2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ee; --soft: #9aa3b2; --line: #2b303b; --page: #0f1115; --card: #171a21;
  --link: #8ab4ff; --good: #7ee2a0; --good-bg: #12331f; --bad: #f5c66b; --bad-bg: #38290f; --no: #ff9db0; --no-bg: #3d141d;
  --none-bg: #262b35; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: break-word; }
header, main { max-width: 64rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.5rem; margin-bottom: 2rem; }
.kicker { margin: 0; color: var(--soft); font-size: .8rem; letter-spacing: .09em; text-transform: uppercase; }
h1 { margin: .1rem 0 .6rem; font-size: clamp(1.7rem, 5vw, 2.4rem); line-height: 1.15; letter-spacing: -.015em; }
h2 { margin: 0; font-size: 1.3rem; line-height: 1.3; display: flex; flex-wrap: wrap; gap: .4rem .7rem; align-items: center; }
h3 { margin: 1.4rem 0 0; font-size: 1.05rem; }
.lead { color: var(--soft); max-width: 46rem; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
.counts { list-style: none; display: flex; flex-wrap: wrap; gap: .5rem; padding: 0; margin: 1.2rem 0; }
.counts .badge { font-size: .9rem; padding: .3rem .8rem; }
.badge { display: inline-block; white-space: nowrap; font-size: .76rem; font-weight: 600; line-height: 1.3; padding: .18rem .55rem;
  border-radius: 1rem; background: var(--none-bg); color: var(--soft); }
.badge.full { background: var(--good-bg); color: var(--good); }
.badge.part { background: var(--bad-bg); color: var(--bad); }
.badge.against { background: var(--no-bg); color: var(--no); }
.verdicts { background: var(--card); border: 1px solid var(--line); border-radius: .9rem; border-collapse: separate;
  border-spacing: 0; }
.verdicts th, .verdicts td { padding: .5rem .8rem; } .verdicts tr:last-child td { border-bottom: 0; }
.verdicts small { display: block; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: .9rem; padding: 1.4rem 1.5rem; margin-bottom: 1.4rem;
  scroll-margin-top: 1rem; }
section p { margin: .5rem 0; }
.where { color: var(--soft); font-size: .92rem; }
code { font: .88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--none-bg);
  padding: .1em .35em; border-radius: .3em; overflow-wrap: anywhere; }
figure { margin: 1rem 0; background: #fff; border: 1px solid var(--line); border-radius: .6rem; padding: .5rem; }
figure label { display: block; cursor: zoom-in; }
figure input { position: absolute; opacity: 0; }
figure input:focus-visible + img { outline: 2px solid var(--link); }
figure input:checked + img { position: fixed; inset: 0; width: 100vw; height: 100vh; object-fit: contain; background: #fff; z-index: 9;
  cursor: zoom-out; }
img { display: block; width: 100%; height: auto; max-height: 40rem; object-fit: contain; }
table { width: 100%; border-collapse: collapse; margin: .9rem 0; font-size: .93rem; }
th { text-align: left; font-size: .8rem; font-weight: 600; color: var(--soft); }
th, td { padding: .45rem .6rem .45rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.wide { overflow-x: auto; } .wide td, .wide th { padding-right: 1rem; } .wide th { min-width: 5rem; white-space: normal; }
th { white-space: nowrap; }
section > table td:nth-child(2) { white-space: nowrap; }
.num { font-variant-numeric: tabular-nums; }
.mark { white-space: nowrap; font-weight: 600; font-size: .85rem; color: var(--soft); }
.mark.yes { color: var(--good); } .mark.no { color: var(--no); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.1rem; margin: 1rem 0 0; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; }
@media (max-width: 640px) {
  header, main { padding-left: .8rem; padding-right: .8rem; }
  section { padding: 1.1rem 1rem; }
  section > table thead, .verdicts thead { display: none; }
  section > table tr, .verdicts tr { display: block; padding: .55rem 0; border-bottom: 1px solid var(--line); }
  section > table td, .verdicts td { display: block; border: 0; padding: .05rem 0; }
  section > table td:nth-child(2) { white-space: normal; }
  .verdicts tr { padding: .6rem .9rem; } .verdicts tr:last-child { border-bottom: 0; }
  .verdicts td:last-child:not(:empty)::before { content: "seeds: "; color: var(--soft); }
  td.what { font-weight: 550; }
  td.num[data-head]::before { content: attr(data-head) ": "; color: var(--soft); }
  td:empty, td.void { display: none !important; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; }
}
"""
