"""Ray Serve LLM's builders, extended by pdlab: they make the served applications.

Each takes the arguments of Ray's builder of the same name, and pdlab's own (`OWN`):

- ``guard``: the fields of `pdlab.deploy.serving.guard.RequestRules`.
- ``traces``: a ``share`` of the requests gets OpenTelemetry spans (`pdlab.deploy.serving.traces`).
- ``kv_guard``: the engines have the KV guard. ``send_sources``: its sources must be sent to the nodes, which have no
  pdlab.
- ``prefill_call``: the fields of `pdlab.deploy.serving.prefill_call.PrefillRules`. ``kv_drain_s``: see
  `pdlab.deploy.serving.drain.DrainsBeforeStop`. Both are arguments of deployments with KV transfer.

The classes of `MIXINS` travel to the replicas by value. So the nodes of a cluster need no pdlab; the machine that
builds the application does. Imports Ray: modules of pdlab's own process do not import this one;
`pdlab.deploy.serve_config` has its name.
"""

from __future__ import annotations

import copy
import importlib
import importlib.resources
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal, NamedTuple

from pdlab.deploy.serving.dead_engine import StopsWithEngine
from pdlab.deploy.serving.drain import DrainsBeforeStop
from pdlab.deploy.serving.engine_errors import ExplainsErrors
from pdlab.deploy.serving.events import DONE, DONE_EVENT
from pdlab.deploy.serving.fluid import SwitchesRoles
from pdlab.deploy.serving.guard import OBJECTS, PARSED, Guard, RequestRules
from pdlab.deploy.serving.guard_sources import InstallsGuard, pythonpath, sources
from pdlab.deploy.serving.kv_pool import CountsPoolTokens
from pdlab.deploy.serving.nixl_port import HoldsPort
from pdlab.deploy.serving.prefill_call import CallsPrefill, PrefillRules
from pdlab.deploy.serving.ray_names import (
    BUILDER,
    INGRESS,
    INGRESS_UTILS,
    PD,
    SERVER,
    SERVER_UTILS,
    bind_class,
    bound_deployment,
)
from pdlab.deploy.serving.role_board import BOARD_PREFIX
from pdlab.deploy.serving.sequences import for_one_engine, join, split
from pdlab.deploy.serving.step_watch import WatchesSteps
from pdlab.deploy.serving.timeline import SendsTimeline, StreamsPast, TimelineHeader, TimelineMiddleware, current
from pdlab.deploy.serving.vllm_costs import CostsLess, EmptiesStats
from pdlab.roles.spec import FluidSpec

# The guard's modules are not imported: they need vLLM, which the machine that builds the application may not have.
_PDLAB = importlib.resources.files("pdlab")
_UNCHANGING = (str, int, float, bytes, type(None))
_END = DONE_EVENT.strip()
FLUID_PREFIX = "Fluid:"  # of the engines' deployment
FLUID_ROUTER = "pdlab.deploy.serving.fluid_router.FluidRouter"
# Packages whose modules go to the nodes with the classes.
BY_VALUE = ("pdlab.deploy.serving", "pdlab.marks", "pdlab.roles")


class HttpFront:
    """Mixed into the class that answers HTTP, an ingress or with direct streaming an engine's own server."""

    rules: RequestRules

    async def __serve_build_asgi_app__(self) -> Any:
        build = getattr(super(), "__serve_build_asgi_app__", None)
        app: Any = await build() if build is not None else self._asgi_app  # type: ignore[attr-defined]
        app.middleware_stack = None  # vLLM builds it at once; it is made again at the first request
        if hasattr(self, "_pd_handle_request"):
            pd: Any = importlib.import_module(PD)
            if not hasattr(pd._pd_http_response, "of_ray"):
                pd._pd_http_response = _with_one_generator(pd._pd_http_response)
        # Starlette, vLLM's metrics and Ray Serve each try the routes in their order, some 25 for each request.
        app.routes[:] = sorted(app.routes, key=lambda route: getattr(route, "path", None) not in OBJECTS)
        for route in app.routes:
            if getattr(route, "path", None) in OBJECTS and hasattr(route, "get_route_handler"):
                route.app = _parsing_once(route.get_route_handler())
        app.add_middleware(Guard, rules=self.rules)
        if isinstance(self, SendsTimeline):
            app.add_middleware(TimelineMiddleware, server=self)
        else:
            app.add_middleware(TimelineHeader)
        return app


class SplitsSequences:
    """Mixed into Ray's decode server: every sequence of a request gets its own prefill and KV transfer.

    Requests that one engine must answer whole (`pdlab.deploy.serving.sequences.for_one_engine`) go only to decode's
    engine.
    """

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return await self._answer("completions", request, raw_request_info)

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return await self._answer("chat", request, raw_request_info)

    async def _answer(self, method: str, request: Any, raw: Any) -> AsyncIterator[Any]:
        pd: Any = importlib.import_module(PD)
        if for_one_engine(request):
            if (timing := current()) is not None:
                timing.orchestrated = True  # with prefill beside it, and without its help
            return await self._answer_whole(method, request, raw)
        utils: Any = importlib.import_module(SERVER_UTILS)
        own = request.request_id if "request_id" in request.model_fields_set else ""
        request_id = own or utils.get_serve_request_id() or request.request_id
        handle: Any = self._pd_handle_request  # type: ignore[attr-defined]
        parts = split(request, request_id)
        if len(parts) == 1:
            one: AsyncIterator[Any] = handle(parts[0], raw)
            return one
        streams = [handle(part, raw) for part in parts]
        return join(streams, request.n or 1, lambda item: isinstance(item, pd.ErrorResponse), request_id)

    async def _answer_whole(self, method: str, request: Any, raw: Any) -> AsyncIterator[Any]:
        """What decode's engine answers by itself."""
        pd: Any = importlib.import_module(PD)
        alone: AsyncIterator[Any] = await getattr(super(pd.PDOrchestratorMixin, self), method)(request, raw)
        return alone

    def _get_connector_backend(self) -> Any:
        backend: Any = super()._get_connector_backend()  # type: ignore[misc]
        if "prepare_prefill_request" not in vars(backend):
            prepare = _sharing_ids(backend.prepare_prefill_request)

            def prepared(**of: Any) -> Any:
                prefill = prepare(**of)
                # Prefill makes one token, which is thrown away, and vLLM refuses more min_tokens than max_tokens.
                prefill.min_tokens = 0
                prefill.return_token_ids = None  # decode returns them
                return prefill

            backend.prepare_prefill_request = prepared
            backend.prepare_decode_request = _sharing_ids(backend.prepare_decode_request)
        return backend


def _parsing_once(handler: Callable[[Any], Any]) -> Any:
    """The application of a FastAPI route, whose requests have the JSON that the guard has parsed. Its streams pass the
    middlewares that need only their ends."""

    async def handle(request: Any) -> Any:
        if (parsed := request.scope.get(PARSED)) is not None:
            request._json = parsed  # Starlette's own, once it has parsed the body
        answer = await handler(request)
        return StreamsPast(answer) if isinstance(answer, responses.StreamingResponse) else answer

    responses: Any = importlib.import_module("starlette.responses")
    return importlib.import_module("fastapi.routing").request_response(handle)


def _with_one_generator(rays: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Ray's way of making an HTTP answer of what an engine sends, with one generator around a stream of events in place
    of two. Each is one more coroutine for every token."""
    responses: Any = importlib.import_module("starlette.responses")
    write: Any = importlib.import_module(INGRESS_UTILS)._apply_openai_json_format

    async def answer(sent: Any) -> Any:
        first = await anext(sent)
        if not isinstance(first[0] if isinstance(first, list) else first, str):  # an error, or a whole answer
            return await rays(_after(first, sent))
        return responses.StreamingResponse(_events(first, sent, write), media_type="text/event-stream")

    answer.of_ray = rays  # type: ignore[attr-defined]
    return answer


async def _after(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for item in rest:
        yield item


async def _events(first: Any, rest: AsyncIterator[Any], write: Callable[[Any], str]) -> AsyncIterator[str]:
    """The texts of a stream, whose items are texts or what Ray would ``write``; the last one is the end, as ever."""
    text = first if isinstance(first, str) else write(first)
    ended = text.strip().endswith(_END)
    yield text
    async for item in rest:
        text = item if isinstance(item, str) else write(item)
        ended = ended or (DONE in text and text.strip().endswith(_END))
        yield text
    if not ended:
        yield DONE_EVENT


def _sharing_ids(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Ray's way of making a request of another, which copies deeply, but without a copy of a prompt's token ids and of
    values that cannot change."""

    def prepared(*, request: Any, **of: Any) -> Any:
        return prepare(request=_SharesValues(request), **of)

    return prepared


class _SharesValues:
    """A request whose deep copy is a request that shares with it what neither engine changes. pydantic's deep copy
    looks at each of some 60 fields."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Any:
        made = self._request.model_copy(update=update)
        if deep:
            for values in (made.__dict__, made.__pydantic_extra__ or {}, made.__pydantic_private__ or {}):
                for name, value in values.items():
                    if not isinstance(value, _UNCHANGING) and not (name == "prompt" and isinstance(value, list)):
                        values[name] = copy.deepcopy(value)
        return made


class Mixin(NamedTuple):
    """A class ``own`` of pdlab that goes in front of one of Ray's. ``into``: every engine server, every server that
    orchestrates prefill and decode, or the deployment that answers HTTP. ``fields``: the fields of the class by the
    builder's arguments; None: the application does not get the class.
    """

    own: type
    into: Literal["engines", "orchestrators", "front"]
    fields: Callable[[Mapping[str, Any]], dict[str, Any] | None]


def _always(args: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _if_given(name: str, fields: Callable[[Any], dict[str, Any]] = _always) -> Callable[..., dict[str, Any] | None]:
    """``fields`` of the builder's argument of that name, where it is given."""
    return lambda args: fields(args[name]) if args.get(name) else None


# A later one is in front of the earlier ones.
MIXINS = (
    Mixin(CountsPoolTokens, "engines", _always),
    Mixin(StopsWithEngine, "engines", _always),
    Mixin(ExplainsErrors, "engines", _always),
    Mixin(EmptiesStats, "engines", _always),
    Mixin(CostsLess, "engines", _always),
    Mixin(WatchesSteps, "engines", _if_given("kv_guard")),
    Mixin(InstallsGuard, "engines", _if_given("guard_files", lambda files: {"guard_files": files})),
    Mixin(HttpFront, "front", lambda args: {"rules": RequestRules(**args["guard"])}),
    Mixin(DrainsBeforeStop, "engines", _if_given("kv_drain_s", lambda limit_s: {"kv_drain_s": limit_s})),
    Mixin(HoldsPort, "engines", _if_given("kv_drain_s")),
    Mixin(
        CallsPrefill, "orchestrators", _if_given("prefill_call", lambda call: {"prefill_rules": PrefillRules(**call)})
    ),
    Mixin(SplitsSequences, "orchestrators", _if_given("prefill_call")),
    Mixin(SwitchesRoles, "orchestrators", _if_given("board", dict)),
    Mixin(
        SendsTimeline,
        "engines",
        lambda args: {"marks_reads": bool(args.get("kv_guard")), "traced": (args.get("traces") or {}).get("share")},
    ),
)
# The arguments that Ray's builders do not get.
OWN = ("guard", "traces", "kv_guard", "guard_files", "prefill_call", "kv_drain_s", "board")


def build_openai_app(args: dict[str, Any]) -> Any:
    """One pool of engines. Raises what Ray's builder raises."""
    return _build("build_openai_app", args)


def build_dp_openai_app(args: dict[str, Any]) -> Any:
    """One pool of data parallel engines. Raises what Ray's builder raises."""
    return _build("build_dp_openai_app", args)


def build_pd_openai_app(args: dict[str, Any]) -> Any:
    """Prefill and decode disaggregated. Raises what Ray's builder raises."""
    return _build("build_pd_openai_app", args)


def build_fluid_openai_app(args: dict[str, Any]) -> Any:
    """One pool of engines whose roles change (`pdlab.deploy.serving.role_board`): ``llm_config``, and under ``roles``
    the fields of `pdlab.roles.spec.FluidSpec`. ``by_session``: sessions stay with the engine that decodes them. Raises
    what Ray's builders raise.
    """
    arguments = dict(args)
    spec, by_session = FluidSpec(**arguments.pop("roles")), bool(arguments.pop("by_session", False))
    board_name = f"{BOARD_PREFIX}{uuid.uuid4().hex[:12]}"
    arguments["board"] = {"board_name": board_name, "board_spec": spec}
    return _build(lambda rays: _fluid(rays, board_name, spec, by_session=by_session), arguments)


def _fluid(args: dict[str, Any], board_name: str, spec: FluidSpec, *, by_session: bool) -> Any:
    """As `build_pd_openai_app` of Ray, with one deployment that is both prefill and decode."""
    builder: Any = importlib.import_module(BUILDER)
    ingress: Any = importlib.import_module(INGRESS)
    pd: Any = importlib.import_module(PD)
    server: Any = importlib.import_module(SERVER)
    serving = ingress.LLMServingArgs.model_validate(
        {**{key: value for key, value in args.items() if key != "llm_config"}, "llm_configs": [args["llm_config"]]}
    )
    (config,) = serving.llm_configs
    router: dict[str, Any] = {"request_router_class": FLUID_ROUTER}
    first, _ = spec.first(config.deployment_config["num_replicas"])
    router["request_router_kwargs"] = {"board": board_name, "prefill": first}
    if by_session:
        router["request_router_kwargs"]["by_session"] = True
    config.deployment_config["request_router_config"] = router
    engines = type("FluidServer", (pd.PDOrchestratorMixin, server.LLMServer), {"__module__": __name__})
    naming: dict[str, Any] = {"name_prefix": FLUID_PREFIX, "deployment_cls": engines}
    if ingress.RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING:
        ingress._validate_direct_streaming_ingress_config(serving.ingress_deployment_config, serving.ingress_cls_config)
        direct = ingress._build_direct_streaming_llm_deployment(config, **naming)
        return direct._with_ingress_request_router(
            ingress._build_openai_ingress_request_router(server=direct, llm_config=config)
        )
    ingress_class = serving.ingress_cls_config.ingress_cls
    options = ingress.maybe_apply_llm_deployment_config_defaults(
        ingress_class.get_deployment_options([config]), serving.ingress_deployment_config
    )
    front = ingress.serve.deployment(ingress.make_fastapi_ingress(ingress_class), **options)
    return front.bind(
        llm_deployments={config.model_id: builder.build_llm_deployment(config, **naming)},
        model_cards={config.model_id: ingress.to_model_metadata(config.model_id, config)},
        lora_paths={},
    )


def _build(builder: str | Callable[[dict[str, Any]], Any], args: Mapping[str, Any]) -> Any:
    """The application that ``builder`` (of Ray by its name) makes, with pdlab's classes in front of Ray's."""
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")
    for package in BY_VALUE:
        cloudpickle.register_pickle_by_value(sys.modules[package])
    own = {name: args[name] for name in OWN if name in args}
    rays = {name: value for name, value in args.items() if name not in OWN}
    if (own.get("kv_guard") or {}).get("send_sources"):
        files = own["guard_files"] = sources(_PDLAB)
        configs = [key for key in ("prefill_config", "decode_config", "llm_config") if key in rays]
        rays |= {key: _with_guard(rays[key], files) for key in configs}
    make: Any = getattr(importlib.import_module("ray.serve.llm"), builder) if isinstance(builder, str) else builder
    application: Any = make(rays)
    every = _applications(application)
    kinds = {
        "engines": (importlib.import_module(SERVER).LLMServer, every),
        "orchestrators": (importlib.import_module(PD).PDOrchestratorMixin, every),
        "front": (object, [application]),
    }
    for mixin in MIXINS:
        kind, applications = kinds[mixin.into]
        if (fields := mixin.fields(own)) is not None:
            for each in applications:
                if issubclass(bound_deployment(each).func_or_class, kind):
                    _mix_in(each, mixin.own, fields)
    return application


def _with_guard(config: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
    """An engine's configuration, whose processes find the guard."""
    runtime_env = dict(config.get("runtime_env") or {})
    variables = dict(runtime_env.get("env_vars") or {})
    variables["PYTHONPATH"] = pythonpath(files, variables.get("PYTHONPATH"))
    return {**config, "runtime_env": {**runtime_env, "env_vars": variables}}


def _mix_in(application: Any, mixin: type, fields: dict[str, Any]) -> None:
    """Put a class in front of the one that the application's deployment runs, under the same name."""
    deployment = bound_deployment(application)
    before = deployment.func_or_class
    mixed = type(before.__name__, (mixin, before), {**fields, "__module__": before.__module__})
    bind_class(application, mixed)


def _applications(top: Any) -> list[Any]:
    """The application and those that its deployments are bound to."""
    applications: list[Any] = []
    waiting = [top]
    while waiting:
        application_ = waiting.pop()
        if isinstance(application_, type(top)):
            if application_ not in applications:
                applications.append(application_)
                bound = bound_deployment(application_)
                waiting += [*bound.init_args, *bound.init_kwargs.values()]
        elif isinstance(application_, dict):
            waiting += application_.values()
        elif isinstance(application_, (list, tuple)):
            waiting += application_
    return applications
