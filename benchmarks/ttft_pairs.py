#!/usr/bin/env python3
"""What a timeline of every request costs, and what an early first token saves: rounds in turn on one deployment.

``timeline``: requests that ask for one (*asked*), against requests that do not (*counted*: marks and metrics alone).
With --launch, which starts a local PD deployment and takes it down, also against a server that keeps no marks and
counts nothing (*off*; what the KV guard notes in the engine core stays, about 7 us per request). ``early-token`` and
``first-token``: on a deployment launched with --early-token or --reuse-first-token, requests whose first token is
prefill's (*early*, *reused*) against the same kind of requests that fall back (*late*: they set a field that means
nothing here and is not known to be exact).

A turn has a round of each kind, and the turns have all orders of the kinds: the ratio of each turn has a 95 % interval
over turns, by a BCa bootstrap. Prompts are new in each. Where the deployment is on local nodes, the CPU time of their
processes per token is compared too: it hears less of what else the machine does. With --texts as many prompts are asked
twice, early and not, and their texts compared. Wants an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import bootstrap

ROOT = Path(__file__).resolve().parents[1]
UNTIMED = str(Path(__file__).with_name("untimed_launch.py"))
sys.path.insert(0, str(ROOT))

from pdlab.bench.client.timeline_tap import TappedSession  # noqa: E402
from pdlab.cluster import local_nodes  # noqa: E402
from pdlab.deploy.serving.timeline import HEADER  # noqa: E402
from pdlab.results.timeline import RequestTimeline  # noqa: E402

LATE = {"spaces_between_special_tokens": False}
KINDS = {"early-token": ("early", "late"), "first-token": ("reused", "late")}
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
    told: str

    @property
    def timeline(self) -> RequestTimeline | None:
        """Read when no round is measured."""
        return RequestTimeline.model_validate(json.loads(self.told) | {"ttft_s": self.ttft_s}) if self.told else None


async def ask(session: Any, url: str, model: str, prompt: list[int], otl: int, *, told: bool, **more: Any) -> Reply:
    """One greedy streamed completion."""
    found: list[str] = []
    body = {
        "model": model, "prompt": prompt, "max_tokens": otl, "temperature": 0.0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip
    headers = {HEADER: "1"} if told else {}
    times, text, rest = list[float](), "", b""
    usage: dict[str, int] = {}
    began = time.perf_counter()
    tapped = TappedSession(session, found.append) if told else session
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
    told_text = found[0] if found else ""
    return Reply(ttft_s, second_s, time.perf_counter() - began, usage["completion_tokens"], text, told_text)


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


async def measure(args: argparse.Namespace, switch: Path | None) -> None:
    import aiohttp

    early = args.what in KINDS
    kinds = KINDS.get(args.what, ("asked", "counted", "off")[: 3 if switch else 2])

    rng = random.Random(args.seed)

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(10, args.vocabulary) for _ in range(args.itl)] for _ in range(count)]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        async with session.get(f"{args.url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]

        async def load(kind: str) -> tuple[list[Reply], float]:
            todo, replies = prompts(args.requests), list[Reply]()
            more = LATE if kind == "late" else {}
            if switch is not None:
                switch.touch() if kind == "off" else switch.unlink(missing_ok=True)

            async def place() -> None:
                while todo:
                    prompt, told = todo.pop(), early or kind == "asked"
                    replies.append(await ask(session, args.url, model, prompt, args.otl, told=told, **more))

            began = time.perf_counter()
            await asyncio.gather(*(place() for _ in range(args.concurrency)))
            return replies, time.perf_counter() - began

        nodes = local_nodes.running()
        for kind in kinds:
            await load(kind)
        if switch is not None:  # off is the last one
            reply = await ask(session, args.url, model, prompts(1)[0], args.otl, told=True)
            if reply.told:
                raise SystemExit("the servers note times although they were told not to")
        rounds = []
        orders = list(itertools.permutations(kinds))  # each kind is in each place, and behind each other kind
        for number in range(args.pairs):
            found = {}
            for kind in orders[number % len(orders)]:
                before_s = cpu_s(nodes)
                replies, seconds = await load(kind)
                wrong = sum(bool(reply.told) is not (early or kind == "asked") for reply in replies)
                if wrong:
                    raise SystemExit(f"{wrong} of {len(replies)} answers ({kind}) have, or lack, a timeline")
                found[kind] = figures(replies, seconds)
                if nodes:
                    tokens = sum(reply.tokens for reply in replies)
                    found[kind]["CPU ms per token"] = 1e3 * (cpu_s(nodes) - before_s) / tokens
                line = ", ".join(f"{name} {value:.4f}" for name, value in found[kind].items())
                print(f"{kind:8} {line}", flush=True)
            rounds.append(found)
        first, *others = kinds
        for kind, base in [*((first, other) for other in others), *([("counted", "off")] if switch else [])]:
            for name in [name for name in rounds[0][kind] if name in rounds[0][base]]:
                ratios = [each[kind][name] / each[base][name] for each in rounds]
                least, most = told_ratio(f"{kind} / {base}: {name}", ratios)
                if name == "tokens/s" and not early:
                    bound = 1 - MOST_COST
                    verdict = "yes" if least >= bound else "no" if most < bound else "not resolved"
                    print(f"  costs at most {MOST_COST:.0%} of tokens/s: {verdict}")
        if args.what == "early-token":
            for name, own in LEAST.items():
                over = [each["early"][name] for each in rounds]
                told_ratio(f"early tokens: TTFT less the front, over {' + '.join(own)}", over)
            print(f"share of early tokens {statistics.fmean(each['early']['early'] for each in rounds):.2f}")
        differ = 0
        for prompt in prompts(args.texts):
            plain = await ask(session, args.url, model, prompt, args.otl, told=False)
            late = await ask(session, args.url, model, prompt, args.otl, told=False, **LATE)
            differ += (plain.text, plain.tokens) != (late.text, late.tokens)
        if args.texts:
            print(f"{differ} of {args.texts} texts differ")


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


def told_ratio(what: str, ratios: list[float]) -> tuple[float, float]:
    """Print the mean over rounds; returns the ends of its interval."""
    drawn = bootstrap((np.array(ratios),), np.mean, method="BCa", random_state=np.random.default_rng(0))
    least, most = drawn.confidence_interval
    print(f"{what} {statistics.fmean(ratios):.4f} ({least:.4f} to {most:.4f}: 95 %, {len(ratios)} turns)")
    return float(least), float(most)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("timeline", *KINDS))
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-u", "--url", default="http://127.0.0.1:8000", help="default %(default)s")
    where.add_argument("--launch", action="store_true", help="timeline: a local PD deployment that can note no times")
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
    if not args.launch:
        asyncio.run(measure(args, None))
        return
    if args.what != "timeline":
        parser.error("--launch goes with timeline alone")
    held, port = local_nodes.hold_port()  # nobody else is given it meanwhile
    args.url = f"http://127.0.0.1:{port}"
    with held, launched(port) as switch:
        asyncio.run(measure(args, switch))


if __name__ == "__main__":
    main()
