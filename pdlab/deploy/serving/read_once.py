"""vLLM's environment variables, read once.

vLLM looks one up for every token that it sends, and parses it each time. Its engine core keeps them from its start on
(`vllm.envs.enable_envs_cache`); the process that answers requests does not. Runs in Ray Serve's replicas, sent there by
value: imports the standard library and its neighbours.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from pdlab.deploy.serving.vllm_names import ENVIRONMENT


class ReadsVariablesOnce:
    """Mixed into Ray's engine servers. From the start of the engine on, changed variables have no effect."""

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]
        try:
            environment: Any = importlib.import_module(ENVIRONMENT)
            environment.enable_envs_cache()
        except (ImportError, AttributeError) as error:  # another vLLM: reads them as before
            logging.getLogger("ray.serve").warning("vLLM's variables are read again and again: %r", error)
