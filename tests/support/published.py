"""Files of the published form, made up on the spot: what `vllm bench serve` writes of a closed loop that is full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TTFT_S, TPOT_S, INPUT, OUTPUT = 0.1, 0.04, 1000, 101


def content(concurrency: int = 8, **changes: Any) -> dict[str, Any]:
    """One file's content; ``changes``: other values, None takes a key away."""
    stays_s = TTFT_S + TPOT_S * (OUTPUT - 1)
    count = 20 * concurrency
    rps = concurrency / stays_s
    usual = {
        "date": "20260105-120000",
        "backend": "openai",
        "model_id": "org/model-a",
        "tokenizer_id": "org/model-a",
        "num_prompts": count,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": concurrency,
        "duration": count / rps,
        "completed": count,
        "total_input_tokens": count * INPUT,
        "total_output_tokens": count * OUTPUT,
        "request_throughput": rps,
        "max_concurrent_requests": concurrency + 1,
        **{f"{statistic}_ttft_ms": 1000 * TTFT_S for statistic in ("mean", "median")},
        **{f"{statistic}_tpot_ms": 1000 * TPOT_S for statistic in ("mean", "median")},
    }
    return {key: value for key, value in {**usual, **changes}.items() if value is not None}


def unanswered(concurrency: int = 8) -> dict[str, Any]:
    """One file's content after a level whose every request failed: all counters and figures are 0."""
    kept = content(concurrency)
    settings = ("num_prompts", "burstiness", "max_concurrency", "duration")
    return {key: 0 if isinstance(value, int | float) and key not in settings else value for key, value in kept.items()}


def write(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    """A folder of such files; stem -> `content`."""
    folder.mkdir(parents=True)
    for stem, data in files.items():
        file = folder / f"{stem}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(data))
    return folder
