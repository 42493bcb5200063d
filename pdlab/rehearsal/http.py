"""A simulated engine's HTTP server for direct streaming: the routes of vLLM's server that pdlab's clients use."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pdlab.rehearsal.ray_names import RawRequestInfo, openai


def build_app(engine: Any) -> FastAPI:
    """The application of ``engine``, a `pdlab.rehearsal.engine.SimulatedEngine`."""
    app = FastAPI()

    async def respond(stream: Any) -> Response:
        first = await stream.__anext__()
        if isinstance(first, openai.ErrorResponse):
            return JSONResponse(first.model_dump(), status_code=first.error.code)
        if not isinstance(first, str):
            return JSONResponse(first.model_dump())

        async def texts() -> Any:
            yield first
            async for text in stream:
                yield text

        return StreamingResponse(texts(), media_type="text/event-stream")

    # FastAPI resolves annotations in this module's globals, so they cannot be local classes.
    @app.post("/v1/completions")
    async def completions(body: dict[str, Any], request: Request) -> Response:
        raw = RawRequestInfo.from_starlette_request(request)
        return await respond(engine.completions(openai.CompletionRequest(**body), raw))

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any], request: Request) -> Response:
        raw = RawRequestInfo.from_starlette_request(request)
        return await respond(engine.chat(openai.ChatCompletionRequest(**body), raw))

    @app.post("/tokenize")
    async def tokenize(body: dict[str, Any]) -> Response:
        kind = openai.TokenizeChatRequest if "messages" in body else openai.TokenizeCompletionRequest
        return await respond(engine.tokenize(kind(**body)))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": engine.llm_config.model_id, "object": "model", "owned_by": "pdlab"}
        return {"object": "list", "data": [{**card, "max_model_len": engine.spec.max_model_len}]}

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    return app
