"""NAME=VALUE words of a command line as vLLM engine arguments."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import yaml

from pdlab.core.errors import UsageError
from pdlab.core.schema import parse_yaml, yaml_fault
from pdlab.remote.redaction import is_secret

# Engine argument -> the flag that sets it.
RESERVED_ENGINE_KWARGS = {
    "model": "--model",
    "served_model_name": "--model-id",
    "tensor_parallel_size": "--tp / --p-tp / --d-tp",
    "pipeline_parallel_size": "--p-pp / --d-pp",
    "data_parallel_size": "--p-dp / --d-dp",
    "enable_expert_parallel": "--p-ep / --d-ep",
    # Ray Serve LLM runs each DP rank as one engine, and gives it its rank and the address of the others.
    **dict.fromkeys(
        (
            "data_parallel_size_local",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
            "data_parallel_multi_port_external_lb",
            "nnodes",
            "node_rank",
        ),
        "--dp / --p-dp / --d-dp",
    ),
    "kv_transfer_config": "--kv-backend, --kv-offload-gb or --kv-connector",
    "otlp_traces_endpoint": "--otlp-endpoint",
    "host": "--host",
    "port": "--port",
    "api_key": "--api-key-file",
}
# Setting of Ray Serve LLM, or argument of vLLM's server, that pdlab does not pass on -> why, and what to do.
NOT_PASSED_ON = {
    "autoscaling_config": (
        "Ray's autoscaling would start replicas without planned room on the nodes: give the number of replicas, or let "
        "it follow the load with pd-fluid, --min and --max"
    ),
    "hf_token": "a secret is given by its name only: export HF_TOKEN, and use --env HF_TOKEN",
    **dict.fromkeys(
        ("lora_config", "lora_modules"),
        "adapters are not served: Ray Serve LLM finds an adapter by the name that a request gives, its prefill and "
        "decode do not pass that name on, and the canary checks only the model itself; merge the adapter into the "
        "weights, and give the merged folder as --model",
    ),
}
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,2}")


def engine_args(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """``KEY=VALUE`` texts as engine arguments; the value is YAML. Raises UsageError."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        key = key.lower() if key.lower() in NOT_PASSED_ON else key
        if not equals or not re.fullmatch(r"[a-z][a-z0-9_]*", key):
            shown = key if is_secret(key) else pair
            raise UsageError(f"{flag} {shown!r}: expected KEY=VALUE, for example {flag} gpu_memory_utilization=0.85")
        if key in NOT_PASSED_ON:
            raise UsageError(f"{flag} {key}: {NOT_PASSED_ON[key]}")
        if key in RESERVED_ENGINE_KWARGS:
            raise UsageError(f"{flag} {key}: pdlab sets it; use {RESERVED_ENGINE_KWARGS[key]} instead")
        try:
            value = _number(text) if _EXPONENT.fullmatch(text.strip()) else parse_yaml(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{flag} {pair!r}: the value is not valid YAML ({yaml_fault(error)})") from error
        if key in arguments and arguments[key] != value:
            raise UsageError(f"{flag} {key} is given twice, as {arguments[key]!r} and {value!r}: keep one")
        arguments[key] = value
    return arguments


def kv_connector(text: str) -> dict[str, Any]:
    """A vLLM KV connector from YAML: its name, or a mapping with ``kv_connector``. Raises ArgumentTypeError."""
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid YAML ({yaml_fault(error)})") from error
    if isinstance(value, str):
        return {"kv_connector": value}
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither the name of a connector nor a mapping, for example "
            "'{kv_connector: LMCacheConnectorV1, kv_role: kv_both}'"
        )
    return value


def _number(text: str) -> int | float:
    """``4e9``, which YAML 1.1 takes for text, because it has no point and no sign; whole numbers are integers."""
    value = float(text)
    return int(value) if value.is_integer() else value


def engine_arg(key: str, value: Any) -> str:
    """``KEY=VALUE`` that `engine_args` reads back equal."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value) and parse_yaml(value) == value:
        return f"{key}={value}"
    try:
        text = json.dumps(value, allow_nan=False)  # JSON is YAML
    except (TypeError, ValueError):  # a date, bytes, infinity
        text = yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("\n...\n").strip()
    return f"{key}={text}"
