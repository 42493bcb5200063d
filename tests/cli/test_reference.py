"""docs/flags.md has every flag of every command whose settings are declared once, and its tables fit its settings.

PDLAB_UPDATE_GOLDEN=1 rewrites the page.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest
from support.flags_page import reference

from pdlab.__main__ import COMMANDS
from pdlab.core.help_pages import parser_of
from pdlab.core.settings import Settings, declared, default_text, help_page, settings_of
from pdlab.deploy.options import LaunchSettings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flags.md"
HEAD = """# Flags

Every flag of every command, made from the settings of the commands by
`make golden`. `--help` shows the common flags of a command, `--help-all` all.
"""


def settings_of_commands() -> list[type[Settings]]:
    """The settings of each command, in the order of `python -m pdlab`."""
    for name in COMMANDS:
        import_module(f"pdlab.cli.{name.replace('-', '_')}")
    return [settings_of(name) for name in COMMANDS]


@pytest.mark.golden
def test_the_page_of_flags_is_made_from_the_settings() -> None:
    text = "\n\n".join([HEAD.rstrip(), *(reference(kind) for kind in settings_of_commands())]) + "\n"
    if os.environ.get("PDLAB_UPDATE_GOLDEN"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run `make golden` and read `git diff docs/flags.md`"


@pytest.mark.parametrize("kind", settings_of_commands(), ids=lambda kind: kind.COMMAND)
def test_every_setting_says_what_it_does_and_no_flag_is_there_twice(kind: type[Settings]) -> None:
    fields = list(declared(kind))
    assert fields and kind.COMMAND and kind.ABOUT and kind.EXAMPLES
    flags = [flag for each in fields for flag in (*each.flags, *(name for name, _, _ in each.flag.implies))]
    assert len(flags) == len(set(flags))
    assert all(each.info.description for each in fields)
    assert {name for *names, _ in kind.EXCLUSIONS for name in names} <= {each.name for each in fields}


@pytest.mark.parametrize("kind", settings_of_commands(), ids=lambda kind: kind.COMMAND)
def test_a_flag_with_a_number_as_default_names_it(kind: type[Settings]) -> None:
    for each in declared(kind):
        default = None if each.info.is_required() else each.default
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert default_text(each), each.name
        if each.required:
            assert default_text(each) == "required"


@pytest.mark.parametrize(
    "kind",
    [kind for kind in settings_of_commands() if not any(each.required for each in declared(kind))],
    ids=lambda kind: kind.COMMAND,
)
def test_a_word_that_is_not_given_sets_nothing(kind: type[Settings]) -> None:
    assert vars(parser_of(help_page(kind)).parse_args([])) == {}


def test_the_launcher_shows_about_twenty_flags_at_first() -> None:
    flags = [1 + len(each.flag.implies) for each in declared(LaunchSettings) if not each.flag.advanced]
    assert 15 <= sum(flags) <= 24, "one field may have several flags"
