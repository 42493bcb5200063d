"""How well stacks that nobody fitted are predicted: public points, every stack left out once. Needs the extra perf.

    python benchmarks/score_model.py TABLE.csv... [--points 20] [--write] [--csv FILE]

TABLE: rows of a published benchmark with ttft_ms and tpot_ms (pdlab/plan/public_points.py). Nothing of a left-out stack
is used for its correction or its bands; stacks of scored_stacks.yaml are scored. ``--write`` puts the scores into
docs/model.md, and what a plan uses of all stacks into configs/errors/public.yaml. The tables are not shipped.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pydantic import Field, TypeAdapter  # noqa: E402

from pdlab.core.catalog import ModelShape, require_shape  # noqa: E402
from pdlab.core.errors import UsageError  # noqa: E402
from pdlab.core.files import cache_dir  # noqa: E402
from pdlab.core.model_files import CONFIG, MODELOPT  # noqa: E402
from pdlab.core.schema import Frozen, parse_yaml, to_yaml  # noqa: E402
from pdlab.core.workload import Closed  # noqa: E402
from pdlab.plan.correction_fit import Response  # noqa: E402
from pdlab.plan.error_catalog import PUBLIC, ErrorCatalog, catalog_of, covered  # noqa: E402
from pdlab.plan.public_points import PublicPoint, Stack, read_points, sample, throughput  # noqa: E402
from pdlab.plan.scoring import (  # noqa: E402
    METRICS,
    START,
    TPOT,
    TTFT,
    PointFigure,
    ScoredPoint,
    StackScore,
    bare_hardware,
    correction_by,
    left_out,
    predict_point,
    response,
    scored,
    with_correction,
)
from pdlab.sim.computed_hardware import as_served  # noqa: E402
from pdlab.sim.hardware import Hardware  # noqa: E402

STACKS = Path(__file__).with_name("scored_stacks.yaml")
PAGE = ROOT / "docs" / "model.md"
BEGIN, END = "<!-- scores: python benchmarks/score_model.py TABLES --write -->\n", "<!-- end of scores -->\n"
FEWEST, MOST_IN_FLIGHT = 8, 64
ALONE_TOKENS = 2048  # context tokens of a mixed step that the estimator of the tables is asked for


class ScoredStack(Frozen):
    """One entry of scored_stacks.yaml."""

    model: str
    precision: str
    engine: Literal["vllm", "sglang", "trtllm"] = "vllm"
    gpus: tuple[str, ...]
    checkpoint: str
    quant: dict[str, str] = Field(default_factory=dict)
    mode: Literal["SILICON", "HYBRID"] = "SILICON"


def shape_of(entry: ScoredStack) -> ModelShape:
    """The checkpoint's, from the files that come with the step times."""
    package = importlib.util.find_spec("aiconfigurator_core")
    if package is None or not package.submodule_search_locations:
        raise UsageError("scores need aiconfigurator-core: pip install 'pdlab[perf]'")
    source = Path(package.submodule_search_locations[0]) / "model_configs"
    name = entry.checkpoint.replace("/", "--")
    folder = cache_dir() / "scored-models" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in (CONFIG, MODELOPT):
        if (bundled := source / f"{name}_{file}").exists():
            shutil.copyfile(bundled, folder / file)
    return require_shape(str(folder))


class Scored(Frozen):
    """A stack with its entry, hardware and points."""

    entry: ScoredStack
    shape: ModelShape
    hardware: Hardware
    points: tuple[Any, ...]


def chosen(tables: list[Path], most: int) -> Iterator[tuple[Stack, Scored]]:
    """The stacks that are scored, with a sample of their points."""
    entries = parse_yaml(STACKS.read_text(encoding="utf-8"))
    known = TypeAdapter(tuple[ScoredStack, ...]).validate_python(entries)
    points: list[PublicPoint] = []
    for path in tables:
        points += read_points(path.read_text(encoding="utf-8"), str(path)).points
    few = [each for each in points if isinstance(each.row.load, Closed) and each.row.load.concurrency <= MOST_IN_FLIGHT]
    for stack, members in sample([each for each in few if each.stack.mode == "collocated"], most).items():
        first = members[0]
        for entry in known:
            asked = (entry.model, entry.precision, entry.engine)
            if asked == (first.model_id, first.precision, stack.engine) and stack.gpu in entry.gpus:
                break
        else:
            continue
        if len(members) < FEWEST:
            continue
        hardware = bare_hardware(stack, entry.quant, entry.mode)
        yield (
            stack,
            Scored(entry=entry, shape=as_served(shape_of(entry), hardware), hardware=hardware, points=tuple(members)),
        )


class Alone:
    """The aggregate estimator that comes with the tables."""

    def __init__(self, scored: Scored) -> None:
        from aiconfigurator_core.sdk import perf_database
        from aiconfigurator_core.sdk.backends.factory import get_backend

        steps = scored.hardware.steps
        assert steps is not None
        self.steps, self.folder = steps, str(scored.shape.asked_for)
        version = perf_database.resolve_query_version(steps.system, steps.engine, steps.version)
        self.database = perf_database.get_database_view(
            steps.system, steps.engine, version, database_mode=steps.mode, allow_missing_data=False
        )
        self.backend = get_backend

    def figure(self, point: PublicPoint) -> PointFigure | None:
        """None where it has no answer."""
        from aiconfigurator_core.sdk.config import RuntimeConfig
        from aiconfigurator_core.sdk.config_builders import build_model_config
        from aiconfigurator_core.sdk.models import get_model

        (pool,) = point.row.deployment.pools.values()
        experts = (1, pool.tp) if pool.expert_parallel else (pool.tp, 1)
        formats = {f"{name}_quant_mode": value for name, value in self.steps.quant.items()}
        workload = point.row.workload
        assert isinstance(point.row.load, Closed)
        load = point.row.load.concurrency
        try:
            model = get_model(self.folder, build_model_config(pool.tp, 1, 1, *experts, **formats), self.steps.engine)
            asked = RuntimeConfig(batch_size=load, isl=workload.input_tokens, osl=workload.output_tokens)
            # A backend of its own: its cache knows neither the model nor its TP.
            backend = self.backend(self.steps.engine)
            found = backend.run_agg(model, self.database, asked, ctx_tokens=ALONE_TOKENS).get_result_dict()
        except Exception:  # whatever it raises for a case that it does not have
            return None
        tpot_s, ttft_s = float(found["tpot"]) / 1e3, float(found["ttft"]) / 1e3
        return PointFigure(tpot_s, ttft_s, throughput(point.row, tpot_s, ttft_s))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--points", type=int, default=20, help="of a stack, at most")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--csv", type=Path, help="write the errors of every stack there")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # the package logs what it reads
    stacks = dict(chosen(arguments.tables, arguments.points))
    found: dict[Stack, list[Response]] = {}
    runs: dict[Stack, list[PublicPoint]] = {}
    refused: set[str] = set()
    for stack, each in stacks.items():
        for number, point in enumerate(each.points):
            try:
                said = response(point, number, each.hardware, each.shape, START)
            except UsageError as error:
                refused.add(f"{stack.label}: {error}")
                continue
            found.setdefault(stack, []).extend(said)
            runs.setdefault(stack, []).append(point)
    print("\n".join(sorted(refused)), file=sys.stderr)
    found = {stack: values for stack, values in found.items() if len(runs[stack]) >= FEWEST}
    scores = []
    for stack in found:
        out = left_out(stack, found)
        each = stacks[stack]
        hardware, alone = with_correction(each.hardware, correction_by(out)), Alone(each)
        scores.append(
            scored(
                out,
                [
                    ScoredPoint(point, predict_point(point, hardware, each.shape), alone.figure(point))
                    for point in runs[stack]
                ],
            )
        )
        print(row_of(scores[-1]), flush=True)
    print(page := table(scores))
    if arguments.csv:
        with arguments.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*Stack._fields, *METRICS])
            writer.writeheader()
            for score in scores:
                errors = {name: round(each.error, 2) for name, each in score.ours.items()}
                writer.writerow({**score.left_out.stack._asdict(), **errors})
    if arguments.write:
        catalog = catalog_of(
            found, scores, arguments.points, covered(point for stack in found for point in runs[stack])
        )
        PUBLIC.parent.mkdir(exist_ok=True)
        PUBLIC.write_text(HEAD + to_yaml(catalog), encoding="utf-8")
        write_page(f"{page}\n{after_levels(catalog)}")
    return 0


def write_page(tables: str) -> None:
    """Into docs/model.md, between its markers."""
    text = PAGE.read_text(encoding="utf-8")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:start]}\n{tables}\n{text[stop:]}", encoding="utf-8")


def after_levels(catalog: ErrorCatalog) -> str:
    """Markdown: what measured levels of a stack change."""
    lines = ["| levels measured | TPOT | mean TTFT | in the band: TPOT / mean TTFT |", "|---|---|---|---|"]
    for count, after in catalog.after.items():
        errors = [f"{after.median_percent[metric]:.1f} %" for metric in (TPOT, TTFT)]
        held = " / ".join(f"{100 * after.held[metric]:.0f} %" for metric in (TPOT, TTFT))
        lines.append(f"| {count} | {' | '.join(errors)} | {held} |")
    return "\n".join(lines) + "\n"


HEAD = "# Written by: python benchmarks/score_model.py TABLES --write (the tables are not shipped; docs/model.md)\n"


def row_of(score: StackScore) -> str:
    """One row of the table."""

    def errors(metric: str) -> str:
        ours, alone = score.ours.get(metric), score.alone.get(metric)
        return " / ".join("-" if each is None else f"{each.error:.0f} ({each.bias:+.0f})" for each in (ours, alone))

    held = " / ".join(f"{100 * score.held[name]:.0f}" for name in METRICS if name in score.held)
    rank = "-" if score.rank is None else f"{score.rank:.2f}"
    lost = "-" if score.regret is None else f"{100 * score.regret:.0f}"
    cells = [score.left_out.stack.label, str(score.points), *map(errors, METRICS), held, rank, lost]
    return f"| {' | '.join(cells)} |"


def table(scores: list[StackScore]) -> str:
    """Markdown."""
    names = ["stack", "points", "TPOT", "mean TTFT", "tokens/s", "in the band", "rank", "lost"]
    head = f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
    return head + "\n".join(map(row_of, scores)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
