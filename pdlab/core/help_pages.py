"""The arguments and the help of a command as data.

The user's cache keeps the page of a command while its modules are unchanged. ``--help`` then imports neither the
settings nor pydantic.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from pdlab.core.errors import NoHomeError, WriteError
from pdlab.core.files import PACKAGE, cache_dir, replace
from pdlab.core.one_line_parser import OneLineParser

HELP, HELP_ALL = ("-h", "--help"), "--help-all"


class Argument(NamedTuple):
    """One argument of a command line. ``options``: those of `argparse.ArgumentParser.add_argument`.

    ``one_of``: arguments with the same word exclude each other. ``advanced``: only --help-all shows it.
    """

    group: str
    names: Sequence[str]
    options: dict[str, Any]
    one_of: str | None
    advanced: bool


class HelpPage(NamedTuple):
    """The arguments of a command, and the texts of its help. ``about`` is at its beginning, ``examples`` at its end."""

    program: str
    usage: str
    about: str
    examples: str
    arguments: Sequence[Argument]


def parser_of(page: HelpPage, *, everything: bool = False) -> OneLineParser:
    """The parser of a command. ``everything``: its help also has the advanced flags."""
    parser = OneLineParser(
        prog=page.program,
        usage=page.usage,
        description=page.about,
        epilog=page.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    if any(each.advanced for each in page.arguments):
        parser.add_argument(HELP_ALL, action=_HelpAll, nargs=0, page=page, help="show the advanced flags too, and exit")
    groups: dict[str, Any] = {}
    exclusive: dict[str, Any] = {}
    for group, names, options, one_of, advanced in page.arguments:
        place = groups.get(group) or parser.add_argument_group(group)
        groups[group] = place
        if one_of is not None:
            place = exclusive.get(one_of) or place.add_mutually_exclusive_group()
            exclusive[one_of] = place
        shown = everything or not advanced
        place.add_argument(*names, **options | ({} if shown else {"help": argparse.SUPPRESS}))
    return parser


class _HelpAll(argparse.Action):
    def __init__(self, *args: Any, page: HelpPage, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.page = page

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        parser_of(self.page, everything=True).print_help()
        parser.exit()


def store_page(command: str, page: HelpPage) -> None:
    """Keep the page until a loaded module of pdlab changes. Does nothing if the cache cannot be written."""
    arguments = [each._replace(options=_shown(each.options)) for each in page.arguments]
    modules = [getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith("pdlab.")]
    sources = {str(path): _state(Path(path)) for path in modules if path is not None}
    with suppress(WriteError, NoHomeError):
        replace(_file(command), json.dumps([sources, page._replace(arguments=arguments)]).encode())


def stored_page(command: str) -> HelpPage | None:
    """The page that `store_page` kept; None if there is none, or one of its modules has changed."""
    try:
        sources, (program, usage, about, examples, arguments) = json.loads(_file(command).read_bytes())
        if any(_state(Path(path)) != state for path, state in sources.items()):
            return None
        return HelpPage(program, usage, about, examples, [Argument(*each) for each in arguments])
    except (OSError, ValueError, TypeError, AttributeError, NoHomeError):
        return None


def _file(command: str) -> Path:
    """The file of a command's page. Each installation of pdlab has its own pages."""
    return cache_dir() / "help" / f"{command}-{crc32(str(PACKAGE).encode()):08x}.json"


def _state(path: Path) -> list[int]:
    """Modification time and size, by which Python too recognises changed source files."""
    state = path.stat()
    return [state.st_mtime_ns, state.st_size]


def _shown(options: dict[str, Any]) -> dict[str, Any]:
    """The options, without those that only the parsing of values needs."""
    return {name: value for name, value in options.items() if name != "type"} | (
        {"const": None} if "const" in options else {}
    )
