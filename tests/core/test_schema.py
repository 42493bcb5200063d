"""Complaints about values and YAML files are in plain words, and name what was probably meant."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import Field

from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen, load_yaml, parse_yaml, validate, yaml_text


class Inner(Frozen):
    count: int = Field(default=1, ge=1, le=9)
    share: float = Field(default=0.5, gt=0, lt=1)


class Left(Frozen):
    kind: Literal["left"] = "left"
    width: int = 1


class Right(Frozen):
    kind: Literal["right"] = "right"
    height: int = 1


class Outer(Frozen):
    name: str
    inner: Inner = Inner()
    several: tuple[Inner, ...] = Field(default=(Inner(),), min_length=1)
    side: Left | Right = Field(default=Left(), discriminator="kind")
    mode: Literal["fast", "slow"] = "fast"
    on: bool = False


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "f: name: is missing"),
        ({"name": 5}, "f: name: must be text, got 5"),
        ({"name": "x", "inner": {"count": 0}}, "f: inner.count: must be at least 1, got 0"),
        ({"name": "x", "inner": {"count": 10}}, "f: inner.count: must be at most 9, got 10"),
        ({"name": "x", "inner": {"count": 1.5}}, "f: inner.count: must be a whole number, got 1.5"),
        ({"name": "x", "inner": {"count": "many"}}, "f: inner.count: must be a whole number, got 'many'"),
        ({"name": "x", "inner": {"share": 0}}, "f: inner.share: must be above 0, got 0"),
        ({"name": "x", "inner": {"share": 1}}, "f: inner.share: must be below 1, got 1"),
        ({"name": "x", "inner": {"cuont": 1}}, "f: inner.cuont: is not a known key; did you mean count?"),
        ({"name": "x", "inner": 5}, "f: inner: must be a mapping of keys, got 5"),
        ({"name": "x", "several": [{}, {"shar": 1}]}, "f: several.1.shar: is not a known key; did you mean share?"),
        ({"name": "x", "several": []}, "f: several: must have at least 1 of them, got []"),
        ({"name": "x", "side": {"kind": "up"}}, "f: side: 'kind' must be one of 'left', 'right', got 'up'"),
        (
            {"name": "x", "side": {"kind": "right", "hight": 2}},
            "f: side.right.hight: is not a known key; did you mean height?",
        ),
        ({"name": "x", "mode": "quick"}, "f: mode: must be one of 'fast' or 'slow', got 'quick'"),
        ({"name": "x", "on": "maybe"}, "f: on: must be true or false, got 'maybe'"),
        ({"nmae": "x"}, "f: nmae: is not a known key; did you mean name? (and 1 more)"),
    ],
)
def test_a_complaint_names_the_key_the_rule_and_the_value(data: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        validate(Outer, data, "f")
    assert str(error.value) == message


def test_a_flag_stands_in_place_of_the_field() -> None:
    with pytest.raises(UsageError) as error:
        validate(Inner, {"count": 0}, "the flags", {"count": "--count"})
    assert str(error.value) == "--count: must be at least 1, got 0"


def test_a_key_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("name: x\ninner:\n  count: 1\n  count: 2\n")
    with pytest.raises(UsageError, match=r"f\.yaml: not valid YAML \(key 'count' is there twice, line 4, column 3\)"):
        load_yaml(path, Outer)
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, b: 2}") == {"a": {"b": 1}, "c": {"b": 2}}
    assert parse_yaml("[{a: 1}, {a: 2}]") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(("default_flow_style", "width"), [(False, 80), (None, 110)])
def test_yaml_is_written_alike_with_and_without_libyaml(default_flow_style: bool | None, width: int) -> None:
    long = [f"option-{number}" for number in range(40)]
    texts = ["", "no", "1e3", "a: b", "# no comment", "line\nnext", "tab\there", "it's", 'say "so"', "caf\u00e9", "~/x"]
    data = {
        "numbers": [1, 2.5, 1e-9, float("inf")],
        "texts": texts,
        "long": long,
        "words": " ".join(long),
        "none": None,
    }
    data["nested"] = {"empty": [{}, [], ""], "on": True, "list": [{"a": 1, "b": [1, 2]}, data["long"]]}
    pure = yaml.safe_dump(data, sort_keys=False, default_flow_style=default_flow_style, width=width)
    assert yaml_text(data, default_flow_style=default_flow_style, width=width) == pure
