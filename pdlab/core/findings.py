"""A judgement is a value: `Finding`, and `CODES`, the registry of everything that pdlab can find.

Gates, the audit of result folders, the doctor, the transfer check and plans report findings by code. Code that decides
on a finding compares its code or reads its numbers, never its text. To add one: write its row in `CODES`, then yield
`found("its_code", ...)`.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import Field

from pdlab.core.commands import BENCH, DOCTOR, PDLAB, PLAN, VIZ
from pdlab.core.schema import Frozen
from pdlab.core.text import counted

Severity = Literal["error", "warning", "note"]
"""error: something is wrong or does not work; warning: it is slow, or less precise; note: worth knowing."""
Source = Literal[
    "gates", "unchecked", "notes", "files", "audit", "doctor", "transfer", "plan", "timeline", "replay", "report"
]


@dataclass(frozen=True)
class FindingCode:
    """What a code means.

    ``source``: the part of pdlab that finds it. ``rule``: the broken rule, in one line. ``template``: the sentence,
    with the names of the finding's numbers in braces; with ``{files:#file}`` the number has its noun (`sentence`).
    ``fix``: what to do, after ``joint`` (empty: no general fix). ``gate``: the gate that the finding fails. ``kind``
    and ``impact`` (audit): the heading of the finding, and the effect of the fault on a plot. The doctor's sentences
    are with its rules: there ``template`` is the topic, and ``severity`` the worst one.
    """

    source: Source
    rule: str
    template: str
    fix: str = ""
    joint: str = "; "
    gate: str | None = None
    severity: Severity = "error"
    kind: str = ""
    impact: str = ""


class Finding(Frozen):
    """One judgement: its code, the gate that it fails (None: none), its numbers and names, and its sentence: ``what``
    was found, then the ``fix``. The sentence is stored, so that it stays the same in later versions of pdlab.
    """

    code: str
    gate: str | None = None
    numbers: dict[str, int | float | str | None] = Field(default_factory=dict)
    what: str
    fix: str = ""

    @property
    def text(self) -> str:
        """The whole sentence."""
        return self.what + self.fix


class _Counting(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        number, counts, noun = format_spec.partition("#")
        if not counts:
            return str(super().format_field(value, format_spec))
        one, _, many = noun.partition("|")
        return counted(value, one, many, number or ".12g")


_COUNTING = _Counting()


def sentence(template: str, numbers: Mapping[str, int | float | str | None]) -> str:
    """A template with its numbers. ``{files:#file}`` is ``1 file`` or ``2 files``, ``{files:#file is|files are}`` has a
    verb, ``{files:g#file}`` a format of the number. Raises KeyError for a missing number."""
    return _COUNTING.vformat(template, (), numbers)


def found(code: str, **numbers: int | float | str | None) -> Finding:
    """A finding with the sentence of its row. Raises KeyError for an unknown code or a missing number."""
    row = CODES[code]
    fix = row.joint + sentence(row.fix, numbers) if row.fix else ""
    what = sentence(row.template, numbers)
    return Finding(code=code, gate=row.gate, numbers=numbers, what=what, fix=fix)


def _gate(gate: str, rule: str, template: str, fix: str = "", joint: str = "; ") -> FindingCode:
    return FindingCode(source="gates", gate=gate, rule=rule, template=template, fix=fix, joint=joint)


def _noted(source: Source, rule: str, template: str, fix: str = "") -> FindingCode:
    return FindingCode(source=source, rule=rule, template=template, fix=fix, severity="note")


_unchecked, _note = partial(_noted, "unchecked"), partial(_noted, "notes")
_of_plan = partial(_noted, "plan")  # the basis of a plan's step times
_of_replay = partial(_noted, "replay")  # which of several deployments is best for a replay, and why
_of_report = partial(_noted, "report")  # what a reader of the figures must know
_remark = partial(_noted, "transfer")  # the basis of a verdict on a wire


def _cause(rule: str, what: str) -> FindingCode:
    """The largest part of a difference in TTFT between two deployments."""
    return _of_replay(
        rule,
        "{figure}: the largest part of the {gap_ms:.3g} ms between {best} and {other} is "
        + what
        + ", {ours_ms:.3g} against {theirs_ms:.3g} ms",
    )


def _part(what: str, fix: str) -> FindingCode:
    """The largest part of a level's mean TTFT, and how to reduce it."""
    return FindingCode(
        source="timeline",
        rule=f"the largest part of the mean TTFT is {what}",
        template="{label} at {where}: the largest part of TTFT is " + what + ", {part_ms:.3g} of {ttft_ms:.3g} ms "
        "({percent:.0f} %)",
        fix=fix,
        severity="note",
    )


def _file(rule: str, template: str) -> FindingCode:
    return FindingCode(source="files", rule=rule, template=template)


def _audit(kind: str, rule: str, template: str, impact: str, fix: str, severity: Severity = "error") -> FindingCode:
    return FindingCode(
        source="audit", kind=kind, rule=rule, template=template, impact=impact, fix=fix, severity=severity
    )


def _doctor(topic: str, rule: str, severity: Severity = "error") -> FindingCode:
    return FindingCode(source="doctor", rule=rule, template=topic, severity=severity)


def _wire(rule: str, template: str, fix: str) -> FindingCode:
    """The likely cause of a wrong or slow wire."""
    return FindingCode(source="transfer", rule=rule, template=template, fix=fix, joint="; try: ")


_PACE_FIX = "launch with a larger --slow-down"
_MIXED_FIX = "measure again; look for edited or mixed files"
_MEASURED_FIX = "find out which of the two was measured; put the file where it belongs, or measure again"
_AGAIN_FIX = "measure the level again with --force"
_EDITED = "the figure was edited, or belongs to another run"
_NO_BASIS = "intervals and goodput of that level have no basis, or belong to other requests than its figures"
_RECORDS_FIX = f"restore the file, or {_AGAIN_FIX}"
_COPIED = "in {folder}, {files:#file is|files are} the same as in {original}, {how}"
_REUSED = "prompts that an earlier level drew from the same seed, upper bound per level: {shares}"
_REUSED_IMPACT = (
    "the prefix cache may have answered that share of the prompts: TTFT too low, throughput too high, and most so with "
    "few prefill replicas"
)
_REUSED_FIX = "a seed of its own for every level, or caches off"
_LITTLE = "{window}: {rate_rps:.2f} requests/s that stay {stay_s:.2f} s are {in_flight:.1f} in flight (Little's law)"

CODES: dict[str, FindingCode] = {
    "requests_unrecorded": _gate(
        "failed_requests",
        "every request of a level has a record",
        "{recorded} of {requests} requests were recorded",
    ),
    "requests_failed": _gate(
        "failed_requests",
        "every request has a complete answer",
        "{failed} of {requests} requests failed (first: {first})",
    ),
    "follow_ups_unsent": _gate(
        "failed_requests",
        "every request of a replay is sent",
        "{unsent} of {requests} requests were not sent, because the requests before them have no answer",
    ),
    "token_count_wrong": _gate(
        "token_counts",
        "the server reports the requested numbers of prompt and output tokens in every answer",
        "{wrong} of {answers} answers have a wrong {side} token count ({count}, not {requested})",
    ),
    "kv_transfers_failed": _gate("kv_transfers", "no KV transfer fails", "{count:g} KV transfers failed"),
    "kv_notifications_failed": _gate(
        "kv_transfers", "no notification of a KV transfer fails", "{count:g} KV-transfer notifications failed"
    ),
    "kv_expired": _gate(
        "kv_transfers",
        "decode reads KV blocks before their lease ends",
        "the KV blocks of {count:g#request} expired before decode read them",
    ),
    "kv_nothing_transferred": _gate(
        "kv_transfers",
        "a PD deployment transfers KV cache",
        "no KV bytes were transferred, by vLLM's counters",
    ),
    "kv_transfers_unseen": _gate(
        "kv_transfers",
        "the KV transfers of a PD deployment are counted",
        "{why}",
    ),
    "prefill_calls_failed": _gate(
        "prefill_calls",
        "prefill answers every call within `--prefill-timeout-s`",
        "calls of prefill failed ({late:g} had no answer within --prefill-timeout-s), and their prompts were {done}",
        "see decode's logs, or give prefill more time",
    ),
    "guard_recomputed": _gate(
        "guard_recomputed",
        "decode recomputes no prompt that prefill computed",
        "decode recomputed {count:g#prompt}, because their KV cache did not arrive or the KV guard could not confirm "
        "it ({receives:g#receive})",
    ),
    "guard_gave_up": _gate(
        "guard_deadline",
        "every KV receive ends within `--kv-deadline-s`",
        "the KV guard ended {count:g} KV receives at their deadline",
    ),
    "guard_no_room": _gate(
        "guard_deadline",
        "no request fails because late KV receives hold the memory",
        "{count:g#request} failed, because late KV receives held the memory (KV guard)",
    ),
    "kv_connection_failed": _gate(
        "kv_connections",
        "no connection between prefill and decode fails, with a failed read (`pdlab_guard_failed_reads`) or a new "
        "handshake (`pdlab_guard_handshakes_renewed`)",
        "a connection between prefill and decode failed: {done}",
    ),
    "replica_replaced": _gate(
        "restarts",
        "only the replicas that the launch verified answer",
        "a replica was replaced: {replicas} answers, but the launch neither started nor verified it",
        "wait until Ray Serve has replaced it, launch again, and measure again",
    ),
    "replica_died": _gate("restarts", "no replica dies in a level", "{why}"),
    "engine_restarted": _gate(
        "restarts",
        "an engine's counters never decrease",
        "an engine was restarted during the level: its counters decreased",
    ),
    "roles_set_by_hand": _gate(
        "roles",
        "a fluid pool has the roles of its launch: nobody set others by hand (`pdlab_roles_changed`)",
        "the roles of the fluid pool were set by hand, so the label {label} is wrong for this level",
        f"launch with --roles P:D to measure fixed roles, or restore the roles of the launch ({PDLAB} roles P:D "
        "or auto) and measure again",
        ": ",
    ),
    "other_requests_more": _gate(
        "other_requests",
        "engines finish no more requests than the client sent",
        "the{pool} engines finished {finished:g#request} during the level, but this client sent {sent}: another "
        "client used the deployment (a sweep, a user, a probe)",
        "measure again without it",
    ),
    "other_requests_fewer": _gate(
        "other_requests",
        "only the published replicas answer",
        "the{pool} engines finished {finished:g#request} during the level, but the client has {answered:#answer}: "
        "replicas that are not published gave the others",
        "launch again and measure again",
    ),
    "preempted": _gate(
        "preemptions",
        "no request loses its KV cache (preemption)",
        "engines preempted requests {count:g#time}: their KV cache was full",
    ),
    "prefix_cache_hits": _gate(
        "prefix_cache",
        "the share of prompt tokens from the prefix cache is at most 0.01 above the declared share (shared prefixes / "
        "prompt tokens, of the answered requests)",
        "{share:.0%} of the prompt tokens came from the prefix cache, but the workload declares {declared:.0%}",
    ),
    "hits_not_as_computed": _gate(
        "cache_hits",
        "the share of a replay's prompt tokens from the prefix cache is within 0.02 of the share by vLLM's rules",
        "{share:.1%} of the prompt tokens came from the prefix cache; by vLLM's rules it is {foreseen:.1%}",
    ),
    "hits_out_of_bounds": _gate(
        "cache_hits",
        "the share of a replay's prompt tokens from the prefix cache is within 0.02 of its bounds by vLLM's rules",
        "{share:.1%} of the prompt tokens came from the prefix cache; by vLLM's rules it is {least:.1%} to {most:.1%}",
    ),
    "sessions_moved": _gate(
        "affinity",
        "in a pool with session routing all requests of a session go to one engine",
        "several {pool} engines served {moved} of {sessions} sessions, although the routing is by session",
    ),
    "context_computed": _gate(
        "decode_context",
        "decode-only: at least 99 % of the context tokens are filled and not computed",
        "only {filled:g} of {tokens} context tokens were filled; the engines computed the others",
    ),
    "client_cpu": _gate(
        "client_saturation",
        "each process of the load generator uses at most 0.9 of a core",
        "load generator saturated: {cores:.2f} of one core (limit {limit})",
    ),
    "client_lag": _gate(
        "client_saturation",
        "the event loop of the load generator is late (p95) by at most 50 ms; or by at most a quarter of the shorter "
        "of median TTFT and median decode time (E2EL - TTFT)",
        "load generator saturated: event loop late by {late_ms:.0f} ms (p95, limit {limit})",
    ),
    "front_cpu": _gate(
        "front_saturation",
        "on their busiest node the ingress replicas use at most 0.9 of a core each; so do Ray Serve's proxy and, with "
        "direct streaming, the router that HAProxy calls",
        "{name} saturated: {cores:.2f} of one core (limit {limit}){cure}",
    ),
    "sent_late": _gate(
        "lateness",
        "requests are sent late (p95) by at most 50 ms; or by at most a quarter of the median TTFT (open loop) or of "
        "the median E2EL (closed loop)",
        "load generator late: requests were sent {late_ms:.0f} ms {when} (p95, limit {limit})",
    ),
    "replay_late": _gate(
        "lateness",
        "requests of a replay are sent late (p99) by less than 50 ms; they are due at their time in the file, or after "
        "the answers that they wait for and their pause",
        "load generator late: requests of the replay were sent {late_ms:.0f} ms late (p99, limit {limit_ms:.0f} ms)",
    ),
    "dependency_violated": _gate(
        "dependencies",
        "no request of a replay is sent before the last token of the answer that it waits for",
        "{violated} of {waiting} requests were sent before the answers that they wait for had ended (first: {first})",
    ),
    "clock_backwards": _gate(
        "clock",
        "the times of a request are in order, to 1 ms",
        "clock: the times of a request are not in order ({times} s)",
    ),
    "clock_set": _gate(
        "clock",
        "the wall clock moves against the monotonic one by at most 20 ms + 1000 ppm of the level",
        "clock: the wall clock moved {step_s:+.3f} s against the monotonic one during the level",
    ),
    "few_requests": _gate(
        "few_requests",
        "at least 9 requests finish in the steady window, in a closed loop also at least 2 per unit of concurrency",
        "too few requests for a steady window: {needed} must finish in it, {window}",
        "{more}",
    ),
    "throughput_drifts": _gate(
        "steady_state",
        "throughput does not drift in the steady window",
        "no steady state: output tokens/s changed by {change:+.0%} within the window",
    ),
    "in_flight_grows": _gate(
        "steady_state",
        "the number in flight does not grow in the steady window of an open loop",
        "no steady state: requests in flight grew by {growth:.0f} while {arrivals} arrived: the rate is above the "
        "capacity",
    ),
    "answers_take_longer": _gate(
        "steady_state",
        "answers of an open loop do not become slower and slower",
        "no steady state: answers{which} took {first_s:.3g} s at the start and {last_s:.3g} s at the end of "
        "{lasted_s:.0f} s of load: the rate is above the capacity",
    ),
    "in_flight_is_not_rate_times_time": _gate(
        "steady_state",
        "the number in flight is rate x time in the system",
        "no steady state: {in_flight:.1f} requests were in flight, but rate x time in the system is {by_rate:.1f} "
        "(Little's law)",
    ),
    "pace_differs": _gate(
        "rehearsed_pace",
        "rehearsal: the means of the client and of the simulated engines agree (limits below)",
        "this machine is too slow for the rehearsal: mean {name} is {client_ms:.3g} ms at the client and "
        "{modelled_ms:.3g} ms in the model (limit {limit:.0%})",
        _PACE_FIX,
    ),
    "pace_late": _gate(
        "rehearsed_pace",
        "rehearsal: requests reach the simulated engines in time (limits below)",
        "this machine is too slow for the rehearsal: requests reached simulated engines {late_ms:.3g} ms too late on "
        "average (limit {limit:.0%} of TTFT)",
        _PACE_FIX,
    ),
    "answers_wrong": _gate(
        "canary",
        "after a sweep the deployment answers the canary's prompts as it did at its launch",
        "the deployment gave wrong answers after the sweep: {detail}",
    ),
    "metrics_unreadable": _unchecked(
        "the engines' metrics can be read", "the engines' metrics could not be read ({error})"
    ),
    "metrics_unread_before": _unchecked(
        "the engines' metrics can be read before a level",
        "the engines' metrics could not be read before the level",
    ),
    "metrics_unknown": _unchecked("the engines' metrics are known", "the engines' metrics are unknown"),
    "counter_not_exported": _unchecked(
        "the engines export the counter", "the engines' metrics are unknown, or lack this counter"
    ),
    "usage_unreported": _unchecked(
        "the server reports the token counts of every answer",
        "the server reports no usage at the end of a stream ({unreported} of {answers} answers), so token counts are "
        "not checked: the tokens of an answer are those of its text by --tokenizer, in {others} of them not the "
        "requested number",
    ),
    "requests_not_counted": _unchecked(
        "the engines count requests", "the engines' metrics are unknown, or do not count requests"
    ),
    "counters_late": _unchecked(
        "counters stop changing after a level",
        "the engines' counters were late: they still changed when the wait for them ended",
    ),
    "kv_counters_unreadable": _unchecked(
        "the counters of KV transfers can be read", "KV-transfer counters could not be read ({error})"
    ),
    "kv_counters_unknown": _unchecked("the counters of KV transfers are known", "the KV-transfer counters are unknown"),
    "guard_counts_lost": _unchecked(
        "the KV guard's counts are of one engine",
        "an engine was restarted or replaced, so the counts of its KV guard are lost",
    ),
    "engine_counts_lost": _unchecked(
        "the engines' counts are of one engine each",
        "an engine was restarted or replaced, so its counts are lost",
    ),
    "pools_unknown": _unchecked(
        "the pool of an engine is known", "the roles of the engines (prefill or decode) are unknown"
    ),
    "role_board_unreachable": _unchecked("the role controller answers", "the role controller was unreachable"),
    "client_unmeasured": _unchecked("the load generator is measured", "the load generator was not measured"),
    "front_unrecorded": _unchecked(
        "the CPU of ingress and proxy is recorded",
        "the CPU usage of ingress and proxy was not recorded: a level needs about 15 s for that",
    ),
    "due_times_unrecorded": _unchecked(
        "due times of requests are recorded", "the due times of requests were not recorded"
    ),
    "clocks_uncompared": _unchecked("the client's clocks are compared", "the clocks were not compared"),
    "smoke_test": _unchecked("a level is long enough to judge", "a smoke test is too short for this gate"),
    "replay_load": _unchecked("the load of a level is constant", "the load of a replay changes with time"),
    "hits_incomputable": _unchecked(
        "the prefix-cache hits of each prompt can be computed beforehand",
        "hits are computed only if the token ids of each prompt and its engine, with model, pool and block size, are "
        "known",
    ),
    "hits_bounded": _unchecked(
        "the prefix-cache hits of each prompt, and not only their bounds, can be computed beforehand",
        "only bounds of the hits are known: {share:.1%} of the prompt tokens came from the prefix cache; by vLLM's "
        "rules it is {least:.1%} to {most:.1%}",
    ),
    "hits_unreported": _unchecked(
        "servers of a fluid pool report the cached tokens of each prompt",
        "a fluid pool counts the cached tokens of prefill and decode together, and its servers did not report those "
        "of each prompt: serve with --engine-arg enable_prompt_tokens_details=true",
    ),
    "replicas_unnamed": _unchecked(
        "timelines name the replica of at least 95 % of the requests",
        "timelines name the {pool} replica of only {named} of {requests} requests",
    ),
    "roles_move_sessions": _unchecked(
        "engines keep their roles", "engines of a fluid pool change roles, and sessions then change engines"
    ),
    "replay_recorded": _unchecked(
        "requests of a replay wait for answers", "no request of the replay waits for an answer"
    ),
    "ramp_load": _unchecked("the load of a level is constant", "a ramp has no steady state"),
    "too_few_for_trend": _unchecked(
        "enough requests finish in the steady window for a trend",
        "too few requests finish in the window to fit a trend",
    ),
    "sending_times_unknown": _unchecked(
        "simulated engines get the sending times of requests",
        "the simulated engines got the sending times of only {known:g} of {answers} requests",
    ),
    "canary_not_compared": _unchecked("the canary has a reference to compare with", "{detail}"),
    "behind_schedule": _note(
        "an open loop keeps its schedule",
        "the load generator does not keep to {rate:g} requests/s: requests were sent {late_ms:.0f} ms after they were "
        "due (p99, noted above {limit_ms:.0f} ms)",
        "give it more processes with --client-processes",
    ),
    "timelines_lacking": _note(
        "the servers report the parts of each request's time",
        "{whole} of {answers} answered requests have a complete timeline (expected: 99 %)",
        "docs/timeline.md lists what each mark needs",
    ),
    "timelines_disordered": _note(
        "the marks of a request are in order",
        "{wrong} of {timelines} timelines have marks out of order, by at most {worst_ms:.2f} ms: their parts are not "
        "exact",
    ),
    "timelines_miss_reads": _note(
        "timelines and engines count the same number of KV reads",
        "the timelines have {reads} reads of KV cache, but the engines counted {counted:g}",
    ),
    "ttft_mostly_front": _part(
        "the network, the proxy and the client",
        "send from the proxy's node to see the share of the network; docs/serving-path.md has the proxy's share",
    ),
    "ttft_mostly_server": _part(
        "the server before it calls prefill, or before the engine has the request",
        "add replicas, which share this work (tokenising and parsing grow with the prompt)",
    ),
    "ttft_mostly_failed_calls": _part(
        "failed calls of prefill", "look at the counters pdlab_prefill_* and at the logs of prefill"
    ),
    "ttft_mostly_call": _part(
        "the network to prefill's server and back",
        "put prefill and decode on nodes close to each other, or add prefill replicas",
    ),
    "ttft_mostly_prefill_server": _part(
        "prefill's server, outside of its engine",
        "add prefill replicas, which share this work (it grows with the prompt)",
    ),
    "ttft_mostly_queue": _part(
        "the queue in front of prefill",
        f"add engines that prefill, or send fewer requests at once; {PLAN} finds the ratio for the SLO",
    ),
    "ttft_mostly_prefill": _part(
        "the computation of the prompt", "use a larger TP for prefill, shorter prompts, or prompts with shared prefixes"
    ),
    "ttft_mostly_submit": _part(
        "decode's server, between prefill's answer and its engine", "add decode replicas, which share this work"
    ),
    "ttft_mostly_admission": _part(
        "the wait for room in decode and for the end of a step",
        "add decode engines or KV memory if decode is full; else make decode steps shorter",
    ),
    "ttft_mostly_post": _part(
        "the posting of the reads of KV cache", "use fewer, larger blocks, or equal TP in both pools"
    ),
    "ttft_mostly_transfer": _part(
        "the transfer of KV cache",
        f"use a faster wire, or a pack; {PDLAB} doctor lists the causes of a slow wire",
    ),
    "ttft_mostly_step_lag": _part(
        "the wait for decode steps until the scheduler can use the KV cache",
        "use --kv-poll-ms, or shorter decode steps (fewer requests per decode engine), or --d-engine-arg "
        "async_scheduling=false, which makes TPOT longer",
    ),
    "ttft_mostly_guard": _part(
        "the KV guard's wait for prefill's confirmation",
        "look at the counters pdlab_guard_*; put prefill and decode on nodes close to each other",
    ),
    "ttft_mostly_lost_read": _part(
        "the time until decode gave up KV cache that did not arrive",
        f"look at the counters pdlab_guard_*, which have the reason, and let {PDLAB} doctor check the wire",
    ),
    "ttft_mostly_wait": _part(
        "the wait in decode after the KV cache was usable or given up",
        "add decode engines, or send fewer requests at once",
    ),
    "ttft_mostly_recompute": _part(
        "decode's recomputation of the prompt", "its KV cache did not arrive: look at the counters pdlab_guard_*"
    ),
    "ttft_mostly_first_step": _part(
        "the decode step of the first token",
        "use --reuse-first-token, or shorter decode steps (fewer requests per decode engine), or --d-engine-arg "
        "async_scheduling=false, which makes TPOT longer",
    ),
    "ttft_mostly_out": _part(
        "the server's streaming of the first token", "add replicas, which share the streaming of tokens"
    ),
    "measured_with_more_processes": _note(
        "one load generator suffices",
        "measured again with {processes} load-generator processes: with {before}, {reason}",
    ),
    "measured_after_recovery": _note(
        "no replica dies during a level",
        "measured again, {after_s:.0f} s after a replica had died in the first measurement",
    ),
    "decode_approximated": _note(
        "decode is measured at its real context length",
        "decode-approx: one input token per request; the result lacks the cost of attention over a real context, so "
        "it is an upper bound of decode speed; the one-token prompts repeat",
    ),
    "decode_only_filled": _note(
        "prompts are computed",
        "decode-only: the KV cache of prompts is filled with random values; filling a prompt takes part of the step "
        "that admits it, and TTFT is only that step",
    ),
    "decode_only_first_group": _note(
        "every group of KV caches is filled",
        "decode-only: the connector fills only the first KV-cache group. Layers of the other groups (here those "
        "with a sliding window or those without) read as many bytes as after a real prompt, but old values: the time "
        "of attention is right, the choice of experts may differ",
    ),
    "answers_ended_early": _note(
        "answers have the length in the name",
        "answers ended before --otl {requested}: they have {actual:.4g} tokens",
    ),
    "file_requests_failed": _file("every request has a complete answer", "{failed} of {requests} requests failed"),
    "file_no_answers": _file(
        "a file with tokens or a rate of requests counts answered requests",
        "the file has tokens or a rate of requests, but counts no answered request: write it again with that client",
    ),
    "file_nothing_answered": _file("a level has an answered request", "no request was answered"),
    "file_not_valid": _file(
        "a file does not mark its level as not valid", "marked as not valid in the file: {reasons}"
    ),
    "file_counts_unknown": _file(
        "a file has the number of requests and the duration",
        "the file has neither the number of requests nor the duration: checks that need them are left out",
    ),
    "file_rate_differs": _file(
        "a stated rate is a count over the duration",
        "the file states {stated:.2f} {name}, but counts over its duration give {expected:.2f}",
    ),
    "file_no_lengths": _file(
        "a file, or a name, has the lengths of the requests",
        "the file does not count {side} tokens, and no name gives their number: the workload is unknown",
    ),
    "file_tokens_recounted": _file(
        "the client's and the server's counts of output tokens agree",
        "the client tokenized the answers again and counted {client:.4g} tokens per answer, the server {server:.4g}: "
        "output tokens/s and TPOT use the client's count",
    ),
    "file_name_differs": _file(
        "the load in a file's name is that of its content",
        "the file's name has {name} {named:g}, its content {actual:g}",
    ),
    "file_tokens_differ": _file(
        "the token counts in a name are those of the file",
        "the {whose}'s name has {named} {side} tokens per request, the file has {actual}",
    ),
    "file_rate_capped": _file(
        "an open loop sends every request when it is due",
        "the file offers {offered:g} requests/s, but the client stopped at {limit:g} in flight: {served:.2f} "
        "requests/s were served",
    ),
    "file_no_latency": _file("a latency is a number of at least 0", "{name} is {value}{more}: not a latency"),
    "figures_impossible": _file("a level's figures can be true at the same time", "{what}"),
    "copied_files": _audit(
        "identical",
        "no file of a folder is a copy of another one there",
        "in {folder}, {files:#file is|files are} byte-identical to other files there",
        "one measurement is drawn as several",
        "remove the copies",
    ),
    "copied_folder": _audit(
        "identical",
        "two experiments of one configuration have no file or records in common",
        _COPIED,
        "one is a copy of the other: one measurement is drawn as two that agree",
        "remove one of the two folders",
    ),
    "copied_to_another": _audit(
        "identical",
        "two experiments of different configurations have no file or records in common",
        _COPIED,
        "one of the two curves belongs to another configuration",
        "find out which of the two was measured, and remove the other",
    ),
    "copied_to_other_gpus": _audit(
        "identical",
        "two experiments on different numbers of GPUs have no file or records in common",
        _COPIED,
        "one of the two curves belongs to another configuration: it ran on {original_gpus} GPUs and is divided by "
        "{gpus}, or the reverse",
        "find out which of the two was measured, and remove the other",
    ),
    "name_contradicts": _audit(
        "contradiction",
        "the load and the token counts in a name are those of the content",
        "{what}",
        "the point is drawn by the file's content, but the name describes another measurement",
        "rename it after its content, or measure again",
    ),
    "rate_not_offered": _audit(
        "contradiction",
        "an open loop sends every request when it is due",
        "{what}",
        "from then on it was a closed loop: the rate was not offered, and TTFT excludes the wait at the client; the "
        "level is not valid",
        "draw it at the served rate, or measure without a limit of requests in flight",
    ),
    "peak_contradicts": _audit(
        "contradiction",
        "the largest number of requests in flight is near the concurrency",
        "concurrency {concurrency:g}, but at most {peak:g#request was|requests were} in flight in any second",
        "the point is drawn at a wrong load",
        "measure again",
    ),
    "level_renamed": _audit(
        "contradiction",
        "a level's file has the name of the level",
        "the file is the level {level}",
        "another level was renamed over this one",
        "rename it back to {level}.json, or measure again",
    ),
    "rates_share_a_limit": _audit(
        "collision",
        "levels differ in their concurrency",
        "{levels} request rates have the same max_concurrency {limit:g}",
        "a reader that uses the concurrency as key draws them as one point",
        f"key request-rate runs by their rate ({VIZ} does)",
        "warning",
    ),
    "loads_repeat": _audit(
        "collision",
        "levels differ in their load",
        "several files have the same load",
        "viz takes them as repeats and draws their mean; other readers may keep only the last one",
        "mark them as repeats in their names (_r1, _r2), or keep one",
        "warning",
    ),
    "reused_prompts": _audit(
        "reused prompts", "no level repeats another level's prompts", _REUSED, _REUSED_IMPACT, _REUSED_FIX, "warning"
    ),
    "reused_default_seed": _audit(
        "reused prompts",
        "no level repeats another level's prompts, if no seed is recorded",
        f"{_REUSED} (no seed is recorded: the client's default is the same for all levels)",
        _REUSED_IMPACT,
        _REUSED_FIX,
        "warning",
    ),
    "few_prompts": _audit(
        "few prompts",
        "ramp-up and drain are a small part of a closed loop",
        "{least:.1f} requests per unit of concurrency at the least (recommended: {recommended})",
        "the first wave (all prompts at once) and the last one (draining) are that share of the run",
        "more prompts per level, and figures of the steady window only",
        "warning",
    ),
    "few_arrivals": _audit(
        "few prompts",
        "an open loop has enough arrivals for its rate",
        "{fewest:#request} in an open loop (recommended: {recommended})",
        "the rate of so few Poisson arrivals has a random error of that size",
        "more prompts per level",
        "warning",
    ),
    "ramp": _audit(
        "ramp",
        "the mean output rate is near that of the steady window",
        "mean output rate as a share of the steady window's, or of the best second's: {shares}",
        "ramp-up, drain or stalls make up the average: the deployment's rate is higher than drawn",
        "a longer run, or the steady window's figures",
        "warning",
    ),
    "rate_impossible": _audit(
        "impossible",
        "a rate is a count over the duration",
        "{name} {stated:.2f}, but counts over duration give {expected:.2f}",
        _EDITED,
        "measure again",
    ),
    "wrong_gpus": _audit(
        "GPUs",
        "figures are divided by the number of GPUs of the deployment",
        "the deployment {label} uses {deployed:#GPU}, the manifest {verb} {gpus}",
        "throughput per node is wrong by that ratio",
        "correct the manifest from the launch's own output",
    ),
    "label_of_another": _audit(
        "contradiction",
        "a folder's label is its deployment's",
        "labelled {label}, its deployment is {deployment}",
        "the curve has the name of another configuration",
        _MEASURED_FIX,
    ),
    "level_of_another": _audit(
        "contradiction",
        "a level's label is its folder's",
        "a level of {level} in the folder of {label}",
        "the point belongs to another configuration",
        _MEASURED_FIX,
    ),
    "tokens_contradict": _audit(
        "contradiction",
        "a level's token rates are those of its workload",
        "the workload has {requested:.10g} {side} tokens per request, rate x duration / requests gives {actual:.1f}",
        "the point is drawn for a workload that was not measured, or its throughput is wrong",
        _AGAIN_FIX,
    ),
    "lengths": _audit(
        "lengths",
        "the levels of a curve have requests of one length",
        "levels of one curve have different token counts: {lengths}",
        "one curve is drawn through points of somewhat different workloads",
        "the same prompts, and --ignore-eos, at every load",
        "warning",
    ),
    "early_ends": _audit(
        "early ends",
        "answers have the length in the name",
        "answers ended before --otl: the names have {requested:g} output tokens, the answers {answered}",
        "the curve is of shorter answers; viz compares them by the generated tokens",
        "measure with --ignore-eos if all answers must have the whole length",
        "warning",
    ),
    "requests_miscounted": _audit(
        "contradiction",
        "every request of a level ended once",
        "{requests:#request was|requests were} sent, {answered} answered ({figures} in the figures), {failed} failed",
        "rates are counts over duration: they have the same error",
        _MIXED_FIX,
    ),
    "latencies_impossible": _audit(
        "impossible", "latencies are at least 0, and percentiles rise", "{what}", _EDITED, "measure again"
    ),
    "too_many_in_flight": _audit(
        "impossible",
        "rate x time in the system is at most the concurrency",
        f"{_LITTLE}, the load allows {{concurrency}}",
        "throughput too high, latency too high, or another concurrency",
        _MIXED_FIX,
    ),
    "too_few_in_flight": _audit(
        "contradiction",
        "rate x time in the system is near the concurrency",
        f"{_LITTLE}, but the load is {{concurrency}}",
        "the point is drawn at a wrong load, or throughput or latency are too low",
        _MIXED_FIX,
    ),
    "more_served_than_arrived": _audit(
        "impossible",
        "an open loop serves no more than arrives",
        "{served_rps:.2f} requests/s were served where {arrived_rps:g} arrived",
        "the point is drawn at a wrong rate",
        "measure again",
    ),
    "metadata": _audit(
        "metadata",
        "everything that a repetition of the measurement needs is recorded",
        "not recorded: {missing}",
        "the measurement cannot be repeated, and differences to others cannot be explained",
        f"measure with {BENCH}, which records all of it",
        "warning",
    ),
    "invalid": _audit(
        "invalid",
        "a level passes its own gates",
        "{what}",
        "viz draws the point crossed and excludes it from comparisons; other readers would use it",
        f"find the cause, and {_AGAIN_FIX}",
        "warning",
    ),
    "records_differ": _audit(
        "records",
        "the requests beside a level are its own, by their hash",
        "the hash of the file is not the one that the level records",
        _NO_BASIS,
        _RECORDS_FIX,
    ),
    "records_empty": _audit(
        "records", "the file of a level's requests is not empty", "the file is empty (0 bytes)", _NO_BASIS, _RECORDS_FIX
    ),
    "records_unreadable": _audit(
        "records", "the requests of a level can be read", "cannot be read ({error})", _NO_BASIS, _RECORDS_FIX
    ),
    "records_not_requests": _audit(
        "records",
        "the records of a level are requests",
        "the file has no requests ({error})",
        "no figure can be checked",
        "measure it again",
    ),
    "figures_differ": _audit(
        "impossible",
        "a level's figures are those of its requests",
        "{what}",
        "the file was edited, or has another level's requests beside it",
        _AGAIN_FIX,
    ),
    "unreadable": _audit(
        "unreadable",
        "a folder can be read",
        "{error}",
        "the folder cannot be plotted",
        "do as the evidence tells: give the folders it names, or --gpus NAME=N, or correct or remove the file",
        "warning",
    ),
    "advertised_host": _doctor("advertised host", "an engine gives the other nodes an address that they can reach"),
    "allocator": _doctor("{name}", "PyTorch's allocator does not remap the memory of the KV cache"),
    "builds_differ": _doctor("builds differ", "every node has the same build of a library", "warning"),
    "clock_differs": _doctor("clock", "the clocks of the nodes agree", "warning"),
    "compiler": _doctor("compiler", "an engine that compiles at its start finds a compiler"),
    "debug_logging": _doctor("debug logging", "no library of the KV transfer logs every call"),
    "dev_shm": _doctor("/dev/shm", "/dev/shm has room for the queues of the engines", "warning"),
    "driver_too_old": _doctor("NVIDIA driver", "the driver is one that torch was built for"),
    "exported_port": _doctor("exported port", "no port of an engine is fixed in the environment"),
    "fabric_not_usable": _doctor("{name} not usable", "RDMA devices that a node has can be opened"),
    "gpu_visibility": _doctor("GPU visibility", "the processes of a node see every GPU", "warning"),
    "gpudirect": _doctor("GPUDirect", "a NIC reaches the memory of GPUs by itself", "warning"),
    "host_name": _doctor("host name", "a node's host name resolves to an address that other nodes reach"),
    "huge_pages": _doctor("huge pages", "there are huge pages for libfabric", "note"),
    "interface_variable": _doctor("{name}", "a variable that names an interface names one of the node"),
    "libefa_missing": _doctor("libefa missing", "a node with EFA has libefa"),
    "library_from_elsewhere": _doctor(
        "{name} from elsewhere", "the package that is imported is the installed one", "warning"
    ),
    "library_twice": _doctor("{name} twice", "a process loads one copy of a library"),
    "memlock": _doctor("memlock", "RDMA may lock as much memory as the KV cache has"),
    "mig": _doctor("MIG", "GPUs are whole", "warning"),
    "namespaces": _doctor("{name} namespaces", "the processes of a node can reach each other's memory", "warning"),
    "nccl_plugin": _doctor("NCCL plugin", "NCCL has the plugin of the network", "note"),
    "nixl_backend": _doctor("NIXL backend {name}", "NIXL creates each requested backend"),
    "nixl_does_not_load": _doctor("NIXL", "NIXL loads"),
    "one_nic": _doctor("one NIC", "every GPU may use its own NIC", "warning"),
    "open_port": _doctor("open port", "no port that others could misuse listens beyond loopback", "warning"),
    "package_version": _doctor("{name} version", "every node has the same version of a package"),
    "rails": _doctor("rails", "UCX uses every NIC of a GPU", "warning"),
    "ray_token": _doctor("Ray token", "every node has the same token of Ray"),
    "rdma_core_abi": _doctor("rdma-core ABI", "the providers of rdma-core load into NIXL's libibverbs", "warning"),
    "side_channel_port": _doctor("side-channel port", "the ports of NIXL's side channel are free"),
    "ucx_emulation": _doctor("UCX emulation", "UCX_PROTO_EMULATION_ENABLE leaves UCX its reads over TCP"),
    "ucx_finds_no_rdma": _doctor("RDMA", "UCX finds the RDMA devices of a node"),
    "ucx_finds_no_srd": _doctor("SRD", "UCX finds the EFA devices of a node"),
    "ucx_module": _doctor("UCX module {name}", "each module of UCX that a node needs loads"),
    "ucx_net_devices": _doctor("UCX_NET_DEVICES", "UCX_NET_DEVICES is not set, or names devices that every node has"),
    "ucx_of_the_system": _doctor("UCX of the system", "UCX is the one of NIXL's wheel", "note"),
    "ucx_tls": _doctor("UCX_TLS", "UCX_TLS is not set, or has the transports that the links need"),
    "ucx_twice": _doctor("UCX twice", "a process loads UCX once"),
    "ucx_version": _doctor("UCX version", "the nodes have one UCX, which reads over EFA without emulation"),
    "weights": _doctor("weights", "the files of the model are present and complete"),
    "wire_not_as_counted": _wire(
        "no interface counts a payload that UCX moves through memory",
        "UCX names {wire}, but {nic} counted {share:.0%} of the payload",
        "repeat it on an idle machine, because other traffic counts too",
    ),
    "wire_counts_nothing": _wire(
        "the interfaces that UCX names count at least half of the payload",
        "UCX names {wire}, but its counters show {share:.0%} of the payload",
        "--verbose, and read UCX's own log",
    ),
    "wire_backend_leaves_host": _wire(
        "the backend of a pack moves memory within a host",
        "{backend} moves between processes of one host over {wire}",
        "--backends UCX for pack",
    ),
    "wire_tls_lacks": _wire(
        "UCX_TLS has a transport of the expected wire",
        "UCX_TLS={tls} leaves out {lacks}",
        "unset UCX_TLS, or let it have {needed}",
    ),
    "wire_module_lacks": _wire(
        "the UCX module of the expected wire loads",
        "UCX's module {module} did not load: {why}",
        DOCTOR,
    ),
    "wire_memory_forbidden": _wire(
        "a process may read the memory of another process",
        "reading another process's memory is forbidden here (ptrace_scope, seccomp or a missing SYS_PTRACE)",
        f"containers with --cap-add SYS_PTRACE, kernel.yama.ptrace_scope=0; {DOCTOR}",
    ),
    "wire_efa_of_some_ranks": _wire(
        "every rank finds an EFA device",
        "some ranks find an EFA device and others none",
        f"{DOCTOR} on both nodes; every GPU's EFA devices visible to its process",
    ),
    "wire_ucx_too_old": _wire(
        "UCX is 1.20 or later, which reads over srd with zero-copy",
        "UCX {version} has srd without get and put zero-copy",
        "UCX 1.20 or later: debug/build_nixl_ucx_efa.sh",
    ),
    "wire_efa_without_gpudirect": _wire(
        "EFA reads the memory of the KV cache without copies",
        "UCX cannot read this memory by EFA (no GPUDirect, or too little memory may be locked)",
        f"{DOCTOR} on both nodes",
    ),
    "wire_efa_module_lacks": _wire(
        "UCX's EFA module loads",
        "UCX's EFA module did not load: {why}",
        f"debug/build_nixl_ucx_efa.sh, or the EFA installer; {DOCTOR} proves it",
    ),
    "wire_efa_not_usable": _wire(
        "the backend can open the EFA devices of a node",
        "{backend} sees no usable EFA device (rdma-core of another ABI, or a container without /dev/infiniband)",
        f"{DOCTOR} on both nodes",
    ),
    "wire_rdma_unused": _wire(
        "the backend uses the InfiniBand or RoCE devices of both nodes",
        "{backend} does not use the RDMA devices",
        f"{DOCTOR} on both nodes; UCX_NET_DEVICES",
    ),
    "wire_rdma_of_some_ranks": _wire(
        "every rank finds an InfiniBand or RoCE device",
        "some ranks use an RDMA device and others none",
        f"{DOCTOR} on both nodes; every GPU's RDMA devices visible to its process",
    ),
    "wire_rdma_without_gpudirect": _wire(
        "the RDMA devices read the memory of the KV cache without copies",
        "UCX cannot read this memory by the RDMA devices (no GPUDirect, or too little memory may be locked)",
        f"{DOCTOR} on both nodes",
    ),
    "wire_rdma_on_one_side": _wire(
        "both nodes have RDMA devices, or neither",
        "only {host} has RDMA devices",
        "use nodes with the same network",
    ),
    "wire_unexpected": _wire(
        "the transport is the expected one",
        "the transport is not the expected one ({expected})",
        f"{DOCTOR}; unset UCX_TLS",
    ),
    "slow_tcp": _wire(
        "tcp reaches half of the line rate",
        "one of the hosts has no free core for its progress threads, or the link is shared",
        "use an idle machine",
    ),
    "slow_rails": _wire(
        "RDMA devices reach a fifth of their line rate",
        "pages too small to fill the devices, devices far from the memory, or other traffic on them",
        f"a smaller TP on decode or a larger --block-len-bytes; {DOCTOR}; an idle network",
    ),
    "slow_gpu_link": _wire(
        "two GPUs of a host are joined by NVLink or peer access",
        "no NVLink or no peer access between these GPUs",
        f"nvidia-smi topo -m; {DOCTOR}",
    ),
    "slow_memory": _wire(
        "shared memory reaches a fifth of memcpy",
        "no core is free for NIXL's threads, or debug logging is on",
        f"use an idle machine; run {DOCTOR}",
    ),
    "spread_on_one_host": _remark(
        "a spread is on two hosts",
        "the two Ray nodes of this spread are on one host: shared memory is the right wire, not the network",
    ),
    "hosts_share_a_kernel": _remark(
        "two hosts are two machines",
        "both nodes share one kernel: they are namespaces or containers of one machine, judged as two hosts",
    ),
    "too_few_bytes": _remark(
        "a transfer is large enough to judge its speed",
        "{megabytes:.1f} MB per transfer are too few to judge speed (at least {least_megabytes:.0f} MB)",
    ),
    "no_protocol_table": _remark(
        "UCX prints a table of the protocols that it used",
        "UCX printed no table of protocols: the wire is known only from the byte counters",
    ),
    "backend_reports_no_transport": _remark(
        "the backend reports its transport",
        "{backend} does not report its transport: the wire is known only from the byte counters",
    ),
    "pack_over_nodes": _of_plan(
        "a pack is within a node",
        "a pack of {gpus:#GPU} does not fit a node of {node}: predicted as if it did, without a band",
    ),
    "tp_over_nodes": _of_plan(
        "the TP ranks of an engine are within a node",
        "TP {tp} spans nodes of {node:#GPU}: its all-reduce is predicted {link}",
    ),
    "experts_balanced": _of_plan(
        "an engine has each expert once",
        "EP over {ranks} GPUs with a load balancer and {copies} redundant experts: neither their effect on steps nor "
        "their memory is simulated, so there is no band",
    ),
    "tables_of_version": _of_plan(
        "step times come from runs like the plan's",
        "step times of {gpu} come from tables of {engine} {tables}; they are sums over single operations",
    ),
    "tables_of_another_version": _of_plan(
        "tables of step times are of the planned engine version",
        "step times of {gpu} come from tables of {engine} {tables}, not of {planned}; they are sums over single "
        "operations",
    ),
    "launches_another_stack": _of_plan(
        "the plan is of the stack that pdlab launches",
        "pdlab launches vllm {launched} on Ray {ray}, and this plan is of {stack}; {flags} plans for that{less}",
    ),
    "unlike_public_stacks": _of_plan(
        "a public stack has the plan's model, GPU and engine version",
        "extrapolated from the public stacks: they lack {unseen}",
    ),
    "host_time": _of_plan(
        "the host's time of a step is measured on the planned engine version",
        "the host adds {host_ms:.2g} ms per step, standard deviation {spread}, and {sequence_us:.2g} us per decoding "
        "sequence; ranks wait {sync_us:.2g} us per layer and doubling of TP ({source})",
    ),
    "steps_of_pd": _of_plan(
        "engines of P:D were measured on the planned stack",
        "of P:D decode takes {decode:.3g} and prefill {prefill:.3g} times the tables' time, the host {sequence_us:.2g} "
        "us per decoding sequence, and the path of a request {path_ms:.0f} ms ({source})",
    ),
    "table_values_estimated": _of_plan(
        "tables are measured with the formats and sizes of the model",
        "some step times of {gpu} are estimated from other sizes or formats ({kinds})",
    ),
    "step_times_extrapolated": _of_plan(
        "steps are within the tables",
        "step times are extrapolated: a step has {times:.2g} times as many tokens or sequences as the tables have",
    ),
    "experts_wider_than_tables": _of_plan(
        "experts are on no more GPUs than in the comparisons of the tables with engines",
        "experts over {gpus} GPUs: the tables were compared with engines only up to {most}; beyond one node their "
        "exchange of tokens is slower than that of engines",
    ),
    "step_times_calculated": _of_plan(
        "step times are sums over measured operations",
        "all step times of {gpu} are calculated ({mode}); none is a sum over measured operations",
    ),
    "band_of_public_stacks": _of_plan(
        "levels of this stack were measured",
        "the 90 % band comes from {stacks} public stacks without Ray, each predicted by the others; not among them: "
        "{unseen}",
    ),
    "no_band": _of_plan(
        "public stacks are like this one",
        "an estimate without a band: among the public stacks with known errors, {why}",
    ),
    "near_saturation": _of_plan(
        "prompts seldom wait for KV memory",
        "near saturation: {share:.0%} of the time KV memory is full, or would be with 15 % fewer tokens; an estimate "
        "without a band",
    ),
    "prefill_near_saturation": _of_plan(
        "prefill engines have time to spare",
        "near saturation: prefill engines are busy {share:.0%} of the time; a small error of their steps is a large "
        "error of the TTFT; an estimate without a band",
    ),
    "overload": _of_plan(
        "no more requests arrive than are served",
        "overload: {arrive:.3g} requests/s arrive and {served:.3g} are served, so queues grow, and latencies with the "
        "number of requests; an estimate without a band",
    ),
    "pools_of_two_types": _of_plan(
        "all pools are on GPUs of one type",
        "prefill is on {prefill}, decode and collocated engines are on {decode}; --gpus counts GPUs of each type",
    ),
    "nodes_of_two_sizes": _of_plan(
        "all nodes have the same number of GPUs",
        "{sizes}, so throughput per node is not defined",
    ),
    "network_not_fitted": _of_plan(
        "nodes have the network of the fitted hardware",
        "between nodes KV cache crosses {network} at {gb_per_s:.3g} GB/s per {of}, {why}; no run was fitted with this "
        "rate",
    ),
    "steps_of_another_gpu_link": _of_plan(
        "GPUs of the nodes have the link of those that were measured",
        "GPUs of a node are linked by {nodes}, and step times are of GPUs with {steps}: engines of several GPUs are "
        "predicted as if they had {steps}",
    ),
    "network_assumed": _of_plan(
        "the plan has the network of its nodes",
        "the network of the nodes is not known: between nodes KV cache crosses EFA at {gb_per_s:.3g} GB/s per GPU (a "
        "plan takes --node FILE)",
    ),
    "weights_not_as_named": _of_plan(
        "the model's files have the format of weights in its name",
        "{what}",
    ),
    "few_guessing_steps": _of_plan(
        "an answer takes many steps that guess tokens",
        "answers of {tokens:.0f} tokens take few steps of {accepted:.3g} tokens: a step is predicted as if its tokens "
        "came one by one, so TPOT and the end of an answer are too early",
    ),
    "encoder_not_counted": _of_plan(
        "the model has no encoder of images or audio",
        "{what}",
    ),
    "draft_time_not_counted": _of_plan(
        "the time to guess tokens is measured",
        "speculative decoding accepts {accepted:g} tokens per step, with {guessed} guessed tokens and one more; the "
        "time of the draft is not counted",
    ),
    "replay_best": _of_replay(
        "one deployment is worse in no figure, and every other one is worse in at least one",
        "Best for {workload}: {best}, by {figures}; it is worse in no figure",
    ),
    "replay_best_of_several": _of_replay(
        "several deployments are worse in no figure, and others are",
        "Best for {workload}: {names}, which are not distinguishable; worse in at least one figure: {behind}",
    ),
    "replay_none_best": _of_replay(
        "different deployments lead by different figures", "None is best for {workload} by every figure: {parts}"
    ),
    "replay_tie": _of_replay(
        "no lead is larger than equal deployments may have by chance",
        "The best for {workload} among {names} is not distinguishable: replay it again in each",
    ),
    "replay_sizes_differ": _of_replay(
        "the compared deployments are of different sizes",
        "the deployments are of different sizes (engine ranks: {sizes})",
    ),
    "replay_not_compared": _of_replay(
        "a replay failed its checks", "{label} failed checks in a replay of {workload}, which is not compared"
    ),
    "replay_best_by": _of_replay(
        "a figure differs by more than equal deployments may",
        "{figure}: {best} is best ({values}); it leads {other} by a factor of {lead}, equal deployments may differ by "
        "{limit} ({scatter})",
    ),
    "replay_figure_tie": _of_replay(
        "a figure differs by no more than equal deployments may",
        "{figure}: {names} are not distinguishable ({values}); they differ by a factor of {lead}, equal deployments "
        "may differ by {limit} ({scatter})",
    ),
    "replay_parts_unknown": _of_replay(
        "not all replays have timelines", "{figure}: the reason is unknown, because not all have timelines"
    ),
    "replay_by_hits": _cause(
        "more of the prompts came from caches",
        "the computation of prompts (share from caches: {ours_hits} and {theirs_hits})",
    ),
    "replay_by_prefill": _cause("prompts are computed faster", "the computation of prompts"),
    "replay_by_queue": _cause("requests wait less for an engine", "the wait for engines"),
    "replay_by_transfer": _cause(
        "the way from prefill to decode takes less", "the hand-over from prefill to decode with the transfer"
    ),
    "replay_by_first_step": _cause("decode's first step takes less", "decode's step of the first token"),
    "replay_by_servers": _cause("servers and network take less", "servers, network and client"),
    "replay_by_bound": _of_replay(
        "fewer sessions missed one of the bounds",
        "goodput of sessions: {bound} makes most of the difference; {ours} sessions of {best} and {theirs} of {other} "
        "missed it",
    ),
    "replay_by_steps": _of_replay(
        "decode steps are shorter",
        "TPOT p50: {best} has shorter decode steps, median gap between tokens {ours_ms:.3g} against {theirs_ms:.3g} ms "
        "of {other}",
    ),
    "replay_by_stalls": _of_replay(
        "decode is interrupted less",
        "TPOT p50: {other} has more long gaps between tokens, mean gap {theirs_mean_ms:.3g} against "
        "{ours_mean_ms:.3g} ms of {best}, medians {theirs_ms:.3g} and {ours_ms:.3g} ms",
    ),
    "replay_by_first_token": _of_replay(
        "slow requests wait less for their first token",
        "normalised interactivity at P90: most of the difference is TTFT, per token of the slowest tenth {ours_ms:.3g} "
        "ms in {best} and {theirs_ms:.3g} ms in {other}",
    ),
    "replay_by_later_tokens": _of_replay(
        "slow requests have shorter gaps between tokens",
        "normalised interactivity at P90: most of the difference is decode, per token of the slowest tenth "
        "{ours_ms:.3g} ms in {best} and {theirs_ms:.3g} ms in {other}",
    ),
    "visits_left": _of_report(
        "every visit of the experiment is measured",
        "{folder} is not finished: {counted} of {visits} visits{without}",
    ),
    "repeats_by_result": _of_report(
        "the number of repeats was set before they were measured",
        "{folder} ended by {stopped}: intervals without a correction for these looks are too narrow; those that the "
        "experiment printed are corrected",
    ),
    "settings_searched": _of_report(
        "the levels were not measured to choose the engine settings",
        "{folder} is the search for engine settings of {tunes}: its best result is partly chance; compare later "
        "measurements with these settings",
    ),
    "several_curves": _of_report(
        "a folder holds one curve",
        "{folder} holds {curves:#curve}, its files differ in more than their load: {parts}",
    ),
    "unmarked_repeats": _of_report(
        "files of one load that differ in a number in their names count repeats",
        "{folder}: files whose names differ only in numbers or letters are averaged as repeats ({names}); join "
        "a setting with its word (batched2048), or count repeats (_r1, _r2)",
    ),
    "drawn_once": _of_report("no result is there twice", "identical results are drawn once: {names}"),
    "other_latency": _of_report(
        "some level has the latency of the view", "no level has the {lacks}: the {has} is shown"
    ),
    "plot_audited": _of_report(
        "the audit finds nothing that makes a plot wrong",
        "the audit has findings that make a plot of these folders wrong ({kinds}): {command} lists them",
    ),
}
