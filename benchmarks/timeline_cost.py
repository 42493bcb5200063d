#!/usr/bin/env python3
"""What the timeline of a request costs in CPU time: in the replicas, and in the load generator.

    python benchmarks/timeline_cost.py
    python benchmarks/timeline_cost.py --profile pd --otl 64     # where the CPU time of a request goes
    python benchmarks/timeline_cost.py --against ../main         # servers of another checkout beside these

The replicas' own code runs in this process, with engine cores that make tokens at no cost (`replica_in_process.py`).
Rounds of requests are of three kinds: *requested* (the header requests timelines), *counted* (no header, as a sweep
sends with --no-timeline: marks and metrics of every request remain), *off* (no mark is kept and nothing is counted). A
turn has a round of each kind and then each again in the opposite order, and turns begin with each kind in turn. What
one kind takes more than another is a figure of a turn; its mean has a 95 % interval by Student's t over turns. CPU time
is that of this process less that of the stand-ins.

The client's part is pdlab's code around vLLM's request function: what it does with the pieces of an answer and with a
request that ends, and what it does when a level is over.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import hashlib
import importlib
import itertools
import os
import pstats
import random
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

from replica_in_process import LABELS, Answer, Replica, StubCore, ask, ask_bare, body_of, replica  # noqa: E402
from untimed_launch import switch_by  # noqa: E402

from pdlab.analysis.intervals import of_repeats  # noqa: E402
from pdlab.bench.client.ended import EndedRequest, EndedRequests, timeline_of  # noqa: E402
from pdlab.bench.client.timeline_tap import TappedSession  # noqa: E402
from pdlab.deploy.serving.timeline import HEADER  # noqa: E402
from pdlab.results.metrics import student_t  # noqa: E402

KINDS = ("requested", "counted", "off", "bare")
PAIRS = (("requested", "counted"), ("counted", "off"), ("requested", "off"), ("counted", "bare"))
COLD_BYTES = 2**23
# CPU time of a request of 512:64 tokens on two cores, by concurrency (docs/serving-path.md).
WHOLE_MS = {4: 123.2, 16: 72.1}


class Load:
    """Requests of one length, and the CPU time that they take. ``off``: whether the servers keep no marks now."""

    off = False

    def __init__(self, served: Replica, itl: int, otl: int, concurrency: int) -> None:
        self.served, self.otl, self.concurrency = served, otl, concurrency
        rng = random.Random(0)
        self._bodies = [body_of([rng.randrange(10, 1000) for _ in range(itl)], otl) for _ in range(concurrency)]
        self._count = itertools.count()

    async def round(self, kind: str) -> tuple[float, list[Answer]]:
        """CPU ms per request, and the answers."""
        Load.off = kind == "off"
        asks = [(HEADER.encode(), b"1")] if kind == "requested" else []
        began_s, stub_s = time.process_time(), self.served.stub_s
        todo = []
        for body in self._bodies:
            headers = [(b"x-request-id", b"r-%d" % next(self._count)), *asks]
            todo.append(
                ask_bare(self.served, body, headers)
                if kind == "bare"
                else ask(self.served.app, self.served.cores[0], body, headers)
            )
        answers = await asyncio.gather(*todo)
        took_s = time.process_time() - began_s - (self.served.stub_s - stub_s)
        return 1e3 * took_s / len(answers), answers

    def check(self, kind: str, answers: Sequence[Answer]) -> None:
        """Raises SystemExit if an answer is not whole, or has a timeline that nobody asked for, or lacks it."""
        for answer in answers:
            body = b"".join(answer.pieces)
            tokens = body.count(b'"finish_reason"')
            comments = body.count(b": pdlab {")
            whole = comments == 0 or (b'"err"' not in body and (b'"first":' in body))
            if (answer.status, tokens, comments, whole) != (200, self.otl, int(kind == "requested"), True):
                raise SystemExit(
                    f"{kind}: HTTP {answer.status}, {tokens} tokens, {comments} timelines: {body[-900:]!r}"
                )


async def turns(load: Load, count: int) -> dict[str, list[float]]:
    """CPU ms per request of each kind, a figure for each turn."""
    figures: dict[str, list[float]] = defaultdict(list)
    for number in range(count):
        first = number % len(KINDS)
        order = KINDS[first:] + KINDS[:first]
        if number // len(KINDS) % 2:
            order = order[::-1]
        found: dict[str, list[float]] = defaultdict(list)
        for kind in (*order, *order[::-1]):
            took_ms, answers = await load.round(kind)
            load.check(kind, answers)
            found[kind].append(took_ms)
        for kind in KINDS:
            figures[kind].append(statistics.fmean(found[kind]))
    return figures


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the ends of its 95 % interval: a difference may be below 0."""
    estimate = of_repeats(values)
    assert estimate.standard_error is not None and estimate.dof is not None
    half = student_t(0.975, estimate.dof) * estimate.standard_error
    return estimate.value, estimate.value - half, estimate.value + half


def row(what: str, values: Sequence[float]) -> None:
    mean, low, high = interval(values)
    shares = ", ".join(
        f"{mean / whole:.3%} ({low / whole:.3%} to {high / whole:.3%}) of {whole:.0f} ms" for whole in WHOLE_MS.values()
    )
    print(f"  {what:18} {mean:.4f} ms ({low:.4f} to {high:.4f}) a request; {shares}", flush=True)


async def measure(kind: str, args: argparse.Namespace) -> None:
    StubCore.forgets = COLD_BYTES if args.cold else 0
    served = await replica(kind, args.ranks)
    load = Load(served, args.itl, args.otl[0], args.concurrency)
    if args.worker:
        await work(served, args)
        return
    switch_by(lambda: Load.off)
    for each in (*KINDS, *KINDS):
        await load.round(each)
    if args.profile:
        await profile(load, args.turns)
        return
    for otl in args.otl:
        load = Load(served, args.itl, otl, args.concurrency)
        for each in (*KINDS, *KINDS):
            await load.round(each)
        gc.collect()
        gc.freeze()  # as Ray Serve does when a replica has started
        found = await turns(load, args.turns)
        print(
            f"{kind}, {args.itl}:{otl} tokens, {args.concurrency} at once, {args.turns} turns; replicas' own CPU time"
        )
        for each in KINDS:
            mean, low, high = interval(found[each])
            print(f"  {each:18} {mean:.4f} ms ({low:.4f} to {high:.4f}) a request")
        for first, second in PAIRS:
            row(f"{first} - {second}", [a - b for a, b in zip(found[first], found[second], strict=True)])
        _, answers = await load.round("requested")
        await of_client(answers[0], otl, args.turns)


class Answered:
    """Stands for aiohttp's session and response: it has an answer already."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.headers: dict[str, str] = {}
        self.content = self
        self._pieces = pieces

    def post(self, **_: Any) -> Any:
        return self

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *error: Any) -> None:
        return None

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


async def work(served: Replica, args: argparse.Namespace) -> None:
    """Do a round for each line of the standard input (its tokens and kind), and print its CPU ms per request."""
    loads = {otl: Load(served, args.itl, otl, args.concurrency) for otl in args.otl}
    for load in loads.values():
        for kind in ("requested", "counted", "requested", "counted"):
            await load.round(kind)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        otl, kind = line.split()
        took_ms, answers = await loads[int(otl)].round(kind)
        loads[int(otl)].check(kind, answers)
        print(took_ms, digest(answers), flush=True)


def digest(answers: Sequence[Answer]) -> str:
    """Of all bytes that clients got, in the pieces in which they came, but for ids, times and timelines."""
    hashed = hashlib.sha256()
    for answer in answers:
        for piece in answer.pieces:
            kept = re.sub(rb'"id":"[^"]*"|"created":[0-9]*|: pdlab [^\n]*\n\n', b"", piece)
            hashed.update(b"%d " % len(kept) + kept)
    return hashed.hexdigest()


def against(kind: str, args: argparse.Namespace) -> None:
    """These servers and those of another checkout, in turns of two rounds each."""
    words = [sys.executable, __file__, "--kinds", kind, "--worker", "--itl", str(args.itl), "-c", str(args.concurrency),
             "--ranks", str(args.ranks), "--otl", *map(str, args.otl), *(["--cold"] if args.cold else [])]  # fmt: skip
    workers = []
    for folder in (ROOT, Path(args.against).resolve()):
        worker = subprocess.Popen(
            words,
            env={**os.environ, "PDLAB_FROM": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        workers.append(worker)
        assert worker.stdout is not None
        while (line := worker.stdout.readline()) != "ready\n":
            if not line:
                raise SystemExit(f"the servers of {folder} did not start")

    seen: set[str] = set()

    def round_of(worker: Any, otl: int, what: str) -> float:
        worker.stdin.write(f"{otl} {what}\n")
        worker.stdin.flush()
        if not (line := worker.stdout.readline()):
            raise SystemExit("a worker has ended")
        took_ms, sent = line.split()
        seen.add(f"{otl} {sent}")
        return float(took_ms)

    for otl in args.otl:
        print(
            f"{kind}, {args.itl}:{otl} tokens, {args.concurrency} at once, {args.turns} turns; these / {args.against}"
        )
        for what in ("requested", "counted"):
            found: dict[int, list[float]] = defaultdict(list)
            for number in range(args.turns):
                order = (0, 1, 1, 0) if number % 2 else (1, 0, 0, 1)
                took: dict[int, float] = defaultdict(float)
                for which in order:
                    took[which] += round_of(workers[which], otl, what) / 2
                for which, ms in took.items():
                    found[which].append(ms)
            mean, low, high = interval([own / other for own, other in zip(found[0], found[1], strict=True)])
            before, after = statistics.fmean(found[1]), statistics.fmean(found[0])
            print(f"  {what:10} {before:.4f} ms before, {after:.4f} after; ratio {mean:.4f} ({low:.4f} to {high:.4f})")
            row(f"{what}, saved", [other - own for own, other in zip(found[0], found[1], strict=True)])
    print(f"  answers of both: {'equal' if len(seen) == len(args.otl) else 'NOT EQUAL'}")
    for worker in workers:
        worker.stdin.close()  # type: ignore[union-attr]
        worker.wait()


async def of_client(answer: Answer, otl: int, count: int) -> None:
    """What pdlab's load generator spends on a timeline, while it sends requests and afterwards."""
    comments: dict[str, str] = {}
    times: dict[str, list[float]] = defaultdict(list)

    async def read(*, tapped: bool) -> None:
        session: Any = Answered(answer.pieces)
        if tapped:
            session = TappedSession(session, lambda text: comments.update({"r": text}))
        async with session.post() as response:
            async for _ in response.content.iter_any():
                pass
        request = EndedRequest(
            1.0, 0.1, 0.2, True, 512, otl, [0.0101] * (otl - 1), "", None, False, 0.0, {}, comments.pop("r", None), None
        )
        ended.add(request)
        if tapped:
            kept.append(request)

    for number in range(count):
        ended, kept = EndedRequests(), list[EndedRequest]()
        for tapped in (True, False, False, True)[:: 1 if number % 2 else -1]:
            began_s = time.process_time()
            for _ in range(20):
                await read(tapped=tapped)
            times["tapped" if tapped else "plain"].append(time.process_time() - began_s)
        began_s = time.process_time()
        lines = [timeline.line() for one in kept if (timeline := timeline_of(one, 0.0)) is not None]
        times["after"].append(1e3 * (time.process_time() - began_s) / len(kept))
        if len(lines) != len(kept):
            raise SystemExit("the load generator has not found the timelines of all answers")
    pairs = [
        1e3 * (sum(times["tapped"][at : at + 2]) - sum(times["plain"][at : at + 2])) / 40
        for at in range(0, 2 * count, 2)
    ]
    row("client, sending", pairs)
    row("client, afterwards", times["after"])


async def profile(load: Load, count: int) -> None:
    """Print where the CPU time of requests goes, by whose code it is and by function."""
    profiler = cProfile.Profile(time.thread_time)
    for each in ("requested", "counted"):
        await load.round(each)
    gc.collect()
    gc.freeze()
    profiler.enable()
    requests = 0
    for _ in range(count):
        requests += len((await load.round("counted"))[1])
    profiler.disable()
    stats: Any = pstats.Stats(profiler)
    whose: dict[str, float] = defaultdict(float)
    rows: list[tuple[Any, ...]] = []
    for (file, line, name), (_, calls, own, whole, _) in stats.stats.items():
        group = owner(file)
        whose[group] += own
        rows.append((own, whole, calls, group, f"{Path(file).name}:{line}({name})"))
    total = sum(whose.values())
    print(f"{1e3 * total / requests:.3f} ms a request under the profiler")
    for group, seconds in sorted(whose.items(), key=lambda pair: -pair[1]):
        print(f"  {group:14} {1e6 * seconds / requests:8.1f} us a request, {seconds / total:.1%}")
    for key, title in ((0, "own time"), (1, "with all that is called")):
        print(f"by {title}: us a request, calls a request, whose, function")
        for function in sorted(rows, key=lambda function: -function[key])[:70]:
            seconds, calls, group, name = function[key], *function[2:]
            print(f"  {1e6 * seconds / requests:8.1f} {calls / requests:7.1f} {group:12} {name}")


def owner(file: str) -> str:
    if "replica_in_process" in file or "timeline_cost" in file or "untimed_launch" in file:
        return "stand-ins"
    for mark in ("pdlab", "ray", "vllm", "starlette", "fastapi", "pydantic", "anyio"):
        if f"/{mark}/" in file.replace("site-packages", "|").split("|")[-1]:
            return mark
    return (
        "built in" if file == "~" else "python" if "/lib/python" in file and "site-packages" not in file else "others"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=LABELS, default=list(LABELS), help="default: all")
    parser.add_argument("--otl", type=int, nargs="+", default=[64, 250], help="output tokens (default 64 250)")
    parser.add_argument("--itl", type=int, default=512, help="input tokens (default %(default)s)")
    parser.add_argument("-c", "--concurrency", type=int, default=4, help="default %(default)s")
    parser.add_argument("--turns", type=int, default=120, help="default %(default)s")
    parser.add_argument("--ranks", type=int, default=1, help="of decode's engine (default %(default)s)")
    parser.add_argument("--cold", action="store_true", help="overwrite the CPU's caches before each step")
    parser.add_argument("--against", metavar="DIR", help="another checkout, whose servers are compared with these")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profile", choices=LABELS, help="where the CPU time of so many --turns goes, no figures")
    args = parser.parse_args(argv)
    if args.turns < 3:
        parser.error(f"--turns {args.turns}: an interval needs 3 turns at least")
    kinds = [args.profile] if args.profile else args.kinds
    if len(kinds) > 1:  # each kind in a process of its own: it changes modules of Ray and vLLM
        words = list(argv if argv is not None else sys.argv[1:])
        for kind in kinds:
            if code := os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, *words, "--kinds", kind]):
                sys.exit(code)
        return
    if args.against:
        against(kinds[0], args)
        return
    importlib.import_module("warnings").simplefilter("ignore")
    importlib.import_module("uvloop").run(measure(kinds[0], args))  # as Ray's replicas, and vLLM's servers
    sys.stdout.flush()
    os._exit(0)  # engines without processes have nothing to end


if __name__ == "__main__":
    main()
