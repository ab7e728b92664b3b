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
from retrograde_experiments.metrics import CONFIG, METRICS, named, read_config, read_metrics
from retrograde_experiments.progress import Quiet
from retrograde_experiments.registry import MODULES, load
from retrograde_experiments.report import default_results, markdown, paper, rows, write
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
    assert {row.status for name, row in table.items() if name != "table1"} == {"not run"}
    numbers = {what: (said, found) for what, said, found in table["table1"].numbers}
    said, found = numbers["Momentum ResNet: inversion / parameters / training"]
    assert said == "yes / yes / yes"
    assert found is not None
    assert found.ours == "yes / yes / yes"
    assert numbers["i-ResNet: inversion / parameters / training"] == (
        "no / yes / no",
        None,
    )  # in the paper, not in this run
    assert table["table1"].status == "2 of 2 targets met"


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
    assert row.status == "1 of 2 targets met"


def test_missing_units_are_named(results: Path, tmp_path: Path) -> None:
    copy = tmp_path / "table1"
    copy.mkdir()
    (copy / CONFIG).write_bytes((results / "table1" / CONFIG).read_bytes())
    lines = (results / "table1" / METRICS).read_text().splitlines(keepends=True)
    (copy / METRICS).write_text("".join(lines[:-1]))
    row = next(row for row in rows(tmp_path) if row.name == "table1")
    assert row.done == row.total - 1
    assert f"(missing: {named(json.loads(lines[-1])['key'])})" in markdown([row], tmp_path)


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.sources += [value for key in ("src", "href") if (value := values.get(key))]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(results: Path, tmp_path: Path) -> None:
    page, text = write(tmp_path / "out" / "report.html", results)
    html, parsed = page.read_text(), Page()
    parsed.feed(html)
    assert parsed.open == []
    assert all(source.startswith(("#", "data:image/png;base64,")) for source in parsed.sources)
    assert sum(source.startswith("data:") for source in parsed.sources) == 1
    assert set(re.findall(r'<section id="([^"]+)"', html)) == set(MODULES)
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


@pytest.mark.parametrize("end", [0.0, 1.0])
@pytest.mark.parametrize(("way", "key"), [("as it is", "plain"), ("statistics anew", "statistics")])
def test_the_tables_of_gamma_in_the_docs_are_what_the_metrics_give(end: float, way: str, key: str) -> None:
    folder = default_results() / "gamma"
    records = [r for r in read_metrics(folder) if r["train"] == end]
    shown = []
    for gamma in read_config(folder)["config"]["gammas"]:
        record = next(r for r in records if r["test"] == gamma)
        value = record.values.get(key, record["accuracy"] if gamma == end and key == "plain" else None)
        shown.append("" if value is None else f"{value:.2f}")
    page = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    cells = re.search(rf"\| trained with γ = {end:g}, {way} \|(.*\d{{2}}\.\d{{2}}.*)\|\n", page)
    assert cells is not None
    assert [cell.strip() for cell in cells[1].split("|")] == shown
