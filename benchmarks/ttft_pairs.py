#!/usr/bin/env python3
"""What a timeline of every request costs, and what an early first token saves: rounds in pairs on one deployment.

``timeline``: requests that ask for one, against requests that do not. ``early-token``: on a deployment launched with
--early-token, requests that have one against the same kind of requests that fall back (they set return_token_ids to
false, which says nothing and is not known to be exact). Rounds alternate (on, off, off, on, ...), prompts are new in
each, and the ratio of each pair has a 95 % interval over pairs. Where the deployment is on local nodes, the CPU time of
their processes per token is compared too: it hears less of what else the machine does. With --texts as many prompts are
asked twice, early and not, and their texts compared. Wants an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.analysis.student import student_t  # noqa: E402
from pdlab.bench.client.timeline_tap import TappedSession  # noqa: E402
from pdlab.cluster import local_nodes  # noqa: E402
from pdlab.deploy.serving.timeline import HEADER  # noqa: E402
from pdlab.results.timeline import RequestTimeline  # noqa: E402

LATE = {"return_token_ids": False}


class Reply(NamedTuple):
    """One streamed answer: seconds, tokens by its usage, its text, and its timeline where it was asked for."""

    ttft_s: float
    second_s: float
    e2el_s: float
    tokens: int
    text: str
    timeline: RequestTimeline | None


async def ask(session: Any, url: str, model: str, prompt: list[int], otl: int, *, told: bool, **more: Any) -> Reply:
    """One greedy streamed completion."""
    found: list[str] = []
    body = {
        "model": model, "prompt": prompt, "max_tokens": otl, "temperature": 0.0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip
    headers = {HEADER: "1"} if told else {}
    times, text, usage, rest = [], "", {}, b""
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
    timeline = RequestTimeline.model_validate(json.loads(found[0]) | {"ttft_s": ttft_s}) if found else None
    return Reply(ttft_s, second_s, time.perf_counter() - began, usage["completion_tokens"], text, timeline)


async def measure(args: argparse.Namespace) -> None:
    import aiohttp

    rng = random.Random(args.seed)

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(10, args.vocabulary) for _ in range(args.itl)] for _ in range(count)]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        async with session.get(f"{args.url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]

        async def load(on: bool) -> tuple[list[Reply], float]:
            todo, replies = prompts(args.requests), list[Reply]()
            early = args.what == "early-token"
            more = LATE if early and not on else {}

            async def place() -> None:
                while todo:
                    prompt = todo.pop()
                    replies.append(await ask(session, args.url, model, prompt, args.otl, told=early or on, **more))

            began = time.perf_counter()
            await asyncio.gather(*(place() for _ in range(args.concurrency)))
            return replies, time.perf_counter() - began

        nodes = local_nodes.running()
        await load(True), await load(False)
        pairs = []
        for number in range(args.pairs):
            both = {}
            for on in (True, False) if number % 2 == 0 else (False, True):
                before_s = cpu_s(nodes)
                replies, seconds = await load(on)
                both[on] = figures(replies, seconds)
                if nodes:
                    tokens = sum(reply.tokens for reply in replies)
                    both[on]["CPU ms per token"] = 1e3 * (cpu_s(nodes) - before_s) / tokens
                print("on " if on else "off", ", ".join(f"{name} {value:.4f}" for name, value in both[on].items()))
            pairs.append(both)
        for name in pairs[0][True].keys() & pairs[0][False].keys():
            told(f"on / off: {name}", [both[True][name] / both[False][name] for both in pairs])
        if args.what == "early-token":
            told(
                "on: TTFT less the front, over server + call + queue + prefill", [both[True]["over"] for both in pairs]
            )
        differ = 0
        for prompt in prompts(args.texts):
            first = await ask(session, args.url, model, prompt, args.otl, told=False)
            second = await ask(session, args.url, model, prompt, args.otl, told=False, **LATE)
            differ += (first.text, first.tokens) != (second.text, second.tokens)
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
    parts = [dict(reply.timeline.parts()) for reply in replies if reply.timeline is not None]
    own = ("server", "call", "prefill_server", "queue", "prefill")
    if parts and all("front" in each for each in parts):
        served = [sum(each.values()) - each["front"] for each in parts]
        least = [sum(each.get(name, 0.0) for name in own) for each in parts]
        found["over"] = statistics.median(served) / statistics.median(least)
    return found


def told(what: str, ratios: list[float]) -> None:
    half = student_t(0.975, len(ratios) - 1) * statistics.stdev(ratios) / len(ratios) ** 0.5
    print(f"{what} {statistics.fmean(ratios):.4f} +- {half:.4f} (95 %, {len(ratios)} pairs of rounds)")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("timeline", "early-token"))
    parser.add_argument("-u", "--url", default="http://127.0.0.1:8000")
    parser.add_argument("-c", "--concurrency", type=int, default=4, help="default %(default)s")
    parser.add_argument("--requests", type=int, default=40, help="per round (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=6, help="default %(default)s")
    parser.add_argument("--itl", type=int, default=512, help="input tokens (default %(default)s)")
    parser.add_argument("--otl", type=int, default=32, help="output tokens (default %(default)s)")
    parser.add_argument("--texts", type=int, default=0, help="prompts to compare texts of (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=1000, help="token ids below it (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(measure(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
