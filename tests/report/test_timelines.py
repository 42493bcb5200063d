"""Load and roles over time: what is counted when, which levels have a picture, and that there is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support import records as made

from pdlab.analysis.loading import Loaded
from pdlab.core.deployment import Deployment, Fluid, Pool, parse_label
from pdlab.core.mixes import parse_mixes
from pdlab.core.workload import Level, Open, Workload
from pdlab.report import paper, timelines
from pdlab.results import roles_log
from pdlab.results.level_data import LevelData
from pdlab.results.roles_log import RoleChange
from pdlab.results.schema import Manifest, RequestRecord
from pdlab.results.store import Store

LEVEL = Level(load=Open(rate_rps=10), num_requests=100, seed=0)
MOVING = Workload(lengths=parse_mixes("1000:10,200:50,every=5"))


def record(arrival_s: float, ttft_s: float = 0.5, tokens: int = 11) -> RequestRecord:
    return made.record(arrival_s, ttft_s, 1.0 / max(tokens - 1, 1), tokens)


SPREAD = Deployment(topology=parse_label("pd-spread-p1xtp2-d1xtp2"))


def experiment(
    folder: Path, workload: Workload, changes: tuple[RoleChange, ...] = (), deployment: Deployment = SPREAD
) -> Loaded:
    store = Store(folder)
    store.write_manifest(Manifest(origin="simulated", label=deployment.label, deployment=deployment))
    sent = [record(index / 10) for index in range(100)]
    fields = {"origin": "simulated", "label": deployment.label, "key": LEVEL.key, "workload": workload}
    store.write(made.run(sent, LEVEL.load, **fields), sent)
    if changes:
        roles_log.write(folder, LEVEL.key, changes)
    return Loaded(folder, store.load(), {})


def bins(records: Sequence[RequestRecord]) -> list[timelines.TimeBin]:
    return timelines.bins(LevelData.of(records))


def test_requests_are_counted_when_they_come() -> None:
    early = [record(0.1 * index, ttft_s=0.2) for index in range(20)]
    late = [record(5 + 0.1 * index, ttft_s=0.1 * index) for index in range(1, 11)]
    series = bins([*late, *early])
    assert len(series) == 6 and series[0].middle_s == pytest.approx(0.5)
    assert [round(one.requests_per_s) for one in series] == [10, 10, 0, 0, 0, 10]
    assert series[0].prompt_tokens_per_s == pytest.approx(1000)
    assert series[0].ttft_s == pytest.approx((0.2, 0.2)) and series[2].ttft_s is None
    assert series[5].ttft_s == pytest.approx((0.55, 0.955)) and series[5].tpot_s == pytest.approx((0.1, 0.1))


def test_a_long_level_has_no_more_bins_than_a_picture_shows() -> None:
    series = bins([record(float(index)) for index in range(5000)])
    assert len(series) == timelines.BINS
    assert sum(one.requests_per_s for one in series) * 4999 / timelines.BINS == pytest.approx(5000)
    assert bins([]) == [] and len(bins([record(0.0)])) == 1


def test_answers_of_one_token_and_failed_requests_have_no_latency() -> None:
    failed = RequestRecord(arrival_s=0.2, input_tokens=10, output_tokens=0, error="refused")
    (one,) = bins([failed, record(0.1, tokens=1)])
    assert one.ttft_s == pytest.approx((0.5, 0.5)) and one.tpot_s is None


def test_levels_of_a_moving_mix_and_those_with_a_log_are_shown(tmp_path: Path) -> None:
    changes = (RoleChange(0.0, 1, 1, "given"), RoleChange(4.0, 1, 1, "1:1 stays"))
    made = [
        experiment(tmp_path / "still", Workload()),
        experiment(tmp_path / "logged", Workload(), changes),
        experiment(tmp_path / "moving", MOVING),
    ]
    found = timelines.moving(list(zip("abc", made, strict=True)))
    assert [each.changes for each in found] == [changes, ()]
    assert all(sum(one.requests_per_s for one in each.bins) == pytest.approx(100 * 9 / 9.9) for each in found)
    assert "10 requests/s, simulated" in found[0].label
    assert timelines.section(found[0]).body.splitlines() == ["     0.0 s  1:1  given", "     4.0 s  1:1  1:1 stays"]
    assert timelines.section(found[1]).text.endswith("none changed")
    path = tmp_path / "roles.png"
    paper.draw(timelines.figure(found), path)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_a_split_that_was_given_at_the_launch_is_drawn_all_along(tmp_path: Path) -> None:
    given = Deployment(topology=Fluid(pool=Pool(replicas=16, tp=2), roles="5:11"))
    follows = Deployment(topology=Fluid(pool=Pool(replicas=16, tp=2)))
    made = [
        experiment(tmp_path / "given", MOVING, deployment=given),
        experiment(tmp_path / "follows", MOVING, deployment=follows),
        experiment(tmp_path / "still", Workload(), deployment=given),
    ]
    found = timelines.moving(list(zip("abc", made, strict=True)))
    assert [each.changes for each in found] == [(RoleChange(0.0, 5, 11, "as launched"),), ()]
    paper.draw(timelines.figure(found), tmp_path / "roles.png")


def repeated(folder: Path, repeats: int, deployment: Deployment = SPREAD) -> Loaded:
    """One load of a moving mix, that many times."""
    experiment(folder, MOVING, deployment=deployment)
    store = Store(folder)
    (run,) = store.runs()
    for repeat in range(1, repeats):
        key = run.key.model_copy(update={"repeat": repeat})
        store.write(run.model_copy(update={"key": key}), store.read_records(run.key))
    return Loaded(folder, store.load(), {})


def test_repeats_of_a_load_are_told_apart_and_leave_room_for_others(tmp_path: Path) -> None:
    many = repeated(tmp_path / "many", timelines.MOST)
    (single,) = timelines.moving([("b", experiment(tmp_path / "one", MOVING))])
    found = [*timelines.moving([("a", many)]), single]
    assert len({each.label for each in found}) == timelines.MOST + 1
    assert found[1].label.endswith(", repeat 2") and "repeat" not in single.label
    drawn = [line.label for line in timelines.figure(found).rows[0][0].lines]
    assert len(drawn) == timelines.MOST and drawn[0] == found[0].label and drawn[-1] == single.label


def test_pools_of_different_sizes_have_shares(tmp_path: Path) -> None:
    def fluid(replicas: int) -> Deployment:
        return Deployment(topology=Fluid(pool=Pool(replicas=replicas, tp=2)))

    large = experiment(tmp_path / "large", MOVING, (RoleChange(0.0, 4, 12, "given"),), fluid(16))
    small = experiment(tmp_path / "small", MOVING, (RoleChange(0.0, 1, 3, "given"),), fluid(4))
    found = timelines.moving([("large", large), ("small", small)])
    (both,), (alone,) = timelines.figure(found).rows[-1], timelines.figure(found[1:]).rows[-1]
    assert [{y for _, y in line.points} for line in both.lines] == [{0.25}, {0.25}] and "share" in both.y.label
    assert [{y for _, y in line.points} for line in alone.lines] == [{1}] and alone.y.label == "prefill, of 4"
