"""Two bare vLLM API servers, prefill and decode, that can be killed, stopped and started again, with or without the KV
guard; and what becomes of requests whose prefill was answered before something went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from bare_pair import MODEL, tiny_model  # noqa: E402

from pdlab.cluster.local_nodes import hold_port  # noqa: E402
from pdlab.deploy.canary import CanaryAnswer, compare, read_answer  # noqa: E402
from pdlab.deploy.metrics_page import samples  # noqa: E402
from pdlab.deploy.serve_config import (  # noqa: E402
    KV_GUARD_CONNECTOR,
    KV_GUARD_DEADLINE,
    KV_GUARD_SCHEDULER,
    cpu_engine_kwargs,
    cpu_env,
)

POLL_S = 0.05
START_LIMIT_S = 300.0
ANSWER_TOKENS = 16
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
# What Ray Serve LLM asks prefill with.
PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class FaultyPair:
    """``lease_s``: for how long prefill keeps blocks that nobody reads; ``deadline_s``: the guard's; ``kv_bytes``: the
    KV pool of each. Logs of the servers are appended to files in ``logs``."""

    def __init__(
        self, logs: Path, *, guarded: bool, lease_s: int = 12, deadline_s: float = 10.0, kv_bytes: int = 96 * 2**20
    ) -> None:
        self.guarded = guarded
        self.lease_s = lease_s
        self.deadline_s = deadline_s
        self.kv_bytes = kv_bytes
        self.urls: dict[str, str] = {}
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._held: list[socket.socket] = []
        self._ports: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> FaultyPair:
        self._logs.mkdir(parents=True, exist_ok=True)
        for role in ROLES:
            ports = []
            for _ in range(2):
                held, port = hold_port()
                self._held.append(held)
                ports.append(port)
            self._ports[role] = (ports[0], ports[1])
            self.urls[role] = f"http://127.0.0.1:{ports[0]}"
        try:
            for role in ROLES:
                self.start(role)
            for role in ROLES:
                self.wait(role)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + 10
        while any(process.poll() is None for process in self._processes.values()) and time.monotonic() < until:
            time.sleep(POLL_S)
        for role in list(self._processes):
            self.kill(role)
        for held in self._held:
            held.close()

    def start(self, role: str) -> None:
        """Start a server, and do not wait for it."""
        kwargs: dict[str, Any] = {**cpu_engine_kwargs(), "max_model_len": 4096, "distributed_executor_backend": "uni"}
        kwargs["kv_cache_memory_bytes"] = self.kv_bytes
        extra: dict[str, Any] = {"backends": ["UCX"], "kv_lease_duration": self.lease_s}
        transfer = {"kv_connector": "NixlConnector", "kv_role": ROLES[role], "kv_buffer_device": "cpu"}
        if self.guarded:
            kwargs["scheduler_cls"] = KV_GUARD_SCHEDULER
            transfer["kv_connector_module_path"] = KV_GUARD_CONNECTOR
            extra[KV_GUARD_DEADLINE] = self.deadline_s
        port, side_channel = self._ports[role]
        env = {**os.environ, **cpu_env(), "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)}
        flags: list[str] = []
        for key, value in kwargs.items():
            flags += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny_model(),
            "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), *flags,
            "--disable-uvicorn-access-log",
            "--kv-transfer-config", json.dumps({**transfer, "kv_connector_extra_config": extra}),
        ]  # fmt: skip
        with (self._logs / f"{role}.log").open("ab") as log:
            self._processes[role] = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, role: str) -> None:
        """Until the server is ready."""
        until = time.monotonic() + START_LIMIT_S
        while True:
            if self._processes[role].poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the {role} server does not start: {self._logs / f'{role}.log'}")
            try:
                with urllib.request.urlopen(f"{self.urls[role]}/health", timeout=5):
                    return
            except OSError:
                time.sleep(POLL_S)

    def kill(self, role: str) -> None:
        """kill -9 of all of the server's processes, and wait for its end."""
        process = self._processes[role]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def restart(self, role: str) -> None:
        """Start it again after `kill`, and wait."""
        self.start(role)
        self.wait(role)

    def stop(self, role: str) -> None:
        """SIGSTOP: the server and its engine core hold still, and their connections stay open."""
        os.killpg(self._processes[role].pid, signal.SIGSTOP)

    def resume(self, role: str) -> None:
        """SIGCONT."""
        os.killpg(self._processes[role].pid, signal.SIGCONT)

    def metric(self, role: str, name: str) -> float:
        """A metric of the server, without ``vllm:`` or ``pdlab_``, summed over its labels."""
        with urllib.request.urlopen(f"{self.urls[role]}/metrics", timeout=60) as page:
            text = page.read().decode()
        return sum(sample.value for sample in samples(text) if sample.name == name)

    def actions(self) -> Counter[str]:
        """What decode's guard has done since decode started."""
        with urllib.request.urlopen(f"{self.urls['decode']}/metrics", timeout=60) as page:
            text = page.read().decode()
        counts: Counter[str] = Counter()
        for sample in samples(text):
            if sample.name.startswith("guard_") and not sample.name.endswith("_created"):
                counts[sample.name.removeprefix("guard_")] += int(sample.value)
        return counts

    def await_unused(self, role: str, limit_s: float) -> float:
        """Seconds until no KV block of the server is in use; infinite where that takes longer than the limit."""
        began = time.monotonic()
        while self.metric(role, "kv_cache_usage_perc") > 0:
            if time.monotonic() - began > limit_s:
                return float("inf")
            time.sleep(POLL_S)
        return time.monotonic() - began


@dataclass
class Tally:
    """What became of the requests of one fault. ``slowest_s``: until the last answer; ``freed_s``: until prefill's and
    decode's KV pools were empty again."""

    fault: str
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    freed_s: dict[str, float] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())

    def add(self, other: Tally) -> None:
        """Another round of the same fault."""
        self.outcomes += other.outcomes
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        for role, seconds in other.freed_s.items():
            self.freed_s[role] = max(self.freed_s.get(role, 0.0), seconds)


@dataclass(frozen=True)
class Prefilled:
    """A prompt, what the engine alone says to it, and the parameters by which decode finds its KV cache."""

    prompt: tuple[int, ...]
    alone: CanaryAnswer
    params: dict[str, Any]


class Client:
    """Sends requests to the pair. ``hang_s``: without an answer for so long a request counts as hung."""

    def __init__(self, pair: FaultyPair, session: Any, *, seed: int, hang_s: float) -> None:
        self.pair = pair
        self.hang_s = hang_s
        self._session = session
        self._random = random.Random(seed)

    def prompts(self, count: int, tokens: int = 300) -> list[tuple[int, ...]]:
        """Random tokens, so that no two prompts share a block."""
        return [tuple(self._random.randrange(10, 1000) for _ in range(tokens)) for _ in range(count)]

    async def post(self, role: str, timeout_s: float, **body: Any) -> tuple[int, Any]:
        """Status and body. Raises TimeoutError and what the connection raises."""
        import aiohttp

        sent_body = {"model": MODEL, "temperature": 0.0, "seed": 0, "ignore_eos": True, **body}
        url, timeout = f"{self.pair.urls[role]}/v1/completions", aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.post(url, json=sent_body, timeout=timeout) as answer:
            return answer.status, await answer.json()

    async def ask(self, role: str, prompt: Sequence[int], timeout_s: float, **more: Any) -> tuple[int, Any]:
        """One answer with the likeliest tokens."""
        sent_body = {"max_tokens": ANSWER_TOKENS, "logprobs": 5, "return_token_ids": True, **more}
        return await self.post(role, timeout_s, prompt=list(prompt), return_tokens_as_token_ids=True, **sent_body)

    async def prefilled(self, count: int, tokens: int = 300) -> list[Prefilled]:
        """So many requests that prefill has answered, and decode has not heard of."""
        prompts = self.prompts(count, tokens)
        # By prefill's engine: decode must not have the prompt in its prefix cache.
        alone = [read_answer(body) for _, body in await each(lambda p: self.ask("prefill", p, 300), prompts, 8)]
        answers = await each(
            lambda p: self.post("prefill", 300, prompt=list(p), max_tokens=1, kv_transfer_params=PREFILL), prompts, 16
        )
        params = [body["kv_transfer_params"] for _, body in answers]
        return [Prefilled(*row) for row in zip(prompts, alone, params, strict=True)]

    async def outcome(self, item: Prefilled) -> tuple[str, float]:
        """Decode's answer: equal, rounded, wrong, error or hang; and after how many seconds."""
        began = time.monotonic()
        try:
            status, body = await self.ask("decode", item.prompt, self.hang_s, kv_transfer_params=dict(item.params))
        except TimeoutError:
            return "hang", time.monotonic() - began
        except Exception as error:
            print(f"decode does not answer: {error!r}", file=sys.stderr)
            return "error", time.monotonic() - began
        took_s = time.monotonic() - began
        if status != 200:
            return "error", took_s
        result = compare([read_answer(body)], [item.alone], "the engine alone", bounded=False)
        return ("wrong" if result.equal is False else "equal" if result.equal else "rounded"), took_s

    async def decoded(self, fault: str, items: Sequence[Prefilled], at_once: int = 16) -> Tally:
        """Decode's answers to all of them."""
        tally = Tally(fault)
        for outcome, took_s in await each(self.outcome, items, at_once):
            tally.outcomes[outcome] += 1
            tally.slowest_s = max(tally.slowest_s, took_s)
        return tally

    async def warm(self) -> None:
        """Both servers know each other, and one request went through."""
        tally = await self.decoded("none", await self.prefilled(1))
        if tally.outcomes["equal"] + tally.outcomes["rounded"] != 1:
            raise SystemExit(f"without any fault a request is {dict(tally.outcomes)}")

    async def fill(self, role: str) -> None:
        """Other requests, of more tokens than the server's whole KV pool: nothing stays that nobody holds."""
        prompts = self.prompts(self.pair.kv_bytes // 2**20 * 3 // 2, tokens=900)
        await each(lambda p: self.post(role, 300, prompt=list(p), max_tokens=1), prompts, 8)


async def each(call: Callable[[Any], Awaitable[Any]], items: Sequence[Any], at_once: int) -> list[Any]:
    """The results in order, so many at once."""
    places = asyncio.Semaphore(at_once)

    async def one(item: Any) -> Any:
        async with places:
            return await call(item)

    return list(await asyncio.gather(*(one(item) for item in items)))


@contextlib.asynccontextmanager
async def client(pair: FaultyPair, *, seed: int) -> AsyncIterator[Client]:
    """A client of the pair. A request that decode computes itself may take longer than the guard's deadline by what
    its prompt takes, on a busy machine too."""
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        yield Client(pair, session, seed=seed, hang_s=pair.deadline_s + 30)


# Faults: each takes a client and a number of requests, and leaves a pair that is whole.


async def kill_before_read(to: Client, count: int) -> Tally:
    """kill -9 of prefill between its answers and the reads."""
    items = await to.prefilled(count)
    to.pair.kill("prefill")
    tally = await to.decoded("prefill killed before the reads", items)
    return await _restarted(to, tally)


async def kill_before_contact(to: Client, count: int) -> Tally:
    """The same with a prefill that decode has never spoken to."""
    to.pair.kill("prefill")
    to.pair.restart("prefill")
    items = await to.prefilled(count)
    to.pair.kill("prefill")
    tally = await to.decoded("prefill killed before the first contact", items)
    return await _restarted(to, tally)


async def kill_during_reads(to: Client, count: int) -> Tally:
    """kill -9 of prefill while decode reads."""
    items = await to.prefilled(count)
    answers = asyncio.create_task(to.decoded("prefill killed during the reads", items, at_once=count))
    await asyncio.sleep(0.1)
    to.pair.kill("prefill")
    return await _restarted(to, await answers)


async def stop_before_read(to: Client, count: int) -> Tally:
    """SIGSTOP of prefill between its answers and the reads, SIGCONT when decode has answered or the client gave up."""
    items = await to.prefilled(count)
    to.pair.stop("prefill")
    tally = await to.decoded("prefill stopped before the reads", items, at_once=count)
    to.pair.resume("prefill")
    return _freed(to, tally)


async def expired(to: Client, count: int) -> Tally:
    """The lease is over, and the blocks are other requests'."""
    items = await to.prefilled(count)
    await asyncio.sleep(to.pair.lease_s + 1)
    await to.fill("prefill")
    return _freed(to, await to.decoded("lease over, blocks used again", items))


async def used_twice(to: Client, count: int) -> Tally:
    """The same parameters a second time, when the blocks are other requests'; decode's own cache is full of others."""
    items = await to.prefilled(count)
    first = await to.decoded("none", items)
    if first.outcomes["equal"] + first.outcomes["rounded"] != count:
        raise SystemExit(f"without any fault {count} requests are {dict(first.outcomes)}")
    await to.fill("prefill")
    await to.fill("decode")
    return _freed(to, await to.decoded("parameters used twice", items))


async def nobody_reads(to: Client, count: int) -> Tally:
    """Prefill's answers are thrown away: no answer to compare, but the blocks come back."""
    await to.prefilled(count)
    return _freed(to, Tally("nobody reads", Counter(abandoned=count)))


async def cancelled(to: Client, count: int) -> Tally:
    """Clients leave while decode waits for prefill, which is stopped; then prefill goes on."""
    items = await to.prefilled(count)
    to.pair.stop("prefill")
    calls = [asyncio.create_task(to.outcome(item)) for item in items]
    await asyncio.sleep(1.0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    to.pair.resume("prefill")
    return _freed(to, Tally("clients leave during the transfer", Counter(abandoned=count)))


async def rejected(to: Client, count: int) -> Tally:
    """Decode's server rejects the request, which prefill has answered: prefill gets a notice."""
    items = await to.prefilled(count)
    tally = Tally("decode rejects the request")
    for item in items:
        status, _ = await to.ask("decode", item.prompt, 60, max_tokens=100_000, kv_transfer_params=dict(item.params))
        tally.outcomes["refused" if status == 400 else f"HTTP {status}"] += 1
    return _freed(to, tally)


async def _restarted(to: Client, tally: Tally) -> Tally:
    await asyncio.to_thread(to.pair.restart, "prefill")
    tally = _freed(to, tally)
    await to.warm()
    return tally


def _freed(to: Client, tally: Tally) -> Tally:
    limit_s = to.pair.lease_s + to.pair.deadline_s + 60
    tally.freed_s = {role: to.pair.await_unused(role, limit_s) for role in ROLES}
    return tally


FAULTS: dict[str, Callable[[Client, int], Awaitable[Tally]]] = {
    "kill": kill_before_read,
    "kill-first": kill_before_contact,
    "kill-during": kill_during_reads,
    "stop": stop_before_read,
    "expired": expired,
    "twice": used_twice,
    "nobody": nobody_reads,
    "cancel": cancelled,
    "reject": rejected,
}
