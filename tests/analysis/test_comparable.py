"""Who may be compared with whom; a verdict on two curves rests on these two alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import curves as made

from pdlab.analysis.comparable import LENGTH_TOLERANCE, groups, incomparable, length_notes
from pdlab.analysis.curves import Curve, Point, workloads_name
from pdlab.analysis.headline import compared
from pdlab.analysis.phase_ratio import implied, measured
from pdlab.analysis.ranking import bounds_rankings, frontiers
from pdlab.analysis.view import View
from pdlab.cli import viz
from pdlab.core.bounds import parse_bounds
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.lengths import Uniform
from pdlab.core.workload import Workload, WorkloadMode
from pdlab.report import verdicts
from pdlab.results.published_folders import load_experiment
from pdlab.results.schema import Experiment

MIXED = Workload(input_tokens=5000, output_tokens=250)


def level(load: float, rates: Sequence[float], workload: Workload | None = MIXED) -> Point:
    samples = (
        made.sample(rate, {"ttft": 900 / rate, "tpot": 100 / rate}, repeat, input_tokens_per_s=rate)
        for repeat, rate in enumerate(rates)
    )
    return made.point(load, *samples, workloads=() if workload is None else (workload,))


def curve(
    label: str,
    rates: Mapping[float, Sequence[float]] | None = None,
    *,
    workload: Workload = MIXED,
    model: str | None = "org/m",
    gpus: int = 8,
    layout: str = "pd-pack-p1xtp4-d1xtp4",
) -> Curve:
    points = [level(load, each, workload) for load, each in (rates or {8.0: (10.0, 11.0)}).items()]
    deployment = Deployment(topology=parse_label(layout))
    return made.curve(
        label, *points, gpus=gpus, deployment=deployment, model=model, workload=workloads_name([workload])
    )


def names(curves: Sequence[Curve], view: View | None = None) -> list[list[str]]:
    return [[each.label for each in group.curves] for group in groups(curves, view or View())]


# Models


def test_two_models_share_no_headline_frontier_or_pick() -> None:
    """Whatever the deployments and the lengths: the better of two models is no answer to anything here."""
    large, small = curve("a", model="org/large"), curve("b", {8.0: (30.0, 33.0)}, model="org/small")
    other = curve("c", {8.0: (20.0, 21.0)}, model="org/small")
    assert names([large, small, other]) == [["a"], ["b", "c"]]
    found = compared([large, small, other], View())
    assert [(each.label, each.reference) for block in found.headlines for each in block.comparisons] == [("c", "b")]
    assert found.pairs == ()
    fronts = [{drawn.curve.label for drawn in front.points} for front in frontiers([large, small, other], View())]
    assert fronts == [{"a"}, {"b"}]
    bounds = parse_bounds("tpot_ms=1000,ttft_ms=9000", "p50")
    rankings = [
        [each.label for each in bounds_ranking.ranking]
        for bounds_ranking in bounds_rankings([large, small, other], bounds, View())
    ]
    assert rankings == [["a"], ["b", "c"]]
    text = verdicts.headline([large, small], View())
    assert len(text.splitlines()) == 1 and "org/large and org/small" in text


def test_models_of_two_organisations_share_no_headline_over_a_bare_name() -> None:
    bare, one, other = (curve(label, model=model) for label, model in (("a", "m"), ("b", "x/m"), ("c", "y/m")))
    for block in compared([bare, one, other], View()).headlines:
        assert not {"b", "c"} <= {block.reference, *(each.label for each in block.comparisons)}


def test_a_model_that_is_not_known_is_not_the_one_that_is() -> None:
    known, unknown, another = curve("a"), curve("b", model=None), curve("c", model=None)
    assert names([known, unknown, another]) == [["a"], ["b", "c"]]
    assert "unknown model" in (incomparable([known, unknown], View()) or "")


def published(folder: Path, model: str | None, rate: float, tokens: tuple[float, float] = (1000, 100)) -> Path:
    """A folder as `vllm bench serve` leaves it; ``tokens``: mean lengths."""
    folder.mkdir()
    for load in (8, 16):
        data = {
            "model_id": model,
            "max_concurrency": load,
            "num_prompts": 400,
            "completed": 400,
            "duration": 400 / rate,
        }
        data |= {"total_input_tokens": round(400 * tokens[0]), "total_output_tokens": round(400 * tokens[1])}
        data |= {"request_throughput": rate, "request_rate": "inf"}
        data |= {f"{of}_{name}_ms": 10.0 for of in ("mean", "median") for name in ("ttft", "tpot", "itl")}
        (folder / f"conc{load}.json").write_text(json.dumps(data))
    return folder


def test_gpus_that_are_stated_do_not_hide_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [published(tmp_path / "large", "org/405b", 3), published(tmp_path / "small", "org/8b", 9)]
    words = ["--exps", *map(str, folders), "--no-plot", "--at", "tpot_ms=500,ttft_ms=9000", "--no-show-tables"]
    assert viz.main([*words, "--gpus", "large=8", "--gpus", "small=8"]) == 0
    first, *readings_ = capsys.readouterr().out.splitlines()
    assert first.startswith("No comparison: ") and "org/405b and org/8b" in first
    assert len(readings_) == 2 and not any("the best" in each for each in readings_)


# Workloads


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((5000, 250), (4998, 250), True),
        ((1000, 62), (1000, 66), True),
        ((1000, 62), (1000, 75), False),
        ((1000, 100), (100, 1000), False),
        ((1000, 100), (1200, 100), False),
    ],
)
def test_lengths_that_differ_by_chance_are_one_workload(
    one: tuple[int, int], other: tuple[int, int], same: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [published(tmp_path / f"{i}_1xtp8", "org/m", 3, each) for i, each in enumerate((one, other))]
    assert viz.main(["--exps", *map(str, folders), "--no-plot"]) == 0
    out = capsys.readouterr().out
    assert ("output tokens/s per node (8 GPUs)  " in out) is same
    assert ("Mean lengths differ by up to" in out) is same
    assert ("different workloads" in out) is not same


def test_a_part_of_a_sweep_is_compared_with_the_whole_at_alike_levels() -> None:
    """Lengths move with the load: levels are held against levels of like lengths, sweeps by their ranges."""

    def answers(tokens: int) -> Workload:
        return Workload(input_tokens=1000, output_tokens=tokens)

    whole = curve("a").model_copy(
        update={"points": tuple(level(2.0**i, (10.0, 11.0), answers(n)) for i, n in enumerate((60, 66, 72, 79)))}
    )
    part = curve("b", {4.0: (10.0, 11.0), 8.0: (10.0, 11.0)}, workload=answers(73))
    assert names([whole, part]) == [["a", "b"]]
    ((each,),) = [block.comparisons for block in compared([whole, part], View()).headlines]
    assert each.loads == (4.0, 8.0)
    moved = part.model_copy(update={"points": (level(1.0, (9.0, 9.1), answers(73)), *part.points)})
    ((each,),) = [block.comparisons for block in compared([whole, moved], View()).headlines]
    assert each.loads == (4.0, 8.0), "60 and 73 tokens at load 1 are too far apart"


@pytest.mark.parametrize(
    "changes", [{"mode": "decode-approx"}, {"shared_prefix_tokens": 2500}, {"lengths": Uniform(low=0.8, high=1.2)}]
)
def test_other_requests_of_the_same_mean_are_another_workload(changes: Mapping[str, object]) -> None:
    other = curve("b", workload=MIXED.model_copy(update=changes))
    assert names([curve("a"), other]) == [["a"], ["b"]]
    assert curve("a").workload != other.workload


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 400)), min_size=1, max_size=7))
def test_every_two_of_a_group_are_within_the_tolerance(lengths: list[tuple[int, int]]) -> None:
    curves = [curve(str(i), workload=Workload(input_tokens=a, output_tokens=b)) for i, (a, b) in enumerate(lengths)]
    found = names(curves)
    assert sorted(label for group in found for label in group) == sorted(each.label for each in curves)
    for group in found:
        for side in (0, 1):
            means = [lengths[int(label)][side] for label in group]
            assert max(means) <= min(means) * (1 + LENGTH_TOLERANCE) + 1e-9


CHAIN = {"a": 1000, "b": 1080, "c": 1160}  # of which only neighbours are within 10 %


def chain(order: Iterable[str]) -> list[Curve]:
    return [curve(name, workload=Workload(input_tokens=CHAIN[name], output_tokens=100)) for name in order]


@pytest.mark.parametrize("order", list(permutations(CHAIN)))
def test_who_is_ranked_with_whom_does_not_depend_on_the_order_of_the_folders(order: tuple[str, ...]) -> None:
    """A curve between two others fits both: one line tells with which it is not ranked."""
    curves = chain(order)
    assert {frozenset(group) for group in names(curves)} == {frozenset("ab"), frozenset("c")}
    rankings = bounds_rankings(curves, parse_bounds("tpot_ms=1000,ttft_ms=9000", "p50"), View())
    assert {frozenset(each.label for each in one.ranking) for one in rankings} == {frozenset("ab"), frozenset("c")}
    found = compared(curves, View())
    pairs = [each for block in (*found.headlines, *found.pairs) for each in block.comparisons]
    assert {frozenset((each.label, each.reference)) for each in pairs} == {frozenset("ab"), frozenset("bc")}
    (line,) = [line for line in length_notes(curves, View()) if "ranked apart" in line]
    both, rest = line.split(", but ")
    assert set(both.split(" may be compared with ")) == {"b 1080:100", "c 1160:100"} and "groups may not" in rest
    reason = incomparable(curves, View()) or ""
    assert "1000-1080:100" in reason and "1160:100" in reason


def test_no_line_where_groups_share_nothing() -> None:
    assert not any("ranked apart" in line for line in length_notes(chain("ac"), View()))
    assert not any("ranked apart" in line for line in length_notes(chain("ab"), View()))


@pytest.mark.parametrize("order", list(permutations(["m", "x/m", "y/m"])))
def test_a_bare_name_is_ranked_with_one_of_two_organisations_in_any_order(order: tuple[str, ...]) -> None:
    curves = [curve(model, model=model) for model in order]
    assert {frozenset(group) for group in names(curves)} == {frozenset(["m", "x/m"]), frozenset(["y/m"])}
    assert any("ranked apart" in line and "y/m" in line for line in length_notes(curves, View()))


@given(st.lists(st.tuples(st.integers(900, 1500), st.integers(90, 150)), min_size=2, max_size=7), st.randoms())
def test_the_groups_are_the_same_in_any_order(lengths: list[tuple[int, int]], chance: Random) -> None:
    curves = [curve(str(i), workload=Workload(input_tokens=a, output_tokens=b)) for i, (a, b) in enumerate(lengths)]
    shuffled = chance.sample(curves, len(curves))
    assert {frozenset(group) for group in names(curves)} == {frozenset(group) for group in names(shuffled)}


def of_mode(experiment: Experiment, mode: WorkloadMode) -> Experiment:
    runs = tuple(
        run.model_copy(update={"workload": run.workload.model_copy(update={"mode": mode})}) for run in experiment.runs
    )
    return experiment.model_copy(update={"runs": runs})


def test_the_phases_of_two_models_imply_no_ratio(tmp_path: Path) -> None:
    phases: list[tuple[WorkloadMode, tuple[int, int]]] = [("prefill-only", (1000, 1)), ("decode-only", (1000, 100))]
    made = [published(tmp_path / f"{mode[0]}_1xtp8", f"org/{i}", 3, tokens) for i, (mode, tokens) in enumerate(phases)]
    prefill, decode, other = (
        of_mode(load_experiment(folder), mode)
        for folder, (mode, _) in zip([*made, made[1]], [*phases, phases[0]], strict=True)
    )
    with pytest.raises(UsageError, match=r"p_1xtp8 \(org/0\) and d_1xtp8 \(org/1\): the .* model"):
        implied(prefill, decode)
    pd = load_experiment(published(tmp_path / "1xtp4-1xtp4", "org/2", 3))
    assert len(measured([pd]).deployments) == 1
    assert measured([pd], (other, decode)) == ((), {"not of the model of the phases": ["1xtp4-1xtp4 (org/2)"]})


# References


def test_pairs_of_one_size_need_no_collocated_run() -> None:
    pack, spread = curve("pack"), curve("spread", layout="pd-spread-p1xtp4-d1xtp4")
    ((each,),) = [block.comparisons for block in compared([pack, spread], View()).headlines]
    assert (each.label, each.reference) == ("spread", "pack")


def test_one_stray_level_of_a_collocated_run_leaves_the_others_compared() -> None:
    stray = curve("stray", {77.0: (5.0, 5.1)}, layout="collocated-2xtp4")
    others = [curve(f"pd {i}", {8.0: (10.0 + i, 11.0 + i), 16.0: (20.0, 21.0)}) for i in range(4)]
    found = compared([stray, *others], View())
    (block,) = found.headlines
    assert (block.reference, len(block.comparisons), found.apart) == ("pd 0", 3, ("stray",))
    assert {frozenset((each.label, each.reference)) for pairs in found.pairs for each in pairs.comparisons} == {
        frozenset((f"pd {i}", f"pd {j}")) for i, j in ((1, 2), (1, 3), (2, 3))
    }
    assert "Reference pd 0: it shares loads with 3 other deployments" in verdicts.headline([stray, *others], View())


def test_what_shares_no_load_with_the_reference_is_compared_among_itself() -> None:
    closed = {8.0: (10.0, 11.0)}
    first = [curve("a", closed), curve("b", closed), curve("c", closed)]
    second = [curve("d", {7.0: (1.0, 1.1)}), curve("e", {7.0: (2.0, 2.1)})]
    found = compared([*second, *first], View())
    assert [(block.reference, len(block.comparisons)) for block in found.headlines] == [("a", 2), ("d", 1)]
    assert found.apart == ()


LOADS = (2.0, 4.0, 8.0)
ONE_CURVE = st.builds(
    dict,
    rates=st.dictionaries(
        st.sampled_from(LOADS), st.lists(st.floats(5, 500), min_size=1, max_size=3), min_size=1, max_size=3
    ),
    layout=st.sampled_from(["collocated-2xtp4", "pd-pack-p1xtp4-d1xtp4", "pd-spread-p1xtp4-d1xtp4"]),
    gpus=st.sampled_from([4, 8]),
    model=st.sampled_from(["org/m", "org/m", "org/n", None]),
    workload=st.sampled_from(
        [MIXED, MIXED, Workload(input_tokens=4998, output_tokens=250), Workload(input_tokens=100)]
    ),
)


def ratios(curves: Sequence[Curve], view: View) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Pair -> figure -> logarithm of the ratio of the first over the second by name, and the standard error behind."""
    found: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    whole = compared(curves, view)
    for each in [each for block in (*whole.headlines, *whole.pairs) for each in block.comparisons]:
        turned = each.label > each.reference
        pair = (each.reference, each.label) if turned else (each.label, each.reference)
        assert pair not in found, "a pair is compared once"
        found[pair] = {
            of.figure: (
                (-1 if turned else 1) * math.log(of.comparison.ratio),
                math.hypot(of.first.relative_error or 0, of.second.relative_error or 0),
            )
            for of in each.ratios
            if of.comparison and of.first and of.second
        }
    return found


@settings(max_examples=150, deadline=None)
@given(st.lists(ONE_CURVE, min_size=2, max_size=5), ONE_CURVE, st.integers(0, 5), st.booleans())
def test_no_ratio_of_two_curves_depends_on_a_third(
    made: list[dict[str, object]], added: dict[str, object], at: int, normalized: bool
) -> None:
    """Neither what it is nor that it is there, where the two are of one size; only the share of the error may."""
    view = View(normalized=normalized)
    curves = [curve(f"c{i}", **each) for i, each in enumerate(made)]  # type: ignore[arg-type]
    more = [*curves[:at], curve("added", **added), *curves[at:]]  # type: ignore[arg-type]
    before, after = ratios(curves, view), ratios(more, view)
    gpus = {each.label: each.gpus.total for each in curves}
    for pair, figures in before.items():
        assert pair in after or gpus[pair[0]] != gpus[pair[1]], "pairs of one size are always compared"
        for figure, (log_ratio, error) in after.get(pair, figures).items():
            assert (log_ratio, error) == pytest.approx(figures[figure]), figure
    assert {pair for pair in after if "added" not in pair and gpus[pair[0]] == gpus[pair[1]]} <= set(before)
