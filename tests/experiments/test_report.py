"""The report: every experiment has a row, ours comes from metrics, what was not run says so."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command_line import app
from retrograde_experiments import table1
from retrograde_experiments.findings import Finding
from retrograde_experiments.metrics import CONFIG, METRICS, named
from retrograde_experiments.progress import Quiet
from retrograde_experiments.registry import MODULES, load
from retrograde_experiments.report import fill, html, markdown, write
from retrograde_experiments.rows import VERDICTS, Row, default_results, paper, rows
from retrograde_experiments.run import complete, reproduce


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    config = table1.Config(networks=("RevNet", "Momentum ResNet"), repeats=1)
    reproduce("table1", config, folder / "table1", Quiet(), preset="paper", command="retrograde reproduce table1")
    return folder


def test_the_paper_has_an_entry_for_each() -> None:
    said = paper()
    assert list(said) == list(MODULES)
    assert all({"where", "title", "setting", "shows"} <= set(entry) for entry in said.values())


def test_rows(results: Path) -> None:
    table = {row.name: row for row in rows(results)}
    assert list(table) == list(MODULES)
    assert {row.verdict for name, row in table.items() if name != "table1"} == {"not run"}
    numbers = {what: (said, found) for what, said, found in table["table1"].numbers}
    said, found = numbers["Momentum ResNet: inversion / parameters / training"]
    assert said == "yes / yes / yes"
    assert found is not None
    assert found.ours == "yes / yes / yes"
    assert numbers["i-ResNet: inversion / parameters / training"] == (
        "no / yes / no",
        None,
    )  # in the paper, not in this run
    assert (table["table1"].verdict, table["table1"].evidence) == ("reproduced", "2 of 2 targets met")


def test_ours_follows_the_metrics(results: Path, tmp_path: Path) -> None:
    copy = tmp_path / "table1"
    copy.mkdir()
    for path in (results / "table1").iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    text = (copy / METRICS).read_text()
    (copy / METRICS).write_text(text.replace('"found": [true, true, true], "paper": [true, true, true], "agrees": true',
                                             '"found": [true, true, false], "paper": [true, true, true], "agrees": false'))  # fmt: skip
    row = next(row for row in rows(tmp_path) if row.name == "table1")
    assert (row.verdict, row.evidence) == ("partly", "1 of 2 targets met; 1 missed")


def test_missing_units_are_named(results: Path, tmp_path: Path) -> None:
    copy = tmp_path / "table1"
    copy.mkdir()
    (copy / CONFIG).write_bytes((results / "table1" / CONFIG).read_bytes())
    lines = (results / "table1" / METRICS).read_text().splitlines(keepends=True)
    (copy / METRICS).write_text("".join(lines[:-1]))
    row = next(row for row in rows(tmp_path) if row.name == "table1")
    assert row.done == row.total - 1
    assert f"(missing: {named(json.loads(lines[-1])['key'])})" in markdown([row], tmp_path, {})


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.sources += [value for key in ("src", "href") if (value := values.get(key))]
        if tag not in ("meta", "img", "link", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(results: Path, tmp_path: Path) -> None:
    page, text = write(tmp_path / "out" / "report.html", results)
    html, parsed = page.read_text(), Page()
    parsed.feed(html)
    assert parsed.open == []
    assert all(source.startswith(("#", "data:image/svg+xml;base64,")) for source in parsed.sources)
    assert sum(source.startswith("data:") for source in parsed.sources) == 1
    assert set(re.findall(r'<section id="([^"]+)"', html)) == {*MODULES, "pretrained"}
    assert html.count("<dd>not run</dd>") == len(MODULES) - 1
    written = text.read_text()
    assert all(f"## {name}\n" in written for name in MODULES)
    figure = re.search(r"!\[.*\]\((.*)\)", written)
    assert figure is not None
    assert (text.parent / figure[1]).exists()


def test_the_command(results: Path, tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["report", "--out", str(tmp_path / "r.html"), "--results", str(results)])
    assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / "r.html").exists()
    assert (tmp_path / "r.md").exists()
    outcome = CliRunner().invoke(
        app, ["report", "--results", str(tmp_path / "none"), "--out", str(tmp_path / "x.html")]
    )
    assert outcome.exit_code == 1
    assert not (tmp_path / "x.html").exists()


def test_what_the_repository_keeps_is_whole() -> None:
    """Each run kept in the repository can be read, and was run to its end."""
    table = [row for row in rows(default_results()) if row.ran]
    assert table
    for row in table:
        assert row.done == row.total, (row.name, row.missing)
        assert row.figure is not None, row.name
        assert "/tmp" not in row.command
    assert complete(load("table1"), table1.Config.paper(), []) == (0, 40)


PAGE = Path(__file__).parents[2] / "docs" / "reproduce.md"


def test_the_numbers_of_the_docs_are_what_the_metrics_give(tmp_path: Path) -> None:
    """Verdicts, tables and settings of docs/reproduce.md, made anew from the kept runs."""
    page = tmp_path / "docs" / "reproduce.md"
    page.parent.mkdir()
    page.write_bytes(PAGE.read_bytes())
    (tmp_path / "experiments").symlink_to(PAGE.parents[1] / "experiments")
    fill(page, default_results())
    figures = re.compile(r"\]\([^)]*results/")  # relative to the page, which lies elsewhere here
    assert figures.sub("](", page.read_text()) == figures.sub("](", PAGE.read_text())


def test_no_number_of_the_docs_stands_outside_of_what_is_made() -> None:
    """No accuracy or error of ours is typed: percentages stand between markers alone, besides the confidence of the tests."""
    typed = re.sub(r"(?s)<!-- ([^/ ]+) -->.*?<!-- /\1 -->", "", PAGE.read_text())
    assert re.findall(r"[\d.]+ %", typed) == ["95 %"]


def test_the_paper_s_file_holds_no_findings() -> None:
    for name, said in paper().items():
        assert not re.search(r"docs/|\bours? (?:ends|is below|is ahead)|beyond the seeds", said.get("differs", "")), (
            name
        )


def judged(*met: bool | None, done: int = 4, departs: tuple[str, ...] = ()) -> str:
    found = [Finding(f"number {k}", "1", "a target", each) for k, each in enumerate(met)]
    return Row("x", {}, "", tuple((f.what, "", f) for f in found), done=done, total=4, departs=departs).verdict


def test_verdicts() -> None:
    assert judged(done=0) == "not run"
    assert judged(True, True) == "reproduced"
    assert judged(True, True, departs=("epochs",)) == judged(True, True, done=3) == "partly"
    assert judged(True, None) == judged(True, False) == judged(None, False, True) == "partly"
    assert judged(False, False) == judged(False, None) == "contradicted"
    assert judged(False, False, departs=("epochs",)) == judged(False, done=3) == "partly"  # not the decisive experiment
    assert judged() == "partly"  # nothing was asked


def test_everything_on_the_page_is_escaped(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    said = dict.fromkeys(("where", "title", "setting", "shows", "differs"), bad)
    row = Row("x", said, bad, ((bad, bad, Finding(bad, bad, bad, True)),), bad, bad, bad, bad, bad, bad, 1, 1, 1)
    page = html([row], {"cifar": f"{bad}\n\n| {bad} | b |\n| --- | --- |\n| c | {bad} |"})
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 15


def test_the_page_leads_with_the_verdicts_counted(results: Path) -> None:
    table = rows(results)
    page = html(table, {})
    assert page.index('class="counts"') < page.index('class="verdicts"') < page.index("<section")
    counts = dict(re.findall(r"<b>(\d+)</b> ([a-z ]+)</li>", page)[k][::-1] for k in range(4))
    assert counts == {word: str(sum(row.verdict == word for row in table)) for word in VERDICTS}
