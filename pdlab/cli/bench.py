"""Command line of the sweep: ``./run_bm.sh`` or ``python -m pdlab bench``. Its exit codes are in its help."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from pdlab.bench.fill import planned
from pdlab.bench.levels import FINAL_HOLD_S, held_s, requests_within
from pdlab.bench.options import ALL_RATES_RPS, BenchSettings, distinct
from pdlab.bench.slo_search import SloSearchOptions
from pdlab.bench.sweep import SweepOptions, SweepResult, build, repeated_searches, run_sweep, with_loads
from pdlab.bench.target import check_name, normal_url
from pdlab.bench.traffic import read_traffic, replayed
from pdlab.core import defaults
from pdlab.core.arguments import MAX_HOLD_S, MAX_LOAD, SLO_QUANTILE
from pdlab.core.command_lines import command_line, resumed
from pdlab.core.commands import typed
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import NOT_CLEAN, exit_code, stop_by_signals
from pdlab.core.mixes import parse_mixes
from pdlab.core.output_paths import check_folder
from pdlab.core.schema import validate
from pdlab.core.settings import flag_names, given_of, parse
from pdlab.core.text import aligned, counted, duration, ms
from pdlab.core.workload import Closed, Load, Open, Ramp, Replay, parse_slo, title, workload_of_flags
from pdlab.deploy.endpoint import reach
from pdlab.results.schema import Distribution, Run, note_texts


def options(argv: Sequence[str]) -> SweepOptions:
    """The sweep of a command line, without any I/O. Raises UsageError."""
    return sweep_of(parse(BenchSettings, argv), argv)


def sweep_of(settings: BenchSettings, argv: Sequence[str]) -> SweepOptions:
    """The sweep of the settings. Raises UsageError."""
    requests = dict(settings.requests)
    if settings.replay_file is not None:
        requests["lengths"] = read_traffic(settings.replay_file)
    if settings.mixes is not None:
        every = "" if settings.mix_every is None else f",every={settings.mix_every:g}"
        requests["lengths"] = parse_mixes(f"{settings.mixes}{every}")
    workload = workload_of_flags(requests)
    searches = _searches(settings)
    loads = _loads(settings, implied=not searches)
    if (lengths := replayed(workload)) is not None:
        loads = (Replay(speed=lengths.speed),)
    soak_s = _soak_s(settings, loads)
    timed = bool(searches) or any(not isinstance(load, Closed) for load in loads)
    return settings.passed_to(
        SweepOptions,
        loads=loads,
        hold_s=soak_s or _hold_s(settings, timed=timed),
        searches=searches,
        workload=workload,
        command=typed("bench", *argv),
    )


def _soak_s(settings: BenchSettings, loads: Sequence[Load]) -> float | None:
    """Seconds of --soak; None without it. Raises UsageError for flags that do not go with one load held for long."""
    if settings.soak_s is None:
        return None
    many = len(loads) + len(settings.per_gpu) != 1
    if many or any(isinstance(load, Ramp) for load in loads) or settings.slo is not None:
        raise UsageError("--soak holds one load: give one --concurrency or one --request-rate, and no --ramp or --slo")
    if unused := given_of(settings, ("hold_s", "final", "smoke", "prompts_per_level", "repeats")):
        raise UsageError(f"--soak sets how long one load is held: leave {unused[0]} out")
    if settings.soak_s > MAX_HOLD_S:
        raise UsageError(f"--soak {settings.soak_s / 60:g}: a load is held for at most {duration(MAX_HOLD_S)}, a day")
    return settings.soak_s


def _hold_s(settings: BenchSettings, *, timed: bool) -> float:
    flag, held = "--final" if settings.final else "--hold-s", given_of(settings, ("hold_s",))
    if not settings.final and not held:
        return settings.hold_s
    if settings.final and held:
        raise UsageError(f"--final holds every rate for {FINAL_HOLD_S:g} s: leave --hold-s out")
    if settings.prompts_per_level is not None:
        raise UsageError(
            f"{flag} holds a rate for a time, --prompts-per-level for a number of requests: give one of the two"
        )
    if settings.smoke:
        raise UsageError(f"--smoke is one short level: leave {flag} out")
    if not timed:
        raise UsageError(f"{flag} belongs to request rates, ramps and --slo: give one of these, or leave it out")
    if settings.final:
        return FINAL_HOLD_S
    return settings.hold_s


def _searches(settings: BenchSettings) -> tuple[SloSearchOptions, ...]:
    if settings.slo is None:
        return ()
    quantile = settings.share.get("quantile", SLO_QUANTILE)
    fields = {"slo": parse_slo(settings.slo, quantile), **settings.search, **settings.arrivals}
    if settings.prompts_per_level is not None:
        fields["requests"] = settings.prompts_per_level
    names = flag_names(BenchSettings) | flag_names(BenchSettings, "search") | {"requests": "--prompts-per-level"}
    return (validate(SloSearchOptions, fields, where="--slo", names=names),)


def _loads(settings: BenchSettings, *, implied: bool) -> tuple[Load, ...]:
    of_kind = {
        "concurrency": ("concurrency", "per_gpu"),
        "request-rate": ("request_rate",),
        "ramp": ("ramp", "growth"),
    }
    named = [kind for kind, names in of_kind.items() if given_of(settings, names)]
    kind = settings.type or (named[-1] if len(named) == 1 else "concurrency")
    for other, names in of_kind.items():
        if other != kind and (wrong := given_of(settings, names)):
            if settings.type is not None:
                raise UsageError(f"{wrong[0]} is for --type {other}, not for --type {kind}: leave one of the two out")
            first = given_of(settings, of_kind[next(each for each in named if each != other)])[0]
            raise UsageError(f"{first} and {wrong[0]} exclude each other: leave one of the two out")
    if settings.arrivals and kind == "concurrency" and settings.slo is None:
        raise UsageError("--burstiness is for arrivals at a rate: give --request-rate, not --concurrency")
    if not implied and settings.type is None and not named:
        return ()  # only a search
    if kind == "concurrency":
        if settings.concurrency is None and settings.per_gpu:
            return ()
        return tuple(Closed(concurrency=value) for value in settings.concurrency or defaults.CONCURRENCIES)
    if kind == "ramp":
        if settings.ramp is None:
            raise UsageError("--type ramp needs --ramp START:END, for example --ramp 1:16")
        return parse_ramps(settings.ramp, **settings.growth, **settings.arrivals)
    return tuple(Open(rate_rps=value, **settings.arrivals) for value in settings.request_rate or ALL_RATES_RPS)


def table(runs: Sequence[Run]) -> str:
    """The levels as text: figures of whole runs, and the output rate of the steady window."""
    header = (
        "level", "ok/sent", "req/s", "out tok/s", "steady", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "E2EL p50 ms"
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [header]
    for run in runs:
        whole = run.whole
        rows.append(
            (
                run.key.stem,
                f"{run.completed}/{run.num_requests}",
                f"{whole.requests_per_s:.2f}",
                f"{whole.output_tokens_per_s:.1f}",
                f"{run.steady.output_tokens_per_s:.1f}" if run.steady else "-",
                *(_percentile(run, whole.ttft, q) for q in ("p50", "p99")),
                *(_percentile(run, whole.tpot, q) for q in ("p50", "p99")),
                _percentile(run, whole.e2el, "p50"),
            )
        )
    lines = aligned(rows, left=(0,))
    for run in runs:
        if not run.validity.valid:
            lines.append(f"INVALID {run.key.stem}: {'; '.join(run.validity.reasons)}")
        if run.replaces:
            lines.append(
                f"measured twice: {run.key.stem}; the first result was not valid ({'; '.join(run.replaces.reasons)}) "
                f"and is kept in {run.replaces.file}"
            )
    fresh = [run.key.stem for run in runs if run.pool_age is not None and run.pool_age < 1]
    if fresh:
        which = "all levels" if len(fresh) == len(runs) else ", ".join(fresh)
        lines.append(f"on fresh KV pools (given fewer tokens than they hold when the level began): {which}")
    soaks = {run.key.stem: run.soak for run in runs if run.soak}
    if soaks:
        from pdlab.report.soaks import changes

        lines += [
            f"{name} over {counted(len(soak.windows), 'minute')}: {changes(soak)}" for name, soak in soaks.items()
        ]
    return "\n".join(lines)


def _percentile(run: Run, values: Distribution | None, name: str) -> str:
    """A percentile of the whole run in ms; ``-`` for a tail that too few requests lie beyond."""
    from pdlab.analysis.intervals import carried
    from pdlab.analysis.requests import judged

    return ms(values.percentiles_s[name] if values and carried(name, judged(run, run.whole)) else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    stop_by_signals()

    def run() -> int:
        settings = parse(BenchSettings, argv)
        sweep_options = sweep_of(settings, argv)
        check_folder(sweep_options.out, "--out")
        check_name(sweep_options.name)
        if settings.dry_run:
            print(describe(sweep_options))
            return 0
        sweep_options = _started(sweep_options)
        with reach(normal_url(sweep_options.base_url)):
            result = run_sweep(sweep_options)
        report(result)
        return 0 if result.valid else NOT_CLEAN

    return exit_code(run, resume=resumed("bench", argv))


def _started(sweep_options: SweepOptions) -> SweepOptions:
    searches = []
    for search in sweep_options.searches:
        if search.start_from is not None:
            from pdlab.cli.slo_start import from_plan

            search, words = from_plan(search, sweep_options.workload, normal_url(sweep_options.base_url))
            print(words, file=sys.stderr)
        searches.append(search)
    return sweep_options.model_copy(update={"searches": tuple(searches)})


def describe(sweep: SweepOptions) -> str:
    """What a sweep would measure, in words, without a request to the server. Raises UsageError as the sweep would."""
    w = sweep.workload
    lines = [f"dry run: nothing is sent to {normal_url(sweep.base_url)}"]
    lines.append(f"workload: {w.mode} {w.label}, seed {w.seed}")
    lines.append(f"KV pools: {planned(sweep.fill_cache, w, smoke=sweep.smoke, soak=sweep.soak_s is not None)}")
    sweep = with_loads(sweep, sweep.gpus) if sweep.gpus is not None else sweep
    lines += [
        f"  {counted(value, 'request')} in flight per GPU (how many GPUs is not known: --gpus N)"
        for value in sweep.per_gpu
    ]
    for level in build(sweep, attempt=0):
        held = ""
        if (lengths := replayed(w)) is not None:
            took = duration(lengths.least_s)
            held = f" of {counted(lengths.sessions, 'session')}; the replay takes at least {took}"
        if isinstance(level.load, Open | Ramp):
            held = _held(sweep, level.load, level.num_requests)
        if sweep.soak_s is not None and not isinstance(level.load, Closed):
            held += ", after a first round that is not kept"
        elif sweep.soak_s is not None:
            held = f" show how many requests take {duration(sweep.soak_s)}; the load is then held for that time"
        repeat = f", repeat {level.repeat}" if level.repeat else ""
        lines.append(f"  {title(level.load)}{repeat}: {counted(level.num_requests, 'request')}{held}")
    for search, number in repeated_searches(sweep):
        start = "the rates measured before; without any, half of what closed loops reached, or 1"
        if search.start_from:
            start = "what the simulator finds"
        elif search.start_rps:
            start = f"{search.start_rps:g} requests/s"
        which = f", repeat {number}" if number else ""
        lines.append(f"  highest rate under {search.slo.label}{which}, from {start}:")
        held = "" if sweep.prompts_per_level is not None else f" and held for {held_s(w, sweep.hold_s):.12g} s"
        lines.append(
            f"    at most {counted(search.max_points, 'level')}, each of at least "
            f"{counted(search.requests_needed, 'request')}{held}, to within "
            f"{search.resolution:.0%} at {search.confidence:.0%} confidence"
        )
    lines.append(f"results: {sweep.out / sweep.name if sweep.name else f'{sweep.out}/(label of what is deployed)'}")
    return "\n".join(lines)


def _held(sweep: SweepOptions, load: Open | Ramp, requests: int) -> str:
    """How long a rate lasts, in words: the fewest requests of a level may take longer than a rate is held."""
    arrive_s = round(sweep.workload.mean_duration_s(load, requests), 1)
    if sweep.prompts_per_level is not None or sweep.smoke:
        return f", which arrive in {arrive_s:.12g} s"
    seconds = held_s(sweep.workload, sweep.hold_s)
    if requests > requests_within(load, sweep.workload, seconds):
        seconds = arrive_s
    return f", held for {seconds:.12g} s, or 10 times E2EL where that is longer"


def report(result: SweepResult) -> None:
    """Print the sweep's table and the next command."""
    skipped = len(result.runs) - result.measured
    print(table(result.runs))
    for search in result.searches:
        print(f"SLO {search.title}: {search.detail}")
    for note in note_texts(result.runs):
        print(f"note: {note}")
    if skipped > 0:
        print(f"{skipped} of {counted(len(result.runs), 'level was', 'levels were')} already measured and skipped")
    print(f"results: {result.folder}")
    print(f"next: {command_line('viz', exps=(result.folder,), view={'normalized': True})}")


def parse_ramps(text: str, **options: Any) -> tuple[Ramp, ...]:
    """``1:16,2:8``: ramps from START to END requests/s, with other fields of theirs. Raises UsageError."""
    ramps = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)\s*", part)
        if not match or not all(0 < float(value) <= MAX_LOAD for value in match.groups()):
            raise UsageError(f"--ramp: expected START:END in requests/s above 0, such as 1:16, got {text!r}")
        ramps.append(Ramp(start_rps=float(match[1]), end_rps=float(match[2]), **options))
    distinct("--ramp", [ramp.end_rps for ramp in ramps])
    return tuple(ramps)
