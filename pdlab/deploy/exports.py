"""Exports of a deployment: Serve configs for ``serve deploy`` on a cluster that pdlab does not reach.

--export has everything that a launch has. --export-plain uses only Ray's public builders: nodes need no pdlab, and
`LOSSES` lists the lost protections. Both come with notes, which are comments of the file and warnings of the command.
Imports neither Ray nor vLLM.
"""

from __future__ import annotations

import copy
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import yaml

from pdlab.core.commands import typed
from pdlab.core.deployment import Collocated
from pdlab.core.environment import shell_assignments
from pdlab.core.errors import UsageError
from pdlab.core.version import __version__, stack_text
from pdlab.deploy.export_options import ExportOptions
from pdlab.deploy.preflight import LIBFABRIC, may_choose
from pdlab.deploy.prepared import Prepared
from pdlab.deploy.serve_config import (
    DP_BUILDER,
    HOST_COPY_SPEC,
    KV_GUARD_DEADLINE,
    KV_GUARD_POLL,
    OPENAI_BUILDER,
    PD_BUILDER,
    PREFILL_ROUTERS,
    ROUTERS,
    ServeApp,
    engine_configs,
    serve_config,
)
from pdlab.deploy.wire_proof import planned_wires

COLUMNS = 100
# Ray's public builders (ray.serve.llm) for pdlab's. Fluid pools have none.
PUBLIC = {
    OPENAI_BUILDER: "ray.serve.llm:build_openai_app",
    DP_BUILDER: "ray.serve.llm:build_dp_openai_app",
    PD_BUILDER: "ray.serve.llm:build_pd_openai_app",
}
# libfabric's provider for EFA, and its reads of GPU memory, as AWS's manifests set them. vLLM hands no FI_ variable on
# to its workers: the environment of the node has to have them.
EFA_ENV = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}


# Ray's own router for the class that pdlab makes of it; None: the default of Ray.
PUBLIC_ROUTERS = {own: ROUTERS[routing] for routing, own in PREFILL_ROUTERS.items()}


class LostProtection(NamedTuple):
    """A protection or an option that Ray's public builders do not have.

    ``text``: what happens without it. ``mixins``: the classes that give it (`pdlab.deploy.serving.builders`). ``keys``:
    arguments that turn it on, which Ray's builders refuse; the first one decides whether it is lost. ``engine_keys``:
    the same in the configuration of an engine, as paths, if the value is pdlab's own. ``option_path``: the path of an
    argument of the builder; the option is lost if its value is true.
    """

    text: str
    mixins: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    engine_keys: tuple[tuple[str, ...], ...] = ()
    option_path: tuple[str, ...] = ()


_CONNECTOR = ("engine_kwargs", "kv_transfer_config")
_EXTRA = (*_CONNECTOR, "kv_connector_extra_config")
_SEVERAL = (*_EXTRA, "connectors")
LOSSES = (
    LostProtection(
        "Request limits and closed routes: clients can call every route of vLLM, without limits.",
        ("HttpFront",),
        ("guard",),
    ),
    LostProtection(
        "The reasons of engine errors: a request that vLLM refuses can be answered with status 500.",
        ("ExplainsErrors",),
        ("guard",),
    ),
    LostProtection(
        "The end of a replica whose engine died: it answers with errors until Ray Serve's health check sees it.",
        ("StopsWithEngine",),
        ("guard",),
    ),
    LostProtection(
        "The counters of KV-pool tokens: a sweep cannot compute how full the KV cache was.",
        ("CountsPoolTokens",),
        ("guard",),
    ),
    LostProtection(
        "Time limit, second try and local prefill of a prefill call: a prefill replica that hangs or dies takes "
        "requests with it.",
        ("CallsPrefill",),
        ("prefill_call",),
    ),
    LostProtection(
        "The early token: the client gets the first token from decode, after the KV cache has moved.",
        option_path=("prefill_call", "early_token"),
    ),
    LostProtection(
        "The reuse of the first token: decode computes again the token that prefill has computed.",
        option_path=("prefill_call", "reuse_first_token"),
    ),
    LostProtection(
        "Requests with n > 1, with several prompts or with min_tokens: with PD they fail or have wrong KV cache.",
        ("SplitsSequences",),
        ("prefill_call",),
    ),
    LostProtection(
        "The drain of prefill: a replica that stops takes KV blocks with it that decode has not read.",
        ("DrainsBeforeStop",),
        ("kv_drain_s",),
    ),
    LostProtection(
        "The hold on NIXL's ports: a port that another process takes keeps a replica from starting.",
        ("HoldsPort",),
        ("kv_drain_s",),
    ),
    LostProtection(
        "The KV guard: decode can generate from KV cache that did not arrive whole, and answer wrongly.",
        ("InstallsGuard",),
        ("kv_guard",),
        (
            ("engine_kwargs", "scheduler_cls"),
            (*_CONNECTOR, "kv_connector_module_path"),
            (*_SEVERAL, "kv_connector_module_path"),
            (*_EXTRA, KV_GUARD_DEADLINE),
            (*_SEVERAL, "kv_connector_extra_config", KV_GUARD_DEADLINE),
        ),
    ),
    LostProtection(
        "The check for arrived KV cache between steps: a request waits for the next step of decode.",
        engine_keys=((*_EXTRA, KV_GUARD_POLL),),
    ),
    LostProtection(
        "The timelines of requests: a sweep cannot show the parts of the time to the first token.",
        ("SendsTimeline",),
        ("guard",),
    ),
    LostProtection(
        "The spans of a request's parts, and their sampling: vLLM makes its own span of every request.",
        (),
        ("traces",),
    ),
    LostProtection(
        "The log of vLLM's statistics: an engine behind an ingress stores those of every KV transfer until it ends.",
        ("EmptiesStats",),
        ("guard",),
    ),
    LostProtection(
        "Fewer looks at variables and metric labels: a replica takes more CPU time for every token.",
        ("CostsLess",),
        ("guard",),
    ),
    LostProtection(
        "The watch on engine steps: an engine that hangs with work is not restarted.",
        ("WatchesSteps",),
        ("kv_guard",),
    ),
    LostProtection(
        "The settings of engines on small CPU nodes: a start takes longer, and NIXL takes a core of its own.",
        (),
        (),
        (
            ("callback_config",),
            ("engine_kwargs", "worker_extension_cls"),
            ("runtime_env", "env_vars", "PDLAB_AT_START"),
        ),
    ),
)
NO_KEY = (
    "No API key: Ray's HTTP servers would have to import pdlab to check one. Whoever reaches the address can use the "
    "model."
)


@dataclass(frozen=True)
class Export:
    """A Serve config, with notes for the person who deploys it. ``env``: environment that `ray start` needs."""

    config: dict[str, Any]
    notes: tuple[str, ...]
    env: dict[str, str]

    @property
    def text(self) -> str:
        """The YAML, the notes as comments on top."""
        return f"{comments(self.notes)}{yaml.safe_dump(self.config, sort_keys=False)}"

    def with_note(self, note: str) -> Export:
        """The same with one more note."""
        return replace(self, notes=(*self.notes, note))


def comments(notes: Sequence[str]) -> str:
    """The notes as comments of a YAML file or of a shell script. Lines after the first of a note are commands and not
    wrapped.
    """
    lines: list[str] = []
    for note in notes:
        sentence, *commands = note.splitlines()
        wrapped = textwrap.wrap(sentence, COLUMNS - 4, break_long_words=False, break_on_hyphens=False)
        lines += [f"{'#   ' if number else '# - '}{line}" for number, line in enumerate(wrapped)]
        lines += [f"#     {command}" for command in commands]
    return "".join(f"{line}\n" for line in lines)


def serve_export(
    prepared: Prepared,
    options: ExportOptions,
    *,
    host: str,
    port: int,
    path_env: Mapping[str, str],
    key_env: Mapping[str, str],
    wants_key: bool,
    choose_backend: bool,
) -> Export:
    """The application of a launch; with --export-plain what Ray's public builders make of it. ``path_env`` is the
    environment of the serving path, ``key_env`` turns on the check of the API key (empty if there is no key, or if it
    cannot be checked). Raises UsageError if Ray has no public builder for it.
    """
    app, lost, url = prepared.app, tuple[str, ...](), options.code_url
    if options.export_plain is not None:
        app, lost = to_public(app)
        code = "Nodes need no pdlab."
    elif url is None:
        code = (
            f"Every process of Ray imports pdlab {__version__}: install it on every node, or put the zip of "
            f"`{typed('code-zip', '.')}` on PYTHONPATH before `ray start`. With --code-url URL Ray fetches it."
        )
    else:
        app = without_bringing(app)
        code = (
            f"Ray fetches pdlab {__version__} from {url}: every node must be able to read it. `serve status` "
            "loads pdlab's router: run it with that zip on PYTHONPATH."
        )
    env = {**path_env, **key_env}
    config = serve_config(app, host=host, port=port, controller_env=env, py_modules=(url,) if url else ())
    stack = f"Every node has {stack_text()}, and the weights of the model or a way to fetch them."
    notes = [stack, code, *_before_start(prepared, env, options.export_env, choose_backend)]
    notes += [f"Lost without pdlab: {text}" for text in lost]
    if wants_key and key_env:
        notes.append(
            "Clients send the API key (Authorization: Bearer KEY). This file has its SHA-256, which grants no access."
        )
    elif wants_key and options.export_plain is not None:
        notes.append(f"Lost without pdlab: {NO_KEY}")
    elif wants_key:
        notes.append(f"{NO_KEY} To have one, install pdlab on the nodes and leave --code-url out.")
    return Export(config, tuple(notes), {**env, **node_env(prepared)})


def to_public(app: ServeApp) -> tuple[ServeApp, tuple[str, ...]]:
    """The application with the arguments that Ray's public builder takes, and what is lost. Raises UsageError."""
    if app.import_path not in PUBLIC:
        raise UsageError("--export-plain: Ray has no public builder for a fluid pool; give --export, or another mode")
    args = copy.deepcopy(app.args)
    engines = engine_configs(args)
    for config in engines:
        _with_public_router(config["deployment_config"])
    lost = []
    for loss in LOSSES:
        configured = [key for key in loss.keys[:1] if key in app.args]
        found = [_removed(config, path) for config in engines for path in loss.engine_keys]
        if configured or (not loss.keys and any(found)) or (loss.option_path and _value_at(app.args, loss.option_path)):
            lost.append(loss.text)
        for key in loss.keys:
            args.pop(key, None)
    if _names(args, HOST_COPY_SPEC):
        raise UsageError(
            "--export-plain: without pdlab, engines on CPUs keep no KV cache in host memory; leave --kv-offload-gb "
            "out, or give --export"
        )
    return ServeApp(import_path=PUBLIC[app.import_path], args=args), tuple(lost)


def without_bringing(app: ServeApp) -> ServeApp:
    """The application for nodes that import pdlab's code: the KV guard's sources are not sent to them."""
    args = copy.deepcopy(app.args)
    if "kv_guard" in args:
        args["kv_guard"]["send_sources"] = False
    return app.model_copy(update={"args": args})


def _with_public_router(options: dict[str, Any]) -> None:
    """Ray's own router in place of pdlab's, in the options of a deployment."""
    router = options.get("request_router_config", {}).get("request_router_class")
    if router not in PUBLIC_ROUTERS:
        return
    public = PUBLIC_ROUTERS[router]
    if public is None:
        del options["request_router_config"]
    else:
        options["request_router_config"] = {"request_router_class": public}


def _removed(config: Any, path: Sequence[str]) -> bool:
    """Take out what is at that path, in every member of a list, if it is pdlab's own and not the user's."""
    if isinstance(config, list):
        return any([_removed(each, path) for each in config])
    key, *rest = path
    if not isinstance(config, dict) or key not in config:
        return False
    if rest:
        return _removed(config[key], rest)
    if not key.startswith("pdlab_") and not _names(config[key], "pdlab."):
        return False
    del config[key]
    return True


def _names(value: Any, module: str) -> bool:
    """Whether any text in the value starts with that name of a module."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(_names(each, module) for each in value)
    return isinstance(value, str) and value.startswith(module)


def _value_at(args: Any, path: Sequence[str]) -> Any:
    for key in path:
        args = args.get(key, {})
    return args


def node_env(prepared: Prepared) -> dict[str, str]:
    """Environment of a node with engines that no runtime environment can carry."""
    return EFA_ENV if any(node.nic.kind == "efa" for node in prepared.view.engine_nodes) else {}


def sourced(file: str) -> str:
    """The command that reads a file into any POSIX shell, which looks for a name without a slash on PATH only."""
    return f". {shlex.quote(file if '/' in file else f'./{file}')}"


def env_script(env: Mapping[str, str]) -> str:
    """A shell script with the environment that `ray start` needs."""
    head = comments(("Source this file before `ray start` on every node.",))
    return head + "".join(f"export {shell_assignments({name: value})}\n" for name, value in env.items())


def prefers_libfabric(prepared: Prepared, choose_backend: bool) -> bool:
    """Whether no NIXL backend was chosen and the KV cache crosses only EFA, for which NIXL recommends LIBFABRIC."""
    transport = prepared.deployment.transport
    if transport is None or not choose_backend or not may_choose(prepared.deployment):
        return False
    return planned_wires(prepared.deployment, prepared.placement, prepared.view) == {"efa"}


def on_libfabric(prepared: Prepared) -> Prepared:
    """The same with the KV cache moved by LIBFABRIC."""
    deployment = prepared.deployment
    assert not isinstance(deployment.topology, Collocated)
    transport = deployment.topology.transport.model_copy(update={"backends": (LIBFABRIC,)})
    return prepared.with_transport_of(deployment.with_topology(transport=transport))


def _before_start(prepared: Prepared, env: Mapping[str, str], env_file: str | None, choose_backend: bool) -> list[str]:
    notes = []
    if env:
        notes.append(
            "Ray Serve reads controller_options when it starts: where it runs already, run `serve shutdown` first."
        )
    if env_file is not None:
        notes.append(f"Before `ray start` on every node:\n{sourced(env_file)}")
    elif of_nodes := node_env(prepared):
        notes.append(f"Before `ray start` on every node:\nexport {shell_assignments(of_nodes)}")
    if names := prepared.deployment.secrets:
        notes.append(f"Before `ray start` every node has {' and '.join(names)} in its environment: no file holds them.")
    if prefers_libfabric(prepared, choose_backend):
        notes.append(
            f"The KV cache moves by UCX. On EFA a launch takes {LIBFABRIC} where it loads on every node: add "
            f"--kv-backend {LIBFABRIC} if the nodes have libfabric."
        )
    return notes
