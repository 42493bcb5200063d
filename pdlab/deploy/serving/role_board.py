"""The role board of a fluid pool: it holds which engine prefills and which decodes, and sends every change to all
routers.

A detached, named actor. The first engine creates it, and any other engine that does not find it; Ray restarts it when
it dies. Routers keep the last roles, and send them to a board that has just started. Engines report their traffic;
without a fixed split the policy (`pdlab.roles.policy`) decides by these reports. The actor ends itself when no engine
has reported for a minute. Sent by value: imports the standard library, `pdlab.roles`, and Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from pdlab.deploy.serving.elastic import EngineAdmission, RayServe, ReplicaScaling, ServesReplicas
from pdlab.deploy.serving.ray_names import NAMESPACE
from pdlab.roles.assign import assign, first_split
from pdlab.roles.count import CountDecision, CountPolicy, load_of
from pdlab.roles.local import locally_below
from pdlab.roles.messages import EngineOrders, EngineReport, ReportedSince, RoleNews
from pdlab.roles.observed import EngineLoad, ObservedPool, ObservedWindow
from pdlab.roles.policy import Policy
from pdlab.roles.prefixes import Prefixes
from pdlab.roles.rates import CACHED_HALF_LIFE_S, DecayingSum
from pdlab.roles.spec import AUTO, FluidSpec, counts_of

# Of the names of all boards' actors.
BOARD_PREFIX = "pdlab-roles-"
JOINED = "an engine joined"  # why roles are decided on; no news where it changes none
# How often engines report; after how long without a report an engine loses its role; after how long without any report
# the application counts as gone; how long a new board waits for the roles that routers hold before it decides.
REPORT_S, SILENT_S, GONE_S, SETTLE_S = 0.25, 3.0, 60.0, 1.0
LOOK_S = 0.5
# How long a router waits for news before it calls again. A router that called within twice that time follows the board.
NEWS_S = 1.0
# With slow engines all of them report, look and wait more slowly, at most by this factor (`pace`).
MOST_PACE = 16.0
MOST_NEWS_S = 5.0  # routers wait 10 s for an answer
LOG_ENTRIES = 10_000
# An engine that is "joining" or "leaving" takes no work unless there is no other (`pdlab.deploy.serving.elastic`).
WORKING_ROLES = ("prefill", "decode", "draining")


class _ReportingEngine:
    """The reports of one engine."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.reported_s = 0.0
        self.now = EngineReport()  # the last one
        self.since = ReportedSince()


class RoleBoard:
    """``clock``: monotonic seconds. ``serves``: the interface that runs the engines (None: Ray Serve)."""

    def __init__(
        self, spec: FluidSpec, clock: Callable[[], float] = time.monotonic, serves: ServesReplicas | None = None
    ) -> None:
        self.spec = spec
        self._clock = clock
        self._began_s = clock()
        self._engines: dict[str, _ReportingEngine] = {}
        self._roles: dict[str, str] = {}
        # The last role with work of each engine, also of engines that are silent now.
        self._last_roles: dict[str, str] = {}
        # The engines of an earlier board that have not reported to this one: until when their roles stay.
        self._awaited: frozenset[str] = frozenset()
        self._awaited_until_s = 0.0
        self._by = self.spec.roles
        self._begins = self._by == AUTO  # nobody has set roles, and no load is known: half of the engines prefill
        # Of a later board greater than of an earlier one: routers take what is newer.
        self._version = time.time_ns()
        self._tick = 0
        self._carried = RoleNews()
        self._policy = Policy(spec)
        self._joining = EngineAdmission(spec.engines if spec.moves else None)
        self._scaling = ReplicaScaling(serves or RayServe(spec.app, spec.deployment), clock) if spec.moves else None
        self._count_policy = CountPolicy(spec)
        self._counted: CountDecision | None = None
        self._window = ReportedSince()
        self._looked_s = clock()
        self._log: deque[dict[str, Any]] = deque(maxlen=LOG_ENTRIES)
        self._local_below = 0
        self._handoff_s: deque[float] = deque(maxlen=200)
        self._prefixes = Prefixes()
        self._tokens = {name: DecayingSum(CACHED_HALF_LIFE_S) for name in ("prefilled_tokens", "computed_tokens")}
        self._news = asyncio.Event()
        # How long after a publication each router had it. This is known when the router calls for the next one.
        self._published_s = clock()
        self._followers: set[str] = set()
        self._followed_s: dict[str, float] = {}
        self._reach_s: deque[float] = deque(maxlen=1000)
        self._running: Any = None
        self._scaled: Any = None
        self._gauges: dict[str, Any] = {}

    # --- what is called ------------------------------------------------------------------------

    async def report(self, engine: str, node: str, counts: dict[str, Any]) -> dict[str, Any]:
        """Take an engine's report since its last one: the fields of an `EngineReport`. Returns those of
        `EngineOrders`.
        """
        self._run()
        reported = EngineReport(**counts)
        joined = engine not in self._engines
        state = self._engines.setdefault(engine, _ReportingEngine(node))
        state.reported_s, state.now = self._clock(), reported
        state.since.add_work(reported)
        self._window.add_requests(reported)
        self._handoff_s.extend(reported.handoff_s)
        self._joining.transfers_ended(engine, reported.warmed, self._clock())
        if (joined or reported.warmed) and self._settled:
            self.decide(JOINED if joined else "")
        warm = self._joining.orders(engine, self._staying, self._clock()) if self._settled else []
        return EngineOrders(self._local_below, warm).fields

    async def follow(self, known: dict[str, Any], who: str) -> dict[str, Any]:
        """Long poll of the router ``who``. Returns the fields of `RoleNews` when roles or loads differ from ``known``,
        its last version, or after a time limit.
        """
        self._run()
        news = RoleNews(**known)
        self._followed_s[who] = self._clock()
        if news.version == self._version and who in self._followers:
            self._followers.remove(who)
            self._reach_s.append(self._clock() - self._published_s)
        if not self._roles and news.version > self._carried.version:
            self._carried = news
        if (news.version, news.tick) == (self._version, self._tick) or not self._roles:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), self._news_s)
        return self._state().fields if self._roles else known

    async def keeps(
        self, engine: str, chunks: list[int], pool_tokens: int | None, pulled: bool, sparse: bool = False
    ) -> None:
        """Record that the engine, with a KV pool of that many tokens, has a prompt with these chunks cached
        (`pdlab.roles.prefixes.Prefixes.keep`).
        """
        self._prefixes.keep(engine, chunks, pool_tokens, pulled=pulled, sparse=sparse)

    async def waits(self, engine: str, tokens: int) -> None:
        """Set the prompt tokens that wait at the engine from now on, a quarter of a second before its next report."""
        if engine in self._engines:
            self._engines[engine].now.waiting_prompt_tokens = tokens

    async def held(self, engine: str, chunks: list[int]) -> dict[str, tuple[int, int]]:
        """For a prompt with these chunks, which ``engine`` will decode: the cached tokens and the waiting prompt tokens
        of every other engine that prefills.
        """
        prefill = (name for name in self._engines if self._roles.get(name) == "prefill" and name != engine)
        return {
            name: (self._prefixes.tokens(name, chunks), self._engines[name].now.waiting_prompt_tokens)
            for name in prefill
        }

    async def set_split(self, text: str) -> dict[str, Any]:
        """Set the split, `AUTO` or ``3:5``, from now on. Raises ValueError for a split that does not match the number
        of engines.
        """
        self._take_over()
        if text != AUTO:
            prefill, decode = counts_of(text)
            if prefill + decode != len(self._at_work):
                raise ValueError(f"{text} is {prefill + decode} engines, but {len(self._at_work)} engines report")
            self._awaited, self._begins = frozenset(), False
        elif self._by != AUTO:
            self._policy, self._count_policy = Policy(self.spec), CountPolicy(self.spec)
        self._by = text
        self.decide(f"set by hand to {text}")
        return await self.look()

    async def set_roles(self, roles: dict[str, str]) -> int:
        """Set exactly these roles, ``prefill`` or ``decode`` and at least one of each, as a manual split. Returns their
        version.
        """
        self._take_over()
        self._awaited, self._begins = frozenset(), False
        self._by = "{}:{}".format(*_split(roles))
        self._publish(dict(roles))
        return self._version

    async def look(self) -> dict[str, Any]:
        """The role of each engine, and the reason."""
        engines = {
            name: {
                "role": self._roles.get(name, "none"),
                "node": each.node,
                "waiting_prompt_tokens": each.now.waiting_prompt_tokens,
                "running": each.now.running,
            }
            for name, each in sorted(self._engines.items())
        }
        last = list(self._log)[-10:]
        reach_ms = sorted(round(1000 * value, 1) for value in self._reach_s)
        return {
            "by": self._by,
            "engines": engines,
            "count": self._look_count(),
            "local_below": self._local_below,
            "decisions": last,
            # Until publications were known to a router: how many, the median, that of 19 in 20, the longest.
            "reach_ms": (len(reach_ms), *(reach_ms[int(part * (len(reach_ms) - 1))] for part in (0.5, 0.95, 1)))
            if reach_ms
            else None,
        }

    async def decisions(self) -> list[dict[str, Any]]:
        """The stored changes of the split, oldest first."""
        return list(self._log)

    # --- what it does by itself ----------------------------------------------------------------

    def decide(self, why: str = "") -> None:
        """Decide and publish the roles of all engines. ``why``: the reason, if it is not the policy's."""
        now_s = self._clock()
        if not self._engines:
            return
        # Silent while others report. If all are silent, the board or the whole machine stood still.
        limit_s = max(each.reported_s for each in self._engines.values()) - SILENT_S * self._pace
        self._engines = {name: each for name, each in self._engines.items() if each.reported_s >= limit_s}
        self._prefixes.forget_others(self._engines)
        if self._take_over():
            why = "the roles that stood"
        if ready := self._joining.look(self._staying):
            why = f"{', '.join(ready)} has made its first transfers"
        observed = None
        self._awaited -= self._engines.keys()
        if self._awaited and now_s < self._awaited_until_s:
            waits = [name for name in self._engines if self._roles.get(name) in (None, "joining")]
            roles = {**self._roles, **dict.fromkeys(waits, "decode")}
            reason = f"{len(self._awaited)} engines have not reported yet"
        else:
            self._awaited = frozenset()
            loads, window = self._observed(now_s)
            observed = ObservedPool(now_s / self.spec.slow_down, loads, window)
            roles, reason = self._choose(observed)
        roles |= {name: self._state_without_work(name) for name in self._engines if self._state_without_work(name)}
        before = _split(self._roles) if self._log else None
        changed = roles != self._roles or not self._log
        if changed:
            self._publish(roles)
        if _split(roles) != before or (not changed and why and why != JOINED):
            self._note(f"{why}: {reason}" if why and reason else why or reason)
        self._learn_local_below()
        if observed is not None:
            self._count(observed)

    def _take_over(self) -> bool:
        """Take the roles that routers hold of an earlier board, if there are any and this board has none. Returns
        whether it did."""
        if self._roles or not self._carried.roles:
            return False
        self._roles, self._by, self._begins = dict(self._carried.roles), self._carried.by, False
        self._joining.knew(self._roles)
        self._last_roles |= _working(self._roles)
        self._awaited, self._awaited_until_s = frozenset(self._roles), self._clock() + SILENT_S * self._pace
        return True

    def _count(self, observed: ObservedPool) -> None:
        """How many engines are wanted from now on: only where a controller follows the load."""
        if self._scaling is None or self._scaling.wanted is None or self._by != AUTO or not observed.engines:
            return
        busy = any(each.running or each.waiting_prompt_tokens for each in observed.engines)
        idle = not (busy or observed.window.prompts)
        # What came some seconds ago is still in the demand, and no reason for more engines.
        demand = None if idle else self._policy.demand(observed.engines)
        p_min, d_min = self.spec.p_min, self.spec.d_min
        self._counted = self._count_policy.decide(
            observed.now_s,
            len(observed.engines),
            self._scaling.wanted,
            lambda engines: load_of(demand, engines, p_min, d_min, idle=idle),
        )
        if self._counted.changed:
            self._scaling.wanted = self._counted.engines
            self._note(self._counted.reason)

    def _look_count(self) -> dict[str, Any] | None:
        """How many engines there are to be; None: their number is fixed."""
        if self._scaling is None:
            return None
        reason = "" if self._counted is None else self._counted.reason
        if self._by != AUTO:
            reason = "roles are set by hand, and their number stays"
        return {"wanted": self._scaling.wanted, "least": self.spec.least, "most": self.spec.most, "reason": reason}

    def _note(self, reason: str) -> None:
        """One more line of the log, of the split that stands."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        prefill, decode = _split(self._roles)
        at_s = round(self._clock(), 3)
        self._log.append({"at": now, "at_s": at_s, "prefill": prefill, "decode": decode, "reason": reason})
        logging.getLogger("ray.serve").info("roles %d:%d (%s)", prefill, decode, reason)

    def _choose(self, observed: ObservedPool) -> tuple[dict[str, str], str]:
        engines = observed.engines
        count = len(engines)
        enough = count >= self.spec.p_min + self.spec.d_min
        if enough and self._roles:
            decision = self._policy.decide(observed)  # it learns, whoever decides
            self._begins = self._begins and self._policy.demand(engines) is None
            if self._by == AUTO and not self._begins:
                return dict(decision.roles), decision.reason
        if enough and self._by == AUTO:
            prefill, _ = first_split(count, self.spec.p_min, self.spec.d_min)
            return dict(assign(engines, prefill, most_running=math.inf)), "nothing is known yet"
        if not count:
            return {}, "no engine takes work"
        if count == 1:
            return {engines[0].engine: "decode"}, "one engine"
        prefill, decode = (self.spec.p_min, self.spec.d_min) if self._by == AUTO else counts_of(self._by)
        share = min(max(round(count * prefill / (prefill + decode)), 1), count - 1)
        reason = self._by if prefill + decode == count else f"{self._by} of {count} engines"
        return dict(assign(engines, share, most_running=math.inf)), reason

    def _observed(self, now_s: float) -> tuple[tuple[EngineLoad, ...], ObservedWindow]:
        """Since the last look, in the engines' seconds."""
        slow = self.spec.slow_down
        loads = tuple(self._load(name, self._engines[name].since) for name in self._at_work)
        passed = self._window
        window = ObservedWindow(
            seconds=max(now_s - self._looked_s, 1e-3) / slow,
            prompts=passed.prompts,
            answers=passed.answers,
            local=passed.local,
            ttft_s=tuple(value / slow for value in passed.ttft_s),
            tpot_s=tuple(value / slow for value in passed.tpot_s),
        )
        for name, total in self._tokens.items():
            total.add(sum(getattr(each.since, name) for each in self._engines.values()), window.seconds)
        self._looked_s, self._window = now_s, ReportedSince()
        for each in self._engines.values():
            each.since = ReportedSince()
        return loads, window

    def _load(self, name: str, since: ReportedSince) -> EngineLoad:
        each = self._engines[name]
        role: Any = self._last_roles.get(name, "decode")
        return EngineLoad(
            engine=name,
            role=role,
            waiting_prompt_tokens=each.now.waiting_prompt_tokens,
            running=each.now.running,
            prefilled_tokens=since.prefilled_tokens,
            prefill_busy_s=since.prefill_busy_s / self.spec.slow_down,
            generated_tokens=since.generated_tokens,
        )

    def _learn_local_below(self) -> None:
        if self.spec.prefill_locally_below != AUTO:
            self._local_below = int(self.spec.prefill_locally_below or 0)
            return
        rate = self._policy.prefill_rate.tokens_per_s
        if rate is None or not self._handoff_s:
            return
        of = {
            role: [e for n, e in self._engines.items() if self._roles.get(n) == role] for role in ("prefill", "decode")
        }
        waiting = sum(each.now.waiting_prompt_tokens for each in of["prefill"]) / max(len(of["prefill"]), 1)
        running = sum(each.now.running for each in of["decode"]) / max(len(of["decode"]), 1)
        transfer_s = statistics.median(self._handoff_s) / self.spec.slow_down
        # Who decides on a prompt compares what is to be computed of it; the rate may be one of whole prompts.
        whole, computed = (self._tokens[name].total for name in ("prefilled_tokens", "computed_tokens"))
        computed_rate = rate * computed / whole if whole else rate
        self._local_below = locally_below(computed_rate, running, waiting / rate, transfer_s)

    @property
    def _settled(self) -> bool:
        """True once routers have had time to report the roles that they hold."""
        return self._clock() - self._began_s >= SETTLE_S

    @property
    def _staying(self) -> list[str]:
        """The engines that report, and are not about to stop."""
        leaving = self._scaling.leaving if self._scaling else ()
        return sorted(name for name in self._engines if name not in leaving)

    @property
    def _at_work(self) -> list[str]:
        """The staying engines that take work."""
        return [name for name in self._staying if not self._joining.joins(name)]

    def _state_without_work(self, name: str) -> str:
        """The role of an engine that takes no work; empty: it takes work."""
        if name not in self._staying:
            return "leaving"
        return "joining" if self._joining.joins(name) else ""

    @property
    def _pace(self) -> float:
        return pace(self.spec.slow_down)

    @property
    def _news_s(self) -> float:
        return min(NEWS_S * self._pace, MOST_NEWS_S)

    def _state(self) -> RoleNews:
        # Of decode also what will be there once it is prefilled: else whoever has least would be sent all of it.
        reports = {name: each.now for name, each in self._engines.items()}
        loads = {name: (now.waiting_prompt_tokens, now.coming + now.running) for name, now in reports.items()}
        return RoleNews(self._version, self._tick, self._roles, loads, self._by)

    def _publish(self, roles: dict[str, str]) -> None:
        self._roles = roles
        self._last_roles |= _working(roles)
        self._version += 1
        self._published_s = self._clock()
        self._followers = {
            who for who, followed_s in self._followed_s.items() if followed_s > self._published_s - 2 * self._news_s
        }
        self._wake()

    def _wake(self) -> None:
        self._tick += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _run(self) -> None:
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._forever())

    async def _forever(self) -> None:
        next_s = self._clock() + SETTLE_S
        sent: Mapping[str, tuple[int, int]] = {}
        while True:
            await asyncio.sleep(REPORT_S * self._pace)
            now_s = self._clock()
            try:
                if now_s >= next_s:
                    next_s = now_s + LOOK_S * self._pace
                    self.decide()
                self._show()  # Ray drops a gauge that was not set for two exports
                if (loads := self._state().loads) != sent:
                    sent = loads
                    self._wake()
            except Exception:  # the roles that stand are sent on
                logging.getLogger("ray.serve").exception("no decision on the roles")
            if self._scaled is None or self._scaled.done():  # it waits for Ray Serve's controller
                self._scaled = asyncio.create_task(self._scale())
            if now_s - max((each.reported_s for each in self._engines.values()), default=next_s) > GONE_S:
                ray: Any = importlib.import_module("ray")
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _scale(self) -> None:
        """Have Ray Serve run as many engines as are wanted."""
        if self._scaling is None or not self._settled:
            return
        before = self._scaling.leaving
        try:
            await self._scaling.step(self._idle)
            for name in sorted((self._scaling.leaving - before) & self._engines.keys()):
                self.decide(f"{name} leaves")
            for name in sorted((before - self._scaling.leaving) & self._engines.keys()):
                self.decide(f"{name} stays")
        except Exception as error:  # the number that stands stays
            logging.getLogger("ray.serve").warning("Ray Serve's number of engines cannot be followed: %r", error)

    def _idle(self, name: str) -> bool:
        each = self._engines.get(name)
        return each is None or not (each.now.waiting_prompt_tokens or each.now.coming or each.now.running)

    def _show(self) -> None:
        """The split in Ray's metrics."""
        metrics: Any = importlib.import_module("ray.util.metrics")
        split = _split(self._roles)
        out = list(self._roles.values())
        values = {"prefill": split[0], "decode": split[1], "changed": int(self._by != self.spec.roles)}
        if self._scaling is not None:
            values |= {"join": out.count("joining"), "leave": out.count("leaving")}
        for name, value in values.items():
            if name not in self._gauges:
                text = f"Engines of the fluid pool that {name}."
                if name == "changed":
                    text = "Whether the split was set by hand to another than that of the launch."
                self._gauges[name] = metrics.Gauge(f"pdlab_roles_{name}", description=text)
            self._gauges[name].set(value)


def _working(roles: Mapping[str, str]) -> dict[str, str]:
    """The roles of engines that take work."""
    return {name: role for name, role in roles.items() if role in WORKING_ROLES}


def _split(roles: Mapping[str, str]) -> tuple[int, int]:
    """Engines that prefill or are about to, and that decode."""
    playing = list(_working(roles).values())
    decode = playing.count("decode")
    return len(playing) - decode, decode


def pace(slow_down: float) -> float:
    """By which factor engines and board communicate less often if engines are that slow: loads are then as old as on
    GPUs.
    """
    return max(1.0, min(slow_down, MOST_PACE))


def board(name: str, spec: FluidSpec) -> Any:
    """The board's actor, created if there is none. Blocks until Ray answers."""
    ray: Any = importlib.import_module("ray")
    actor = ray.remote(RoleBoard).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy="DEFAULT",  # else it would be in the placement group of the replica that makes it
        max_restarts=-1,
        max_concurrency=10_000,
    )
    return actor.remote(spec)
