"""The cost of scattered KV blocks within a node, measured by a KV-transfer check with ``--compare-blocks``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pdlab.core.catalog import ModelShape
from pdlab.core.command_lines import command_line
from pdlab.core.errors import UsageError
from pdlab.core.model_size import full_layers, kv_bytes_per_token_layer, latent_check

KIND = "kv-transfer-check"


@dataclass(frozen=True, slots=True)
class ScatteredBlocks:
    """Transfer time of the KV cache of a prompt of ``tokens`` tokens, in scattered blocks and in contiguous ones.

    ``pages_ratio``: pages that a planned engine moves for that prompt, over those that the check moved. A page is one
    block of one layer, or of one region that layers share.
    """

    source: str
    tokens: int
    scattered_s: float
    contiguous_s: float
    pages_ratio: float

    @property
    def extra_s_per_token(self) -> float:
        """Further seconds per token of a planned engine, as the cost of a page times its pages."""
        return max(0.0, self.scattered_s - self.contiguous_s) * self.pages_ratio / self.tokens


def check_line(shape: ModelShape, **more: Any) -> str:
    """The command line of the check that measures it for the model. ``more``: more of its settings."""
    cache = latent_check(shape)._asdict() if shape.kv_latent else {"model": shape.word}
    return command_line("check-transfer", strategy="pack", compare=True, **cache, **more)


def read(path: Path, shape: ModelShape, tokens: int, *, cpu: bool, hybrid: bool) -> ScatteredBlocks:
    """The costs in the ``--json`` file of a check, at the size nearest to ``tokens``. ``cpu``: the plan is for engines
    on CPUs, whose KV cache is in host memory. ``hybrid``: layers with sliding windows keep only their window in the
    planned engines. Raises UsageError for a file of a model with another KV cache, of another memory or kind of
    check."""
    where = f"--blocks {path}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "not JSON"
        raise UsageError(f"{where}: cannot be read ({reason}); give the --json file of {check_line(shape)}") from error
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise UsageError(f"{where}: not the --json of a KV-transfer check; make one with {check_line(shape)}")
    try:
        return _chosen(data, where, path, shape, tokens, cpu=cpu, hybrid=hybrid)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{where}: something is missing or damaged ({error!r}); make it again with {check_line(shape)}"
        ) from error


def _chosen(
    data: dict[str, Any], where: str, path: Path, shape: ModelShape, tokens: int, *, cpu: bool, hybrid: bool
) -> ScatteredBlocks:
    plan, runs = data["plan"], data["runs"]
    if not plan.get("compare"):
        raise UsageError(f"{where}: has only one kind of blocks; make it with --compare-blocks")
    if plan["strategy"] != "pack" or plan["prefill_tp"] != plan["decode_tp"]:
        raise UsageError(
            f"{where}: is of {plan['strategy']}, TP {plan['prefill_tp']} to {plan['decode_tp']}; blocks are copied one "
            "by one within a node, and merge at equal TP: check --strategy pack with equal --prefill-tp and --decode-tp"
        )
    if plan["shape"]["name"] != shape.name and not _same_cache(plan["shape"], shape):
        flags = latent_check(shape) if shape.kv_latent else f"--model {shape.word}"
        raise UsageError(f"{where}: is of {plan['shape']['name']}, the plan of {shape.name}; check with {flags}")
    run = next((each for each in runs if each.get("exit_code") == 0), None)
    if run is None:
        reasons = [each["error"]["text"] if "error" in each else each["verdict"]["text"] for each in runs]
        raise UsageError(
            f"{where}: the check did not pass ({'; '.join(reasons) or 'it has no run'}); make it pass first"
        )
    if bool(run["vram"]) == cpu:
        measured_in, planned_on = ("memory of the host", "GPUs") if not cpu else ("memory of GPUs", "CPUs")
        raise UsageError(
            f"{where}: was measured in {measured_in}, the plan is of {planned_on}; check on nodes like the planned ones"
        )
    sizes = [size for size in run["sizes"] if size["size"]["tokens"] and size["contiguous_s"]]
    if not sizes:
        raise UsageError(f"{where}: no size was given in tokens; check with --tokens {tokens}")
    nearest = min(sizes, key=lambda size: abs(math.log(size["size"]["tokens"] / tokens)))
    return ScatteredBlocks(
        source=f"{run['backend']}, {path}",
        tokens=int(nearest["size"]["tokens"]),
        scattered_s=_each_s(nearest["seconds"], plan["concurrent"]),
        contiguous_s=_each_s(nearest["contiguous_s"], plan["concurrent"]),
        pages_ratio=1.0 if hybrid else _pages_ratio(plan["shape"], nearest["size"], shape),
    )


def _pages_ratio(measured: dict[str, Any], size: dict[str, Any], shape: ModelShape) -> float:
    """Pages of an engine that keeps all blocks of all layers, over those of a check, whose engine keeps only windows
    of the layers that have them."""
    all_pages = shape.layers * math.ceil(size["tokens"] / measured["block_tokens"])
    return float(all_pages / (measured["regions"] * size["blocks"]))


def _same_cache(measured: dict[str, Any], shape: ModelShape) -> bool:
    """Whether the KV cache of a check (`pdlab.transfer.rank.layout.KvShape`) has the blocks of this model."""
    if "layers" not in measured:
        return False
    block_bytes = measured["kv_heads"] * measured["head_bytes"]
    heads = 1 if shape.kv_latent else shape.kv_heads  # each rank has the whole latent
    own = (shape.layers, full_layers(shape), heads, kv_bytes_per_token_layer(shape) * measured["block_tokens"])
    return own == (measured["layers"], measured["regions"], measured["kv_heads"], block_bytes)


def _each_s(seconds: Sequence[float], concurrent: int) -> float:
    """Seconds of one request; ``seconds`` are for ``concurrent`` requests together. Raises ValueError for no time."""
    each_s = median(float(value) for value in seconds) / concurrent
    if not 0 < each_s < math.inf:
        raise ValueError(f"a transfer of {each_s} s")
    return each_s
