"""A result as people see it: facts and tables on a terminal, and as HTML in a notebook."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from raypipe.report.formats import cell
from raypipe.tables.table import TableVersion
from raypipe.work.tables import Table

Facts = dict[str, Any]


def prepared_from(version: TableVersion, name: str = "prepared_from") -> dict[str, str]:
    """Of a prepared table, the version that it stands for."""
    return {name: version.origin} if version.origin else {}


class Result:
    """Facts and tables; a notebook shows them."""

    def facts(self) -> Facts:
        """Names and values for people."""
        raise NotImplementedError

    def summary(self) -> Facts:
        """What --json prints."""
        raise NotImplementedError

    def tables(self) -> list[Table]:
        return []

    def report_page(self) -> str | None:
        """The path of the HTML report, if there is one."""
        return None

    def key(self) -> str:
        """Names the result among those of its verb; "" where nothing does."""
        return ""

    def files(self) -> dict[str, Path]:
        """Files and folders that it made, by their names below `artifacts.uri`."""
        page = self.report_page()
        return {} if page is None else {"report.html": Path(page)}

    def __repr__(self) -> str:
        """Text, like that on a terminal."""
        facts = self.facts()
        # Values stand below each other, as on a terminal.
        width = max(map(len, facts), default=0)
        lines = [f"{name:<{width}}  {cell(value)}" for name, value in facts.items()]
        return "\n".join([type(self).__name__, *lines])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        parts = [_html_table(table) for table in self.tables()]
        rows = []
        for name, value in self.facts().items():
            # Labels and names are the user's, and may hold markup.
            rows.append(f"<tr><th>{escape(name)}</th><td>{escape(cell(value))}</td></tr>")
        parts.append(f"<table style='text-align:left'>{''.join(rows)}</table>")
        # A notebook opens a local page by its address only.
        page = self.report_page()
        if page is not None:
            link = escape(Path(page).absolute().as_uri(), quote=True)
            parts.append(f'<p><a href="{link}">Open the report</a></p>')
        return "".join(parts)


def _html_table(table: Table) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    body = ""
    for row in table.rows:
        cells = "".join(f"<td>{escape(cell(value))}</td>" for value in row)
        body += f"<tr>{cells}</tr>"
    title = f"<caption>{escape(table.title)}</caption>"
    return f"<table>{title}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
