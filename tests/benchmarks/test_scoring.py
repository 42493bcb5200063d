"""Stacks that are left out, and their scores: in a made-up world, and in the long tier by public points."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from score_model import scored_stacks
from stack_scores import scoring
from stack_scores.chance import BandedLevel, points_in_band, sum_of
from stack_scores.components import is_represented
from stack_scores.public_points import PublicPoint, read_points, throughput
from stack_scores.scoring import (
    METRICS,
    START,
    PointFigure,
    ScoredPoint,
    group_scores,
    left_out,
    lost_by_ratio,
    predict_point,
    rank_of,
    regret,
    response,
    scored,
)
from support.made_up_tables import TOKEN_S, made_up_tables

from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Pool
from pdlab.core.files import CONFIGS
from pdlab.core.workload import Level
from pdlab.plan.correction_fit import TPOT, TTFT, LevelSetting, Response
from pdlab.plan.error_catalog import NEAR, home_fit, public_errors
from pdlab.plan.pd_catalog import public_pd
from pdlab.plan.stack_prior import LEAST_STACKS, EffectSds, ErrorComponents, Stack, prior_of
from pdlab.sim import aic
from pdlab.sim.hardware import Hardware
from pdlab.sim.kv_transfer import wire_rate
from pdlab.sim.simulator import simulate
from pdlab.sim.step_source import Correction, Tabulated

HEADER = "model,gpu,mode,framework,framework_version,precision,isl,osl,concurrency,tp,ttft_ms,tpot_ms,ttft_stat\n"
SHAPE = require_shape("gpt-oss-20b")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(model: object, system: str, engine: str, version: str, pool: Pool, *rest: object) -> Tabulated:
        return made_up_tables(pool.tp)

    monkeypatch.setattr(aic, "tabulate", made_up)


def hardware(stack: Stack) -> Hardware:
    return scoring.bare_hardware(stack)


def points_of(
    model: str, gpu: str, loads: tuple[int, ...] = (4, 16), isl: int = 1024, osl: int = 128
) -> list[PublicPoint]:
    """Points that still lack what was measured."""
    rows = "".join(
        f"made/{model},{gpu}_sxm,agg,vllm,0.18.0,fp8,{isl},{osl},{load},{tp},1,1,InferenceX\n"
        for load in loads
        for tp in (1, 2)
    )
    return read_points(HEADER + rows, "made-up.csv").points


def measured(model: str, gpu: str, truth: Correction, seed: int = 0) -> list[PublicPoint]:
    """As a stack with that correction would measure them, with errors of 2 %."""
    rng = random.Random(f"{model} {gpu} {seed}")
    found = []
    for point in points_of(model, gpu):
        figure = predict_point(point, hardware(point.stack).with_correction(truth), SHAPE, seed=9)
        found.append(
            point._replace(
                tpot_s=figure.tpot_s * rng.lognormvariate(0, 0.02), ttft_s=figure.ttft_s * rng.lognormvariate(0, 0.02)
            )
        )
    return found


def test_a_burst_of_all_requests_is_in_the_mean_ttft_and_not_in_the_median() -> None:
    """The closed form: a tenth of the prompts waits for half of the others, each of which takes S to prefill."""
    load, tokens = 16, 8192
    (point, *_) = points_of("a", "h100", (load,), tokens, 8192)
    row = point.row
    level = Level(load=row.load, num_requests=row.num_requests, seed=0)
    (run,) = simulate(row.deployment, [level], row.workload, hardware(point.stack), SHAPE)
    ttft = [first - came for first, came in zip(run.first_token_s, run.arrival_s, strict=True)]
    path_s = 10e-3 + 0.9 * tokens * 5e-6
    alone_s = 0.9 * tokens * TOKEN_S + 4e-3
    assert statistics.fmean(ttft) == pytest.approx(path_s + alone_s * (0.95 + 0.05 * load), rel=0.25)
    assert statistics.median(ttft) < path_s + 1.5 * alone_s


def test_a_left_out_stack_is_predicted_by_the_same_model_on_another_gpu() -> None:
    """Host time by model: 2 ms of "a" and "c", none of "b" and "d". The tables alone are 2 ms short for "a"."""
    found, points = {}, {}
    for model, host_ms in (("a", 2.0), ("b", 0.0), ("c", 2.0), ("d", 0.0)):
        for gpu in ("h100", "h200"):
            members = measured(model, gpu, Correction(host_ms=host_ms))
            stack = members[0].stack
            points[stack] = members
            found[stack] = [
                each
                for number, point in enumerate(members)
                for each in response(point, number, hardware(stack), SHAPE, START)
            ]
    stack = next(each for each in found if each.model == "a fp8" and each.gpu == "H100")
    out = left_out(stack, found)
    assert out.unseen == ()
    corrected = hardware(stack).with_correction(scoring.correction_by(out, hardware(stack)))
    ours, raw = (
        scored(out, [ScoredPoint(point, predict_point(point, each, SHAPE)) for point in points[stack]])
        for each in (corrected, hardware(stack))
    )
    assert ours.ours["TPOT"].error < 0.7 * raw.ours["TPOT"].error
    assert set(ours.ours) == set(METRICS)
    assert "TPOT" not in ours.held, "seven other stacks give no band"
    assert ours.rank is not None and ours.rank > 0.9


def test_what_is_left_out_changes_nothing_of_its_prior() -> None:
    found = {}
    for model, host_ms in (("a", 1.0), ("b", 0.0), ("c", 2.0)):
        members = measured(model, "h100", Correction(host_ms=host_ms))
        found[members[0].stack] = [
            each
            for number, point in enumerate(members)
            for each in response(point, number, hardware(point.stack), SHAPE, START)
        ]
    stack = next(iter(found))
    wrong = {**found, stack: [each._replace(residual=5.0) for each in found[stack]]}
    one, other = left_out(stack, found), left_out(stack, wrong)
    assert one.components == other.components
    assert one.prior.mean.tolist() == other.prior.mean.tolist()


def stated(off_by: dict[str, float] | None = None) -> dict[Stack, list[Response]]:
    """Ten stacks of four levels that are 3 % off. ``off_by``: further errors of what has that label."""
    rng = random.Random(1)
    found = {}
    for number in range(10):
        stack = Stack(f"m{number % 5} fp8", f"G{number // 2}", "vllm", f"0.{number}", "collocated")
        of_stack = rng.gauss(0, 0.03)
        found[stack] = []
        for level, (tp, load) in enumerate(itertools.product(("tp1", "tp2"), ("4", "64"))):
            setting = LevelSetting(tp, "1024:1024", load)
            labels = (stack.model.split()[0], stack.gpu, tp, load)
            further = sum((off_by or {}).get(label, 0.0) for label in labels)
            for metric in (TPOT, TTFT):
                error = of_stack + rng.gauss(0, 0.03) + further
                found[stack].append(Response(metric, setting, level, error, (0.02, 0.9, 0.1, 0.01)))
    return found


def test_a_group_that_is_left_out_is_not_in_its_own_band() -> None:
    """Levels of 64 in flight are far off: their band is made of the others and holds none of them."""
    plain, far = ({each.group: each for each in group_scores(stated(by), ("load",))} for by in (None, {"64": 3.0}))
    assert plain["64"].held[TPOT].of == 20 and plain["64"].stacks == 10
    assert plain["64"].held[TPOT].share >= 0.8
    assert far["64"].held[TPOT].inside == 0
    assert far["64"].error[TPOT] > 500


def test_all_of_a_model_is_left_out_at_once() -> None:
    """Two stacks each, 3 off: were one of them left in, it would predict the other."""
    scores = {each.group: each for each in group_scores(stated({"m2": 3.0}), ("model",))}
    assert list(scores) == ["m0", "m1", "m2", "m3", "m4"]
    assert scores["m2"].stacks == 2 and scores["m2"].error[TPOT] > 500
    assert not scores["m2"].held, "eight other stacks make no band"


def levels(parts: ErrorComponents, unseen: tuple[str, ...] = (), stacks: int = 1) -> list[BandedLevel]:
    """Twenty levels that share nothing but their stack, or what is unseen of it."""
    return [
        BandedLevel(
            Stack("m fp8", f"G{n}", "vllm", "0.1", "collocated"), unseen, LevelSetting(*[str(i)] * 3), parts, 1.0
        )
        for n in range(stacks)
        for i in range(20)
    ]


def test_a_right_band_holds_86_to_94_percent_of_few_stacks() -> None:
    """Of twenty levels 18 must be inside: 28 % of stacks, were each level off by itself. Common errors make it less."""
    parts = dict.fromkeys(("stack", "model", "gpu", "engine", "parallelism", "lengths", "load", "level"), 0.0)
    alone = ErrorComponents.model_validate({**parts, "level": 5.0, "reach": 1.6})
    common = ErrorComponents.model_validate({**parts, "stack": 15.0, "level": 5.0, "reach": 1.6})
    by_model = ErrorComponents.model_validate({**parts, "model": 15.0, "level": 5.0, "reach": 1.6})
    one, off_together, unseen = (
        points_in_band([True] * len(each), each)
        for each in (levels(alone), levels(common), levels(by_model, ("model",), stacks=5))
    )
    assert one.near_by_chance == pytest.approx(0.285, abs=0.03)
    assert off_together.near_by_chance < 0.1 and unseen.near_by_chance < 0.1
    for held in (one, off_together, unseen):
        assert held.share == 1.0 and held.drawn.mean() / held.of == pytest.approx(0.9, abs=0.02)
    assert one.by_chance[0] > 0.7, "18 of 20 on average"
    assert unseen.by_chance[0] < 0.2, "a model that is far off has none of its five stacks in the band"
    both = sum_of([one, off_together])
    assert (both.inside, both.of) == (40, 40) and one.by_chance[0] > both.by_chance[0] > off_together.by_chance[0]


def chosen(tp: int, load: int, tpot_s: float, predicted_s: float) -> ScoredPoint:
    point = next(each for each in points_of("a", "h100", (load,)) if f"tp{tp}" in each.row.deployment.label)
    figure = PointFigure(predicted_s, 0.01, throughput(point.row, predicted_s, 0.01))
    return ScoredPoint(point._replace(tpot_s=tpot_s, ttft_s=0.01), figure)


def test_a_right_choice_loses_nothing_and_a_choice_beyond_the_target_everything() -> None:
    right = [chosen(1, 4, 5e-3, 5e-3), chosen(1, 16, 9e-3, 9e-3), chosen(2, 16, 6e-3, 6e-3)]
    assert regret(right) == 0.0
    wrong = [right[0], chosen(1, 16, 9e-3, 5.5e-3), right[2]]
    assert regret(wrong) == 1.0


def test_lengths_with_one_deployment_leave_nothing_to_choose() -> None:
    assert regret([chosen(1, 4, 5e-3, 5e-3), chosen(1, 16, 9e-3, 9e-3)]) is None


def test_the_shipped_catalog_lists_what_it_has_seen() -> None:
    catalog = public_errors()
    known = next(each.stack for each in catalog.stacks if each.version == "0.18")
    assert catalog.unseen(known) == ()
    stacks = [each.stack for each in catalog.stacks]
    assert is_represented(known, stacks) and is_represented(known._replace(version="0.99"), stacks)
    assert not is_represented(known._replace(mode="pd"), stacks), "no P:D stack is among them"
    assert not is_represented(known._replace(engine="sglang"), stacks)
    assert len(catalog.stacks) >= LEAST_STACKS
    assert not {"int4", "nvfp4"} & set(catalog.covered.weights), "their tables are in doubt"
    seen, strange = catalog.prior(known), catalog.prior(known._replace(model="another", version="0.99"))
    assert seen.covariance[0, 0] < strange.covariance[0, 0]


def test_a_plan_predicts_by_the_prior_that_was_scored() -> None:
    """Of public stacks alone. The host of vLLM 0.11, measured at home, counts for that version and earlier ones."""
    catalog = public_errors()
    later = next(each.stack for each in catalog.stacks if each.model.startswith("gpt-oss"))._replace(version="0.99")
    effects = [EffectSds(*each) for each in catalog.effects]
    scored_prior = prior_of(later, [each.fit for each in catalog.stacks], effects)
    assert catalog.prior(later).mean.tolist() == scored_prior.mean.tolist()
    older, measured = (catalog.prior(later._replace(version=each)) for each in ("0.8", "0.11"))
    assert older.mean.tolist() == measured.mean.tolist()
    host = home_fit()
    assert measured.mean[0] == pytest.approx(host.mean[0], abs=host.covariance[0, 0] ** 0.5), "as it was measured"
    assert measured.covariance[0, 0] > host.covariance[0, 0], "of another GPU"
    assert catalog.prior(later._replace(version="0.12")).mean[0] < measured.mean[0] - 0.5


PD_HEADER = (
    "model,gpu,mode,framework,framework_version,precision,isl,osl,concurrency,p_workers,p_tp,d_workers,d_tp,ttft_ms,"
    "tpot_ms,ttft_stat\n"
)


def of_ratio(prefills: int, decodes: int, tpot_ms: float, predicted_ms: float, osl: int = 128) -> ScoredPoint:
    """One point of P:D, and a prediction that has its TTFT and another TPOT."""
    row = f"made/Up-1,h100_sxm,disagg,vllm,0.18.0,fp8,1024,{osl},32,{prefills},2,{decodes},2,50,{tpot_ms},InferenceX\n"
    (point,) = read_points(PD_HEADER + row, "made-up.csv").points
    tokens_per_s = throughput(point.row, predicted_ms / 1e3, point.ttft_s)
    return ScoredPoint(point, PointFigure(predicted_ms / 1e3, point.ttft_s, tokens_per_s))


def test_the_ratio_chosen_loses_what_the_best_one_serves_more() -> None:
    # 4 GPUs at 10 ms, or 6 at 5 ms, which serve 4/3 as much per GPU, but for the part of TTFT.
    right = [of_ratio(1, 1, 10, 12), of_ratio(1, 2, 5, 6)]
    assert lost_by_ratio(right) == [0]
    wrong = [of_ratio(1, 1, 10, 5), of_ratio(1, 2, 5, 6)]
    output = 0.9 * 128
    served = [1 / gpus / (0.05 + (output - 1) * tpot_s) for gpus, tpot_s in ((4, 0.010), (6, 0.005))]
    assert lost_by_ratio(wrong) == [pytest.approx(1 - served[0] / served[1], abs=0.005)]
    assert lost_by_ratio([*right, of_ratio(1, 1, 2, 50, osl=256)]) == [0], "one ratio of other lengths: no choice"


def test_a_ratio_counts_with_its_best_point() -> None:
    slow = of_ratio(1, 1, 30, 30)
    assert lost_by_ratio([slow, of_ratio(1, 1, 4, 4), of_ratio(1, 2, 5, 5)]) == [0]
    assert rank_of([slow, of_ratio(1, 1, 4, 5), of_ratio(1, 2, 5, 9)]) == 1
    assert rank_of([slow]) is None


@pytest.mark.parametrize(
    ("gpu", "version", "kvcache"),
    # By requests that waited for memory (decision 043).
    [("B200", "0.19", "fp8"), ("B300", "0.19", "fp8"), ("B200", "0.17", None), ("H100", "0.18", None)],
)
def test_a_stack_has_the_formats_of_its_version(gpu: str, version: str, kvcache: str | None) -> None:
    point = points_of("a", "h100")[0]._replace(
        stack=Stack("MiniMax-M2.5 fp8", gpu, "vllm", version, "collocated"), model_id="MiniMaxAI/MiniMax-M2.5"
    )
    entry = next(each for each in scored_stacks() if each.means(point))
    assert entry.quant.get("kvcache") == kvcache


def test_engines_of_pd_have_the_network_of_their_nodes() -> None:
    for gpu in ("H200", "GB200"):
        assert wire_rate(hardware(Stack("m", gpu, "trtllm", "1.2", "pd")), "srd") == (50.0, False), (
            "400 Gbit/s for each GPU"
        )


TABLES = os.environ.get("PDLAB_PUBLIC_TABLES", "")


@pytest.mark.long
@pytest.mark.skipif(not TABLES, reason="PDLAB_PUBLIC_TABLES names no folder of public tables")
@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
def test_no_stack_is_predicted_worse_than_the_stored_scores(tmp_path: Path) -> None:
    """Of the same points: a change that makes one stack 2 percentage points worse in TPOT, or 5 in TTFT, is named. So
    is another left-out group whose bands hold fewer points than right bands do, and a kind of groups that falls below
    86 %.
    """
    tables = [path for path in sorted(Path(TABLES).glob("inferencex_*.csv"))]
    assert tables, f"{TABLES} has no inferencex_*.csv"
    stored = public_errors()
    out, of_groups = tmp_path / "scores.csv", tmp_path / "groups.csv"
    subprocess.run(
        [
            sys.executable,
            "benchmarks/score_model.py",
            *map(str, tables),
            "--points",
            str(stored.points),
            "--csv",
            str(out),
            "--groups",
            str(of_groups),
        ],
        cwd=ROOT,
        check=True,
    )
    now = {tuple(row[name] for name in Stack._fields): row for row in csv.DictReader(out.read_text().splitlines())}
    worse = []
    for known in stored.stacks:
        row = now[tuple(known.stack)]
        for metric, allowed in (("TPOT", 2.0), ("mean TTFT", 5.0)):
            before = known.errors_percent.get(metric)
            if before is not None and float(row[metric]) > before + allowed:
                worse.append(f"{known.stack.label}: {metric} {before} -> {row[metric]} %")
    groups = list(csv.DictReader(of_groups.read_text().splitlines()))
    for row in groups:
        below = int(row["inside"]) / int(row["of"]) < float(row["low"]) - 0.02
        if below:
            worse.append(f"{row['kind']} {row['group']}: {row['metric']} {row['inside']} of {row['of']} in the band")
    for kind, shares in stored.left_out.items():
        for metric, before in shares.items():
            rows = [row for row in groups if (row["kind"], row["metric"]) == (kind, metric)]
            share = sum(int(row["inside"]) for row in rows) / sum(int(row["of"]) for row in rows)
            if share < NEAR[0] <= before:
                worse.append(f"{kind}: {metric} {before:.0%} -> {share:.0%} in the band")
    assert not worse
    assert (CONFIGS / "errors" / "public.yaml").exists()


@pytest.mark.long
@pytest.mark.skipif(not TABLES, reason="PDLAB_PUBLIC_TABLES names no folder of public tables")
@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
def test_no_stack_of_pd_is_predicted_worse_than_the_stored_scores(tmp_path: Path) -> None:
    """As of collocated stacks. Points near saturation do not count; more of them than before are named too."""
    tables = [path for path in sorted(Path(TABLES).glob("inferencex_*.csv"))]
    assert tables, f"{TABLES} has no inferencex_*.csv"
    out = tmp_path / "points.csv"
    command = [sys.executable, "benchmarks/score_model.py", *map(str, tables), "--disaggregated", "--csv", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    kept = [row for row in rows if row["near_saturation"] == "False"]
    worse = []
    for known in public_pd().stacks:
        own = [row for row in kept if row["stack"] == known.stack.label]
        for metric, name, allowed in (("TPOT", "tpot", 2.0), ("mean TTFT", "ttft", 5.0)):
            errors = [
                100 * abs(float(row[f"predicted_{name}_s"]) / float(row[f"measured_{name}_s"]) - 1) for row in own
            ]
            now, before = statistics.median(errors), known.errors_percent[metric]
            if now > before + allowed:
                worse.append(f"{known.stack.label}: {metric} {before} -> {now:.1f} %")
    assert not worse
    labels = {each.stack.label for each in public_pd().stacks}
    assert sum(row["stack"] in labels for row in kept) >= public_pd().points
