"""The servers of a deployment in this process, with engine cores that make tokens at no cost, and a client of them.

All that runs in a replica's process is the code of a launch: pdlab's classes on Ray Serve LLM's servers, vLLM's client,
its detokenizer, its OpenAI layer and its ASGI application. Stand-ins are the engine cores (`StubCore`), and Ray's call
of prefill (`StubHandle`: requests and answers are pickled, and no gRPC carries them). There is no HTTP server: the
client calls the ASGI application.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import json
import logging
import os
import pickle
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Another checkout, whose servers are measured.
SOURCES = os.environ.get("PDLAB_FROM", str(ROOT))
sys.path[:0] = [SOURCES, str(ROOT / "benchmarks")]

from pdlab.deploy import serving_path  # noqa: E402

os.environ.update(serving_path.HAPROXY | serving_path.DIRECT)  # Ray reads them when it is imported

from bare_pair import MODEL, tiny_model  # noqa: E402

from pdlab.core.catalog import load_cluster, resolve_model  # noqa: E402
from pdlab.core.deployment import Deployment, Serving, parse_label  # noqa: E402
from pdlab.deploy.serve_config import cpu_env, render  # noqa: E402
from pdlab.deploy.serving.ray_names import ENGINE_MODELS  # noqa: E402
from pdlab.marks.engine_marks import CORE, READ, WIRE, boot_id  # noqa: E402
from pdlab.placement.place import place  # noqa: E402

HOST = "127.0.0.1"
LABELS = {"collocated": "collocated-1xtp1", "pd": "pd-spread-p1xtp1-d1xtp1"}
DONE = b"data: [DONE]\n\n"
_BOOT = boot_id()
# NIXL's telemetry of a read.
_READ = SimpleNamespace(xferDuration=900.0, postDuration=50.0, totalBytes=2**20, descCount=16)


class StubCore:
    """Stands for vLLM's client of an engine core's process: every request has its next token at each step, and a step
    begins when the step before has been sent to the clients. What it does is counted in ``spent_s`` of CPU time; taking
    a message apart is the replica's work and is not. ``ranks``: workers that report reads of KV cache. ``forgets``: so
    many bytes are copied before each step, so that caches of the CPU have lost what the replica had there, as beside
    an engine core that computes."""

    engine_ranks_managed = (0,)
    forgets = 0

    def __init__(self, vllm_config: Any, ranks: int) -> None:
        engine, serial, self._stats = (
            importlib.import_module(name)
            for name in ("vllm.v1.engine", "vllm.v1.serial_utils", "vllm.v1.metrics.stats")
        )
        self._engine: Any = engine
        self._pack, self._unpack = serial.MsgpackEncoder(), serial.MsgpackDecoder(engine.EngineCoreOutputs)
        self._packs_requests = serial.MsgpackEncoder()
        vllm_config.cache_config.num_gpu_blocks = 4096
        self._connector = importlib.import_module("pdlab.guard.metrics").GuardStats
        self._ranks = ranks
        self._messages = asyncio.Queue[Any]()
        self._running: dict[str, list[int]] = {}  # tokens made, tokens wanted
        self._new: list[Any] = []
        self._unsent = 0
        self._due = False
        self.spent_s = 0.0
        self._garbage = bytearray(self.forgets)
        self.resources = SimpleNamespace(engine_dead=False)

    async def get_output_async(self) -> Any:
        frames = await self._messages.get()
        return self._unpack.decode(frames)

    async def add_request_async(self, request: Any) -> None:
        self._packs_requests.encode(request)
        began_s = time.thread_time()
        self._new.append(request)
        self._unsent = max(0, self._unsent)
        self._step_soon()
        self.spent_s += time.thread_time() - began_s

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    def shutdown(self, timeout: float | None = None) -> None:
        pass

    def sent(self) -> None:
        """A token of this engine has reached its client."""
        self._unsent -= 1
        if self._unsent <= 0:
            self._step_soon()

    def _step_soon(self) -> None:
        if not self._due and (self._new or (self._running and self._unsent <= 0)):
            self._due = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        began_s = time.thread_time()
        engine, self._due, now_s = self._engine, False, time.monotonic()
        if self._garbage:
            self._garbage = bytearray(self._garbage)
        outputs, connector = list[Any](), self._connector()
        ready = list(self._running.items()) if self._unsent <= 0 else []
        for request in self._new:
            events = [
                engine.EngineCoreEvent(type=kind, timestamp=now_s)
                for kind in (engine.EngineCoreEventType.QUEUED, engine.EngineCoreEventType.SCHEDULED)
            ]
            wanted = request.sampling_params.max_tokens
            params = (request.sampling_params.extra_args or {}).get("kv_transfer_params") or {}
            answer = None
            if params.get("do_remote_decode"):
                answer = {"do_remote_prefill": True, "remote_block_ids": list(range(16)), "remote_engine_id": "e",
                          "remote_request_id": request.request_id, "remote_host": HOST, "remote_port": 1,
                          "tp_size": 1}  # fmt: skip
            elif params.get("do_remote_prefill"):
                connector.data[CORE].append((request.request_id, now_s, now_s, now_s, READ))
                for rank in range(self._ranks):
                    connector.record_transfer(_READ)
                    connector.data[WIRE].append((request.request_id, rank, now_s, now_s, 900.0, 2**20, 1, _BOOT))
            stats = self._stats.PrefillStats()
            stats.set(
                num_prompt_tokens=len(request.prompt_token_ids), num_local_cached_tokens=0, num_external_cached_tokens=0
            )
            outputs.append(self._token(request.request_id, 1, wanted, events=events, prefill_stats=stats,
                                       kv_transfer_params=answer))  # fmt: skip
            if wanted > 1:
                self._running[request.request_id] = [1, wanted]
        for request_id, counted in ready:
            counted[0] += 1
            outputs.append(self._token(request_id, *counted))
            if counted[0] == counted[1]:
                del self._running[request_id]
        self._unsent = max(0, self._unsent) + len(outputs)
        self._new.clear()
        scheduled = self._stats.SchedulerStats(
            num_running_reqs=len(self._running), kv_cache_usage=len(self._running) / 64,
            kv_connector_stats=None if connector.is_empty() else connector.data,
        )  # fmt: skip
        message = engine.EngineCoreOutputs(outputs=outputs, scheduler_stats=scheduled)
        self._messages.put_nowait(self._pack.encode(message))
        self.spent_s += time.thread_time() - began_s

    def _token(self, request_id: str, number: int, wanted: int, **more: Any) -> Any:
        reason = self._engine.FinishReason.LENGTH if number == wanted else None
        return self._engine.EngineCoreOutput(
            request_id=request_id, new_token_ids=[400 + number % 500], finish_reason=reason, **more
        )


class StubHandle:
    """Stands for Ray's handle of prefill's deployment: ``server`` is in this process."""

    server: Any = None

    def options(self, **_: Any) -> StubHandle:
        return self

    @property
    def completions(self) -> Any:
        return SimpleNamespace(remote=self._remote)

    async def _remote(self, request: Any, raw: Any, **_: Any) -> AsyncIterator[Any]:
        request, raw = pickle.loads(pickle.dumps((request, raw), pickle.HIGHEST_PROTOCOL))

        async def answered() -> list[Any]:
            return [item async for item in await self.server.completions(request, raw)]

        # An empty context, as in another process.
        for item in await contextvars.Context().run(asyncio.create_task, answered()):
            yield pickle.loads(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))


class Replica(NamedTuple):
    """Its servers, the one first that answers; the ASGI application of that one; the servers' engine cores; vLLM's own
    applications of the same engines, without Ray's and pdlab's classes around them."""

    servers: list[Any]
    app: Any
    cores: list[StubCore]
    bare: list[Any]

    @property
    def stub_s(self) -> float:
        """CPU time of the stand-ins until now."""
        return sum(core.spent_s for core in self.cores)


def stand_ins(ranks: int, cores: list[StubCore]) -> None:
    """Put in place what a server needs of a cluster to start, until this process ends."""
    ray: Any = importlib.import_module("ray")
    serve: Any = importlib.import_module("ray.serve")
    local: Any = importlib.import_module("pdlab.deploy.cpu_engine.replica")
    config: Any = importlib.import_module(ENGINE_MODELS).VLLMEngineConfig
    client: Any = importlib.import_module("vllm.v1.engine.core_client").EngineCoreClient
    environment: Any = importlib.import_module("ray.runtime_env").RuntimeEnv()

    def core(vllm_config: Any, *_: Any, **__: Any) -> StubCore:
        cores.append(StubCore(vllm_config, ranks))
        return cores[-1]

    context = SimpleNamespace(
        replica_id=SimpleNamespace(unique_id="replica1"), deployment="Decode:tiny", app_name="llm", rank=None
    )
    for owner, name, stand_in in (
        (ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env=environment)),
        (serve, "get_replica_context", lambda: context),
        (client, "make_async_mp_client", core),
        (config, "get_or_create_pg", lambda _: None),
        (local, "set_niceness", lambda _: None),
        (local.prefork, "use_in", lambda _: None),
    ):
        setattr(owner, name, stand_in)


async def replica(kind: str, ranks: int = 1) -> Replica:
    """The servers of a deployment of that ``kind`` (of `LABELS`), started; each decode engine has ``ranks`` workers. It
    changes modules of Ray and vLLM: once in a process."""
    topology = parse_label(LABELS[kind])
    serving = Serving(**serving_path.defaults(topology, HOST, local=True))
    deployment = Deployment(topology=topology, model=MODEL, serving=serving)
    view = load_cluster("local-2")
    shape, _ = resolve_model(deployment.model)
    rendered = render(deployment, place(deployment, view), view, shape, tiny_model())
    os.environ.update(cpu_env() | {"VLLM_NIXL_SIDE_CHANNEL_PORT": "20000", "VLLM_LOGGING_LEVEL": "ERROR"})
    module, _, name = rendered.import_path.partition(":")
    cores: list[StubCore] = []
    stand_ins(ranks, cores)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    builders: Any = importlib.import_module(module)
    applications = builders._applications(getattr(builders, name)(rendered.args))
    handle, servers = StubHandle(), list[Any]()
    for application in applications:
        bound = builders.bound_deployment(application)
        if not hasattr(bound.func_or_class, "marks_reads"):  # the router that HAProxy calls
            continue
        given = {
            key: handle if isinstance(value, type(application)) else value for key, value in bound.init_kwargs.items()
        }
        for config in [*bound.init_args, *given.values()]:
            if hasattr(config, "experimental_configs"):
                config.experimental_configs.pop("_prewarm_prefill_decode", None)
        server = bound.func_or_class.__new__(bound.func_or_class)
        await server.__init__(*bound.init_args, **given)
        servers.append(server)
    handle.server = servers[-1]
    bare = [await server.engine.build_asgi_app() for server in servers]
    return Replica(servers, await servers[0].__serve_build_asgi_app__(), cores, bare)


class Answer(NamedTuple):
    """What a client got: the body's pieces, and its HTTP status and headers."""

    status: int
    headers: dict[bytes, bytes]
    pieces: list[bytes]


async def ask(
    app: Any, core: StubCore, body: bytes, headers: list[tuple[bytes, bytes]], path: str = "/v1/completions"
) -> Answer:
    """One request of an ASGI application, as HTTP servers send it."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()
    start: dict[str, Any] = {}
    pieces: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if piece := message.get("body"):
            pieces.append(piece)
            if b'"finish_reason"' in piece:
                core.sent()
        elif message["type"] == "http.response.start":
            start.update(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST", "path": path,
        "raw_path": path.encode(), "root_path": "", "query_string": b"", "http_version": "1.1",
        "scheme": "http", "client": (HOST, 1), "server": (HOST, 2), "state": {},
        "headers": [(b"content-type", b"application/json"), (b"host", b"h"), *headers],
    }  # fmt: skip
    context: Any = sys.modules["ray.serve.context"]  # as Ray Serve's replica does
    request_id = next((value.decode() for key, value in headers if key == b"x-request-id"), "")
    context._serve_request_context.set(context._RequestContext(request_id=request_id, app_name="llm"))
    await app(scope, receive, send)
    return Answer(start["status"], dict(start["headers"]), pieces)


async def ask_bare(served: Replica, body: bytes, headers: list[tuple[bytes, bytes]]) -> Answer:
    """The same of vLLM's own servers; with two, as a minimal client of prefill and decode does it."""
    if len(served.bare) > 1:
        shared = {name: value for name, value in json.loads(body).items() if not name.startswith("stream")}
        wants = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                 "remote_block_ids": None, "remote_host": None, "remote_port": None}  # fmt: skip
        first = json.dumps({**shared, "max_tokens": 1, "kv_transfer_params": wants}).encode()
        answer = await ask(served.bare[1], served.cores[1], first, headers)
        transfer = json.loads(b"".join(answer.pieces))["kv_transfer_params"]
        body = json.dumps({**json.loads(body), "kv_transfer_params": transfer}).encode()
    return await ask(served.bare[0], served.cores[0], body, headers)


def body_of(prompt: list[int], otl: int) -> bytes:
    """A streamed completion, as vLLM's load generator sends it."""
    return json.dumps(
        {"model": MODEL, "prompt": prompt, "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": otl,
         "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    ).encode()  # fmt: skip
