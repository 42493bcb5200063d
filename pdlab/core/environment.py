"""Variables in the environment of the engines: which ones a deployment may set, and which of them are secret.

A variable is ``NAME=VALUE``, or ``NAME`` with the value of the launcher's environment. A secret is given only by its
name: no file, command line or manifest of pdlab has its value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator

from pdlab.core.errors import UsageError
from pdlab.core.settings import NamedValues
from pdlab.remote.redaction import is_secret

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Variable -> why a deployment does not set it, and what to do.
_OF_EACH_RANK = "Ray sets it for each rank; leave it out"
_OF_EACH_NODE = "every node needs another value; set it before `ray start` on each node"
SET_ELSEWHERE = {
    "UCX_TLS": "it has its own setting: use --ucx-tls (ucx_tls)",
    "VLLM_API_KEY": "the server in front of the engines checks the key: use --api-key-file",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "Ray gives each engine rank a port of its own; leave it out",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": _OF_EACH_NODE,
    "VLLM_HOST_IP": _OF_EACH_NODE,
    "VLLM_RAY_BUNDLE_INDICES": "pdlab places the ranks; leave it out",
    "VLLM_RAY_PER_WORKER_GPUS": "pdlab gives each rank one GPU; leave it out",
    "CUDA_VISIBLE_DEVICES": _OF_EACH_RANK,
    "HIP_VISIBLE_DEVICES": _OF_EACH_RANK,
    "ROCR_VISIBLE_DEVICES": _OF_EACH_RANK,
    **dict.fromkeys(
        ("VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE", "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT"),
        "Ray Serve LLM sets it for each data parallel rank; use --dp / --p-dp / --d-dp",
    ),
}
# Ray's variables that the processes of engines read. Other processes read the rest: `ray start`, the node's daemons,
# Ray Serve's controller and its proxies.
_RAY_IN_ENGINES = re.compile(r"RAY_(CGRAPH_\w+|EXPERIMENTAL_NOSET_\w+|metrics_report_interval_ms|DEDUP_LOGS\w*)")


def before_ray_start(name: str) -> bool:
    """Whether the variable works only in the environment of `ray start`, on every node."""
    return name.startswith("RAY_") and not _RAY_IN_ENGINES.fullmatch(name)


def _checked(variables: dict[str, str | None]) -> dict[str, str | None]:
    for name, value in variables.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a variable; an example of one is NCCL_DEBUG")
        if name in SET_ELSEWHERE:
            raise ValueError(f"{name}: {SET_ELSEWHERE[name]}")
        if before_ray_start(name):
            raise ValueError(
                f"{name}: Ray reads it when it starts, engines do not; leave it out, and start Ray on every node with "
                f"{name}=VALUE in the environment of `ray start`"
            )
        if value is not None and is_secret(name):
            raise ValueError(
                f"{name}: a secret is given by its name only, its value comes from the launcher's environment: export "
                f"{name}, and give {name} without a value"
            )
        if value is not None and "\0" in value:
            raise ValueError(f"{name}: the value has a NUL character, which no environment can hold")
    return variables


def env_variables(pairs: Sequence[str], flag: str) -> dict[str, str | None]:
    """Variables from ``NAME=VALUE`` and ``NAME`` texts. Raises UsageError."""
    variables: dict[str, str | None] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not _NAME.fullmatch(name):
            shown = f"{name!r}" if is_secret(pair) else f"{pair!r}"
            raise UsageError(f"{flag} {shown}: expected NAME=VALUE or NAME, for example {flag} NCCL_DEBUG=INFO")
        value = text if equals else None
        if variables.setdefault(name, value) != value:
            raise UsageError(f"{flag} {name} is given twice, with two values: keep one")
    return variables


def env_variable(name: str, value: str | None) -> str:
    """The text that `env_variables` reads back equal."""
    return name if value is None else f"{name}={value}"


Environment = Annotated[dict[str, str | None], AfterValidator(_checked), NamedValues(env_variables, env_variable)]


def with_values(variables: Mapping[str, str | None], environ: Mapping[str, str], flag: str) -> dict[str, str | None]:
    """The variables; those without a value, except secrets, get the value of ``environ``. Raises UsageError."""
    return {
        name: value if value is not None or is_secret(name) else _value(name, environ, flag)
        for name, value in variables.items()
    }


def secret_values(variables: Mapping[str, str | None], environ: Mapping[str, str]) -> dict[str, str]:
    """The values of the variables that are given by name only. Raises UsageError."""
    return {name: _value(name, environ, "--env") for name, value in variables.items() if value is None}


def _value(name: str, environ: Mapping[str, str], flag: str) -> str:
    if name not in environ:
        other = "" if is_secret(name) else f", or give {flag} {name}=VALUE"
        raise UsageError(f"{flag} {name}: the launcher's environment has no {name}: export it{other}")
    return environ[name]


def shell_assignments(variables: Mapping[str, str]) -> str:
    """``NAME=VALUE NAME='TWO WORDS'``, for a shell before a command or after export. The name stays outside the quotes,
    because a shell runs a quoted first word as the command."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
