"""Names of Ray's private modules that pdlab reads, and of those that it changes on local nodes.

This module imports nothing, because every Python process of the local nodes loads it. A contract test imports each one.
"""

from __future__ import annotations

AGENT = "ray.dashboard.http_server_agent"
# Subcommands of `ray` in other modules; `ray` works without a subcommand that cannot be imported.
COMMANDS = ("ray.dashboard.modules.job.cli", "ray.serve.scripts", "ray.util.state.state_cli")
CONTROLLER = "ray.serve._private.controller"
DEPLOYMENTS = "ray.serve._private.deployment_state"
HAPROXY = "ray.serve._private.haproxy"
HAPROXY_TEMPLATES = "ray.serve._private.haproxy_templates"
IMPORTS = "ray.llm._internal.common.utils.import_utils"
NODE = "ray._private.node"
RECORDER = "ray._private.telemetry.open_telemetry_metric_recorder"
REPLICA = "ray.serve._private.replica"
SETUP_WORKER = "ray._private.workers.setup_worker"  # the script that starts a worker's process
SERVICES = "ray._private.services"
STATE = "ray._private.state"
TOKEN = "ray._private.authentication.grpc_authentication_client_interceptor"
