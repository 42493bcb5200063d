#!/usr/bin/env python3
"""What a timeline of every request costs, and what an early first token saves: rounds in turn on one deployment.

``timeline``: requests that ask for one (*requested*), against requests that do not (*counted*: marks and metrics only).
With --launch, which starts a local PD deployment and takes it down, also against a server that keeps no marks and
counts nothing (*off*; what the KV guard notes in the engine core stays, about 7 us per request). ``early-token`` and
``first-token``: on a deployment launched with --early-token or --reuse-first-token, requests whose first token is
prefill's (*early*, *reused*) against the same kind of requests that fall back (*late*: they set a field that means
nothing here and is not known to be exact).

``kv-poll`` and ``scheduler``, with --launch, have a deployment for each kind, both up at once: decode that looks for
arrived KV cache between its steps too (*polling*) against decode that does not (*waiting*), and decode with
asynchronous scheduling (*asynchronous*) against decode without it (*synchronous*). vLLM schedules synchronously on
CPUs: `asynchronous_cpu.py` has it do both, with a worker process as on GPUs. With --asynchronous the kinds of
``kv-poll`` are such engines too. Each decode engine's scheduler is printed first, and at the end the reads that were
seen between steps: kinds that are not what they are called are refused.

A turn has a round of each kind, and the turns have all orders of the kinds: the ratio of each turn has a 95 % interval
over turns, by a BCa bootstrap. Prompts are new in each. Where the deployment is on local nodes, the CPU time of their
processes per token is compared too: it hears less of what else the machine does. With --texts as many prompts are asked
of both kinds, and their texts compared. Wants an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import bootstrap

ROOT = Path(__file__).resolve().parents[1]
UNTIMED = str(Path(__file__).with_name("untimed_launch.py"))
BESIDE = str(Path(__file__).with_name("launch_beside.py"))
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from asynchronous_cpu import ASYNCHRONOUS, SYNCHRONOUS, EngineNote, decode_flags, read_notes  # noqa: E402

from pdlab.bench.client.timeline_tap import TappedSession  # noqa: E402
from pdlab.cluster import local_nodes  # noqa: E402
from pdlab.deploy.endpoint import load_running  # noqa: E402
from pdlab.deploy.metrics_page import read_pages, samples  # noqa: E402
from pdlab.deploy.serving.timeline import HEADER  # noqa: E402
from pdlab.results.timeline import RequestTimeline  # noqa: E402

LATE = {"spaces_between_special_tokens": False}
KINDS = {"early-token": ("early", "late"), "first-token": ("reused", "late")}
# Of decode, by comparison and kind.
DEPLOYED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "kv-poll": {"polling": ("--kv-poll-ms", "0.5"), "waiting": ()},
    "scheduler": {"asynchronous": (), "synchronous": ("--d-engine-arg", "async_scheduling=false")},
}
# Where decode's steps are waited for: the medians of these parts are compared.
STEPS = ("step_lag", "wait", "first_step")
MOST_COST = 0.01  # of tokens/s
# What a first token needs at least: the prefilling engine, and with it the servers and the call between them.
LEAST = {
    "over engine": ("queue", "prefill"),
    "over servers": ("server", "call", "prefill_server", "queue", "prefill"),
}


class Reply(NamedTuple):
    """One streamed answer: seconds, tokens by its usage, its text, and its timeline's JSON (empty: none came)."""

    ttft_s: float
    second_s: float
    e2el_s: float
    tokens: int
    text: str
    timeline_json: str

    @property
    def timeline(self) -> RequestTimeline | None:
        """Read when no round is measured."""
        return (
            RequestTimeline.model_validate(json.loads(self.timeline_json) | {"ttft_s": self.ttft_s})
            if self.timeline_json
            else None
        )


async def ask(session: Any, url: str, model: str, prompt: list[int], otl: int, *, timed: bool, **more: Any) -> Reply:
    """One greedy streamed completion."""
    found: list[str] = []
    body = {
        "model": model, "prompt": prompt, "max_tokens": otl, "temperature": 0.0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip
    headers = {HEADER: "1"} if timed else {}
    times, text, rest = list[float](), "", b""
    usage: dict[str, int] = {}
    began = time.perf_counter()
    tapped = TappedSession(session, found.append) if timed else session
    async with tapped.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise SystemExit(f"HTTP {response.status}: {await response.text()}")
        async for piece in response.content.iter_any():
            now = time.perf_counter()
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    chunk = json.loads(event[6:])
                    usage = chunk.get("usage") or usage
                    if chunk["choices"]:
                        times.append(now - began)
                        text += chunk["choices"][0]["text"]
    ttft_s, second_s = times[0], times[1] if len(times) > 1 else math.nan
    timeline_text = found[0] if found else ""
    return Reply(ttft_s, second_s, time.perf_counter() - began, usage["completion_tokens"], text, timeline_text)


class Kind(NamedTuple):
    """Requests to compare: to which server, on which local nodes (None: elsewhere), with which further fields, and
    whether with a timeline. ``off``: while they are sent, the servers note no times."""

    name: str
    url: str
    nodes: Any = None
    more: Mapping[str, Any] = {}
    timed: bool = True
    off: bool = False


class Deployed(NamedTuple):
    """A deployment that serves one kind: its records are in a cache folder of their own, so that two are up at once."""

    kind: Kind
    cache: Path
    notes: Path


@contextlib.contextmanager
def records_in(cache: Path) -> Iterator[None]:
    """Have pdlab read and write its records of deployments there."""
    before = os.environ.get("PDLAB_CACHE_DIR")
    os.environ["PDLAB_CACHE_DIR"] = str(cache)
    try:
        yield
    finally:
        del os.environ["PDLAB_CACHE_DIR"]
        if before is not None:
            os.environ["PDLAB_CACHE_DIR"] = before


@contextlib.contextmanager
def deployed(name: str, flags: Sequence[str], *, worker_process: bool) -> Iterator[Deployed]:
    """A local PD deployment with those flags. ``worker_process``: see `asynchronous_cpu.decode_flags`."""
    held, port = local_nodes.hold_port()  # nobody else is given it meanwhile
    with held, tempfile.TemporaryDirectory(prefix=f"pdlab-{name}-") as folder:
        cache, notes = Path(folder) / "cache", Path(folder) / "notes"
        notes.mkdir()
        launcher = [sys.executable, "launch_gptoss.py", "--port", str(port)]
        more = [*flags, *(decode_flags(notes) if worker_process else [])]
        with records_in(cache):
            env = dict(os.environ)
        try:
            start = [sys.executable, BESIDE, "--port", str(port), "--pd-spread", "--local", "--detach", *more]
            subprocess.run(start, check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
            with records_in(cache):
                nodes = local_nodes.running()
            yield Deployed(Kind(name, f"http://127.0.0.1:{port}", nodes), cache, notes)
        finally:
            # Not checked: nothing may serve after a failed launch, whose error is the one to see.
            subprocess.run([*launcher, "--shutdown"], check=False, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)


def seen_between_steps(of: Deployed) -> float:
    """Reads of KV cache whose end decode saw before a step's output reported it, since the deployment's start."""
    with records_in(of.cache):
        running = load_running(of.kind.url)
    assert running is not None
    pages = read_pages(running.metrics_urls)
    return sum(each.value for page in pages for each in samples(page, lambda name: "guard_reported_early" in name))


def check_schedulers(found: Mapping[str, Sequence[EngineNote]]) -> None:
    """Print what decode of each kind runs; raises SystemExit where it differs from the name of the kind."""
    for name, notes in found.items():
        print(f"{name}: {'; '.join(map(str, notes))}")
        wanted = SYNCHRONOUS if name == "synchronous" else ASYNCHRONOUS
        if set(notes) != {wanted}:
            raise SystemExit(f"{name}: decode is to have {wanted}")


def compare_deployed(args: argparse.Namespace) -> None:
    """Launch a deployment for each kind, and compare them."""
    own_worker = args.what == "scheduler" or args.asynchronous
    with contextlib.ExitStack() as stack:
        each = [
            stack.enter_context(deployed(name, flags, worker_process=own_worker))
            for name, flags in DEPLOYED[args.what].items()
        ]
        if own_worker:
            check_schedulers({one.kind.name: read_notes(one.notes) for one in each})
        asyncio.run(measure(args, [one.kind for one in each], None))
        if args.what == "kv-poll":
            seen = {one.kind.name: seen_between_steps(one) for one in each}
            print("reads seen between steps: " + ", ".join(f"{name} {count:.0f}" for name, count in seen.items()))
            if not seen["polling"] or seen["waiting"]:
                raise SystemExit("only the decode engine that polls is to see reads between its steps")


@contextlib.contextmanager
def launched(port: int) -> Iterator[Path]:
    """A local PD deployment at that port; the path of the file that keeps its servers from noting times."""
    launcher = [sys.executable, "launch_gptoss.py", "--port", str(port)]
    with tempfile.TemporaryDirectory(prefix="pdlab-ttft-pairs-") as folder:
        switch = Path(folder) / "off"
        start = [sys.executable, UNTIMED, str(switch), "--pd-spread", "--local", "--detach", "--port", str(port)]
        try:
            subprocess.run(start, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            yield switch
        finally:
            subprocess.run([*launcher, "--shutdown"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def kinds_at(args: argparse.Namespace, switch: Path | None) -> list[Kind]:
    """The kinds of one deployment."""
    nodes = local_nodes.running()
    if args.what in KINDS:
        first, late = KINDS[args.what]
        return [Kind(first, args.url, nodes), Kind(late, args.url, nodes, LATE)]
    kinds = [Kind("requested", args.url, nodes), Kind("counted", args.url, nodes, timed=False)]
    return [*kinds, Kind("off", args.url, nodes, timed=False, off=True)] if switch is not None else kinds


async def measure(args: argparse.Namespace, kinds: Sequence[Kind], switch: Path | None) -> None:
    import aiohttp

    rng = random.Random(args.seed)

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(10, args.vocabulary) for _ in range(args.itl)] for _ in range(count)]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        async with session.get(f"{kinds[0].url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]

        async def load(kind: Kind) -> tuple[list[Reply], float]:
            todo, replies = prompts(args.requests), list[Reply]()
            if switch is not None:
                switch.touch() if kind.off else switch.unlink(missing_ok=True)

            async def place() -> None:
                while todo:
                    prompt = todo.pop()
                    replies.append(await ask(session, kind.url, model, prompt, args.otl, timed=kind.timed, **kind.more))

            began = time.perf_counter()
            await asyncio.gather(*(place() for _ in range(args.concurrency)))
            return replies, time.perf_counter() - began

        for kind in kinds:
            await load(kind)
        if switch is not None:  # off is the last one
            reply = await ask(session, kinds[0].url, model, prompts(1)[0], args.otl, timed=True)
            if reply.timeline_json:
                raise SystemExit("the servers note times although the switch is off")
        rounds = []
        orders = list(itertools.permutations(kinds))  # each kind is in each place, and behind each other kind
        for number in range(args.pairs):
            found = {}
            for kind in orders[number % len(orders)]:
                before_s = cpu_s(kind.nodes)
                replies, seconds = await load(kind)
                wrong = sum(bool(reply.timeline_json) is not kind.timed for reply in replies)
                if wrong:
                    raise SystemExit(f"{wrong} of {len(replies)} answers ({kind.name}) have, or lack, a timeline")
                mine = found[kind.name] = figures(replies, seconds)
                if kind.nodes:
                    tokens = sum(reply.tokens for reply in replies)
                    mine["CPU ms per token"] = 1e3 * (cpu_s(kind.nodes) - before_s) / tokens
                if args.what in DEPLOYED:
                    mine |= waits(replies)
                line = ", ".join(f"{name} {value:.4f}" for name, value in mine.items())
                print(f"{kind.name:8} {line}", flush=True)
            rounds.append(found)
        first, *others = (kind.name for kind in kinds)
        for kind_name, base in [*((first, other) for other in others), *([("counted", "off")] if switch else [])]:
            compare(rounds, kind_name, base, costs=args.what == "timeline")
        if args.what == "early-token":
            for name, own in LEAST.items():
                over = [each["early"][name] for each in rounds]
                print_mean(f"early tokens: TTFT less the front, over {' + '.join(own)}", over)
            print(f"share of early tokens {statistics.fmean(each['early']['early'] for each in rounds):.2f}")
        differ = 0
        one, other = kinds[0], kinds[-1]
        for prompt in prompts(args.texts):
            texts = [await ask(session, at.url, model, prompt, args.otl, timed=False, **at.more) for at in (one, other)]
            differ += (texts[0].text, texts[0].tokens) != (texts[1].text, texts[1].tokens)
        if args.texts:
            print(f"{differ} of {args.texts} texts differ")


def compare(rounds: Sequence[Mapping[str, Mapping[str, float]]], kind: str, base: str, *, costs: bool) -> None:
    """Print the figures of a kind divided by those of another one, and the difference of parts. ``costs``: with a
    verdict on tokens/s."""
    for name in [name for name in rounds[0][kind] if name in rounds[0][base]]:
        pairs = [(each[kind][name], each[base][name]) for each in rounds]
        if name.partition(" ")[0] in STEPS:
            for one, values in ((kind, [mine for mine, _ in pairs]), (base, [theirs for _, theirs in pairs])):
                print_mean(f"{one}: {name}", values)
            print_mean(f"{kind} - {base}: {name}", [mine - theirs for mine, theirs in pairs])
            continue
        least, most = print_mean(f"{kind} / {base}: {name}", [mine / theirs for mine, theirs in pairs])
        if name == "tokens/s" and costs:
            bound = 1 - MOST_COST
            verdict = "yes" if least >= bound else "no" if most < bound else "not resolved"
            print(f"  costs at most {MOST_COST:.0%} of tokens/s: {verdict}")


def cpu_s(nodes: Any) -> float:
    """CPU time of all processes of the local nodes until now."""
    import psutil

    total = 0.0
    for pid in local_nodes.processes(nodes) if nodes else ():
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def figures(replies: list[Reply], seconds: float) -> dict[str, float]:
    """Of one round."""
    found = {
        "tokens/s": sum(reply.tokens for reply in replies) / seconds,
        "TTFT p50 s": statistics.median(reply.ttft_s for reply in replies),
        "second token p50 s": statistics.median(reply.second_s for reply in replies),
        "E2EL p50 s": statistics.median(reply.e2el_s for reply in replies),
    }
    timelines = [timeline for reply in replies if (timeline := reply.timeline) is not None and timeline.early]
    if timelines:  # the others' first token is decode's
        parts = [dict(timeline.parts()) for timeline in timelines]
        served = statistics.median(sum(each.values()) - each["front"] for each in parts)
        found["early"] = len(timelines) / len(replies)
        for name, own in LEAST.items():
            found[name] = served / statistics.median(sum(each.get(part, 0.0) for part in own) for each in parts)
    return found


def waits(replies: Sequence[Reply]) -> dict[str, float]:
    """Medians of the parts `STEPS` of one round, over the requests whose KV cache decode has read."""
    parts = [dict(line.parts()) for reply in replies if (line := reply.timeline) is not None and line.path == "pd"]
    if not parts:
        raise SystemExit("decode has read no KV cache in this round: no step waits for one")
    return {f"{name} p50 ms": 1e3 * statistics.median(each.get(name, 0.0) for each in parts) for name in STEPS}


def print_mean(what: str, values: Sequence[float]) -> tuple[float, float]:
    """Print the mean over rounds; returns the ends of its interval."""
    least, most = min(values), max(values)
    if least < most:  # BCa divides by the spread
        drawn = bootstrap((np.array(values),), np.mean, method="BCa", random_state=np.random.default_rng(0))
        least, most = drawn.confidence_interval
    print(f"{what} {statistics.fmean(values):.4f} ({least:.4f} to {most:.4f}: 95 %, {len(values)} turns)")
    return float(least), float(most)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("timeline", *KINDS, *DEPLOYED))
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-u", "--url", default="http://127.0.0.1:8000", help="default %(default)s")
    where.add_argument(
        "--launch", action="store_true", help="local PD deployments of its own; not for early and first tokens"
    )
    parser.add_argument("--asynchronous", action="store_true", help="kv-poll: decode with asynchronous scheduling")
    parser.add_argument("-c", "--concurrency", type=int, default=4, help="default %(default)s")
    parser.add_argument("--requests", type=int, default=40, help="per round (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=6, help="rounds of each kind (default %(default)s)")
    parser.add_argument("--itl", type=int, default=512, help="input tokens (default %(default)s)")
    parser.add_argument("--otl", type=int, default=32, help="output tokens (default %(default)s)")
    parser.add_argument("--texts", type=int, default=0, help="prompts to compare texts of (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=1000, help="token ids below it (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.pairs < 3:
        parser.error(f"--pairs {args.pairs}: an interval needs 3 rounds at least")
    if args.asynchronous and args.what != "kv-poll":
        parser.error("--asynchronous goes with kv-poll only")
    if (args.launch and args.what in KINDS) or (not args.launch and args.what in DEPLOYED):
        parser.error(f"{args.what} goes {'with' if args.what in DEPLOYED else 'without'} --launch")
    if args.what in DEPLOYED:
        compare_deployed(args)
    elif args.launch:
        held, port = local_nodes.hold_port()  # nobody else is given it meanwhile
        args.url = f"http://127.0.0.1:{port}"
        with held, launched(port) as switch:
            asyncio.run(measure(args, kinds_at(args, switch), switch))
    else:
        asyncio.run(measure(args, kinds_at(args, None), None))


if __name__ == "__main__":
    main()
