"""A judgement is a value: `Finding`, and `CODES`, the registry of everything that pdlab can find.

Gates, the audit of result folders, the doctor and the transfer check say what they found by code. Whoever decides on a
finding compares its code or reads its numbers, never its text. To add one: write its row in `CODES`, then yield
`found("its_code", ...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from pdlab.core.schema import Frozen

Severity = Literal["error", "warning", "note"]
"""error: what was judged is wrong or does not work; warning: it is slow, or less precise; note: worth knowing."""
Source = Literal["gates", "unchecked", "notes", "files", "audit", "doctor", "transfer", "plan", "timeline", "replay"]


@dataclass(frozen=True)
class FindingCode:
    """What a code means. ``rule``: the rule that was broken, in one line. ``template``: the sentence, with the names of
    a finding's numbers in braces; ``fix``: what to do, behind ``joint`` (empty: nothing in general).

    ``source``: the gates of a level, the reading of files of others, the audit, the doctor, or the check of KV
    transfers. The sentences of the doctor are with its rules: there ``template`` is the topic in words, and
    ``severity`` the worst. ``gate``: the gate that the finding fails. ``kind`` and ``impact``: of the audit, the
    heading of the finding and what the fault does to a plot.
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
    """One judgement: its code, the gate that it fails (None: none), the numbers and names that it is about, and its
    sentence, in which ``what`` was found comes first and the ``fix`` last.

    The sentence is kept as well, so that a stored finding reads the same when a later version words it otherwise.
    """

    code: str
    gate: str | None = None
    numbers: dict[str, int | float | str | None] = Field(default_factory=dict)
    what: str
    fix: str = ""

    @property
    def text(self) -> str:
        """The sentence, and what to do."""
        return self.what + self.fix


def found(code: str, **numbers: int | float | str | None) -> Finding:
    """A finding in the words of its row. Raises KeyError for a code, or a number, that has no row or is missing."""
    row = CODES[code]
    fix = row.joint + row.fix.format(**numbers) if row.fix else ""
    return Finding(code=code, gate=row.gate, numbers=numbers, what=row.template.format(**numbers), fix=fix)


def _gate(gate: str, rule: str, template: str, fix: str = "", joint: str = "; ") -> FindingCode:
    return FindingCode(source="gates", gate=gate, rule=rule, template=template, fix=fix, joint=joint)


def _unchecked(rule: str, template: str) -> FindingCode:
    return FindingCode(source="unchecked", rule=rule, template=template, severity="note")


def _note(rule: str, template: str, fix: str = "") -> FindingCode:
    return FindingCode(source="notes", rule=rule, template=template, fix=fix, severity="note")


def _of_plan(rule: str, template: str) -> FindingCode:
    """What a plan's step times rest on."""
    return FindingCode(source="plan", rule=rule, template=template, severity="note")


def _of_replay(rule: str, template: str) -> FindingCode:
    """Which of several deployments is best for a replay, and why."""
    return FindingCode(source="replay", rule=rule, template=template, severity="note")


def _cause(rule: str, what: str) -> FindingCode:
    """What makes most of a difference in TTFT between two deployments."""
    return _of_replay(
        rule,
        "{figure}: the largest part of the {gap_ms:.3g} ms between {best} and {other} is "
        + what
        + ", {ours_ms:.3g} against {theirs_ms:.3g} ms",
    )


def _part(what: str, fix: str) -> FindingCode:
    """The largest part of a level's mean TTFT, and what changes it."""
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


def _remark(rule: str, template: str) -> FindingCode:
    """What a verdict on a wire rests on."""
    return FindingCode(source="transfer", rule=rule, template=template, severity="note")


_PACE_FIX = "launch with a larger --slow-down"
_MIXED_FIX = "measure again; look for edited or mixed files"
_MEASURED_FIX = "find out which of the two was measured; put the file where it belongs, or measure again"
_AGAIN_FIX = "measure the level again with --force"
_EDITED = "the figure was edited, or belongs to another run"
_NO_BASIS = "intervals and goodput of that level have no basis, or are of other requests than its figures"
_RECORDS_FIX = f"restore the file, or {_AGAIN_FIX}"
_COPIED = "{files} files of {folder} are {how} those of {original}"
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
        "{unsent} of {requests} requests were not sent, for what they follow has no answer",
    ),
    "token_count_wrong": _gate(
        "token_counts",
        "the server counts the prompt and output tokens that a request asked for, in every answer",
        "{wrong} of {answers} answers have a wrong {side} token count ({count}, not {asked})",
    ),
    "kv_transfers_failed": _gate("kv_transfers", "no KV transfer fails", "{count:g} KV transfers failed"),
    "kv_notifications_failed": _gate(
        "kv_transfers", "no notification of a KV transfer fails", "{count:g} KV-transfer notifications failed"
    ),
    "kv_expired": _gate(
        "kv_transfers",
        "decode reads KV blocks before their lease ends",
        "{count:g} requests' KV blocks expired before decode took them",
    ),
    "kv_nothing_transferred": _gate(
        "kv_transfers",
        "a PD deployment transfers KV cache",
        "no KV bytes were transferred, by vLLM's counters",
    ),
    "kv_transfers_unseen": _gate(
        "kv_transfers",
        "KV transfers are counted where they must happen",
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
        "decode computes no prompt whose KV cache was to come from prefill",
        "the KV guard had decode compute {count:g} prompts whose KV cache did not arrive or was not confirmed "
        "({receives:g} receives)",
    ),
    "guard_gave_up": _gate(
        "guard_deadline",
        "every KV receive ends within `--kv-deadline-s`",
        "the KV guard gave up {count:g} KV receives at their deadline",
    ),
    "guard_no_room": _gate(
        "guard_deadline",
        "the guard fails no request for which late KV receives leave no room",
        "the KV guard failed {count:g} requests for which late KV receives left no room",
    ),
    "kv_connection_failed": _gate(
        "kv_connections",
        "no connection between prefill and decode fails: no failed read (`pdlab_guard_failed_reads`), no new handshake "
        "(`pdlab_guard_handshakes_renewed`)",
        "a connection between prefill and decode failed: {done}",
    ),
    "replica_replaced": _gate(
        "restarts",
        "the replicas that the launch verified answer, and no others",
        "a replica was replaced: {replicas} answers, which the launch neither started nor verified",
        "wait until Ray Serve has replaced it, launch again, and measure anew",
    ),
    "replica_died": _gate("restarts", "no replica dies in a level", "{why}"),
    "engine_restarted": _gate(
        "restarts",
        "an engine's counters never go back",
        "an engine was restarted during the level: its counters went back",
    ),
    "roles_set_by_hand": _gate(
        "roles",
        "a fluid pool has the split of its launch: nobody set another by hand (`pdlab_roles_changed`)",
        "the split of the fluid pool was set by hand, and {label} is the curve of another",
        "launch with --roles P:D to measure a split, or set that of the launch again (python -m pdlab roles P:D or "
        "auto) and measure again",
        ": ",
    ),
    "other_requests_more": _gate(
        "other_requests",
        "engines finish no more requests than the client sent",
        "the{pool} engines finished {finished:g} requests during the level, {sent} are the client's: another client "
        "used the deployment (a sweep, a user, a probe)",
        "measure again without it",
    ),
    "other_requests_fewer": _gate(
        "other_requests",
        "the published replicas give every answer",
        "the{pool} engines finished {finished:g} requests during the level, but the client has {answered} answers: "
        "others than the published replicas gave them",
        "launch again and measure again",
    ),
    "preempted": _gate(
        "preemptions",
        "no request loses its KV cache",
        "engines preempted requests {count:g} times: their KV cache was full",
    ),
    "prefix_cache_hits": _gate(
        "prefix_cache",
        "the share of prompt tokens from the prefix cache is at most 0.01 above the declared share (shared prefixes / "
        "prompt tokens, of the answered requests)",
        "{share:.0%} of the prompt tokens came from the prefix cache, the workload declares {declared:.0%}",
    ),
    "hits_unforeseen": _gate(
        "cache_hits",
        "the share of a replay's prompt tokens from the prefix cache is within 0.02 of what vLLM's rules foresee",
        "{share:.1%} of the prompt tokens came from the prefix cache, its rules foresee {foreseen:.1%}",
    ),
    "hits_out_of_bounds": _gate(
        "cache_hits",
        "where vLLM's rules give bounds alone, the share of a replay's prompt tokens from the prefix cache is within "
        "0.02 of them",
        "{share:.1%} of the prompt tokens came from the prefix cache, its rules allow {least:.1%} to {most:.1%}",
    ),
    "sessions_moved": _gate(
        "affinity",
        "all requests of a session go to one engine of a pool with the routing session",
        "{moved} of {sessions} sessions were served by several {pool} engines, and the routing is by session",
    ),
    "context_computed": _gate(
        "decode_context",
        "decode-only: at least 99 % of the context tokens are filled and not computed",
        "only {filled:g} of {tokens} context tokens were filled: the others were computed, which is no decode",
    ),
    "client_cpu": _gate(
        "client_saturation",
        "each process of the load generator uses at most 0.9 of a core",
        "load generator saturated: {cores:.2f} of one core (limit {limit})",
    ),
    "client_lag": _gate(
        "client_saturation",
        "the event loop of the load generator is late (p95) by at most 50 ms, or by at most a quarter of the shorter "
        "of median TTFT and median decode time (E2EL - TTFT)",
        "load generator saturated: event loop late by {late_ms:.0f} ms (p95, limit {limit})",
    ),
    "front_cpu": _gate(
        "front_saturation",
        "on their busiest node the ingress replicas use at most 0.9 of a core each, as do Ray Serve's proxy and, with "
        "direct streaming, the router that HAProxy asks",
        "{name} saturated: {cores:.2f} of one core (limit {limit}){cure}",
    ),
    "sent_late": _gate(
        "lateness",
        "requests are sent late (p95) by at most 50 ms, or by at most a quarter of the median TTFT (open loop) or of "
        "the median E2EL (closed loop)",
        "load generator late: requests were sent {late_ms:.0f} ms {when} (p95, limit {limit})",
    ),
    "replay_late": _gate(
        "lateness",
        "requests of a replay are sent late (p99) by at most 50 ms: after they are due by the file, or after the "
        "answers that they wait for and their pause",
        "load generator late: requests of the replay were sent {late_ms:.0f} ms late (p99, limit {limit_ms:.0f} ms)",
    ),
    "dependency_violated": _gate(
        "dependencies",
        "no request of a replay is sent before the last token of what it waits for",
        "{violated} of {waiting} requests were sent before what they wait for had ended (first: {first})",
    ),
    "clock_backwards": _gate(
        "clock",
        "the times of a request are in their order, to 1 ms",
        "clock: a request's times run backwards ({times} s)",
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
        "no steady state: requests in flight grew by {growth:.0f} while {arrivals} arrived: the rate is above what is "
        "served",
    ),
    "answers_take_longer": _gate(
        "steady_state",
        "answers of an open loop do not take ever longer",
        "no steady state: answers{which} took {first_s:.3g} s at the begin and {last_s:.3g} s at the end of "
        "{lasted_s:.0f} s of load: the rate is above what is served",
    ),
    "in_flight_is_not_rate_times_time": _gate(
        "steady_state",
        "the number in flight is rate x time in the system",
        "no steady state: {in_flight:.1f} requests were in flight, rate x time in the system is {by_rate:.1f} "
        "(Little's law)",
    ),
    "pace_differs": _gate(
        "rehearsed_pace",
        "rehearsal: the means of the client and of the simulated engines agree (limits below)",
        "this machine set the pace: mean {name} is {client_ms:.3g} ms at the client and {modelled_ms:.3g} ms by the "
        "model (limit {limit:.0%})",
        _PACE_FIX,
    ),
    "pace_late": _gate(
        "rehearsed_pace",
        "rehearsal: requests reach the simulated engines in time (limits below)",
        "this machine set the pace: requests reached simulated engines {late_ms:.3g} ms too late on average (limit "
        "{limit:.0%} of TTFT)",
        _PACE_FIX,
    ),
    "answers_wrong": _gate(
        "canary",
        "the deployment answers the canary's prompts behind a sweep as it did at its launch",
        "the deployment answered wrongly behind the sweep: {detail}",
    ),
    "metrics_unreadable": _unchecked(
        "the engines' metrics can be read", "the engines' metrics could not be read ({error})"
    ),
    "metrics_unread_before": _unchecked(
        "the engines' metrics can be read before a level",
        "the engines' metrics could not be read before the level",
    ),
    "metrics_unknown": _unchecked("the engines' metrics are known", "the engines' metrics are not known"),
    "counter_not_exported": _unchecked(
        "the engines export the counter", "the engines' metrics are not known or do not have it"
    ),
    "requests_not_counted": _unchecked(
        "the engines count requests", "the engines' metrics are not known or do not count requests"
    ),
    "counters_late": _unchecked(
        "counters come to rest behind a level",
        "the engines' counters were late: they still moved when the wait for them ended",
    ),
    "kv_counters_unreadable": _unchecked(
        "the counters of KV transfers can be read", "KV-transfer counters could not be read ({error})"
    ),
    "kv_counters_unknown": _unchecked(
        "the counters of KV transfers are known", "the KV-transfer counters are not known"
    ),
    "guard_counts_lost": _unchecked(
        "the KV guard's counts are of one engine",
        "an engine was restarted or replaced, and what its guard had counted is not known",
    ),
    "engine_counts_lost": _unchecked(
        "the engines' counts are of one engine each",
        "an engine was restarted or replaced, and what it had counted is not known",
    ),
    "pools_unknown": _unchecked(
        "the pool of an engine is known", "which engines prefill and which decode is not known"
    ),
    "role_board_unreachable": _unchecked("the role controller answers", "the role controller was unreachable"),
    "client_unmeasured": _unchecked("the load generator is measured", "the load generator was not measured"),
    "front_unrecorded": _unchecked(
        "the CPU of ingress and proxy is recorded", "the CPU usage of ingress and proxy was not recorded"
    ),
    "due_times_unrecorded": _unchecked(
        "it is recorded when requests were due", "when requests were due was not recorded"
    ),
    "clocks_uncompared": _unchecked("the client's clocks are compared", "the clocks were not compared"),
    "smoke_test": _unchecked("a level is long enough to judge", "a smoke test is too short to tell"),
    "replay_load": _unchecked("the load of a level stays as it is", "a replay has the load of its source, which moves"),
    "hits_not_foreseen": _unchecked(
        "what a prefix cache has of each prompt is foreseen",
        "hits are foreseen of prompts whose token ids and whose engine, with its model, pool and block size, are known",
    ),
    "hits_bounded": _unchecked(
        "what a prefix cache has of each prompt is foreseen, and not bounds of it alone",
        "engines or what they hold are not known: {share:.1%} of the prompt tokens came from the prefix cache, its "
        "rules allow {least:.1%} to {most:.1%}",
    ),
    "hits_not_told": _unchecked(
        "servers of a fluid pool tell what was cached of each prompt",
        "a fluid pool counts what is cached for prefill and for decode together, and its servers did not tell what was "
        "cached of each prompt: serve with --engine-arg enable_prompt_tokens_details=true",
    ),
    "replicas_not_told": _unchecked(
        "timelines tell which replica served at least 95 % of the requests",
        "timelines tell which {pool} replica served {named} of {requests} requests",
    ),
    "roles_move_sessions": _unchecked(
        "engines keep their roles", "engines of a fluid pool change roles, and their sessions then move"
    ),
    "replay_recorded": _unchecked(
        "requests of a replay wait for others", "no request of the replay waits for another one's answer"
    ),
    "ramp_load": _unchecked("the load of a level stays as it is", "a ramp has no steady state by intention"),
    "too_few_for_trend": _unchecked(
        "enough requests finish in the steady window for a trend",
        "too few requests finish in the window to fit a trend",
    ),
    "sending_times_unknown": _unchecked(
        "simulated engines know when requests were sent",
        "the simulated engines know when {known:g} of {answers} requests were sent",
    ),
    "canary_not_compared": _unchecked("the canary has a reference to compare with", "{detail}"),
    "behind_schedule": _note(
        "an open loop keeps its schedule",
        "the load generator does not keep to {rate:g} requests/s: requests were sent {late_ms:.0f} ms after they were "
        "due (p99, noted above {limit_ms:.0f} ms)",
        "let it grow with --client-processes",
    ),
    "timelines_lacking": _note(
        "the servers tell where each request's time went",
        "{whole} of {answers} answered requests have a whole timeline (expected: 99 %)",
        "see docs/timeline.md for what a mark needs",
    ),
    "timelines_disordered": _note(
        "the marks of a request follow one another",
        "{wrong} of {told} timelines have marks out of order, by {worst_ms:.2f} ms at most: their parts are not exact",
    ),
    "timelines_miss_reads": _note(
        "the reads in the timelines are those that the engines count",
        "the timelines have {reads} reads of KV cache, and the engines counted {counted:g}",
    ),
    "ttft_mostly_front": _part(
        "the network, the proxy and the client",
        "send from the node of the proxy to see what the network takes; docs/serving-path.md has the proxy's share",
    ),
    "ttft_mostly_server": _part(
        "the server before prefill is called, or before the engine has the request",
        "more replicas share it (tokenising and parsing grow with the prompt)",
    ),
    "ttft_mostly_failed_calls": _part(
        "calls of prefill that failed", "look at the counters pdlab_prefill_* and at the logs of prefill"
    ),
    "ttft_mostly_call": _part(
        "the way to prefill's server and back",
        "put prefill and decode on nodes with a short way between them, or more prefill replicas beside it",
    ),
    "ttft_mostly_prefill_server": _part(
        "prefill's server around its engine", "more prefill replicas share it (it grows with the prompt)"
    ),
    "ttft_mostly_queue": _part(
        "the queue in front of prefill",
        "more engines that prefill, or fewer requests at once; plan.py says which ratio holds the SLO",
    ),
    "ttft_mostly_prefill": _part(
        "the computation of the prompt", "a larger TP of prefill, shorter prompts, or prompts that share a beginning"
    ),
    "ttft_mostly_submit": _part(
        "decode's server between prefill's answer and its engine", "more decode replicas share it"
    ),
    "ttft_mostly_admission": _part(
        "waiting for room in decode and for a step to end",
        "more decode engines or KV memory where decode is full, else shorter decode steps",
    ),
    "ttft_mostly_post": _part("posting the reads of KV cache", "fewer, larger blocks, or equal TP of both pools"),
    "ttft_mostly_transfer": _part(
        "the transfer of KV cache",
        "a faster wire or a pack; python -m pdlab doctor says what holds the wire up",
    ),
    "ttft_mostly_step_lag": _part(
        "waiting for decode steps until the scheduler is told of the KV cache",
        "--kv-poll-ms, shorter decode steps (fewer requests per decode engine), or --d-engine-arg "
        "async_scheduling=false, which pays with TPOT",
    ),
    "ttft_mostly_guard": _part(
        "the KV guard's wait for prefill's word", "look at the counters pdlab_guard_*; a short way to prefill's port"
    ),
    "ttft_mostly_wait": _part(
        "waiting in decode with usable KV cache", "more decode engines, or fewer requests at once"
    ),
    "ttft_mostly_recompute": _part(
        "the prompt computed again by decode", "its KV cache did not arrive: look at the counters pdlab_guard_*"
    ),
    "ttft_mostly_first_step": _part(
        "the decode step of the first token",
        "--reuse-first-token, shorter decode steps (fewer requests per decode engine), or --d-engine-arg "
        "async_scheduling=false, which pays with TPOT",
    ),
    "ttft_mostly_out": _part(
        "the way of the first token out of the server", "more replicas share the streaming of tokens"
    ),
    "measured_with_more_processes": _note(
        "one load generator suffices",
        "measured again with {processes} load-generator processes: with {before}, {reason}",
    ),
    "measured_after_recovery": _note(
        "a level is measured on the replicas of the launch",
        "measured again {after_s:.0f} s after a replica had died in it",
    ),
    "decode_approximated": _note(
        "decode is measured at its real context length",
        "decode-approx: one input token per request; without the cost of attention over a real context it is an "
        "upper bound of decode speed, and its one-token prompts repeat",
    ),
    "decode_only_filled": _note(
        "prompts are computed",
        "decode-only: the KV cache of prompts is filled with random values; filling a prompt takes part of the step "
        "that admits it, and TTFT is only that step",
    ),
    "decode_only_first_group": _note(
        "every group of KV caches is filled",
        "decode-only: the connector fills only the first KV-cache group. Layers of the other groups (here those "
        "with a sliding window or those without) read as many bytes as behind a real prompt, but values that were "
        "there before: time of attention is right, the choice of experts may differ",
    ),
    "answers_ended_early": _note(
        "answers are as long as the name says",
        "answers ended before --otl {asked}: they have {actual:.4g} tokens",
    ),
    "file_requests_failed": _file("every request has a complete answer", "{failed} of {requests} requests failed"),
    "file_not_valid": _file("a table of levels calls a level valid", "not valid when the table was written: {reasons}"),
    "file_counts_unknown": _file(
        "a file has the number of requests and the duration",
        "the file has neither the number of requests nor the duration: what depends on them is not checked",
    ),
    "file_no_lengths": _file(
        "a file, or a name, has the lengths of the requests",
        "the file does not count {side} tokens, and no name gives their number: the workload is not known",
    ),
    "file_tokens_recounted": _file(
        "the client's and the server's counts of output tokens agree",
        "the client counted {client:.4g} tokens per answer anew, the server {server:.4g}: output tokens/s and TPOT are "
        "by the client's count",
    ),
    "file_name_differs": _file(
        "a file's name says the load that the file holds",
        "the file's name says {name} {named:g}, its content {actual:g}",
    ),
    "file_tokens_differ": _file(
        "a name says the token counts that the file holds",
        "the {whose}'s name says {named} {side} tokens per request, the file has {actual}",
    ),
    "file_rate_capped": _file(
        "an open loop sends every request when it is due",
        "{offered:g} requests/s were to arrive, but the client stopped at {limit:g} in flight: {served:.2f} requests/s "
        "were served",
    ),
    "file_no_latency": _file("a latency is a number of at least 0", "{name} is {value}{more}: not a latency"),
    "figures_impossible": _file("a level's figures can be true at the same time", "{what}"),
    "copied_files": _audit(
        "identical",
        "no file of a folder is a copy of another one there",
        "{files} files of {folder} have the bytes of other files there",
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
        "one of the two curves is another configuration's",
        "find out which of the two was measured, and remove the other",
    ),
    "copied_to_other_gpus": _audit(
        "identical",
        "two experiments on different numbers of GPUs have no file or records in common",
        _COPIED,
        "one of the two curves is another configuration's, normalised by {gpus} GPUs where it ran on "
        "{original_gpus}, or the other way",
        "find out which of the two was measured, and remove the other",
    ),
    "name_contradicts": _audit(
        "contradiction",
        "a name says the load and the token counts of the content",
        "{what}",
        "the point is drawn by the file's content, and a name says that this was not to be measured",
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
        "the most requests in flight in a second are near the concurrency",
        "concurrency {concurrency:g}, but at most {peak:g} requests were in flight in any second",
        "the point is drawn at another load than it had",
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
        "a reader that is keyed on the concurrency keeps every level",
        "{levels} request rates carry the same max_concurrency {limit:g}",
        "a reader keyed on concurrency draws them as one point",
        "key request-rate runs by their rate (viz.py does)",
        "warning",
    ),
    "loads_repeat": _audit(
        "collision",
        "a reader that is keyed on the load keeps every level",
        "several files have the same load",
        "taken as repeats: their mean is drawn; a reader that keys on the load keeps the last one",
        "mark them as repeats in their names (_r1, _r2), or keep one",
        "warning",
    ),
    "reused_prompts": _audit(
        "reused prompts", "no level repeats another level's prompts", _REUSED, _REUSED_IMPACT, _REUSED_FIX, "warning"
    ),
    "reused_default_seed": _audit(
        "reused prompts",
        "no level repeats another level's prompts, where no seed is recorded",
        f"{_REUSED} (no seed is recorded: the client's default is the same for all)",
        _REUSED_IMPACT,
        _REUSED_FIX,
        "warning",
    ),
    "few_prompts": _audit(
        "few prompts",
        "ramp-up and drain are a small part of a closed loop",
        "{least:.1f} requests per unit of concurrency at the least (recommended: {recommended})",
        "the first wave (all prompts at once) and the last one (draining) are that share of the run",
        "more prompts per level, and figures of the steady window alone",
        "warning",
    ),
    "few_arrivals": _audit(
        "few prompts",
        "an open loop has enough arrivals for its rate",
        "{fewest} requests in an open loop (recommended: {recommended})",
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
        "the deployment {label} uses {deployed} GPUs, the manifest {verb} {gpus}",
        "throughput per node is wrong by that ratio",
        "correct the manifest from the launch's own output",
    ),
    "label_of_another": _audit(
        "contradiction",
        "a folder's label is its deployment's",
        "labelled {label}, its deployment is {deployment}",
        "the curve carries the name of another configuration",
        _MEASURED_FIX,
    ),
    "level_of_another": _audit(
        "contradiction",
        "a level's label is its folder's",
        "a level of {level} in the folder of {label}",
        "the point is another configuration's",
        _MEASURED_FIX,
    ),
    "tokens_contradict": _audit(
        "contradiction",
        "a level's token rates are those of its workload",
        "the workload has {asked:.10g} {side} tokens per request, rate x duration / requests gives {actual:.1f}",
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
        "answers are as long as the name says",
        "answers ended before --otl: names ask for {asked:g} output tokens, answers have {answered}",
        "the curve is one of shorter answers, which are compared by what was generated",
        "measure with --ignore-eos if the answers were to have the whole length",
        "warning",
    ),
    "requests_miscounted": _audit(
        "contradiction",
        "every request of a level ended once",
        "{requests} requests were sent, {answered} answered ({figures} in the figures), {failed} failed",
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
        f"{_LITTLE}, the load says {{concurrency}}",
        "the point is drawn at another load than it had, or throughput or latency are too low",
        _MIXED_FIX,
    ),
    "more_served_than_arrived": _audit(
        "impossible",
        "an open loop serves no more than arrives",
        "{served_rps:.2f} requests/s were served where {arrived_rps:g} arrived",
        "the point is drawn at another rate than it had",
        "measure again",
    ),
    "metadata": _audit(
        "metadata",
        "what a repetition of the measurement needs is recorded",
        "not recorded: {missing}",
        "the measurement cannot be repeated, and differences to others cannot be explained",
        "measure with run_bm.sh, which records all of it",
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
    "records_are_none": _audit(
        "records",
        "the records of a level are requests",
        "no requests ({error})",
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
        "correct or remove the file, or give the number of GPUs with --gpus NAME=N",
        "warning",
    ),
    "advertised_host": _doctor("advertised host", "an engine gives the other nodes an address that they can reach"),
    "allocator": _doctor("{name}", "PyTorch's allocator does not remap the memory of the KV cache"),
    "builds_differ": _doctor("builds differ", "every node has the same build of a library", "warning"),
    "clock_differs": _doctor("clock", "the clocks of the nodes agree", "warning"),
    "compiler": _doctor("compiler", "what an engine compiles at its start finds a compiler"),
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
    "nixl_backend": _doctor("NIXL backend {name}", "NIXL makes each backend that is asked for"),
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
    "weights": _doctor("weights", "the files of the model are there and whole"),
    "wire_not_as_counted": _wire(
        "no interface counts a payload that UCX moves through memory",
        "UCX names {wire}, but {nic} counted {share:.0%} of the payload",
        "repeat it on an idle machine, because other traffic counts too",
    ),
    "wire_counts_nothing": _wire(
        "the interfaces that UCX names count at least half of the payload",
        "UCX names {wire}, whose counters saw {share:.0%} of the payload",
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
        "unset UCX_TLS, or add {needed} to it",
    ),
    "wire_module_lacks": _wire(
        "the UCX module of shared memory or GPU memory loads",
        "UCX's module {module} did not load: {why}",
        "debug/doctor.py",
    ),
    "wire_memory_forbidden": _wire(
        "a process may read the memory of another process",
        "reading another process's memory is forbidden here (ptrace_scope, seccomp or a missing SYS_PTRACE)",
        "containers with --cap-add SYS_PTRACE, kernel.yama.ptrace_scope=0; debug/doctor.py",
    ),
    "wire_efa_of_some_ranks": _wire(
        "every rank finds an EFA device",
        "some ranks find an EFA device and others none",
        "debug/doctor.py on both nodes; every GPU's EFA devices visible to its process",
    ),
    "wire_ucx_too_old": _wire(
        "UCX is 1.20 or later, which reads over srd with zero-copy",
        "UCX {version} has srd without get and put zero-copy",
        "UCX 1.20 or later: debug/build_nixl_ucx_efa.sh",
    ),
    "wire_efa_without_gpudirect": _wire(
        "UCX registers the memory of the KV cache with EFA",
        "UCX cannot register this memory with EFA (no GPUDirect?)",
        "debug/doctor.py on both nodes",
    ),
    "wire_efa_module_lacks": _wire(
        "UCX's EFA module loads",
        "UCX's EFA module did not load: {why}",
        "debug/build_nixl_ucx_efa.sh, or the EFA installer; debug/doctor.py proves it",
    ),
    "wire_efa_not_usable": _wire(
        "UCX can open the EFA devices of a node",
        "UCX sees no usable EFA device (rdma-core of another ABI, or a container without /dev/infiniband)",
        "debug/doctor.py on both nodes",
    ),
    "wire_rdma_unused": _wire(
        "UCX uses the InfiniBand or RoCE devices of both nodes",
        "UCX does not use the RDMA devices",
        "debug/doctor.py on both nodes; UCX_NET_DEVICES",
    ),
    "wire_rdma_on_one_side": _wire(
        "both nodes have RDMA devices, or neither",
        "only {host} has RDMA devices",
        "use nodes with the same network",
    ),
    "wire_unexpected": _wire(
        "the transport is the expected one",
        "the transport is not the expected one ({expected})",
        "debug/doctor.py; unset UCX_TLS",
    ),
    "slow_tcp": _wire(
        "tcp reaches half of the line rate",
        "one of the hosts has no free core for its progress threads, or the link is shared",
        "use an idle machine",
    ),
    "slow_rails": _wire(
        "EFA reaches a fifth of its rails",
        "too few rails, or pages too small to fill them",
        "UCX_MAX_RMA_RAILS=4, --block-len-bytes larger",
    ),
    "slow_gpu_link": _wire(
        "two GPUs of a host are joined by NVLink or peer access",
        "no NVLink or no peer access between these GPUs",
        "nvidia-smi topo -m; debug/doctor.py",
    ),
    "slow_memory": _wire(
        "shared memory reaches a fifth of memcpy",
        "no core is free for NIXL's threads, or debug logging is on",
        "use an idle machine; run debug/doctor.py",
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
        "UCX printed no table of protocols: the wire is known from the byte counters alone",
    ),
    "backend_reports_no_transport": _remark(
        "the backend reports its transport",
        "{backend} does not report its transport: the wire is known from the byte counters alone",
    ),
    "tables_of_version": _of_plan(
        "step times are of runs like the plan's",
        "step times of {gpu} are tables of {engine} {tables}, added up from single operations",
    ),
    "tables_of_another_version": _of_plan(
        "tables of step times are of the engine version that is planned for",
        "step times of {gpu} are tables of {engine} {tables}, added up from single operations, not of {planned}",
    ),
    "host_time": _of_plan(
        "the host's time of a step is measured on the engine version that is planned for",
        "the host adds {host_ms:.2g} ms per step, standard deviation {spread}, and ranks wait {sync_us:.2g} us per "
        "layer and doubling of TP ({source})",
    ),
    "table_values_estimated": _of_plan(
        "tables are measured with the formats and sizes of the model",
        "some step times of {gpu} are estimated from other sizes or formats ({kinds})",
    ),
    "step_times_extrapolated": _of_plan(
        "steps are within the tables",
        "step times are extrapolated: a step has {times:.2g} times as many tokens or sequences as the tables go to",
    ),
    "experts_wider_than_tables": _of_plan(
        "experts are spread over no more GPUs than tables were compared for",
        "experts over {gpus} GPUs: tables were compared for up to {most}, and beyond one node they exchange tokens "
        "more slowly than engines do",
    ),
    "step_times_calculated": _of_plan(
        "step times are added up from measured operations",
        "all step times of {gpu} are calculated ({mode}), none is added up from measured operations",
    ),
    "band_of_public_stacks": _of_plan(
        "levels of this stack were measured",
        "the 90 % band is of {stacks} public stacks without Ray, each predicted by the others; seen in none of them: "
        "{unseen}",
    ),
    "no_band": _of_plan(
        "public stacks are like this one",
        "an estimate without a band: of the public stacks whose errors are known, {why}",
    ),
    "near_saturation": _of_plan(
        "prompts seldom wait for KV memory",
        "near saturation: prompts wait for KV memory {share:.0%} of the time, so TTFT and requests/s have no band",
    ),
    "pools_of_two_types": _of_plan(
        "all pools are on GPUs of one type",
        "prefill is on {prefill}, decode and collocated engines are on {decode}; --gpus counts GPUs of each type",
    ),
    "draft_time_not_counted": _of_plan(
        "what guessing tokens takes is measured",
        "{accepted:g} tokens per step of {guessed} guessed ones and one more; the time of the draft is not counted",
    ),
    "replay_best": _of_replay(
        "one deployment is behind by no figure, and every other one is behind by some",
        "Best for {workload}: {best}, by {figures}; it is behind by no figure",
    ),
    "replay_best_of_several": _of_replay(
        "several deployments are behind by no figure, and others are",
        "Best for {workload}: {names}, which cannot be told apart; behind by some figure: {behind}",
    ),
    "replay_none_best": _of_replay(
        "different deployments lead by different figures", "None is best for {workload} by every figure: {parts}"
    ),
    "replay_none_told": _of_replay(
        "by no figure one deployment leads by more than single replays differ",
        "Which is best for {workload} cannot be told between {names}: replay it again in each",
    ),
    "replay_sizes_differ": _of_replay(
        "the compared deployments are of one size", "the deployments are of different sizes (engine ranks: {sizes})"
    ),
    "replay_not_compared": _of_replay(
        "a replay passed its checks", "{label} failed checks in a replay of {workload}, which is not compared"
    ),
    "replay_best_by": _of_replay(
        "a figure differs by more than single replays of one deployment",
        "{figure}: {best} is best ({values}); it leads {other} by a factor of {lead}, single replays of one deployment "
        "may differ by {limit:.2f}",
    ),
    "replay_not_told": _of_replay(
        "a figure differs by less than single replays of one deployment",
        "{figure}: cannot be told between {names} ({values}); a factor of {lead:.2f}, single replays of one deployment "
        "may differ by {limit:.2f}",
    ),
    "replay_parts_unknown": _of_replay(
        "the timelines of a replay were kept", "{figure}: why cannot be told, for not all have timelines"
    ),
    "replay_by_hits": _cause(
        "more of the prompts came from caches",
        "computing prompts, of which caches had {ours_hits} and {theirs_hits}",
    ),
    "replay_by_prefill": _cause("prompts are computed faster", "the computation of prompts"),
    "replay_by_queue": _cause("requests wait less for an engine", "waiting for engines"),
    "replay_by_transfer": _cause(
        "the way from prefill to decode takes less", "the hand-over from prefill to decode with the transfer"
    ),
    "replay_by_first_step": _cause("decode's first step takes less", "decode's step of the first token"),
    "replay_by_servers": _cause("servers and network take less", "servers, network and client"),
    "replay_by_bound": _of_replay(
        "fewer sessions missed one of the bounds",
        "goodput of sessions: {bound} makes most of the difference, which {ours} sessions of {best} and {theirs} of "
        "{other} missed",
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
}
