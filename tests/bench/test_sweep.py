"""The sweep's own rules without a server: counters that come late, folders that do not match, its text."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import records as made
from support.launched import running
from support.validity import failing

from pdlab.bench import levels, measure, slo_search, target
from pdlab.bench.measure import settled
from pdlab.bench.progress import ExperimentProgress, Progress
from pdlab.bench.slo_search import SloSearchOptions
from pdlab.bench.sweep import (
    SweepOptions,
    _check_again,
    _length_setting,
    _run_held,
    _start_manifest,
    _Sweeper,
    _todo,
    all_answered,
    build,
    run_sweep,
    same_experiment,
)
from pdlab.bench.target import normal_url
from pdlab.cli import bench
from pdlab.core.deployment import Collocated, Deployment, Pool
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.lengths import Uniform
from pdlab.core.settings import parse
from pdlab.core.workload import Closed, Level, Load, Open, Ramp, RunKey, Slo, Workload
from pdlab.deploy import canary
from pdlab.deploy.options import LaunchSettings, deployment_from
from pdlab.deploy.serve_config import engine_kwargs
from pdlab.results.schema import CanaryResult, Manifest, NixlCounters, RequestRecord, Run, Summary
from pdlab.results.store import Store


def at_least(transfers: float) -> Callable[[NixlCounters], bool]:
    return lambda counters: (counters.transfers or 0.0) >= transfers


class Exporter:
    """Counters that show other values at given seconds, and the clock that they are read by."""

    def __init__(self, shown: dict[float, float]) -> None:
        self.now_s = 0.0
        self._shown = shown

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def scrape(self) -> NixlCounters:
        return NixlCounters(transfers=[value for since_s, value in self._shown.items() if since_s <= self.now_s][-1])

    def settled(self, still_s: float = 0.0) -> tuple[float | None, str]:
        got = settled(self.scrape, at_least(160), lambda counters: still_s, lambda: self.now_s, self.sleep)
        return got.counters.transfers, got.settling


@pytest.mark.parametrize(
    ("shown", "ends"),
    [
        ({0.0: 160}, (160, "whole")),
        ({0.0: 100, 3.0: 161, 3.5: 162}, (162, "whole")),
        # Slow by more than two exports, and still coming: waited for.
        ({0.0: 80, 20.0: 151, 40.0: 160}, (160, "whole")),
        # The same exporter where even that is too short.
        ({second: 100.0 + second / 2 for second in (0.0, 20.0, 40.0, 59.0, 80.0)}, (129.5, "late")),
        # One that is done, and has not counted what was answered.
        ({0.0: 80, 10.0: 151, 59.0: 160}, (151, "short")),
        ({0.0: 151}, (151, "short")),
    ],
)
def test_counters_are_whole_late_or_short(shown: dict[float, float], ends: tuple[float, str]) -> None:
    exporter = Exporter(shown)
    assert exporter.settled() == ends
    assert exporter.now_s <= measure.SETTLE_TIMEOUT_S
    if ends[1] == "short":
        assert exporter.now_s >= measure.SHORT_STILL_S


def test_whole_counters_must_stand_still_as_long_as_required() -> None:
    exporter = Exporter({0.0: 160, 5.0: 170})
    assert exporter.settled(still_s=11.0) == (170, "whole")


def manifest(**changes: Any) -> Manifest:
    deployment = Deployment(model="m", topology=Collocated(pool=Pool(tp=changes.pop("tp", 1))))
    fields: dict[str, Any] = {
        "origin": "measured", "label": deployment.label, "deployment": deployment, "gpus": deployment.gpus,
        "workload": Workload(),
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": Workload(seed=1)}, "workload seed 0, now it is 1"),
        ({"workload": Workload(input_tokens=7)}, "workload input_tokens 5000, now it is 7"),
        ({"workload": Workload(lengths=Uniform(low=0.8, high=1))}, "workload 5000:250, now it is 5000:250 uniform 0.8"),
        ({"tp": 2}, "deployment collocated-1xtp1"),
        ({"deployment": None}, "now it is unknown"),
        ({"gpus": 4}, "GPUs 1, now it is 4"),
        ({"label": "other"}, "label collocated-1xtp1, now it is other"),
    ],
)
def test_levels_of_two_experiments_never_share_a_folder(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StoreError, match="use another --exp-name or --out") as refused:
        same_experiment(manifest(), manifest(**changes), Path("x"))
    assert words in str(refused.value)


def test_the_same_experiment_goes_on() -> None:
    same_experiment(manifest(), manifest(commands=("again",), started_at="later"), Path("x"))


def of_server(**changes: Any) -> Manifest:
    """The manifest of a server that pdlab did not launch."""
    known = {"deployment": None, "label": "free", "gpus": 2, "model": "org/one", "tokenizer": "/t/one"}
    return manifest(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "org/other"}, "x was measured with model org/one, now it is org/other; use another --exp-name or"),
        ({"tokenizer": "/t/other"}, "x was measured with tokenizer /t/one, now it is /t/other; use another"),
        ({"gpus": 4}, "x was measured with GPUs 2, now it is 4; use another --exp-name or --out"),
    ],
)
def test_levels_of_two_models_or_sizes_never_share_a_folder(changes: dict[str, Any], words: str) -> None:
    for earlier, current in ((of_server(), of_server(**changes)), (of_server(**changes), of_server())):
        with pytest.raises(StoreError) as refused:
            same_experiment(earlier, current, Path("x"))
        if earlier == of_server():
            assert str(refused.value).startswith(words)
    for unknown in ({name: None} for name in changes):
        same_experiment(of_server(**unknown), of_server(**changes), Path("x"))
        same_experiment(of_server(**changes), of_server(**unknown), Path("x"))
    same_experiment(of_server(), of_server(model="one", tokenizer="/elsewhere/one"), Path("x"))


def nowhere(known: Manifest) -> SimpleNamespace:
    """A target to which nothing may be sent."""
    return SimpleNamespace(manifest=known, base_url="http://127.0.0.1:9", name=known.label, figure_notes=())


def test_the_number_of_gpus_may_be_given_later(tmp_path: Path) -> None:
    """As the note on an unknown number advises; also where no level is left to measure."""
    planned = levels.sweep_levels(Workload(), (Closed(concurrency=2),))
    sweeper(tmp_path, Fake(1.0)).run(planned, planned, of_server(gpus=None))
    options = SweepOptions(loads=(Closed(concurrency=2),), resume=True)

    def printed(gpus: int | None) -> str:
        stream = io.StringIO()
        _run_held(options, nowhere(of_server(gpus=gpus)), Store(tmp_path), Progress(stream), None)  # type: ignore[arg-type]
        return stream.getvalue()

    assert "the number of GPUs of free is unknown" in printed(None) and Store(tmp_path).read_manifest().gpus is None
    for gpus in (4, None):  # once given it is known
        assert printed(gpus) == "" and Store(tmp_path).read_manifest().gpus == 4
    with pytest.raises(StoreError, match="was measured with GPUs 4, now it is 8"):
        printed(8)


PINNED: list[dict[str, Any]] = [
    {"tokenizer": "/t/other"},
    {"model": "org/other"},
    {"gpus": 4},
    {"label": "other"},
    {"workload": Workload(input_tokens=7)},
    {"deployment": Deployment(model="m", topology=Collocated(pool=Pool(tp=2)))},
]


@pytest.mark.parametrize("changes", PINNED, ids=lambda changes: next(iter(changes)))
@pytest.mark.parametrize("measured", ["finished", "set aside", "nothing"])
def test_only_what_was_measured_pins_the_facts_of_a_folder(
    measured: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    store, planned = Store(tmp_path), levels.sweep_levels(Workload(), (Closed(concurrency=2),))
    wrong = of_server(**changes, commands=("./run_bm.sh wrong",))
    sweeping = sweeper(tmp_path, Fake(1.0))
    store.write_manifest(wrong)
    if measured == "finished":
        sweeping.run(planned, planned, wrong)
    elif measured == "set aside":
        store.set_aside(*Fake(1.0).measure(planned[0]))
    options = SweepOptions(loads=(Closed(concurrency=2),), resume=True, command="./run_bm.sh right")
    target: Any = nowhere(of_server())
    if measured != "nothing":
        before = store.read_manifest()
        with pytest.raises(StoreError, match="use another --exp-name"):
            _start_manifest(target, before, options, store)
        return
    made = _start_manifest(target, wrong, options, store)
    right = of_server()
    for name in ("tokenizer", "model", "gpus", "label", "workload", "deployment"):
        assert getattr(made, name) == getattr(right, name)
    assert made.commands == ("./run_bm.sh wrong", "./run_bm.sh right"), "whose prompts may be cached"


@pytest.mark.parametrize(("measured", "kept"), [(True, None), (False, "org/one")])
def test_levels_of_an_unknown_model_do_not_get_todays(measured: bool, kept: str | None, tmp_path: Path) -> None:
    """A folder whose levels were measured before the model was stored does not say which one it was."""
    store, planned = Store(tmp_path), levels.sweep_levels(Workload(), (Closed(concurrency=2),))
    earlier = of_server(model=None, tokenizer=None)
    sweeper(tmp_path, Fake(1.0)).run(planned if measured else (), planned, earlier)
    target = nowhere(of_server(model="org/one", tokenizer="org/one"))
    made = _start_manifest(target, earlier, SweepOptions(loads=(Closed(concurrency=4),), resume=True), store)  # type: ignore[arg-type]
    assert (made.model, made.tokenizer) == (kept, kept)


@pytest.mark.parametrize(("rates", "look", "valid"), [((4.0,), 0, False), ((4.0,), 1, True), ((), 0, True)])
def test_a_requested_level_counts_even_if_a_search_used_its_rate(
    rates: tuple[float, ...], look: int, valid: bool
) -> None:
    point = slo_search.LevelSample(rate_rps=4, repeat=0, judged=1000, met=1000)
    search = slo_search.evaluate([point], SloSearchOptions(slo=Slo(ttft_s=0.5)), label="x", repeat=0).answer
    load = Open(rate_rps=4)
    key = RunKey(kind="rate", value=4, look=look)
    run = made.run([made.record()], load, key=key).model_copy(update={"validity": failing("steady_state")})
    finished = search.model_copy(update={"finished": True})
    assert all_answered([run], [finished], [Open(rate_rps=rate) for rate in rates]) is valid
    assert not all_answered([run], [search.model_copy(update={"finished": False})], ())


@pytest.mark.parametrize("text", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_base_url_forms(text: str) -> None:
    assert normal_url(text) == "http://h:1"


@pytest.mark.parametrize("text", ["", "h:1", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://[::1"])
def test_bad_base_urls(text: str) -> None:
    with pytest.raises(UsageError, match="expected http://HOST:PORT"):
        normal_url(text)


def test_published_scripts_flags() -> None:
    options = bench.options(
        ["-e", "x", "-t", "request-rate", "-r", "1,2", "--itl", "8", "--otl", "4", "--mode", "mixed", "-u", "http://h",
         "-m", "gpt-oss", "-s"]
    )  # fmt: skip
    assert options.loads == (Open(rate_rps=1), Open(rate_rps=2)) and options.smoke
    assert options.workload == Workload(input_tokens=8, output_tokens=4)
    assert (options.name, options.model, options.base_url) == ("x", "gpt-oss", "http://h")
    assert options.command.startswith("./run_bm.sh -e x -t request-rate")


def test_flag_aliases_and_defaults() -> None:
    assert (
        bench.options(["--isl", "8", "--osl", "4"]).workload
        == bench.options(["--input-len", "8", "--output-len", "4"]).workload
    )
    assert [load.value for load in bench.options([]).loads] == [4, 8, 16, 32, 48, 64]
    assert [load.value for load in bench.options(["-t", "request-rate"]).loads] == [1, 2, 4, 8, 12, 16]
    assert bench.options(["-r", "3", "--burstiness", "0.5"]).loads == (Open(rate_rps=3, burstiness=0.5),)


def run(reasons: tuple[str, ...] = ()) -> Run:
    whole = Summary(duration_s=10, completed=20, requests_per_s=2, input_tokens_per_s=200, output_tokens_per_s=10)
    return made.run((), Closed(concurrency=4), count=20, whole=whole, validity=failing(*reasons))


def test_table_shows_unknown_and_invalid() -> None:
    header, row, invalid = bench.table([run(("a", "b"))]).splitlines()
    assert row.split() == ["concurrency4", "20/20", "2.00", "10.0", "-", "-", "-", "-", "-", "-"]
    assert len(header) == len(row)
    assert invalid == "INVALID concurrency4: a; b"


@pytest.mark.parametrize(("requests", "shown"), [(499, "-"), (500, "1000.0")])
def test_table_shows_no_tail_that_few_requests_lie_beyond(requests: int, shown: str) -> None:
    """As viz's tables: five requests beyond the p99 are those of 500."""
    records = [made.record(0.1 * i, 1.0, 0.02, 11) for i in range(requests)]
    level = made.run(records, Closed(concurrency=4), count=requests)
    row = bench.table([level]).splitlines()[1].split()
    assert row[5:7] == ["1000.0", shown] and (row[8] == "-") is (shown == "-") and row[9] != "-"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_plain_and_on_a_terminal() -> None:
    for stream in (io.StringIO(), Terminal()):
        progress = Progress(stream)
        progress.extend(30, 1)
        progress.level("warm-up", 10, counts=False)
        progress.update(5, 0)
        progress.level_done("done")
        progress.level("concurrency 4", 20)
        progress.update(10, 2)
        progress.level_done("fine")
        progress.note("a note")
        progress.close()
        text = stream.getvalue()
        assert "warm-up: done\n" in text and "[1/1] concurrency 4: fine\n" in text and "a note\n" in text
        if stream.isatty():
            assert "\r\x1b[K[1/1] concurrency 4: 10/20 requests, 2 failed (elapsed 0:00, about 0:00 to go)" in text
        else:
            assert "[1/1] concurrency 4: 20 requests (elapsed 0:00)" in text


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (Workload(), "--itl + --otl is 5250 tokens, but m is served with at most 5000"),
        (Workload(lengths=Uniform(low=0.5, high=1)), "the longest request of 5000:250 uniform 0.5-1.0 is 5250 tokens"),
        (Workload(input_tokens=2500, lengths=Uniform(low=0.5, high=2)), "the longest request of 2500:250 uniform 0.5"),
    ],
)
def test_the_longest_request_must_be_within_what_is_served(
    workload: Workload, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "load_running", lambda url: None)
    monkeypatch.setattr(target, "_served_models", lambda url: {"m": {"max_model_len": 5000}})
    with pytest.raises(UsageError) as refused:
        target.resolve_target("http://h:1/v1", workload=workload, name="x")
    assert str(refused.value).startswith(words)
    shorter = workload.model_copy(update={"input_tokens": 2000})
    assert target.resolve_target("http://h:1/v1", workload=shorter, name="x").model_id == "m"


def test_gpus_come_from_a_label_or_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "load_running", lambda url: None)
    monkeypatch.setattr(target, "_served_models", lambda url: {"m": {}})

    def resolve(**more: Any) -> target.Target:
        return target.resolve_target("http://h:1/v1", workload=Workload(), **more)

    labelled = resolve(name="pd-spread-p2xtp2-d1xtp4")
    assert (labelled.manifest.gpus, labelled.manifest.model, labelled.tokenizer) == (8, "m", "m")
    assert resolve(name="free", gpus=16).manifest.gpus == 16
    assert resolve(name="free").manifest.gpus is None
    assert resolve(name="free", smoke=True).name == "free-smoke"
    with pytest.raises(UsageError, match="--gpus 4: collocated-4xtp2 uses 8"):
        resolve(name="collocated-4xtp2", gpus=4)


def test_new_loads_of_the_command_line() -> None:
    assert bench.options(["--concurrency-per-gpu", "1,2.5"]).per_gpu == (1, 2.5)
    assert bench.options(["--concurrency-per-gpu", "1"]).loads == ()
    assert bench.options(["--ramp", "1:16,2:8", "--ramp-shape", "exponential"]).loads == (
        Ramp(start_rps=1, end_rps=16, shape="exponential"),
        Ramp(start_rps=2, end_rps=8, shape="exponential"),
    )
    options = bench.options(["--slo", "ttft_ms=2000,tpot_ms=50", "--slo-quantile", "0.9", "--slo-start", "3"])
    assert options.loads == ()
    (search,) = options.searches
    assert search.slo == Slo(ttft_s=2, tpot_s=0.05, quantile=0.9) and search.start_rps == 3
    both = bench.options(["--slo", "e2el_ms=900", "-c", "4"])
    assert both.loads == (Closed(concurrency=4),) and both.searches[0].slo.e2el_s == 0.9
    assert bench.options(["--shared-prefix", "100"]).workload.shared_prefix_tokens == 100


@pytest.mark.parametrize(
    ("argv", "hold_s"),
    [([], 60), (["-r", "2"], 60), (["-r", "2", "--hold-s", "7"], 7), (["--slo", "ttft_ms=5", "--final"], 600)],
)
def test_how_long_a_rate_is_held(argv: list[str], hold_s: float) -> None:
    assert bench.options(argv).hold_s == hold_s


def test_a_dry_run_prints_what_would_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    slo = ["--slo", "ttft_ms=2000,stall_ms=500", "--slo-quantile", "0.9"]
    assert bench.main(["--dry-run", "-r", "2", "--repeats", "2", "--hold-s", "90", *slo, "-e", "x"]) == 0
    assert capsys.readouterr().out == (
        "dry run: nothing is sent to http://127.0.0.1:8000\n"
        "workload: mixed 5000:250, seed 0\n"
        "KV pools: filled once before the first level (prompts of 5249 tokens, one token each) where that takes at "
        "most 3 minutes by the pace of the first ones, and not on CPUs of this machine\n"
        "  2 requests/s: 180 requests, held for 90 s, or 10 times E2EL where that is longer\n"
        "  2 requests/s, repeat 1: 180 requests, held for 90 s, or 10 times E2EL where that is longer\n"
        "  highest rate under ttft2000ms-stall500ms-q0.9, from the rates measured before; without any, half of what "
        "closed loops reached, or 1:\n"
        "    at most 20 levels, each of at least 182 requests and held for 90 s, to within 10% at 95% confidence\n"
        "  highest rate under ttft2000ms-stall500ms-q0.9, repeat 1, from the rates measured before; without any, half "
        "of what closed loops reached, or 1:\n"
        "    at most 20 levels, each of at least 182 requests and held for 90 s, to within 10% at 95% confidence\n"
        "results: bm_results/x\n"
    )
    assert bench.main(["--dry-run", "-r", "9", "--mixes", "5:2,1:1", "--mix-every", "50000"]) == 2
    assert "rate 9 held for 200000 s is 1800000 requests" in capsys.readouterr().err
    for flags, words in (
        ("--mixes 5000:250,1000:1000@1.5 -r 4", "1200 requests, held for 240 s, or 10 times E2EL where"),
        ("--lengths mixes:1000:100,crowd=rate*10@60+30 -r 4", "2040 requests, held for 240 s, or"),
        ("-r 0.1", "20 requests, held for 200 s, or"),
        ("-r 0.7 --hold-s 90.5", "64 requests, held for 90.5 s, or"),
        ("--ramp 4:4 --prompts-per-level 30", "30 requests, which arrive in 7.5 s\n"),
        ("-r 4 --smoke", "40 requests, which arrive in 10 s\n"),
        ("--slo ttft_ms=9 --mixes 5:2,1:1", "of at least 373 requests and held for 240 s, to"),
        ("--slo ttft_ms=9 --prompts-per-level 30", "of at least 30 requests, to"),
    ):
        assert bench.main(["--dry-run", *flags.split()]) == 0
        assert words in capsys.readouterr().out
    assert bench.main(["--dry-run", "--concurrency-per-gpu", "0.5,2", "--gpus", "4"]) == 0
    assert "  concurrency 2: 20 requests\n  concurrency 8: 80 requests\n" in capsys.readouterr().out
    assert bench.main(["--dry-run", "--concurrency-per-gpu", "2"]) == 0
    assert "  2 requests in flight per GPU (how many GPUs is not known: --gpus N)\n" in capsys.readouterr().out
    assert bench.main(["--dry-run", "-c", "4", "--repeats", "0"]) == 2
    assert bench.main(["--dry-run", *slo, "--start-from", "plan"]) == 0
    assert "q0.9, from what the simulator finds:\n" in capsys.readouterr().out
    assert bench.main(["--dry-run", "-c", "4", "-u", "nowhere"]) == 2


class Fake:
    """A driver that answers every level at once; requests take ``e2el_s``."""

    def __init__(self, e2el_s: float) -> None:
        self.e2el_s = self.warm_e2el_s = e2el_s
        self.levels: list[Level] = []
        self.once: list[bool] = []

    local, to_fill = False, None  # how much is not known
    timelines = ()

    def warm_up(self, attempt: int) -> None:
        pass

    def measure(self, level: Level, *, once: bool = False) -> tuple[Run, tuple[RequestRecord, ...]]:
        self.levels.append(level)
        self.once.append(once)
        records = tuple(
            made.record(0.1 * i, self.e2el_s / 2, 0.0, 1, finish_s=0.1 * i + self.e2el_s)
            for i in range(level.num_requests)
        )
        run = made.run(records, level.load, count=len(records), key=level.key, seed=level.seed)
        return run, records


def sweeper(folder: Path, driver: Fake, **changes: Any) -> _Sweeper:
    store = Store(folder)
    store.write_manifest(manifest())
    return _Sweeper(driver, store, SweepOptions(**changes), Progress(io.StringIO()), 0)  # type: ignore[arg-type]


def test_rates_are_held_longer_where_answers_take_long(tmp_path: Path) -> None:
    loads = (Closed(concurrency=2), Open(rate_rps=2))
    planned = levels.sweep_levels(Workload(), loads)
    for e2el_s, requests in ((1.0, 120), (9.0, 180)):
        driver = Fake(e2el_s)
        sweeper(tmp_path / str(e2el_s), driver, loads=loads).run(planned, planned, manifest())
        assert [level.num_requests for level in driver.levels] == [20, requests]
        options = SweepOptions(loads=loads, resume=True)
        assert _todo(Store(tmp_path / str(e2el_s)), planned, options) == []
    with pytest.raises(StoreError, match="was measured with 180 requests, this command has 1200"):
        _todo(Store(tmp_path / "9.0"), levels.sweep_levels(Workload(), loads, hold_s=600), options)
    counted = Fake(9.0)
    all_levels = levels.sweep_levels(Workload(), loads, prompts_per_level=30)
    sweeper(tmp_path / "counted", counted, loads=loads, prompts_per_level=30).run(all_levels, all_levels, manifest())
    assert [level.num_requests for level in counted.levels] == [30, 30]


@pytest.mark.parametrize(
    ("kept", "planned", "words"),
    [
        (Closed(concurrency=8), Closed(concurrency=8, per_gpu=2.0), None),
        (Closed(concurrency=8, per_gpu=4.0), Closed(concurrency=8, per_gpu=2.0), None),
        (Open(rate_rps=4), Open(rate_rps=4, burstiness=0.5), "burstiness 1, this command has burstiness 0.5;"),
        (Ramp(start_rps=1, end_rps=8), Ramp(start_rps=2, end_rps=8), "start_rps 1, this command has start_rps 2;"),
        (
            Ramp(start_rps=1, end_rps=8),
            Ramp(start_rps=1, end_rps=8, shape="exponential"),
            "shape linear, this command has shape exponential;",
        ),
    ],
)
def test_a_kept_level_of_another_load_is_refused_by_what_differs(
    kept: Load, planned: Load, words: str | None, tmp_path: Path
) -> None:
    levels_of_both = [levels.sweep_levels(Workload(), [load]) for load in (kept, planned)]
    sweeper(tmp_path, Fake(1.0), loads=(kept,)).run(levels_of_both[0], levels_of_both[0], manifest())
    options = SweepOptions(loads=(planned,), resume=True)
    if words is None:
        assert _todo(Store(tmp_path), levels_of_both[1], options) == []
        return
    with pytest.raises(StoreError, match=f"was measured with {words}"):
        _todo(Store(tmp_path), levels_of_both[1], options)


SEARCH = SloSearchOptions(slo=Slo(ttft_s=0.5), burstiness=0.5)


def test_a_search_of_another_burstiness_is_refused_before_the_first_request(tmp_path: Path) -> None:
    """Levels are named by their rate, and results of searches by the SLO."""
    loads = (Open(rate_rps=4),)
    planned = levels.sweep_levels(Workload(), loads)
    sweeper(tmp_path, Fake(1.0), loads=loads).run(planned, planned, manifest())

    def search(search: SloSearchOptions, store: Store) -> None:
        options = SweepOptions(searches=(search,), resume=True)
        _run_held(options, nowhere(manifest()), store, Progress(io.StringIO()), None)  # type: ignore[arg-type]

    with pytest.raises(StoreError, match=r"rate4\.json was measured with burstiness 1, the search for .* has 0\.5;"):
        search(SEARCH, Store(tmp_path))
    store = Store(tmp_path / "searched")
    store.write_manifest(manifest())
    point = slo_search.LevelSample(rate_rps=1, repeat=0, judged=1000, met=1000)
    alike = SEARCH.model_copy(update={"burstiness": 1.0})
    store.write_search(slo_search.evaluate([point], alike, label="x", repeat=0).answer)
    with pytest.raises(StoreError, match=r"slo-ttft500ms-q0\.95\.json was measured with burstiness 1, the search"):
        search(SEARCH, store)


@pytest.mark.parametrize(
    ("loads", "searches", "words"),
    [
        ((), (SEARCH, SEARCH), "two searches for ttft500ms-q0.95 have one result"),
        ((), (SEARCH, SEARCH.model_copy(update={"burstiness": 1.0, "slo": Slo(tpot_s=0.1)})), "give both one burst"),
        ((Open(rate_rps=2),), (SEARCH,), "the search for ttft500ms-q0.95 has burstiness 0.5, 2 requests/s has 1"),
        ((Open(rate_rps=2, burstiness=0.5), Ramp(start_rps=1, end_rps=2), Closed(concurrency=1)), (SEARCH,), None),
    ],
)
def test_searches_that_would_share_levels_are_refused(
    loads: tuple[Load, ...], searches: tuple[SloSearchOptions, ...], words: str | None
) -> None:
    options = SweepOptions(loads=loads, searches=searches)
    if words is None:
        assert len(build(options, 0)) == len(loads)
        return
    with pytest.raises(UsageError, match=words):
        build(options, 0)


def test_a_closed_loop_is_soaked_for_as_many_requests_as_a_first_round_shows(tmp_path: Path) -> None:
    changes = {"loads": (Closed(concurrency=2),), "soak_s": 60.0, "hold_s": 60.0}
    options, driver = SweepOptions(**changes, resume=True), Fake(0.5)
    (level,) = planned = build(options, 0)
    sweeper(tmp_path, driver, **changes).run(planned, planned, manifest())
    first, held = driver.levels
    pace_rps = 20 / 2.4  # one every 0.1 s, the last takes 0.5 s
    assert (first.num_requests, held.num_requests) == (20, pytest.approx(60 * pace_rps, abs=1))
    assert first.seed != held.seed == level.seed, "no prompt of the first round is sent again"
    (run,) = Store(tmp_path).runs()
    assert run.soak and run.soak.requested_s == 60 and len(run.soak.windows) == 1
    assert _todo(Store(tmp_path), planned, options) == []
    with pytest.raises(StoreError, match="was measured with --soak 1, this command has --soak 2;"):
        _todo(Store(tmp_path), planned, options.model_copy(update={"soak_s": 120.0}))
    with pytest.raises(StoreError, match="was measured with 500 requests, this command has 20"):
        _todo(Store(tmp_path), planned, options.model_copy(update={"soak_s": None}))


def test_only_the_first_round_of_a_soak_is_measured_again(tmp_path: Path) -> None:
    """An hour that ends with a saturated load generator would be another one, and another."""
    for load, requests in ((Closed(concurrency=2), 20), (Open(rate_rps=2), 60)):
        changes = {"loads": (load,), "soak_s": 600.0, "hold_s": 600.0}
        driver = Fake(0.5)
        planned = build(SweepOptions(**changes), 0)
        sweeper(tmp_path / load.kind, driver, **changes).run(planned, planned, manifest())
        assert driver.once == [False, True]
        assert driver.levels[0].num_requests == requests and driver.levels[0].seed != driver.levels[1].seed
        (run,) = Store(tmp_path / load.kind).runs()
        assert run.soak and run.num_requests == driver.levels[1].num_requests >= 1200


class Unsteady(Fake):
    """Its first ``spoiled`` levels are not valid."""

    spoiled = 2

    def measure(self, level: Level, *, once: bool = False) -> tuple[Run, tuple[RequestRecord, ...]]:
        run, records = super().measure(level, once=once)
        gates = ["steady_state"] if len(self.levels) <= self.spoiled else []
        return run.model_copy(update={"validity": failing(*gates)}), records


@pytest.mark.parametrize("load", [Closed(concurrency=2), Open(rate_rps=2)])
def test_an_invalid_soak_is_replaced_by_a_soak(load: Load, tmp_path: Path) -> None:
    changes = {"loads": (load,), "soak_s": 600.0, "hold_s": 600.0, "retry_invalid": True}
    driver = Unsteady(0.5)
    planned = build(SweepOptions(**changes), 0)
    sweeper(tmp_path, driver, **changes).run(planned, planned, manifest())
    assert driver.once == [False, True, False, True] and len({level.seed for level in driver.levels}) == 4
    assert driver.levels[3].num_requests == driver.levels[1].num_requests >= 1200
    (run,) = Store(tmp_path).runs()
    assert run.validity.valid and run.replaces and run.num_requests == driver.levels[3].num_requests
    assert run.soak and run.soak.requested_s == 600


@pytest.mark.parametrize("loads", [(), (Open(rate_rps=2),)])
def test_a_search_is_repeated_as_levels_are(loads: tuple[Load, ...], tmp_path: Path) -> None:
    search = SloSearchOptions(slo=Slo(ttft_s=0.5), max_points=3, start_rps=2)
    options = {"loads": loads, "searches": (search,), "repeats": 2, "prompts_per_level": 30}
    driver = Fake(0.1)
    planned = build(SweepOptions(**options), 0)
    sweeper(tmp_path, driver, **options).run(planned, planned, manifest())
    store = Store(tmp_path)
    assert sorted(each.repeat for each in store.searches()) == [0, 1]
    assert [each.points[0].rate_rps for each in store.searches()] == [2, 2]
    assert len({level.seed for level in driver.levels}) == len(driver.levels) == 6
    assert [run.key.repeat for run in store.runs()].count(1) == 3
    result = _run_held(
        SweepOptions(**options, resume=True),
        nowhere(manifest()),
        store,
        Progress(io.StringIO()),
        None,  # type: ignore[arg-type]
    )
    assert [each.repeat for each in result.searches] == [0, 1] and len(result.runs) == 6


def test_a_search_is_not_forced() -> None:
    search = SloSearchOptions(slo=Slo(ttft_s=0.5))
    with pytest.raises(UsageError, match="--slo goes on from the levels at a rate that the folder has: leave --force"):
        build(SweepOptions(searches=(search,), force=True), 0)


def test_a_finished_level_beside_a_search_is_not_advised_to_be_forced(tmp_path: Path) -> None:
    planned = levels.sweep_levels(Workload(), (Closed(concurrency=2),))
    sweeper(tmp_path, Fake(1.0)).run(planned, planned, manifest())
    search = SloSearchOptions(slo=Slo(ttft_s=0.5))
    for changes, words in (({}, "or --force to"), ({"searches": (search,)}, "finished levels or another --exp-name")):
        with pytest.raises(StoreError, match=words):
            _todo(Store(tmp_path), planned, SweepOptions(**changes))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"loads": (Open(rate_rps=12345.67), Open(rate_rps=12345.68))},
            "two loads have one name, rate12345.7 (12345.67 and 12345.68; a name has six digits): leave one of the two",
        ),
        (
            {"loads": (Closed(concurrency=8), Closed(concurrency=8, per_gpu=2.0))},
            "concurrency 8 is listed twice: leave one of the two out",
        ),
    ],
)
def test_two_loads_of_one_name_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        build(SweepOptions(**options, prompts_per_level=20), 0)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--gpus 8 -c 4 --concurrency-per-gpu 4", None),
        ("-c 4 --concurrency-per-gpu 4", None),
        ("--gpus 8 --concurrency-per-gpu 0.25,0.5", None),
        ("--concurrency-per-gpu 0.25,0.5", None),
        ("--gpus 8 -c 32 --concurrency-per-gpu 4", "concurrency 32 is listed twice"),
        ("-r 12345.67,12345.68 --hold-s 1", "two loads have one name, rate12345.7 "),
    ],
)
def test_loads_per_gpu_are_named_where_the_gpus_are_known(
    flags: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, one GPU is no number to judge them by."""
    asked = False

    def resolved(*args: Any, **more: Any) -> Any:
        nonlocal asked
        asked = True
        raise StoreError("asked")

    monkeypatch.setattr("pdlab.bench.sweep.resolve_target", resolved)
    options = bench.options(["-u", "http://127.0.0.1:9", "-e", "x", *flags.split()])
    with pytest.raises(StoreError if words is None else UsageError, match=words or "asked"):
        run_sweep(options)
    assert asked is (words is None)


def test_a_kept_level_of_the_same_name_and_another_rate_is_refused(tmp_path: Path) -> None:
    kept, planned = (
        levels.sweep_levels(Workload(), (Open(rate_rps=rate),), prompts_per_level=20) for rate in (12345.67, 12345.68)
    )
    sweeper(tmp_path, Fake(1.0), prompts_per_level=20).run(kept, kept, manifest())
    with pytest.raises(StoreError, match=r"with rate_rps 12345\.67, this command has rate_rps 12345\.68;"):
        _todo(Store(tmp_path), planned, SweepOptions(resume=True, prompts_per_level=20))


@pytest.mark.parametrize(
    ("argv", "flag"),
    [("-r 0.5 --soak 1", "soak_s"), ("-r 0.5 --prompts-per-level 3", "prompts_per_level"), ("-r 0.5", None)],
)
def test_the_advice_names_the_flag_that_sets_the_length(argv: str, flag: str | None) -> None:
    assert _length_setting(bench.options(argv.split())) == flag


@pytest.mark.parametrize("loads", [(Closed(concurrency=2),), (Open(rate_rps=2),)])
def test_a_soak_shows_how_pools_fill(loads: tuple[Load, ...], tmp_path: Path) -> None:
    """So they are not filled before it, unless it is requested."""
    for mode, words in (("auto", "not filled first"), ("yes", "filled once"), ("no", "not filled (--fill-cache no)")):
        driver = Fake(0.5)
        driver.to_fill, driver.local, driver.engines = 10_000.0, False, 1

        def fill(requests: int, seed: int, concurrency: int, driver: Fake = driver) -> float:
            driver.to_fill = 0.0
            return 1.0

        driver.fill = fill  # type: ignore[attr-defined]
        made = sweeper(tmp_path / mode, driver, loads=loads, soak_s=60.0, hold_s=60.0, fill_cache=mode)
        stream = io.StringIO()
        made._progress = Progress(stream)
        planned = build(made._options, 0)
        made.run(planned, planned, manifest())
        assert f"KV pools: {words}" in stream.getvalue()


def test_flags_of_a_soak(capsys: pytest.CaptureFixture[str]) -> None:
    options = bench.options(["-r", "2", "--soak", "30"])
    assert (options.soak_s, options.hold_s) == (1800, 1800) and build(options, 0)[0].num_requests == 3600
    assert bench.options(["--concurrency-per-gpu", "4", "--soak", "30"]).soak_s == 1800
    assert bench.main(["--dry-run", "-c", "4", "--soak", "30"]) == 0
    printed = capsys.readouterr().out
    assert (
        "concurrency 4: 40 requests show how many requests take 30 minutes; the load is then held for that time"
        in printed
    )
    assert "KV pools: not filled first" in printed


def test_decode_only_needs_engines_that_fill_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Deployment(model="tiny-gptoss", topology=Collocated(pool=Pool()))
    monkeypatch.setattr(target, "_served_models", lambda url: {"m": {}})

    def resolve(mode: Any, deployment: Deployment | None) -> target.Target:
        known = deployment and running("http://h:1", deployment=deployment)
        monkeypatch.setattr(target, "load_running", lambda url: known)
        return target.resolve_target("http://h:1", workload=Workload(mode=mode), name="x", gpus=1)

    filling = served.model_copy(update={"decode_bench": True})
    resolved = resolve("decode-only", filling)
    codes = [note.code for note in resolved.figure_notes]
    assert codes == ["decode_only_filled", "decode_only_first_group"], "gpt-oss has sliding windows"
    for deployment in (served, None):
        with pytest.raises(UsageError, match=r"--decode-bench, or take --mode decode-approx"):
            resolve("decode-only", deployment)
    for mode in ("mixed", "prefill-only", "decode-approx"):
        with pytest.raises(UsageError, match="fills KV cache instead of computing prompts"):
            resolve(mode, filling)
    assert [note.code for note in resolve("decode-approx", served).figure_notes] == ["decode_approximated"]
    assert resolve("mixed", served).figure_notes == ()


def test_the_decode_bench_flag() -> None:
    args = parse(LaunchSettings, ["--collocated", "--local", "--decode-bench"])
    assert deployment_from(args).decode_bench
    with pytest.raises(UsageError, match="--decode-bench measures decode in collocated engines, not in pd-pack"):
        deployment_from(parse(LaunchSettings, ["--pd-pack", "--local", "--decode-bench"]))
    deployment = Deployment(model="m", topology=Collocated(pool=Pool()))
    filling = deployment.model_copy(update={"decode_bench": True})
    kwargs = engine_kwargs(filling, "collocated", None, cpu=True)
    assert kwargs["kv_transfer_config"]["kv_connector"] == "DecodeBenchConnector"
    assert kwargs["enable_prefix_caching"] is False
    assert "kv_transfer_config" not in engine_kwargs(deployment, "collocated", None, cpu=True)
    assert filling.fingerprint != deployment.fingerprint


def test_the_experiments_one_line() -> None:
    stream = io.StringIO()
    progress = ExperimentProgress([100.0, 100.0], stream)
    progress.visit(0, "pack, repeat 0")
    progress.extend(100, 1)
    progress.level("concurrency 4", 100)
    progress.update(50, 1)
    assert progress.left_s == pytest.approx(150, abs=1)
    progress.level_done("fine")
    progress.visit_done("done", measured=True)
    assert progress.left_s < 1, "the other visit takes no longer than this one did"
    progress.visit(1, "spread, repeat 0")
    progress.visit_done("DID NOT START", measured=False)
    assert progress.left_s == 0
    text = stream.getvalue()
    assert "[1/2] pack, repeat 0: launching (elapsed 0:00, about 3:20 to go)\n" in text
    assert "[1/2] pack, repeat 0: concurrency 4: fine\n" in text
    assert "[2/2] spread, repeat 0: DID NOT START\n" in text


class TestCanaryAfterTheSweep:
    """It is recorded, and wrong answers fail the levels that this sweep measured."""

    def store(self, folder: Path) -> Store:
        store = Store(folder)
        for concurrency in (1, 2):
            sent = [made.record()]
            store.write(made.run(sent, Closed(concurrency=concurrency)), sent)
        store.write_manifest(manifest())
        return store

    def after(self, store: Store, equal: bool | None, monkeypatch: pytest.MonkeyPatch, answers: int = 1) -> Store:
        kept = (canary.CanaryAnswer(tokens=(1,), tops=({1: -0.1},)),) * answers
        aimed = target.Target(
            base_url="http://127.0.0.1:1", model_id="m", tokenizer="m", name="x", manifest=manifest(), answers=kept
        )
        result = CanaryResult(equal=equal, compared=1, detail="x")
        monkeypatch.setattr(canary, "ask_again", lambda *_: result)
        measured = {RunKey(kind="concurrency", value=2)}
        _check_again(aimed, store, measured, Progress(stream=io.StringIO()))
        return store

    def test_wrong_answers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = self.after(self.store(tmp_path), False, monkeypatch)
        assert [run.validity.failed_gates for run in store.runs()] == [(), ("canary",)], "one is of an earlier sweep"
        for run in store.runs():
            store.check_records(run)
        assert [result.equal for result in store.read_manifest().canaries_after] == [False]

    def test_every_sweep_adds_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = self.store(tmp_path)
        before = store.path(RunKey(kind="concurrency", value=2)).read_bytes()
        for equal in (True, True):
            self.after(store, equal, monkeypatch)
        assert len(store.read_manifest().canaries_after) == 2
        assert store.path(RunKey(kind="concurrency", value=2)).read_bytes() == before

    def test_without_answers_of_the_launch_nothing_is_sent(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = self.after(self.store(tmp_path), False, monkeypatch, answers=0)
        assert store.read_manifest().canaries_after == () and all(run.validity.valid for run in store.runs())
