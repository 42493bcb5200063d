"""The flags of a command as a part of docs/flags.md."""

from __future__ import annotations

import textwrap
from typing import Literal, get_args, get_origin

from pdlab.core.commands import program
from pdlab.core.settings import Declared, Settings, declared, default_text

PAGE_COLUMNS = 100


def reference(kind: type[Settings]) -> str:
    """The flags of a command as a table in Markdown."""
    lines = [f"## `{program(kind.COMMAND)}`", "", _about(kind)]
    group = None
    for each in declared(kind):
        if each.flag.group != group:
            group = each.flag.group
            lines += ["", f"**{group}**", "", "| flag | what | default |", "|---|---|---|"]
        rows = [(f"`{name}`", text, "") for name, _, text in each.flag.implies]
        value = "" if each.kind is bool or each.flag.positional else f" `{_placeholder(each)}`"
        advanced = " (advanced)" if each.flag.advanced else ""
        names = ", ".join(f"`{name}`" for name in each.flags)
        rows.append((f"{names}{value}", f"{each.info.description}{advanced}", default_text(each)))
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _about(kind: type[Settings]) -> str:
    return "\n\n".join(textwrap.fill(part, PAGE_COLUMNS) for part in kind.ABOUT.split("\n\n"))


def _placeholder(each: Declared) -> str:
    if get_origin(each.kind) is Literal:
        return ",".join(map(str, get_args(each.kind)))
    return each.flag.value or ("N" if each.kind in (int, float) else each.name.upper())
