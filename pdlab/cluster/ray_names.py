"""The private modules of Ray that pdlab asks about a cluster, and those that it changes on local nodes.

Names only, no import: every Python process of the local nodes loads them. A contract test imports each of them.
"""

from __future__ import annotations

AGENT = "ray.dashboard.http_server_agent"
# Of the command line `ray`, beside its own ones; it does without those that cannot be imported.
COMMANDS = ("ray.dashboard.modules.job.cli", "ray.serve.scripts", "ray.util.state.state_cli")
CONTROLLER = "ray.serve._private.controller"
DEPLOYMENTS = "ray.serve._private.deployment_state"
HAPROXY = "ray.serve._private.haproxy"
HAPROXY_TEMPLATES = "ray.serve._private.haproxy_templates"
IMPORTS = "ray.llm._internal.common.utils.import_utils"
NODE = "ray._private.node"
RECORDER = "ray._private.telemetry.open_telemetry_metric_recorder"
REPLICA = "ray.serve._private.replica"
SETUP_WORKER = "ray._private.workers.setup_worker"  # the script that becomes the process of a worker
SERVICES = "ray._private.services"
STATE = "ray._private.state"
TOKEN = "ray._private.authentication.grpc_authentication_client_interceptor"
