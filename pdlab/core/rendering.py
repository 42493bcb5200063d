"""Facts -> text or HTML, by Jinja templates.

A template is a file in the folder ``templates`` beside the module with the facts. It may use `FILTERS`. Jinja is
imported when the first text is rendered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.core import text

if TYPE_CHECKING:
    import jinja2

CELL = "¦"
"""Separates the cells of a table in a template. In data, ``|`` replaces it."""
LEFT = "<"
"""Before a column's heading in a template: the column is left-aligned."""


def rendered(template: Path, **facts: Any) -> str:
    """The text of a template, without white space at its end. Raises jinja2.UndefinedError for a missing fact."""
    return str(_environment(template.parent).get_template(template.name).render(facts)).rstrip()


def macro(template: Path, name: str, *facts: Any, **more: Any) -> str:
    """The text of one macro of a template, without empty lines before it and white space after it."""
    named = getattr(_environment(template.parent).get_template(template.name).module, name)
    return str(named(*facts, **more)).lstrip("\n").rstrip()


class Macros:
    """The macros of a text template, for an HTML page, which escapes their text. If the page imported the macros, it
    would take their text for markup."""

    def __init__(self, template: Path) -> None:
        self._template = template

    def __getattr__(self, name: str) -> Callable[..., str]:
        return partial(macro, self._template, name)


def table(lines: str, *, drop_unknown: bool = False) -> str:
    """A head and rows, one a line, with `CELL` between cells -> aligned columns and a rule under the head.

    ``drop_unknown``: leave out columns with ``-`` in every row.
    """
    head, *rows = ([cell.strip() for cell in line.split(CELL)] for line in lines.split("\n") if line.strip())
    kept = [i for i in range(len(head)) if not drop_unknown or any(row[i] != "-" for row in rows)]
    left = {column for column, i in enumerate(kept) if head[i].startswith(LEFT)}
    rows = [[row[i] for i in kept] for row in rows]
    return text.table([head[i].removeprefix(LEFT) for i in kept], rows, left)


def aligned(lines: str) -> str:
    """Rows, one a line, with `CELL` between cells -> left-aligned columns without a rule."""
    rows = [[cell.strip() for cell in line.split(CELL)] for line in lines.split("\n") if line.strip()]
    return "\n".join(text.aligned(rows, range(len(rows[0]))))


def capital(words: str) -> str:
    """The text with a capital first letter."""
    return words[:1].upper() + words[1:]


def fmt(value: object, specification: str) -> str:
    """Python's format(): ``{{ 0.5|fmt(".0%") }}``."""
    return format(value, specification)


FILTERS: dict[str, Callable[..., str]] = {
    "aligned": aligned,
    "capital": capital,
    "counted": text.counted,
    "fmt": fmt,
    "listed": text.listed,
    "ms": text.ms,
    "number": text.number,
    "percent": text.percent,
    "plain": text.plain,
    "table": table,
}


def without_cell(value: object) -> object:
    """The value with ``|`` in place of `CELL`, so that no name adds a column to a table."""
    return value.replace(CELL, "|") if isinstance(value, str) and CELL in value else value


@cache
def _environment(folder: Path) -> jinja2.Environment:
    import jinja2

    from pdlab.core.compiled_templates import CompiledTemplates

    environment = jinja2.Environment(
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=without_cell,
        loader=jinja2.FileSystemLoader(folder),
        bytecode_cache=CompiledTemplates((Path(__file__), Path(str(text.__file__)))),
    )
    environment.filters.update(FILTERS)
    return environment
