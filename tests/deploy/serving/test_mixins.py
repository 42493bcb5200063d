"""The classes that are mixed into one server do not take each other's names."""

from __future__ import annotations

import ast
from pathlib import Path

from pdlab.deploy.serving import builders

FOLDER = Path(builders.__file__).parent


def mixed_in() -> set[str]:
    """The classes that `builders` mixes in."""
    return {each.own.__name__ for each in builders.MIXINS}


def names(made: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Of a class: its functions, and what it keeps on ``self``."""
    functions = {each.name for each in made.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    kept = {
        each.attr
        for each in ast.walk(made)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return functions, kept


def test_what_one_keeps_is_no_function_of_another() -> None:
    """A function that is hidden so is missed by nobody but its caller: a fluid pool's board heard of no engine."""
    classes = {
        each.name: names(each)
        for path in sorted(FOLDER.glob("*.py"))
        for each in ast.parse(path.read_text("utf-8")).body
        if isinstance(each, ast.ClassDef) and each.name in mixed_in()
    }
    assert {"SwitchesRoles", "SendsTimeline", "CallsPrefill", "CountsPoolTokens"} <= classes.keys()
    hidden = {
        (one, other, name)
        for one, (functions, _) in classes.items()
        for other, (_, kept) in classes.items()
        for name in functions & kept
        if one != other
    }
    assert hidden == set()
