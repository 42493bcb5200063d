"""Ray's internals that simulated engines use, and which a new version of Ray may change. Imports Ray."""

from __future__ import annotations

from ray.llm._internal.serve.core.configs import openai_api_models as openai
from ray.llm._internal.serve.core.engine.protocol import LLMEngine
from ray.llm._internal.serve.core.protocol import RawRequestInfo

__all__ = ["LLMEngine", "RawRequestInfo", "openai"]
