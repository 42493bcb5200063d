"""Changes to every Python process of the local nodes, so that a small machine starts and serves faster.

- The garbage collector runs seldom (`collect_seldom`).
- `ray start` does not import the other commands of ``ray``: they import all of Ray Serve.
- A worker's process imports Ray once. Ray itself imports it twice: to read the worker's environment, and in the worker.
- ``ray.serve`` does not import pandas, which it uses only to encode data frames.
- Ray Serve LLM's helpers import torch at its first use, so that the router does not import it.
- Ray's agents record a bucket of a histogram in one call. Ray itself makes one call per observation, which is one per
  token for inter-token latencies.
- On two hosts the router of direct streaming runs only on the head's host. HAProxy runs there and uses no other router.
- HAProxy wakes for every chunk; ``SCHED_BATCH`` (sched(7)) keeps it from interrupting other processes. Its turn comes
  before that of an engine core (`pdlab.cluster.priority`).
- HAProxy calls no router where one replica answers clients.
- Ray Serve's control loop runs once a second after the application has been running for a while.

Imports only the standard library.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pdlab.cluster.after_import import change_after_import
from pdlab.cluster.loopback import LISTEN, LOOPBACK
from pdlab.cluster.priority import ANSWERING, set_niceness
from pdlab.cluster.ray_names import COMMANDS, CONTROLLER, DEPLOYMENTS, HAPROXY, IMPORTS, RECORDER, SETUP_WORKER

LAZY_MODULE, UNUSED_MODULE = "torch", "pandas"
AGGREGATION = "opentelemetry.sdk.metrics._internal.aggregation"
AT_REST_S = 10.0  # longer than every action that follows the start of an application
SELDOM_S = 1.0
# Where Ray's Lua for HAProxy begins to choose a replica, and what is done there first. Without a choice a request goes
# to the application's first backend. Failed connections take a replica out of that backend only, and Serve's proxy then
# gets the requests; in the backend of routed requests the client gets errors.
CHOOSES = "local function _route_via_ingress_request_router(txn, app, pool, replica_map)\n"
ONLY_REPLICA = """\
    local only = next(replica_map)
    if not FORWARD_BODY and only and next(replica_map, only) == nil then
        return
    end
"""


def collect_seldom() -> None:
    """Collect garbage seldom: the import of vLLM makes ten million objects, and collections take a quarter of it."""
    gc.set_threshold(200_000, 50, 50)


def install() -> None:
    """Make the changes of this module in this process, but `collect_seldom`."""
    script, arguments = _script(sys.orig_argv)
    if script == f"{SETUP_WORKER.rpartition('.')[2]}.py":
        _become_worker(arguments)
    leave_out([UNUSED_MODULE])
    if script == "ray" and arguments[:1] == ["start"]:
        leave_out(COMMANDS)
    changes = {
        IMPORTS: _import_later,
        RECORDER: _record_at_once,
        AGGREGATION: _count_times,
        CONTROLLER: _change_controller,
        HAPROXY: _change_haproxy,
    }
    change_after_import(changes)


def leave_out(names: Iterable[str]) -> None:
    """Let the import of these modules raise ImportError, as if they were not installed."""
    modules: Any = sys.modules
    for name in names:
        modules.setdefault(name, None)


def _script(command: Sequence[str]) -> tuple[str, list[str]]:
    """(name of the script that Python runs, its arguments). Ray passes Python only options of one word."""
    words = list(command[1:])
    while words and words[0].startswith("-"):
        if words.pop(0) in ("-c", "-m"):
            return "", []
    return (Path(words[0]).name, words[1:]) if words else ("", [])


def _become_worker(arguments: Sequence[str]) -> None:
    """Replace this process by the worker, as Ray's ``RuntimeEnvContext.exec_worker`` does.

    Returns if the worker differs in more than its environment; Ray then does it.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--serialized-runtime-env-context")
    parser.add_argument("--language")
    try:
        read, command = parser.parse_known_args(arguments)
        context = json.loads(read.serialized_runtime_env_context or "{}")
        named = {name for name, value in context.items() if value}
        python = shlex.split(context.get("py_executable") or shlex.quote(sys.executable))
    except (argparse.ArgumentError, ValueError, AttributeError):
        return
    if read.language != "PYTHON" or not named <= {"env_vars", "py_executable"} or len(python) != 1:
        return
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    with contextlib.suppress(OSError):  # the shell reports the reason
        os.execvp(python[0], [*python, *command])


def _import_later(module: Any) -> None:
    at_once = module.try_import

    def try_import(name: str, error: bool = False) -> Any:
        if name != LAZY_MODULE or name in sys.modules or importlib.util.find_spec(name) is None:
            return at_once(name, error)
        return _LazyModule(name)

    module.try_import = try_import


class _LazyModule(ModuleType):
    """Replaces a module until its first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


class CountedValue(float):
    """A value that was observed ``times`` times."""

    times: int

    @classmethod
    def of(cls, value: float, times: int) -> CountedValue:
        observed = cls(value)
        observed.times = times
        return observed


def _record_at_once(module: Any) -> None:
    """Change Ray's recorder of metrics."""
    recorder = module.OpenTelemetryMetricRecorder
    one_by_one = recorder.record_histogram_aggregated_batch

    def record_histogram_aggregated_batch(self: Any, name: str, data_points: list[dict[str, Any]]) -> None:
        with self._lock:
            instrument = self._registered_instruments.get(name)
            midpoints = self._histogram_bucket_midpoints.get(name) or ()
        fitting = [point for point in data_points if len(point["bucket_counts"]) == len(midpoints)]
        if len(fitting) < len(data_points):  # Ray logs that it leaves these points out
            one_by_one(self, name, [point for point in data_points if len(point["bucket_counts"]) != len(midpoints)])
        dropped = module.MetricCardinality.get_high_cardinality_labels_to_drop(name)
        for point in fitting:
            tags = {key: value for key, value in point["tags"].items() if key not in dropped}
            for midpoint, times in zip(midpoints, point["bucket_counts"], strict=True):
                if times:
                    instrument.record(CountedValue.of(midpoint, times), attributes=tags)

    recorder.record_histogram_aggregated_batch = record_histogram_aggregated_batch


def _count_times(module: Any) -> None:
    """Change OpenTelemetry's histograms: a `CountedValue` counts ``times`` times."""
    histogram = module._ExplicitBucketHistogramAggregation
    once = histogram.aggregate

    def aggregate(self: Any, measurement: Any, *args: Any) -> None:
        once(self, measurement, *args)
        value = measurement.value
        if isinstance(value, CountedValue) and value.times > 1:
            with self._lock:
                if self._value is None:  # a collection emptied it meanwhile
                    self._value = self._get_empty_bucket_counts()
                self._sum += float(value) * (value.times - 1)
                self._value[bisect.bisect_left(self._boundaries, value)] += value.times - 1

    histogram.aggregate = aggregate


def _change_controller(module: Any) -> None:
    """Change Ray Serve's controller."""
    _look_seldom_at_rest(module)
    if os.environ.get(LISTEN, LOOPBACK) != LOOPBACK:  # on loopback HAProxy goes on to another router if one is dead
        _route_on_the_head(module)


def _look_seldom_at_rest(module: Any) -> None:
    """Run the control loop seldom at rest: each step takes milliseconds of CPU time, also without work."""
    controller = module.ServeController
    step = controller.run_control_loop_step
    often_s = module.CONTROL_LOOP_INTERVAL_S
    busy_at_s = time.monotonic()

    async def run_control_loop_step(self: Any, *args: Any) -> None:
        nonlocal busy_at_s
        await step(self, *args)
        applications = self.application_state_manager.list_app_statuses().values()
        if self._shutting_down or not applications or any(each.status != "RUNNING" for each in applications):
            busy_at_s = time.monotonic()
        at_rest = time.monotonic() - busy_at_s >= AT_REST_S
        interval_s = max(SELDOM_S, often_s) if at_rest else often_s
        # Ray paces health checks by the interval of `DEPLOYMENTS`.
        module.CONTROL_LOOP_INTERVAL_S = sys.modules[DEPLOYMENTS].CONTROL_LOOP_INTERVAL_S = interval_s  # type: ignore[attr-defined]

    controller.run_control_loop_step = run_control_loop_step


def _route_on_the_head(module: Any) -> None:
    """Run the router only on the controller's node, where HAProxy is.

    Ray Serve starts a router on every node that may have a proxy. There is one proxy (``HeadOnly``).
    """
    controller = module.ServeController
    every_node = controller._update_proxy_nodes

    def _update_proxy_nodes(self: Any) -> None:
        every_node(self)
        self._proxy_nodes = {self._controller_node_id}

    controller._update_proxy_nodes = _update_proxy_nodes


def _change_haproxy(module: Any) -> None:
    """Change how Ray Serve starts and configures HAProxy."""
    _let_others_run(module)
    _choose_the_only_replica(module)


def _choose_the_only_replica(module: Any) -> None:
    """A router has nothing to choose where one replica answers clients. It is still called where it reads the request's
    body: there its answer has headers for the replica."""
    load = module._load_lua_template

    def _load_lua_template() -> Any:
        template = load()
        return type(template)(template.template.replace(CHOOSES, CHOOSES + ONLY_REPLICA))

    module._load_lua_template = _load_lua_template


def _let_others_run(module: Any) -> None:
    """Start HAProxy with ``SCHED_BATCH``; it has one thread here."""
    api = module.HAProxyApi
    start = api._start_and_wait_for_haproxy

    async def _start_and_wait_for_haproxy(self: Any, *args: Any, **kwargs: Any) -> Any:
        process = await start(self, *args, **kwargs)
        with contextlib.suppress(OSError):  # some sandboxes do not have this policy
            os.sched_setscheduler(process.pid, os.SCHED_BATCH, os.sched_param(0))
        set_niceness(ANSWERING, process.pid)
        return process

    api._start_and_wait_for_haproxy = _start_and_wait_for_haproxy
