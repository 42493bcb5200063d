"""Levels that others measured and published, as points to score predictions by. Pure.

A table is read by `pdlab.plan.csv_rows`; its further columns ``ttft_ms``, ``tpot_ms`` and ``ttft_stat`` are what was
measured. A row of P:D says in ``p_workers`` and ``d_workers`` how many engines ran. What the benchmark did counts as
much as the engine: `BenchmarkProcedure`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdlab.core.deployment import Disaggregated, Pool
from pdlab.core.errors import UsageError
from pdlab.core.workload import Closed, Workload
from pdlab.plan import csv_rows
from pdlab.plan.csv_rows import RefusedRow, RequestedRow
from pdlab.plan.extrapolation import major_minor
from pdlab.plan.stack_prior import UNSTATED, Stack

MEASURED = ("ttft_ms", "tpot_ms")
WORKERS = ("p_workers", "d_workers")  # of a row of P:D: without them it is not known what ran


class BenchmarkProcedure(NamedTuple):
    """How a benchmark ran a level: prompts per request in flight, and how lengths vary below the nominal ones.

    All requests in flight start at once. Its TTFT is the mean over all prompts, that burst included.
    """

    prompts: int
    lengths: str


# InferenceX's scripts (github.com/SemiAnalysisAI/InferenceX, benchmarks/): --num-prompts 10 x --max-concurrency,
# --random-range-ratio 0.8, --request-rate inf. Tables call its TTFT a median. It behaves as the mean: docs/model.md.
INFERENCEX = BenchmarkProcedure(10, "uniform:0.8-1.0")


# Rows of NVIDIA's images of Dynamo state its version. TensorRT-LLM in it is what ai-dynamo requires (its metadata on
# PyPI): 1.1.0rc5 in 0.5.1, 1.2.0rc6.post1 in 0.8.1.
DYNAMO = "ai-dynamo/tensorrtllm-runtime"
IN_DYNAMO = {"0.5": "1.1", "0.8": "1.2"}


class PublicPoint(NamedTuple):
    """One measured level. ``model_id`` and ``precision`` as the table has them. ``conduct`` None: not known, and then
    its TTFT cannot be compared. Seconds."""

    stack: Stack
    model_id: str
    precision: str
    row: RequestedRow
    tpot_s: float
    ttft_s: float
    conduct: BenchmarkProcedure | None

    @property
    def output_tokens_per_s(self) -> float:
        """Of the deployment, from TPOT and TTFT: tables have no throughput of their own."""
        return throughput(self.row, self.tpot_s, self.ttft_s)


class PublicTable(NamedTuple):
    """The points of a file, and the rows of it that no simulation of pdlab describes."""

    points: list[PublicPoint]
    refused: list[RefusedRow]


def throughput(row: RequestedRow, tpot_s: float, ttft_s: float) -> float:
    """Output tokens/s of a closed loop whose requests take so long (Little's law)."""
    assert isinstance(row.load, Closed)
    output = row.workload.mean_tokens.output
    return row.load.concurrency * output / (ttft_s + (output - 1) * tpot_s)


def read_points(text: str, source: str) -> PublicTable:
    """Raises UsageError where the text is no such table."""
    table = csv_rows.read(text, source, refuse_rows=True)
    missing = [name for name in MEASURED if name not in table.header]
    if missing:
        raise UsageError(f"{source}: no column {' or '.join(missing)}; a table of measured levels has both")
    points, refused = [], []
    for cells, row in zip(table.rows, table.requested, strict=True):
        if isinstance(row, RefusedRow):
            refused.append(row)
        elif row.deployment.transport is not None and not all(cells.get(name) for name in WORKERS):
            refused.append(RefusedRow(row.line, f"{' or '.join(WORKERS)} is empty: the number of engines is unknown"))
        elif not isinstance(row.load, Closed):
            refused.append(RefusedRow(row.line, "only closed loops are scored"))
        else:
            points.append(_point(cells, row, source))
    return PublicTable(points, refused)


def _point(cells: dict[str, str], row: RequestedRow, source: str) -> PublicPoint:
    values = {}
    for name in MEASURED:
        try:
            values[name] = float(cells[name])
        except ValueError as error:
            raise UsageError(f"{source}, line {row.line}: {name} {cells[name]!r} is not a number") from error
        if not values[name] > 0:
            raise UsageError(f"{source}, line {row.line}: {name} {cells[name]!r} must be above 0")
    conduct = INFERENCEX if "InferenceX" in cells.get("ttft_stat", "") else None
    model_id, stated = row.deployment.model, row.stated
    version = major_minor(stated.version)
    if DYNAMO in cells.get("image", ""):
        version = IN_DYNAMO.get(version or "", version)
    precision = stated.precision.lower()
    stack = Stack(
        model=" ".join(filter(None, (model_id.rsplit("/", 1)[-1], precision))),
        gpu=stated.hardware.split("_")[0].upper(),
        engine=stated.framework.lower(),
        version=version or _quarter(cells.get("measured", "")) or UNSTATED,
        mode="pd" if row.deployment.transport is not None else "collocated",
    )
    return PublicPoint(
        stack=stack,
        model_id=model_id,
        precision=precision,
        row=_as_conducted(row, conduct),
        tpot_s=values["tpot_ms"] / 1e3,
        ttft_s=values["ttft_ms"] / 1e3,
        conduct=conduct,
    )


def with_whole_experts(point: PublicPoint, width: int | None, block: int | None) -> PublicPoint:
    """The point with whole experts on each rank where no rank can have a part of one. ``width``: columns of an expert;
    ``block``: how many of them share a scale (None: each has its own).

    SGLang and vLLM refuse parts that are narrower than a block. With DeepEP SGLang spreads whole experts whatever its
    flag is (``_handle_a2a_moe``, 0.5.8), so a row may state that there is no expert parallel.
    """
    topology = point.row.deployment.topology
    if width is None or block is None or not isinstance(topology, Disaggregated):
        return point

    def whole(pool: Pool) -> Pool:
        narrow = width / (pool.tp * pool.dp) < block
        return pool.model_copy(update={"expert_parallel": True}) if narrow else pool

    pools = {role: whole(getattr(topology, role)) for role in ("prefill", "decode")}
    return point._replace(row=point.row._replace(deployment=point.row.deployment.with_topology(**pools)))


def _quarter(date: str) -> str:
    """Stands for a version that nobody stated: engines that were measured in one quarter, such as ``2025-Q4``. A
    benchmark runs all its models and GPUs with one version for weeks. Empty: the date is not known."""
    known = re.fullmatch(r"(\d{4})-(\d\d)(-\d\d.*)?", date)
    return f"{known[1]}-Q{(int(known[2]) + 2) // 3}" if known else ""


def _as_conducted(row: RequestedRow, conduct: BenchmarkProcedure | None) -> RequestedRow:
    """The row with the prompts and lengths of the benchmark; prompts are never repeated there.

    One whose benchmark is not known has those of `INFERENCEX` too. With equal lengths all requests of a closed loop end
    together, and all of the next ones wait for each other's prefill: TTFT is then two to four times the published one.
    """
    assert isinstance(row.load, Closed)
    assumed = conduct or INFERENCEX
    workload = Workload(
        input_tokens=row.workload.input_tokens,
        output_tokens=row.workload.output_tokens,
        lengths=assumed.lengths,
    )
    return row._replace(workload=workload, num_requests=assumed.prompts * row.load.concurrency, prompts="fresh")


def sample(points: Iterable[PublicPoint], most: int, seed: int = 0) -> dict[Stack, list[PublicPoint]]:
    """By stack at most so many points, drawn by seed from the rows in order, so that the same ones are taken again."""
    groups: dict[Stack, list[PublicPoint]] = {}
    for point in points:
        groups.setdefault(point.stack, []).append(point)
    return {
        stack: _drawn(members, most, f"{seed} {_as_stated(stack, members).label}")
        for stack, members in sorted(groups.items(), key=lambda each: each[0].label)
    }


def _as_stated(stack: Stack, members: Sequence[PublicPoint]) -> Stack:
    """Without what stands for a version: the same points are drawn, whatever that is."""
    return stack._replace(version=major_minor(members[0].row.stated.version) or UNSTATED)


def _drawn(points: Sequence[PublicPoint], most: int, seed: str) -> list[PublicPoint]:
    if len(points) <= most:
        return list(points)
    chosen = random.Random(seed).sample(range(len(points)), most)
    return [points[number] for number in sorted(chosen)]
