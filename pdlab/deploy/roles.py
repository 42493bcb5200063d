"""Show and set the roles of the running fluid engines, through the role board (`pdlab.deploy.serving.role_board`).

Imports Ray inside functions.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pdlab.cluster import local_nodes, run_on_host
from pdlab.cluster.connection import Cluster
from pdlab.cluster.local_nodes import LocalNodes
from pdlab.cluster.namespaces import INSIDE
from pdlab.core import defaults
from pdlab.core.commands import LAUNCH, PDLAB
from pdlab.core.deployment import Split
from pdlab.core.errors import ClusterError, UsageError
from pdlab.core.settings import Settings, setting
from pdlab.core.text import aligned
from pdlab.deploy.application import board_names
from pdlab.deploy.endpoint import load_running
from pdlab.deploy.serving.ray_names import NAMESPACE
from pdlab.deploy.serving.role_board import WORKING_ROLES

ANSWER_S = 30.0
DECISIONS_SHOWN = 5


EPILOG = f"""\
examples:
  {PDLAB} roles
      show the role of each engine at port 8000, and the last decisions with their reasons
  {PDLAB} roles 3:5
      from now on three engines prefill and five decode; requests that have begun end where they are
  {PDLAB} roles auto
      the controller follows the load again
  {PDLAB} roles --log > decisions.jsonl
      every decision since the launch, one line of JSON each (docs/fluid.md)
"""


class RolesSettings(Settings):
    """Whether ``python -m pdlab roles`` shows the roles or sets a split."""

    COMMAND = "roles"
    ABOUT = f"Look at the roles of a deployment of {LAUNCH} --pd-fluid, or set them."
    EXAMPLES = EPILOG
    EXCLUSIONS = (("split", "log", "--log prints decisions: leave it out to set the roles"),)

    split: Split | None = setting(
        None, "set the roles; without it: show them", "roles", positional=True, value="P:D|auto"
    )
    log: bool = setting(False, "print every decision as a line of JSON", "roles")
    base_url: str = setting(defaults.BASE_URL, "server of the deployment", "roles", value="URL")


def execute(settings: RolesSettings) -> None:
    """Show or set the roles; prints to standard output. Raises UsageError, ClusterError."""
    running = load_running(settings.base_url)
    local: LocalNodes | None = None
    if running is not None and running.manifest.on_local_nodes:
        local = local_nodes.still_running(settings.base_url)
        if local.two_hosts is not None and INSIDE not in os.environ:
            host = local.host(1)
            env = local_nodes.environment_on(host, local)
            run_on_host.call(host.pid, __name__, settings.model_dump_json(), env)
            return
        local_nodes.become_driver(local)
    with Cluster(local):
        if settings.split is not None:
            ask("set_split", settings.split)
        if settings.log:
            for entry in ask("decisions"):
                print(json.dumps(entry))
            return
        print(describe(ask("look")))


def ask(method: str, *arguments: Any) -> Any:
    """The role board's answer, on the Ray cluster that this process is connected to. Raises UsageError for a request
    that it refuses, ClusterError if there is no board or it does not answer.
    """
    import ray

    names = board_names()
    if not names:
        raise ClusterError(f"no fluid engines report roles here: launch them with {LAUNCH} --pd-fluid")
    if len(names) > 1:
        raise ClusterError(f"{len(names)} role boards report here, some of deployments that have just ended: try again")
    try:
        board = ray.get_actor(names[0], namespace=NAMESPACE)
        return ray.get(getattr(board, method).remote(*arguments), timeout=ANSWER_S)
    except ray.exceptions.RayTaskError as error:
        raise UsageError(str(error.cause)) from error
    except (ray.exceptions.RayError, ValueError) as error:
        raise ClusterError(f"the board of the roles does not answer ({type(error).__name__}): try again") from error


def describe(looked: Mapping[str, Any]) -> str:
    """A table of the engines, and the last decisions with their reasons."""
    engines: Mapping[str, Mapping[str, Any]] = looked["engines"]
    roles = [each["role"] for each in engines.values()]
    decoding = roles.count("decode")
    prefilling = sum(role in WORKING_ROLES for role in roles) - decoding
    control = "a controller follows the load" if looked["by"] == "auto" else f"set to {looked['by']}"
    rows: list[Sequence[str]] = [("engine", "node", "role", "prompt tokens waiting", "requests decoded")]
    for name, each in sorted(engines.items(), key=lambda item: (item[1]["role"] == "decode", item[0])):
        waiting, running = str(each["waiting_prompt_tokens"]), str(each["running"])
        rows.append((name, str(each["node"])[:8], str(each["role"]), waiting, running))
    lines = [f"{prefilling}:{decoding} (prefill:decode), {control}"]
    if count := looked.get("count"):
        lines.append(f"{count['least']} to {count['most']} engines by the load: {count['reason'] or 'no look yet'}")
    if looked["local_below"]:
        lines.append(f"prompts below {looked['local_below']} tokens are prefilled where they are decoded")
    if looked["reach_ms"]:
        count, median, most, longest = looked["reach_ms"]
        lines.append(
            f"a router knew a new split after {median:g} ms (median of {count}), "
            f"19 of 20 within {most:g} ms, {longest:g} ms at most"
        )
    lines += ["", *aligned(rows, left=(0, 1, 2)), "", "last decisions"]
    for entry in looked["decisions"][-DECISIONS_SHOWN:]:
        lines.append(f"  {entry['at']}  {entry['prefill']}:{entry['decode']}  {entry['reason']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_on_host.answering(lambda text: execute(RolesSettings.model_validate_json(text))))
