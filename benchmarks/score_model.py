"""How well stacks that nobody fitted are predicted: public points, every stack left out once. Needs the extra perf.

    python benchmarks/score_model.py TABLE.csv... [--points 20] [--disaggregated] [--jobs N] [--write] [--csv FILE]
        [--rows FILE] [--groups FILE]

TABLE: rows of a published benchmark with ttft_ms and tpot_ms (stack_scores/public_points.py). Nothing of a left-out
stack is used for its correction or its bands; stacks of scored_stacks.yaml are scored. ``--write`` puts the scores into
docs/model.md, and what a plan uses of all stacks into configs/errors/public.yaml. The tables are not shipped.
``--disaggregated``: points of prefill and decode in engines of their own instead, all of them, by the tables and the
time of a sequence. What other stacks have in common corrects them (stack_scores/pd_points.py). ``--rows`` writes what
was measured and predicted of every collocated point, ``--groups`` what the bands of left-out groups hold.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import logging
import math
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pydantic import Field, TypeAdapter  # noqa: E402
from stack_scores.catalog import catalog_of, covered, pd_catalog_of  # noqa: E402
from stack_scores.chance import BandedLevel, PointsInBand, points_in_band, sum_of  # noqa: E402
from stack_scores.pd_points import (  # noqa: E402
    BATCH_LIMITED,
    WAYS,
    PdBand,
    PdCorrection,
    PdResponse,
    PdStack,
    Way,
    as_run,
    band_by,
    learnt,
    pd_group_scores,
    pd_response,
)
from stack_scores.public_points import PublicPoint, read_points, sample, throughput, with_whole_experts  # noqa: E402
from stack_scores.scoring import (  # noqa: E402
    METRICS,
    START,
    THROUGHPUT,
    GroupScore,
    PointFigure,
    Score,
    ScoredPoint,
    StackScore,
    bare_hardware,
    correction_by,
    group_scores,
    held_of,
    lost_by_ratio,
    measured_figure,
    others_of,
    predict_point,
    rank_of,
    response,
    score_of,
    scored,
    setting_of,
)

from pdlab.core.catalog import ModelShape, config_of, require_shape  # noqa: E402
from pdlab.core.errors import UsageError  # noqa: E402
from pdlab.core.files import cache_dir  # noqa: E402
from pdlab.core.model_files import CONFIG, MODELOPT  # noqa: E402
from pdlab.core.schema import Frozen, parse_yaml, to_yaml  # noqa: E402
from pdlab.core.workload import Closed  # noqa: E402
from pdlab.plan.correction_fit import TPOT, TTFT, LevelSetting, Response  # noqa: E402
from pdlab.plan.error_catalog import MODELS, NEAR, PUBLIC, ErrorCatalog, PublicModels, weights_of  # noqa: E402
from pdlab.plan.pd_catalog import PUBLIC_PD, PdCatalog  # noqa: E402
from pdlab.plan.stack_prior import KINDS, Stack  # noqa: E402
from pdlab.sim.computed_hardware import as_served  # noqa: E402
from pdlab.sim.hardware import Hardware  # noqa: E402

Serving = Literal["collocated", "pd"]
STACKS = Path(__file__).with_name("scored_stacks.yaml")
PAGE = ROOT / "docs" / "model.md"
BEGIN, END = "<!-- scores: python benchmarks/score_model.py TABLES --write -->\n", "<!-- end of scores -->\n"
PD_BEGIN = "<!-- scores of P:D: python benchmarks/score_model.py TABLES --disaggregated --write -->\n"
PD_END = "<!-- end of scores of P:D -->\n"
FEWEST = 8
MOST_IN_FLIGHT: dict[Serving, int] = {"collocated": 64, "pd": 4096}  # more take minutes a point to simulate
FEW_GPUS = 8  # of an engine
ALONE_TOKENS = 2048  # context tokens of a mixed step that the estimator of the tables is asked for


class ScoredStack(Frozen):
    """One entry of scored_stacks.yaml."""

    model: str
    precision: str
    engine: Literal["vllm", "sglang", "trtllm"] = "vllm"
    serving: Serving = "collocated"
    gpus: tuple[str, ...]
    versions: tuple[str, ...] = ()
    """Of the engine; empty: every one."""
    checkpoint: str
    quant: dict[str, str] = Field(default_factory=dict)
    mode: Literal["SILICON", "HYBRID"] = "SILICON"
    in_doubt: bool = False
    """Its tables are: other stacks are not predicted by it, and it has no band."""

    def means(self, point: PublicPoint) -> bool:
        """Whether it is the entry of the point's stack, if no entry before it is."""
        stack = point.stack
        wanted = (point.model_id, point.precision, stack.engine, stack.mode)
        return (
            wanted == (self.model, self.precision, self.engine, self.serving)
            and stack.gpu in self.gpus
            and (not self.versions or stack.version in self.versions)
        )


def write_models() -> None:
    """Write the numbers of all models that are scored, by the names of their stacks."""
    entries = TypeAdapter(tuple[ScoredStack, ...]).validate_python(parse_yaml(STACKS.read_text(encoding="utf-8")))
    models = {entry.model.rpartition("/")[2]: shape_of(entry).numbers for entry in entries}
    MODELS.write_text(HEAD + to_yaml(PublicModels(models=dict(sorted(models.items())))), encoding="utf-8")


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


def scored_stacks() -> tuple[ScoredStack, ...]:
    """Of scored_stacks.yaml."""
    return TypeAdapter(tuple[ScoredStack, ...]).validate_python(parse_yaml(STACKS.read_text(encoding="utf-8")))


def chosen(tables: list[Path], most: int, serving: Serving = "collocated") -> Iterator[tuple[Stack, Scored]]:
    """The stacks that are scored, with a sample of their points."""
    known = scored_stacks()
    points: list[PublicPoint] = []
    for path in tables:
        points += read_points(path.read_text(encoding="utf-8"), str(path)).points
    in_flight = MOST_IN_FLIGHT[serving]
    few = [each for each in points if isinstance(each.row.load, Closed) and each.row.load.concurrency <= in_flight]
    if serving == "collocated":  # a plan gives no band to others
        few = [each for each in few if all(pool.dp == pool.pp == 1 for pool in each.row.deployment.pools.values())]
    for stack, members in sample([each for each in few if each.stack.mode == serving], most).items():
        entry = next((each for each in known if each.means(members[0])), None)
        if entry is None or len(members) < FEWEST:
            continue
        hardware = bare_hardware(stack, entry.quant, entry.mode)
        shape = as_served(shape_of(entry), hardware)
        whole = tuple(with_whole_experts(each, shape.expert_intermediate, scaled_block(shape)) for each in members)
        yield stack, Scored(entry=entry, shape=shape, hardware=hardware, points=whole)


def scaled_block(shape: ModelShape) -> int | None:
    """The columns of a matrix that share a scale, by the model's config.json; None: each has its own."""
    files = config_of(shape)
    size = (files.config.get("quantization_config") or {}).get("weight_block_size") if files else None
    return int(size[0]) if size else None


class Alone:
    """The aggregate estimator that comes with the tables."""

    def __init__(self, scored: Scored) -> None:
        from aiconfigurator_core.sdk import perf_database
        from aiconfigurator_core.sdk.backends.factory import get_backend

        steps = scored.hardware.steps
        assert steps is not None
        self.steps, self.folder = steps, str(scored.shape.read_from)
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
            wanted = RuntimeConfig(batch_size=load, isl=workload.input_tokens, osl=workload.output_tokens)
            # A backend of its own: its cache knows neither the model nor its TP.
            backend = self.backend(self.steps.engine)
            found = backend.run_agg(model, self.database, wanted, ctx_tokens=ALONE_TOKENS).get_result_dict()
        except Exception:  # whatever it raises for a case that it does not have
            return None
        tpot_s, ttft_s = float(found["tpot"]) / 1e3, float(found["ttft"]) / 1e3
        return PointFigure(tpot_s, ttft_s, throughput(point.row, tpot_s, ttft_s))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--points", type=int, default=20, help="of a collocated stack, at most")
    parser.add_argument("--disaggregated", action="store_true", help="score points of P:D")
    parser.add_argument("--jobs", type=int, default=1, help="processes for points of P:D")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--csv", type=Path, help="write the errors of every stack there")
    parser.add_argument("--rows", type=Path, help="write what was measured and predicted of every point there")
    parser.add_argument("--groups", type=Path, help="write what the bands of every left-out group hold there")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # the package logs what it reads
    if arguments.disaggregated:
        of_pd = disaggregated(arguments.tables, arguments.csv, arguments.jobs)
        print(of_pd.page)
        if arguments.write:
            write_models()
            PUBLIC_PD.write_text(PD_HEAD + to_yaml(of_pd.catalog), encoding="utf-8")
            write_page(of_pd.page, PD_BEGIN, PD_END)
        return 0
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
    pool = {stack: values for stack, values in found.items() if not stacks[stack].entry.in_doubt}
    scores, without = [], {}
    rows: list[list[object]] = []
    for stack in found:
        others = others_of({each: values for each, values in pool.items() if each != stack})
        out = others.of(stack)
        if stack in pool:
            without[stack] = others
        else:
            out = out._replace(banded=False)
        each = stacks[stack]
        hardware, alone = each.hardware.with_correction(correction_by(out, each.hardware)), Alone(each)
        points = [
            ScoredPoint(point, predict_point(point, hardware, each.shape), alone.figure(point)) for point in runs[stack]
        ]
        scores.append(scored(out, points))
        rows += [[stack.label, *setting_of(each.point), *errors_of(each)] for each in points]
        print(row_of(scores[-1]), flush=True)
    print(page := table(scores))
    scores_of_groups = group_scores(pool)
    print(groups := group_table(scores_of_groups))
    if arguments.csv:
        with arguments.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*Stack._fields, *METRICS])
            writer.writeheader()
            for score in scores:
                errors = {name: round(each.error, 2) for name, each in score.ours.items()}
                writer.writerow({**score.left_out.stack._asdict(), **errors})
    if arguments.groups:
        with arguments.groups.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([GROUP_COLUMNS, *group_rows(scores_of_groups)])
    if arguments.rows:
        with arguments.rows.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["stack", *LevelSetting._fields, *ERROR_COLUMNS], *rows])
    if arguments.write:
        catalog = catalog_of(
            pool,
            without,
            scores,
            scores_of_groups,
            arguments.points,
            covered(
                (point for stack in pool for point in runs[stack]),
                (weights_of(stacks[stack].hardware, stacks[stack].shape) for stack in pool),
            ),
        )
        PUBLIC.parent.mkdir(exist_ok=True)
        write_models()
        PUBLIC.write_text(HEAD + to_yaml(catalog), encoding="utf-8")
        write_page(f"{page}\n{groups}\n{after_levels(catalog)}", BEGIN, END)
    return 0


def disaggregated(tables: list[Path], errors: Path | None, jobs: int = 1) -> PdScores:
    """The scores of P:D stacks. ``errors``: a file for the figures of every point. ``jobs``: processes."""
    names = ["stack", "points", "decode, prefill, path; prompts, batch", "TPOT", "engines of up to 8 GPUs", "mean TTFT"]
    names += ["near saturation", "tokens/s", "in the band: TPOT / mean TTFT", "rank", "best ratio"]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    losses: list[float] = []
    every: list[ScoredPoint] = []
    rows: list[list[object]] = []
    stacks = list(chosen(tables, sys.maxsize, "pd"))
    held: dict[str, list[PointsInBand]] = {TPOT: [], TTFT: []}
    medians: list[float] = []
    kept: dict[Stack, list[ScoredPoint]] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as processes:
        found = processes.map(responses, *zip(*stacks, strict=True))
        known = [
            PdStack.of(stack, values)
            for (stack, _), values in zip(stacks, found, strict=True)
            if all(map(len, values.values()))
        ]
        corrections = [learnt(stack, known) for stack, _ in stacks]
        for (stack, each), correction, (points, refused) in zip(
            stacks, corrections, processes.map(predicted, *zip(*stacks, strict=True), corrections), strict=True
        ):
            for line in sorted(refused):
                print(line, file=sys.stderr)
            for point, figure, _ in points:
                what = (stack.label, point.row.deployment.label, *setting_of(point)[1:])
                figures = [point.tpot_s, figure.tpot_s, point.ttft_s, figure.ttft_s, figure.saturated]
                rows.append([*what, *figures])
            if len(points) < FEWEST:
                continue
            near = [
                scored_point
                for scored_point in points
                if max(pool.gpus_per_replica for pool in scored_point.point.row.deployment.pools.values()) <= FEW_GPUS
            ]
            lost = lost_by_ratio(points)
            losses += lost
            every += points
            with_number = [each for each in points if not each.predicted.saturated]
            kept[stack] = with_number
            band = band_by(stack, known)
            in_band = {metric: points_in_pd_band(points, band, metric) for metric in held}
            for metric, of_stack in in_band.items():
                held[metric] += [of_stack] if of_stack else []
            cells = [stack.label.removesuffix(", P:D"), f"{len(points)} of {len(each.points)}"]
            cells.append(said_of(correction, stack))
            cells += [short(score_of(points, TPOT)), short(score_of(near, TPOT)) if near else "-"]
            cells.append(short(score_of(with_number, TTFT)) if with_number else "-")
            medians += [score_of(with_number, TTFT).error] if with_number else []
            full = [each for each in points if each.predicted.saturated]
            cells.append(f"{len(full)}: {short(score_of(full, TTFT))}" if full else "0")
            cells.append(short(score_of(points, THROUGHPUT)))
            shares = [f"{100 * each.share:.0f}" if each else "-" for each in in_band.values()]
            cells.append(" / ".join(shares) if in_band[TTFT] else "-")
            rank = rank_of(points)
            cells += ["-" if rank is None else f"{rank:.2f}", f"{lost.count(0)} of {len(lost)}" if lost else "-"]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if errors:
        with errors.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([PD_COLUMNS, *rows])
    worst = max(losses, default=0.0)
    groups = pd_group_scores(known)
    all_kept = [each for of_stack in kept.values() for each in of_stack]
    far = score_of(all_kept, TTFT).error
    all_held = ", ".join(f"{metric} {said(sum_of(each))}" for metric, each in held.items() if each)
    lines += [
        "",
        f"TPOT of all {len(every)} points: {score_of(every, TPOT).error:.1f} % off in the median.",
        f"Mean TTFT of {len(all_kept)} points that are not near saturation: {far:.1f} % off in the",
        f"median. The stacks' medians have a mean of {statistics.fmean(medians):.1f} %.",
        f"With the {len(every) - len(all_kept)} points near saturation: {score_of(every, TTFT).error:.1f} %.",
        f"In the band, over all stacks: {all_held}.",
        f"Best ratio chosen: {losses.count(0)} of {len(losses)} workloads. The worst choice loses {worst:.0%}.",
        f"All stacks together: {said_of(learnt(UNLIKE, known))}.",
        "",
        group_table(groups),
    ]
    return PdScores("\n".join(lines), pd_catalog_of(known, groups, held, kept))


PD_COLUMNS = (
    *("stack", "deployment", "lengths", "load", "measured_tpot_s", "predicted_tpot_s"),
    *("measured_ttft_s", "predicted_ttft_s", "near_saturation"),
)


class PdScores(NamedTuple):
    """Markdown, and what a plan uses of it."""

    page: str
    catalog: PdCatalog


UNLIKE = Stack("-", "-", "-", "-", "pd")  # like none of the stacks


def points_in_pd_band(points: Sequence[ScoredPoint], band: PdBand, metric: str) -> PointsInBand | None:
    """Of a stack, those that are not near saturation; None: it has no band."""
    components = band.components[metric]
    if not band.banded or components.reach is None:
        return None
    inside, levels = [], []
    for each in points:
        if not each.predicted.saturated:
            value, truth = each.predicted.value(metric), measured_figure(each.point).value(metric)
            inside.append(abs(math.log(value / truth)) <= components.half_width(band.unseen, value))
            levels.append(BandedLevel(each.point.stack, band.unseen, setting_of(each.point), components, value))
    return points_in_band(inside, levels) if levels else None


def said_of(correction: PdCorrection, stack: Stack = UNLIKE) -> str:
    """In a cell."""
    said = f"{correction.factor:.2f}, {correction.prefill_factor:.1f}, {correction.path_ms:.0f} ms"
    ran = f"{correction.way.prompts}" + (f", {correction.way.batches}" if stack.engine == BATCH_LIMITED else "")
    return f"{said}; {ran}"


def responses(stack: Stack, each: Scored) -> dict[Way, list[PdResponse]]:
    """What the points of a P:D stack say of a correction, in each way."""
    logging.disable(logging.CRITICAL)
    known: dict[str, PdResponse | None] = {}
    found: dict[Way, list[PdResponse]] = {}
    for way in WAYS:
        found[way] = []
        for number, point in enumerate(as_run(each.points, way)):
            key = f"{number} {point.row.num_requests} {point.row.deployment.pools['decode'].engine_kwargs}"
            if key not in known:
                known[key] = None
                with contextlib.suppress(UsageError):
                    known[key] = pd_response(point, each.hardware, each.shape)
            if (response := known[key]) is not None:
                found[way].append(response)
    return found


def predicted(stack: Stack, each: Scored, correction: PdCorrection) -> tuple[list[ScoredPoint], set[str]]:
    """The points of a P:D stack by its tables and that correction, and why others cannot run."""
    logging.disable(logging.CRITICAL)
    points, refused = [], set()
    hardware = correction.of(each.hardware)
    for point in as_run(each.points, correction.way):
        try:
            points.append(ScoredPoint(point, predict_point(point, hardware, each.shape)))
        except UsageError as error:
            refused.add(f"{stack.label}: {error}")
    return points, refused


ERROR_COLUMNS = ("measured_tpot_ms", "tpot_error_percent", "measured_ttft_ms", "ttft_error_percent")


def errors_of(each: ScoredPoint) -> list[float]:
    """`ERROR_COLUMNS` of a point; an error above 0: predicted too long."""
    found = []
    for metric in (TPOT, TTFT):
        measured_s = measured_figure(each.point).value(metric)
        error = each.predicted.value(metric) / measured_s - 1
        found += [round(1e3 * measured_s, 2), round(100 * error, 1)]
    return found


def short(score: Score) -> str:
    """In a cell."""
    return f"{score.error:.0f} ({score.bias:+.0f})"


def write_page(tables: str, begin: str, end: str) -> None:
    """Into docs/model.md, between those markers."""
    text = PAGE.read_text(encoding="utf-8")
    start, stop = text.index(begin) + len(begin), text.index(end)
    PAGE.write_text(f"{text[:start]}\n{tables}\n{text[stop:]}", encoding="utf-8")


def after_levels(catalog: ErrorCatalog) -> str:
    """Markdown: what measured levels of a stack change."""
    names = ["levels measured", "TPOT", "mean TTFT", "in the band: TPOT / mean TTFT", "stacks with 86 to 94 %"]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for count, after in catalog.after.items():
        errors = [f"{after.median_percent[metric]:.1f} %" for metric in (TPOT, TTFT)]
        held = " / ".join(f"{100 * after.held[metric]:.0f} %" for metric in (TPOT, TTFT))
        near = " / ".join(str(after.near[metric]) for metric in (TPOT, TTFT))
        lines.append(f"| {count} | {' | '.join(errors)} | {held} | {near} |")
    return "\n".join(lines) + "\n"


def group_table(scores: list[GroupScore]) -> str:
    """Markdown: groups that were left out whole."""
    names = ["left out", "stacks", "TPOT", "in the band", "mean TTFT", "in the band"]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for score in scores:
        if score.held and score.held[TPOT].of < LEAST_POINTS:
            continue
        cells = [f"{KINDS[score.kind]} {score.group.removeprefix('collocated-')}", str(score.stacks)]
        for metric in (TPOT, TTFT):
            error, held = score.error.get(metric), score.held.get(metric)
            cells += ["-" if error is None else f"{error:.0f}", "-" if held is None else said(held)]
        lines.append(f"| {' | '.join(cells)} |")
    names = ["left out, all groups", *(f"{metric}: {each}" for metric in (TPOT, TTFT) for each in SAID)]
    lines += ["", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for kind, word in KINDS.items():
        if not any(score.kind == kind and score.held for score in scores):
            continue
        cells = [word]
        for metric in (TPOT, TTFT):
            groups = held_of(scores, kind, metric)
            cells += [said(sum_of(groups)), *near_and_likely(groups)] if groups else ["-"] * len(SAID)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


GROUP_COLUMNS = ("kind", "group", "metric", "inside", "of", "low", "high")


def group_rows(scores: Sequence[GroupScore]) -> list[list[object]]:
    """`GROUP_COLUMNS`: points in the bands of a left-out group, and the shares between which 95 of 100 right bands
    are."""
    return [
        [score.kind, score.group, metric, held.inside, held.of, *(round(end, 3) for end in held.by_chance)]
        for score in scores
        for metric, held in score.held.items()
    ]


SAID = ("in the band", "86 to 94 % in", "a right band", "as a right band")


def near_and_likely(held: Sequence[PointsInBand]) -> list[str]:
    """``3 of 8``: how many shares are in `NEAR`, in how many a right band would be, and how many are what 95 of 100
    right bands hold."""
    near = sum(NEAR[0] <= each.share <= NEAR[1] for each in held)
    likely = sum(each.by_chance[0] <= each.share <= each.by_chance[1] for each in held)
    expected = sum(each.near_by_chance for each in held)
    return [f"{near} of {len(held)}", f"{expected:.1f}", f"{likely} of {len(held)}"]


LEAST_POINTS = 10  # of a group that has a row: the others are in the sums


def said(held: PointsInBand) -> str:
    """``90 % of 120 (83-94)``: the share, and what 95 of 100 right bands hold."""
    low, high = held.by_chance
    return f"{held.share:.0%} of {held.of} ({100 * low:.0f}-{100 * high:.0f})".replace("%", " %", 1)


PD_HEAD = (
    "# Written by: python benchmarks/score_model.py TABLES --disaggregated --write (the tables are not shipped; "
    "docs/model.md)\n"
)
HEAD = "# Written by: python benchmarks/score_model.py TABLES --write (the tables are not shipped; docs/model.md)\n"


def row_of(score: StackScore) -> str:
    """One row of the table."""

    def errors(metric: str) -> str:
        ours, alone = score.ours.get(metric), score.alone.get(metric)
        return " / ".join("-" if each is None else short(each) for each in (ours, alone))

    held = " / ".join(f"{100 * score.held[name].share:.0f}" for name in METRICS if name in score.held) or "-"
    rank = "-" if score.rank is None else f"{score.rank:.2f}"
    lost = "-" if score.regret is None else f"{100 * score.regret:.0f}"
    cells = [score.left_out.stack.label, str(score.points), *map(errors, METRICS), held, rank, lost]
    return f"| {' | '.join(cells)} |"


def table(scores: list[StackScore]) -> str:
    """Markdown."""
    names = ["stack", "points", "TPOT", "mean TTFT", "tokens/s", "in the band", "rank", "lost"]
    head = f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
    return head + "\n".join(map(row_of, scores)) + f"\n\n{coverage(scores)}\n"


def coverage(scores: list[StackScore]) -> str:
    """Markdown: what the bands hold, over stacks and in each."""
    names = ["all stacks", "in the band, the mean", *SAID[1:]]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for metric in METRICS:
        held = [score.held[metric] for score in scores if metric in score.held]
        cells = [metric, f"{100 * statistics.fmean(each.share for each in held):.0f} %", *near_and_likely(held)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
