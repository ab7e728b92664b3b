"""Text for pages: tables in Markdown, places in a page that are filled in, and Markdown of our own as HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from .errors import ExperimentError


def grid(head: list[str], rows: Iterable[list[str]]) -> str:
    r"""A table in Markdown.

    >>> print(grid(["a", "b"], [["1", "2 | 3"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 \| 3 |
    """
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def between(text: str, name: str, body: str, page: Path) -> str:
    """The text with `body` between the markers <!-- name --> and <!-- /name -->, each on a line of its own."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ExperimentError(
            f"{page} has no place for {name}: put <!-- {name} --> and <!-- /{name} --> on lines of their own."
        )
    return pattern.sub(lambda match: f"{match[1]}{body}\n{match[2]}", text)


def as_html(markdown: str) -> str:
    """Paragraphs and tables of Markdown as HTML; images are left out, everything else is escaped.

    >>> as_html("**a** & b")
    '<p><b>a</b> &amp; b</p>'
    """
    found = []
    for part in markdown.split("\n\n"):
        lines = part.strip().splitlines()
        if not lines or part.startswith("!["):
            continue
        if lines[0].startswith("| "):
            head, _, *body = [[_inline(cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
            rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body)
            heads = "".join(f"<th>{cell}</th>" for cell in head)
            found.append(f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>')
        else:
            found.append(f"<p>{_inline(' '.join(lines))}</p>")
    return "".join(found)


def _inline(text: str) -> str:
    text = escape(text.replace("\\|", "|"))
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
