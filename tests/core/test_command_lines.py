"""Command lines that are written from settings: order, spelling, what is left out, and wrong fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pdlab.core.command_lines import child_words, command_line, flag_words, resumed
from pdlab.core.commands import typed
from pdlab.core.deployment import launch_words, parse_label
from pdlab.core.settings import parse as parse_words
from pdlab.deploy.options import LaunchSettings, deployment_from


@pytest.mark.parametrize(
    ("command", "fields", "line"),
    [
        ("bench", {"name": "x", "concurrency": (4, 8), "smoke": True}, "-e x -c 4,8 --smoke"),
        ("bench", {"smoke": True, "concurrency": (4, 8)}, "--smoke -c 4,8"),
        ("bench", {"requests": {"input_tokens": 5000}, "resume": False, "gpus": None}, "--itl 5000"),
        ("launch", {"mode": "pd-pack", "prefill": {"tp": 2}, "decode": {"replicas": 1}},
         "--pd-pack --p-tp 2 --d-num 1"),
        ("launch", {"local": 2, "port": 8000}, "--local --port 8000"),
        ("launch", {"local": 3, "link": {"gbit_per_s": 0.1, "delay_s": 0.002}},
         "--local 3 --link-rate 100mbit --link-delay-ms 2"),
        ("launch", {"deployment": {"engine_kwargs": {"max_num_seqs": 8}}}, "--engine-arg max_num_seqs=8"),
        ("viz", {"exps": (Path("a"), "b c"), "note": ("n",)}, "--exps a 'b c' --note n"),
        ("chaos", {"plan": "soak", "base_url": "http://x"}, "soak --base-url http://x"),
        ("two-hosts", {"action": "shell", "command": ("python", "-c", "1")}, "shell -- python -c 1"),
    ],
)  # fmt: skip
def test_words_have_the_order_and_the_values_that_are_given(command: str, fields: dict[str, Any], line: str) -> None:
    assert command_line(command, **fields) == f"{typed(command)} {line}"
    assert child_words(command, **fields)[-len(flag_words(command, **fields)) :] == flag_words(command, **fields)


@pytest.mark.parametrize(
    ("command", "fields", "error"),
    [
        ("launch", {"prot": 8000}, ValidationError),
        ("launch", {"port": 0}, ValidationError),
        ("launch", {"prefill": {"tensor": 2}}, LookupError),
        ("lunch", {}, ModuleNotFoundError),
    ],
)
def test_a_wrong_field_is_found_before_anything_runs(
    command: str, fields: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        flag_words(command, **fields)


def test_a_command_goes_on_with_its_flag_for_that() -> None:
    assert resumed("bench", ["-e", "x", "--force"]).endswith("-e x --resume")
    assert resumed("experiment", ["file", "--resume"]).endswith("experiment file --resume")


def test_a_launch_of_a_label_is_that_deployment() -> None:
    for label in ("collocated-2xtp1", "pd-pack-p1xtp4-d1xtp2", "pd-spread-p2xtp1-d3xtp2", "pd-fluid-4xtp2-n2to8"):
        words = launch_words(deployment_from(parse_words(LaunchSettings, ["--config", label])))
        assert deployment_from(parse_words(LaunchSettings, words)).topology == parse_label(label)
