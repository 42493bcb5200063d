"""Settings declared once: the parser, the words of its complaints, the help, and the command line that gives them."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Le
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from support.flags_page import reference

from pdlab.core.arguments import positive
from pdlab.core.errors import UsageError
from pdlab.core.named_values import engine_arg, engine_args
from pdlab.core.schema import Frozen, validate
from pdlab.core.settings import (
    AboveZero,
    FlagsOf,
    Milliseconds,
    Numbers,
    Port,
    Positive,
    Seconds,
    Seed,
    Settings,
    Share,
    Text,
    from_flag_keys,
    given_of,
    not_given,
    parse,
    setting,
    to_words,
)
from pdlab.deploy.options import LaunchSettings


class Example(Settings):
    COMMAND = "example"
    ABOUT = "Show every kind of setting."

    plan: Path | None = setting(None, "the plan", "what", positional=True, value="FILE")
    mode: Literal["far", "near"] | None = setting(
        None, "the placement as one word", "what", "--mode", implies=(("--near", "near", "on one node"),)
    )
    sizes: Numbers = setting((1, 2), "sizes", "what", value="N,N")
    count: Positive | None = setting(None, "how many", "what", "-n", "--count", "--number", otherwise="one per node")
    port: Port = setting(8000, "port to serve on", "where")
    rate: AboveZero | None = setting(None, "rate", "where", value="R")
    slo_s: Milliseconds | None = setting(None, "limit of TTFT", "where", "--slo-ms", value="MS")
    timeout_s: Seconds = setting(60.0, "limit", "where", value="S")
    quantile: Share = setting(0.95, "share", "where", value="Q", needs="slo_s")
    seed: Seed = setting(0, "seed", "where")
    out: Path = setting(Path("out"), "folder", "where", value="DIR")
    local: Positive | None = setting(None, "local nodes", "where", bare=2)
    extra: tuple[str, ...] = setting((), "a word (repeatable)", "how", several="times", value="WORD")
    folders: tuple[Path, ...] = setting((), "folders", "how", several="words", value="DIR")
    dry_run: bool = setting(False, "start nothing", "how")
    guard: bool = setting(True, "keep the guard", "how", advanced=True)


def test_nothing_given_is_the_defaults_and_nothing_is_set() -> None:
    settings = parse(Example, [])
    assert settings == Example()
    assert settings.model_fields_set == set()
    assert to_words(settings) == []


def test_each_kind_of_flag_sets_its_field() -> None:
    words = "plan.yaml --near --sizes 3,1 --number 4 --port 1 --rate 0.5 --slo-ms 12 --timeout-s 1e3 --quantile 0.5"
    words += " --local --extra a --extra b --dry-run --no-guard --folders x y"
    settings = parse(Example, words.split())
    assert (settings.plan, settings.mode, settings.sizes, settings.count) == (Path("plan.yaml"), "near", (1, 3), 4)
    assert (settings.port, settings.rate, settings.slo_s, settings.timeout_s) == (1, 0.5, 0.012, 1000.0)
    assert (settings.local, settings.extra, settings.guard) == (2, ("a", "b"), False)
    assert settings.folders == (Path("x"), Path("y")) and settings.dry_run
    assert parse(Example, to_words(settings)) == settings


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--count 0", "--count: '0' is not a whole number of at least 1"),
        ("-n x", "--count: 'x' is not a whole number of at least 1"),
        ("--port 70000", "--port: '70000' is not a port from 1 to 65535"),
        ("--rate 0", "--rate: '0' is not a number above 0"),
        ("--rate nan", "--rate: 'nan' is not a number above 0"),
        ("--slo-ms -1", "--slo-ms: '-1' is not a number of milliseconds from 0"),
        ("--timeout-s inf", "--timeout-s: 'inf' is not a number of seconds above 0"),
        ("--slo-ms 1 --quantile 1", "--quantile: '1' is not a share: a number above 0 and below 1"),
        ("--quantile 0.5", "--quantile is for --slo-ms, which is not given: add --slo-ms, or leave it out"),
        ("--near --mode far", "--mode and --near exclude each other: leave one out"),
        ("--mode nearr", "--mode 'nearr': did you mean near? choose from far, near"),
        ("--prot 1", "--prot is not a flag; did you mean --port? (all flags: python -m pdlab example --help)"),
        ("--port 1 --port 2", "--port is given twice: give it once"),
        ("--count 1 --number 2", "--count and --number are the same flag: give it once"),
        ("--port", "--port needs a value"),
        ("--out=", "--out needs a value, got ''"),
    ],
)
def test_what_is_typed_wrong_is_one_line_with_value_rule_and_fix(words: str, complaint: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(Example, words.split())
    assert str(raised.value) == complaint


def test_help_has_what_is_needed_often_and_help_all_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    for word, shown in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as ended:
            parse(Example, [word])
        text = " ".join(capsys.readouterr().out.split())
        assert ended.value.code == 0
        assert ("keep the guard" in text) == shown
        assert "how many (default one per node)" in text and "port to serve on (default 8000)" in text


def test_the_reference_has_every_flag_with_its_default() -> None:
    text = reference(Example)
    assert "| `--port` `N` | port to serve on | 8000 |" in text
    assert "| `--near` | on one node |  |\n| `--mode` `far,near` | the placement as one word |  |" in text
    assert "| `--guard` | keep the guard (advanced) | on |" in text
    assert "| `FILE` | the plan |  |" in text


texts = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8)


@given(
    plan=st.none() | texts,
    count=st.none() | st.integers(1, 10**17),
    rate=st.none() | st.floats(1e-6, 1e6).map(lambda value: float(f"{value:.6g}")),
    slo_ms=st.none() | st.integers(0, 10**6),
    extra=st.lists(texts, max_size=3),
    guard=st.booleans(),
    mode=st.sampled_from([None, "near", "far"]),
)
def test_the_command_line_of_settings_gives_them_back(
    plan: str | None,
    count: int | None,
    rate: float | None,
    slo_ms: int | None,
    extra: list[str],
    guard: bool,
    mode: Literal["far", "near"] | None,
) -> None:
    settings = Example(
        plan=plan,
        count=count,
        rate=rate,
        slo_s=None if slo_ms is None else slo_ms / 1000,
        extra=tuple(extra),
        guard=guard,
        mode=mode,
    )
    assert parse(Example, to_words(settings)) == settings


def test_flags_that_change_nothing_are_refused_even_with_the_value_of_the_default() -> None:
    settings = parse(Example, ["--port", "8000"])
    not_given(settings, ("count",), "--mode")
    with pytest.raises(UsageError, match="--port does nothing with --mode; leave it out"):
        not_given(settings, ("count", "port"), "--mode")


def test_a_part_of_the_settings_goes_on_to_another_command() -> None:
    settings = parse(Example, ["--port", "1", "--number", "3"])
    assert to_words(settings, only=("port",)) == ["--port", "1"]


@pytest.mark.parametrize(
    "value",
    [1, 0.5, True, None, "word", "yes", "1e3", "two words", {"a": [1, "b"]}, float("inf"), date(2026, 1, 1), b"\xff"],
    ids=str,
)
def test_an_engine_argument_is_read_back_as_it_was(value: object) -> None:
    assert engine_args([engine_arg("key", value)], "--engine-arg") == {"key": value}


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_a_part_writes_what_was_given_although_it_is_the_default_of_its_model(tp: int) -> None:
    words = ["--pd-spread", "--p-tp", str(tp)]
    settings = parse(LaunchSettings, words)
    assert parse(LaunchSettings, to_words(settings)) == settings
    assert settings.prefill == {"tp": tp}


def test_named_values_are_given_in_one_flag_or_in_several() -> None:
    one = parse(LaunchSettings, ["--pd-spread", "--env", "UCX_A=1", "UCX_B=2"])
    several = parse(LaunchSettings, ["--pd-spread", "--env", "UCX_A=1", "--ucx-env", "UCX_B=2"])
    assert one == several and one.deployment == {"env": {"UCX_A": "1", "UCX_B": "2"}}


class Shell(Settings):
    COMMAND = "shell"
    ABOUT = "A word, flags, and a command behind two dashes."

    action: str = setting(..., "what", "what", positional=True)
    command: tuple[str, ...] = setting((), "the command", "what", positional=True, several="words")
    host: str = setting("a", "where", "what")


@pytest.mark.parametrize(
    ("words", "host", "command"),
    [
        ("run", "a", ()),
        ("run --host b", "b", ()),
        ("run -- ls -l", "a", ("ls", "-l")),
        ("run --host b -- ls -l --host c", "b", ("ls", "-l", "--host", "c")),
        ("run --host b -- sh -c --", "b", ("sh", "-c", "--")),
    ],
)
def test_a_command_behind_two_dashes_is_taken_as_it_is(words: str, host: str, command: tuple[str, ...]) -> None:
    settings = parse(Shell, words.split())
    assert (settings.action, settings.host, settings.command) == ("run", host, command)
    assert parse(Shell, to_words(settings)) == settings


class Part(Frozen):
    pause_s: Annotated[Milliseconds, Le(1)] = setting(0.5, "pause", "part", "--pause-ms", value="MS")
    most: Annotated[Annotated[int, Ge(1)] | None, Text(positive, none="none")] = setting(None, "most", "part")
    fast: bool = setting(False, "at once", "part", needs="pause_s", both_ways=True)
    inside: int = 0


class Whole(Settings):
    COMMAND = "whole"

    use: bool = setting(False, "use the part", "what")
    part: Annotated[dict[str, Any], FlagsOf(Part, prefix="p-", needs="use", over_file=True)] = Field(
        default_factory=dict
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--p-pause-ms 5", "--p-pause-ms is for --use, which is not given: add --use, or leave it out"),
        ("--use --p-fast", "--p-fast is for --p-pause-ms, which is not given: add --p-pause-ms, or leave it out"),
        ("--use --p-pause-ms 1001", "--p-pause-ms: '1001' is not a number of milliseconds from 0 to 1000"),
        ("--use --p-most 0", "--p-most: '0' is not a whole number of at least 1"),
    ],
)
def test_the_flags_of_a_part_have_its_rules_and_what_the_command_adds(words: str, complaint: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(Whole, words.split())
    assert str(raised.value) == complaint


def test_a_part_has_what_was_given_and_its_command_line_gives_it_back() -> None:
    settings = parse(Whole, ["--use", "--p-pause-ms", "20", "--p-most", "none", "--no-p-fast"])
    assert settings.part == {"pause_s": 0.02, "most": None, "fast": False}
    assert parse(Whole, to_words(settings)) == settings
    assert given_of(settings, ("part",)) == ["--p-pause-ms", "--p-most", "--no-p-fast"]
    assert "0.5" not in reference(Whole), "the defaults are those of a file"


def test_keys_of_a_file_are_the_flags_with_their_units_and_rules() -> None:
    part = FlagsOf(Part)
    keys = from_flag_keys(part, {"pause_ms": 20, "most": "none", "fast": True})
    assert validate(Part, keys, where="x") == Part(pause_s=0.02, fast=True)
    assert validate(Part, {"most": "7"}, where="x").most == 7
    for key, value, words in (
        ("pause_ms", -1, "pause_ms: '-1' is not a number of milliseconds from 0 to 1000"),
        ("inside", 1, "inside is not a known key"),
        ("mots", 1, "did you mean most"),
    ):
        with pytest.raises(ValueError, match=words):
            from_flag_keys(part, {key: value})


@pytest.mark.parametrize("pair", ["hf_token=hf_abcdefgh", "--hf-token=hf_abcdefgh", "HF_TOKEN=hf_abcdefgh"])
def test_no_engine_argument_is_a_secret(pair: str) -> None:
    with pytest.raises(UsageError) as refused:
        engine_args([pair], "--p-engine-arg")
    assert "abcdefgh" not in str(refused.value) and "--p-engine-arg" in str(refused.value)
    assert "--env HF_TOKEN" in str(refused.value)
