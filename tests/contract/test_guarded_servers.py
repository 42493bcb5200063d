"""The classes of pdlab.deploy.serving.builders on Ray's and vLLM's own: the guard in the built application, and
requests on their way through Ray's PD orchestration with engines that answer at once."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from contract.conftest import SERVE, quietly
from contract.test_builders import builder_of, deployments_of, rendered
from support.asgi import exchange, text_of

from pdlab.core.deployment import Deployment, RequestLimits, Serving, parse_label
from pdlab.deploy.serving.timeline import IDS_KEY, packed

pytestmark = pytest.mark.usefixtures("ray_llm", "no_cluster", "import_warnings_aside")


def built(label: str, *, direct: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    for name in (
        "core.ingress.builder",
        "serving_patterns.prefill_decode.builder",
        "serving_patterns.data_parallel.builder",
    ):
        monkeypatch.setattr(quietly(f"{SERVE}.{name}"), "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING", direct)
    serving = Serving(direct_streaming=direct, requests=RequestLimits(expose=("/detokenize",), max_prompts=3))
    case = rendered(Deployment(topology=parse_label(label), model="tiny-gptoss", serving=serving), "local-2")
    return deployments_of(builder_of(case.app)(case.app.args))


@pytest.mark.parametrize("direct", [False, True], ids=["ingress", "direct"])
@pytest.mark.parametrize(
    "label", ["collocated-1xtp1", "collocated-1xdp2", "pd-spread-p1xtp1-d1xtp1", "pd-pack-p1xtp1-d1xdp2"]
)
def test_the_application_that_answers_http_is_guarded(
    label: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi import FastAPI

    front = built(label, direct=direct, monkeypatch=monkeypatch)[0].func_or_class
    names = [base.__name__ for base in front.__mro__]
    assert "HttpFront" in names and ("SplitsSequences" in names) is (direct and label.startswith("pd"))
    assert inspect.iscoroutinefunction(front.__init__), "Ray refuses a wrapped ingress that is built otherwise"
    app = FastAPI()
    for path in ("/v1/completions", "/inference/v1/generate", "/detokenize"):
        app.post(path)(lambda: {})
    app.post("/tokenize")(echoed)
    app.middleware_stack = app.build_middleware_stack()  # as vLLM leaves it
    server = front.__new__(front)
    if direct:
        server.engine = SimpleNamespace(_engine_client=SimpleNamespace(errored=False))

        async def native(_: Any) -> Any:
            return app

        monkeypatch.setattr(quietly(f"{SERVE}.core.server.llm_server").LLMServer, "__serve_build_asgi_app__", native)
        monkeypatch.setattr(
            quietly(f"{SERVE}.serving_patterns.prefill_decode.pd_server").PDOrchestratorMixin,
            "__serve_build_asgi_app__",
            native,
        )
    else:
        server._asgi_app = app

    made = asyncio.run(server.__serve_build_asgi_app__())
    assert isinstance(made, FastAPI), "Ray adds handlers to it"
    paths = [getattr(route, "path", None) for route in made.routes]
    assert paths[:2] == ["/v1/completions", "/tokenize"], "each request tries the routes in their order"
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "x"}),
        ("/detokenize", {}),
        ("/inference/v1/generate", {}),
        ("/v1/completions", {"prompt": "x", "kv_transfer_params": {}}),
        ("/v1/completions", {"prompt": ["x"] * 4}),
    ]
    statuses = [exchange(made, path, json.dumps(body).encode())[0]["status"] for path, body in requests]
    assert statuses == [200, 200, 404, 400, 400]
    monkeypatch.setattr("starlette.requests.json", None)
    sent = {"prompt": [1, 2.5, "\u00e9"], "model": "m"}
    sent_request = json.dumps(sent).encode()
    assert json.loads(text_of(exchange(made, "/tokenize", sent_request))) == sent, "the guard has parsed it"
    assert exchange(app_that_echoes(), "/tokenize", sent_request)[0]["status"] == 400, "without it nothing parses"


async def echoed(body: dict[str, Any]) -> dict[str, Any]:
    return body


def app_that_echoes() -> Any:
    from fastapi import FastAPI

    app = FastAPI()
    app.post("/tokenize")(echoed)
    return app


@pytest.mark.parametrize("label", ["collocated-1xtp1", "collocated-1xdp2", "pd-spread-p1xtp1-d1xtp1"])
@pytest.mark.parametrize("direct", [False, True], ids=["ingress", "direct"])
def test_every_engine_counts_its_kv_pool_once_where_it_stays(
    label: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own gauge is gone from Ray's pages after two exports."""
    counted: list[tuple[str, float, dict[str, str]]] = []

    class Counter:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name = name

        def inc(self, value: float, tags: dict[str, str]) -> None:
            counted.append((self.name, value, tags))

    cache: Any = SimpleNamespace(num_gpu_blocks=7, block_size=16)
    base = quietly(f"{SERVE}.core.server.llm_server").LLMServer

    async def start(self: Any) -> None:
        client = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))
        self.engine = SimpleNamespace(_engine_client=client)

    monkeypatch.setattr(base, "start", start)
    monkeypatch.setattr(quietly("ray.util.metrics"), "Counter", Counter)
    replica = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r7"), deployment="Decode:m")
    monkeypatch.setattr(quietly("ray.serve"), "get_replica_context", lambda: replica)
    made = [deployment.func_or_class for deployment in built(label, direct=direct, monkeypatch=monkeypatch)]
    engines = [each for each in made if issubclass(each, base)]
    for each in engines:
        asyncio.run(each.__new__(each).start())
    tags = {"ReplicaId": "r7", "deployment": "Decode:m"}
    assert counted == [("pdlab_kv_pool_tokens", 112, tags)] * (2 if label.startswith("pd") else 1)
    cache = SimpleNamespace(num_gpu_blocks=None, block_size=16)
    with quiet():
        asyncio.run(engines[0].__new__(engines[0]).start())
    assert len(counted) == len(engines), "a pool that is not known is no reason not to start"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ray's logger may have handlers by now, and the warning is what is meant."""
    logger = logging.getLogger("ray.serve")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def test_where_engine_and_pool_are() -> None:
    engine = quietly(f"{SERVE}.engines.vllm.vllm_engine").VLLMEngine
    assert "self._engine_client = self._start_async_llm_engine(" in inspect.getsource(engine.start)
    assert "self.vllm_config = vllm_config" in inspect.getsource(quietly("vllm.v1.engine.async_llm").AsyncLLM.__init__)
    labels = quietly("vllm.config.cache").CacheConfig(block_size=16).metrics_info()
    assert labels["block_size"] == "16" and "num_gpu_blocks" in labels


IDS = [5, 2**31, 7]


class Engines:
    """A prefill and a decode engine that answer at once, and what they were asked."""

    def __init__(self, models: Any) -> None:
        self.models = models
        self.prefill: list[Any] = []
        self.decode: list[Any] = []
        self.reused: list[int] | None = None

    def completion(self, request: Any, text: str, **more: Any) -> Any:
        choices = [{"index": i, "text": text} for i in range(request.n)]
        usage = {"prompt_tokens": len(request.prompt), "completion_tokens": 1, "total_tokens": len(request.prompt) + 1}
        return self.models.CompletionResponse(
            model="m", id=f"cmpl-{request.request_id}", choices=choices, usage=usage, **more
        )

    async def remote(self, request: Any, _: Any, **route: Any) -> AsyncIterator[Any]:
        self.prefill.append(request)
        if request.prompt == "too long":
            error = self.models.ErrorInfo(message="too long", type="BadRequestError", code=400)
            yield self.models.ErrorResponse(error=error)
        else:
            parameters = {"remote_block_ids": request.prompt}
            if request.kv_transfer_params.get(IDS_KEY):
                parameters[IDS_KEY] = (packed(IDS), packed([9]))
            yield self.completion(request, "", kv_transfer_params=parameters)

    async def completions(self, request: Any, _: Any) -> AsyncIterator[Any]:
        self.decode.append(request)
        self.reused = quietly("ray.llm._internal.common.patches.vllm.tokenize_once")._reused_token_ids.get()
        yield self.completion(request, f"after {request.prompt}")


def decode_server(monkeypatch: pytest.MonkeyPatch, *, tokenize_once: bool = False) -> tuple[Any, Engines]:
    models = quietly(f"{SERVE}.core.configs.openai_api_models")
    backend = quietly(f"{SERVE}.engines.vllm.kv_transfer.base").DefaultConnectorBackend(None)
    decode = next(
        d for d in built("pd-spread-p1xtp1-d1xtp1", direct=False, monkeypatch=monkeypatch) if "Decode" in d.name
    )
    engines = Engines(models)
    server = decode.func_or_class.__new__(decode.func_or_class)
    server.engine = engines
    server._prefill_handle = SimpleNamespace(completions=SimpleNamespace(remote=engines.remote))
    server._llm_config = SimpleNamespace(kv_connector_backend=backend, experimental_configs={})
    server._pd_tokenize_once = tokenize_once
    return server, engines


def answer(server: Any, engines: Engines, **fields: Any) -> list[Any]:
    async def run() -> list[Any]:
        request = engines.models.CompletionRequest(model="m", **fields)
        return [item async for item in await server.completions(request, None)]

    return asyncio.run(run())


def test_every_prompt_has_transfer_parameters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    server, engines = decode_server(monkeypatch)
    prompts = ["a", "bb", "ccc"]
    (reply,) = answer(server, engines, prompt=prompts, n=2, seed=3, min_tokens=5)
    assert [(c.index, c.text) for c in reply.choices] == [(i, f"after {prompts[i // 2]}") for i in range(6)]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 6)
    assert reply.id.count("-") == 1 or not reply.id.endswith("-0")
    for decode in engines.decode:
        assert decode.kv_transfer_params == {"remote_block_ids": decode.prompt}
    assert sorted(decode.seed for decode in engines.decode) == [3, 3, 3, 4, 4, 4]
    assert len({decode.request_id for decode in engines.decode}) == 6
    assert all((p.max_tokens, p.min_tokens, p.n) == (1, 0, 1) for p in engines.prefill)
    assert all(decode.min_tokens == 5 for decode in engines.decode)


@pytest.mark.parametrize(("prompt", "reused"), [("a", IDS), ([5, 6], None)], ids=["text", "ids"])
def test_decode_takes_the_ids_that_prefill_tells_it_packed(
    prompt: Any, reused: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, engines = decode_server(monkeypatch, tokenize_once=True)
    (reply,) = answer(server, engines, prompt=prompt, return_token_ids=True)
    (prefill,), (decode,) = engines.prefill, engines.decode
    assert reply.choices[0].text == f"after {prompt}" and engines.reused == reused
    assert prefill.return_token_ids is None and decode.return_token_ids, "decode answers the client"
    assert decode.kv_transfer_params == {"remote_block_ids": prompt}, "vLLM's own"


def test_the_ids_of_a_prompt_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    server, engines = decode_server(monkeypatch)
    prompt = [5, 6]
    request = engines.models.CompletionRequest(model="m", prompt=prompt, vllm_xargs={"a": [1]})
    answered = SimpleNamespace(kv_transfer_params={"remote_block_ids": [1]})
    backend = server._get_connector_backend()
    for made in (
        backend.prepare_prefill_request(request=request, peer=None),
        backend.prepare_decode_request(request=request, peer=None, prefill_response=answered),
    ):
        assert made.prompt is request.prompt and made.vllm_xargs is not request.vllm_xargs
        assert made.model_fields_set >= request.model_fields_set and made is not request
        made.vllm_xargs["a"] = [2]
    assert request.prompt == [5, 6] and request.kv_transfer_params is None and request.vllm_xargs == {"a": [1]}
    chat = engines.models.ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "a"}], unknown=[1])
    made = backend.prepare_prefill_request(request=chat, peer=None)
    assert made.messages == chat.messages and made.messages is not chat.messages
    assert made.unknown == [1] and made.unknown is not chat.unknown, "a field that vLLM does not know"


def test_one_sequence_goes_the_way_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    server, engines = decode_server(monkeypatch)
    (reply,) = answer(server, engines, prompt="a")
    assert reply.choices[0].text == "after a" and len(engines.prefill) == len(engines.decode) == 1


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"use_beam_search": True, "n": 2}, {"max_tokens": 0}],
)
def test_what_needs_the_whole_prompt_is_not_prefilled_elsewhere(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, engines = decode_server(monkeypatch)
    answer(server, engines, prompt="a", **fields)
    (request,) = engines.decode
    assert engines.prefill == [] and request.kv_transfer_params is None and request.n == fields.get("n", 1)


def test_an_error_of_one_prompt_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    server, engines = decode_server(monkeypatch)
    (reply,) = answer(server, engines, prompt=["a", "too long"])
    assert isinstance(reply, engines.models.ErrorResponse) and reply.error.code == 400


def test_requests_have_what_is_asked_of_them() -> None:
    models = quietly(f"{SERVE}.core.configs.openai_api_models")
    common = {
        "n",
        "seed",
        "request_id",
        "prompt_logprobs",
        "use_beam_search",
        "echo",
        "logprobs",
        "max_tokens",
        "min_tokens",
    }
    for request in (models.CompletionRequest, models.ChatCompletionRequest):
        assert common | {"temperature", "kv_transfer_params"} <= set(request.model_fields)
    assert "prompt" in models.CompletionRequest.model_fields
    assert "prompt" not in models.ChatCompletionRequest.model_fields


def test_vllms_rule_for_greedy_is_ours() -> None:
    from pdlab.deploy.serving import sequences

    assert quietly("vllm.sampling_params")._SAMPLING_EPS == sequences.GREEDY


def test_every_field_of_a_request_is_known_to_be_free_or_sends_no_token_early() -> None:
    """A field that vLLM adds or renames falls back until somebody has looked at it."""
    from pdlab.deploy.serving.early_token import _FREE, first_token

    models = quietly(f"{SERVE}.core.configs.openai_api_models")
    choice = {"text": " ufo", "finish_reason": "length"}
    answer = SimpleNamespace(id="x", created=7, model="m", choices=[SimpleNamespace(**choice)])
    common = {"model": "m", "max_tokens": 8, "temperature": 0.0}
    kinds = {
        models.CompletionRequest: ({"prompt": "ba"}, {"echo", "suffix"}),
        models.ChatCompletionRequest: ({"messages": [{"role": "user", "content": "ba"}]}, {"tools", "top_logprobs"}),
    }
    for kind, (given, own) in kinds.items():
        sent_request = kind(**common, **given)
        assert first_token(sent_request, answer, 100, [5, 6], [9]) == 9
        others = set(kind.model_fields) - _FREE
        assert own | {"n", "stop", "logprobs", "min_tokens", "response_format", "structured_outputs"} < others
        for name in others:
            assert first_token(sent_request.model_copy(update={name: object()}), answer, 100, [5, 6], [9]) is None, name
    assert set.union(*(set(kind.model_fields) for kind in kinds)) >= _FREE


def test_a_message_that_rays_ingress_cannot_read_is_known_by_what_it_says() -> None:
    from pdlab.deploy.serving import guard

    utils = quietly(f"{SERVE}.core.ingress.utils")

    def parts() -> Iterator[Any]:
        raise ValueError("of no known kind")
        yield

    class Unreadable:
        def __iter__(self) -> Iterator[Any]:
            return parts()

    sent_request: Any = SimpleNamespace(messages=[{"role": "user", "content": Unreadable()}])
    with pytest.raises(ValueError, match=guard._NO_CONTENT):
        utils._sanitize_chat_completion_request(sent_request)


def test_a_vocabulary_that_is_not_there_is_known_by_what_harmony_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdlab.deploy.serving import guard

    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    harmony = quietly("openai_harmony")
    with pytest.raises(harmony.HarmonyError, match=guard.NO_VOCABULARY):
        harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    (tmp_path / "o200k_base.tiktoken").write_text("damaged")
    with pytest.raises(harmony.HarmonyError):
        harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def test_vllms_statuses_and_parser_are_those_that_errors_are_explained_with() -> None:
    from pdlab.deploy.serving import engine_errors
    from pdlab.deploy.serving.vllm_names import HARMONY

    serving = quietly("vllm.entrypoints.openai.chat_completion.serving").OpenAIServingChat
    completion = quietly("vllm.entrypoints.openai.completion.serving").OpenAIServingCompletion
    harmony_error = quietly("openai_harmony").HarmonyError("Unexpected token 5")
    template_error = quietly("jinja2").TemplateError("roles must alternate")
    for made in (serving, completion):
        codes = [made.create_error_response(error).error.code for error in (TypeError(), template_error, harmony_error)]
        assert codes == [400, 400, 500], "else the mixin is of no use"
    assert engine_errors.harmonys(harmony_error) and engine_errors.harmonys(template_error) is None
    engine = inspect.getsource(quietly(f"{SERVE}.engines.vllm.vllm_engine"))
    for name, method in engine_errors._SERVINGS.items():
        assert f"self.{name}.{method}(" in engine
    parser = quietly(HARMONY).HarmonyParser
    assert "count_reasoning_tokens" not in vars(parser), "it counts itself: take ours out"
    engine_errors.count_reasoning_of(SimpleNamespace(parser_cls=parser))
    try:
        assert parser.count_reasoning_tokens is engine_errors.reasoning_tokens
    finally:
        del parser.count_reasoning_tokens
