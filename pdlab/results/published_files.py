"""One result file of others -> a ``PublishedLevel`` for each level in it.

`pdlab.results.readers` reads the file of any client. The content of the file counts. A name fills in what the file
leaves out; a name that contradicts the file is a fault of the level. What is in neither is None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pdlab.core.deployment import Collocated, Disaggregated, Pool, parse_pool
from pdlab.core.errors import StoreError
from pdlab.core.findings import Finding, found
from pdlab.core.lengths import Uniform
from pdlab.core.workload import Closed, Load, Open, Ramp, RunKey, Workload, WorkloadMode
from pdlab.results.description import FileDescription, topology_of
from pdlab.results.published_names import (
    FileName,
    FolderName,
    NamedConfiguration,
    parse_file_name,
    placement_in,
    replica_counts,
)
from pdlab.results.readers import NOTHING_ANSWERED, FileReading, RawLevel, RequestTimes, read_file
from pdlab.results.readers.statistics import number_in
from pdlab.results.readers.vllm_bench import OF_SGLANG
from pdlab.results.schema import NO_LENGTHS, Distribution, Run, SpeculativeDecoding, Summary, Validity

# Clients write a rate above this for "all at once"; it is not a load.
UNLIMITED_RPS = 1e5
# Relative difference that is no contradiction: a tokenizer changes the length of some random prompts by a token.
NAME_SLACK = 0.02
RATE_SLACK = 0.02  # relative difference of a stated rate that is no contradiction
# If an open loop serves less than the offered rate by more than this share, its client may have held it back.
SERVED_SLACK = 0.02
EngineName = Literal["vllm", "sglang", "trtllm"]
NO_SPECULATION = {"none", "false", "no", "off", "0"}
DEVIATIONS = 5.0  # of a mean of drawn lengths, in standard deviations
# With a mean number in flight above this share of the limit, the client was at the limit for most of the run.
AT_LIMIT = 0.9

_LATENCY = re.compile(
    r"(?P<statistic>mean|median|p(?P<percent>\d+(?:\.\d+)?))_(?P<metric>ttft|tpot|itl|e2el|e2e_latency)(?P<unit>_ms|_s)?"
)
_METRIC = {"e2e_latency": "e2el"}


class PublishedLevel(NamedTuple):
    """One level of a file. ``part``: which part of the file (empty: all of it). ``data``: its figures under the keys of
    ``vllm bench serve``. ``name``: parsed from its name; ``stated``: stated by people. ``tool`` wrote the file, whose
    hash is ``sha256``. ``shown``: its path in the folder, and its part. ``requests``: all answered requests, if they
    were kept. ``settings``: see `RawLevel`."""

    tool: str
    sha256: str
    file: Path
    part: str
    shown: str
    data: dict[str, Any]
    name: FileName
    stated: FileDescription
    run: Run
    requests: RequestTimes | None = None
    settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def topology(self) -> Collocated | Disaggregated | None:
        """The deployment that people state, that the file's name gives, or that the name's counts and the file's TP
        and PP degrees give."""
        if self.stated.deployment is not None:
            return topology_of(self.stated.deployment)
        if self.name.configured.found is not None:
            return self.as_measured(self.name.configured.found)
        counts = replica_counts(self.name.deployment or "")
        roles = [{name: self._degree(role, name) for name in ("tp", "pp", "dp")} for role in ("prefill", "decode")]
        if counts is None or not all(role["tp"] for role in roles):
            return None
        attention = [self._attention(role) for role in ("prefill", "decode")]
        if any((role["dp"] or 1) > 1 and not own for role, own in zip(roles, attention, strict=True)):
            return None  # with DP attention the TP degree counts all GPUs; otherwise replicas may mean DP ranks
        pools = [
            parse_pool(f"{count}xtp{role['tp']}" + (f"pp{role['pp']}" if (role["pp"] or 1) > 1 else ""))
            for count, role in zip(counts, roles, strict=True)
        ]
        return Disaggregated(prefill=pools[0], decode=pools[1], placement=placement_in(self.shown, pools))

    def as_measured(self, named: NamedConfiguration) -> Collocated | Disaggregated:
        """The configuration of a name, in which the file's degrees count before the words beside it."""
        roles = ("prefill", "decode") if len(named.pools) > 1 else ("collocated",)
        each = zip(roles, named.pools, named.bare, strict=True)
        return named._replace(pools=tuple(self._pool(role, pool, bare) for role, pool, bare in each)).topology

    def _pool(self, role: str, pool: Pool, bare: Pool) -> Pool:
        tp, pp, dp = (self._degree(role, name) for name in ("tp", "pp", "dp"))
        stages, ranks = (pool.pp if pp in (None, pool.pp) else bare.pp), pool.dp
        if not self._attention(role):
            ranks = pool.dp if dp in (None, pool.dp) else bare.dp
        elif tp != pool.tp * pool.dp:  # its ranks are among those of TP
            ranks = 1 if tp == pool.tp else bare.dp
        return pool.model_copy(update={"pp": stages, "dp": ranks})

    def _attention(self, role: str) -> bool:
        """Whether the ranks of attention are among those of TP, which then counts all GPUs of an engine."""
        known = {**self.settings, **self.stated_words}
        names = (f"{prefix}{name}" for prefix in (f"{role}_", "") for name in ("enable_dp_attention", "dp_attention"))
        value = next((known[name] for name in names if known.get(name) is not None), False)
        return str(value).lower() == "true"

    def _degree(self, role: str, name: str) -> int | None:
        """A degree of parallelism of a role, else of all engines; a table or metadata has it as text."""
        value = self.stated_words.get(f"{role}_{name}", self.stated_words.get(name))
        known = number_in(value)
        return int(known) if known and known.is_integer() else None

    @property
    def stated_words(self) -> dict[str, Any]:
        """Its figures, and what people gave their client to be written beside them."""
        metadata = self.data.get("metadata")
        return {**self.data, **(metadata if isinstance(metadata, dict) else {})}

    @property
    def gpus(self) -> int | None:
        """The GPUs of its deployment as stated by people or by the file; None if neither does."""
        stated = self.stated.gpus if self.stated.gpus is not None else number(self.data.get("num_gpus"))
        return int(stated) if stated else None


class FileLevels(NamedTuple):
    """The levels of one file. ``skipped``: the kind of file, if it has no level."""

    levels: tuple[PublishedLevel, ...]
    skipped: str = ""


def read_levels(folder: Path, file: Path, label: str, named: FolderName, stated: FileDescription) -> FileLevels:
    """Read one file in ``folder``, which is called ``label`` and whose name gives ``named``. Raises StoreError, which
    names the file."""
    reading = read_file(file)
    timed = [raw for raw in reading.levels if "duration" in raw.data or number(raw.data.get("completed")) != 0]
    levels = tuple(_level(folder, file, reading, raw, label, named, stated) for raw in timed)
    skipped = reading.skipped or (NOTHING_ANSWERED if reading.levels else "no level")
    return FileLevels(levels, "" if levels else f"{reading.tool}: {skipped}")


def _level(
    folder: Path,
    file: Path,
    reading: FileReading,
    raw: RawLevel,
    label: str,
    named: FolderName,
    stated: FileDescription,
) -> PublishedLevel:
    data = {**raw.data, "model_id": stated.model} if stated.model else raw.data
    inside = file.relative_to(folder)
    name = parse_file_name(inside.with_suffix("").as_posix())
    shown = f"{inside}, {raw.part}" if raw.part else str(inside)
    duration_s = _count(file, data, "duration")
    completed = int(_count(file, data, "completed"))
    input_tokens, output_tokens, unknown_lengths = _tokens(file, data, completed, named, name)
    num_requests = int(_count(file, data, "num_prompts")) if data.get("num_prompts") else completed
    if duration_s <= 0:
        raise StoreError(f"{file}: duration is {duration_s:g} s; no rate can be computed from it")
    failed = num_requests - completed
    load, faults = _load(file, data, name)
    faults += [*unknown_lengths, *_no_latencies(data), *_recounted(data, completed, output_tokens)]
    if failed:
        faults.append(found("file_requests_failed", failed=failed, requests=num_requests))
    elif not completed:
        counted = input_tokens + output_tokens + (number(data.get("request_throughput")) or 0) > 0
        faults.append(found("file_no_answers" if counted else "file_nothing_answered"))
    if "invalid" in data:
        faults.append(found("file_not_valid", reasons=str(data["invalid"])))
    lengths = _lengths(named, name, completed, input_tokens, output_tokens)
    if drawn := _drawn_lengths(reading.tool, data, completed, input_tokens, output_tokens):
        of_names = (name.input_tokens or named.input_tokens, name.output_tokens or named.output_tokens)
        as_named = all(each in (None, most) for each, most in zip(of_names, drawn.longest, strict=True))
        lengths = _Lengths(drawn, None, () if as_named else lengths.faults, ())
    latencies = _latencies(file, data, duration_s, gaps=output_tokens / completed - 1 if completed else 0.0)
    whole = Summary(
        duration_s=duration_s,
        completed=completed,
        judged=int(_count(file, data, "judged")) if data.get("judged") is not None else None,
        requests_per_s=completed / duration_s,
        input_tokens_per_s=input_tokens / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        ttft=latencies.get("ttft") if completed else None,
        tpot=latencies.get("tpot") if output_tokens > completed else None,
        itl=latencies.get("itl") if output_tokens > completed else None,
        e2el=latencies.get("e2el") if completed else None,
    )
    limit = capped_at(load, whole, limit=number(data.get("max_concurrency")), peak=peak_in_flight(data))
    if limit is not None:
        faults.append(found("file_rate_capped", offered=offered_rps(load), limit=limit, served=whole.requests_per_s))
    faults += lengths.faults
    notes = lengths.notes
    if data.get("counts_unknown"):
        notes = (*notes, found("file_counts_unknown"))
    for rate in contradicting_rates(data, whole):
        notes = (*notes, found("file_rate_differs", **rate._asdict()))
    run = Run(
        origin="imported",
        label=label,
        model=_text(data, "model_id"),
        key=RunKey(kind=load.kind, value=load.value),
        workload=lengths.workload,
        load=load,
        num_requests=num_requests,
        completed=completed,
        failed=failed,
        requested_tokens=lengths.requested,
        whole=whole,
        steady=whole if data.get("steady") is True else None,
        validity=Validity(findings=tuple(faults), notes=notes),
        speculation=_speculation(data),
        engine=_engine(reading.tool, data),
    )
    times = raw.requests if raw.requests is not None and len(raw.requests.ttft_s) == completed else None
    return PublishedLevel(
        reading.tool, reading.sha256, file, raw.part, shown, data, name, stated, run, times, raw.settings
    )


def number(value: Any) -> float | None:
    """The value as a finite float; None for anything else (clients write "inf" for no limit)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def peak_in_flight(data: dict[str, Any]) -> float | None:
    """The most requests in flight in any second, as the client counted them.

    This is more than were in flight at once, because requests that follow one another in one second count each. See
    `max_counted`.
    """
    return number(data.get("max_concurrent_requests"))


def max_counted(concurrency: float, whole: Summary) -> float:
    """The most requests that a client can count in one second of a full closed loop.

    These are the requests in flight at its begin and their successors: twice the concurrency if a request stays for a
    second or longer.
    """
    stay = residence_time(whole)
    turns = 1 / stay.low if stay is not None and stay.low > 0 else 1.0
    return concurrency * (1 + max(1.0, turns))


def offered_rps(load: Load) -> float:
    """Mean rate at which an open loop sends; infinite for a closed loop."""
    return load.mean_rps if isinstance(load, Open | Ramp) else math.inf


def capped_at(load: Load, whole: Summary, *, limit: float | None, peak: float | None) -> float | None:
    """The limit of requests in flight that turned an open loop into a closed one; None if none did.

    If an open loop reached its client's limit and served less than was to arrive, its rate was not offered. Its TTFT
    then leaves out the wait at the client. Without a usable peak the mean number in flight decides (Little's law). A
    peak is not usable if requests that followed one another in one second were counted.
    """
    if isinstance(load, Closed) or limit is None or whole.requests_per_s >= (1 - SERVED_SLACK) * offered_rps(load):
        return None
    stay = residence_time(whole)
    if peak is None or (stay is not None and stay.high < 1):
        return limit if stay is not None and whole.requests_per_s * stay.low >= AT_LIMIT * limit else None
    return limit if peak >= limit else None


class ContradictingRate(NamedTuple):
    """A rate that a file states, and the counts of the file over its duration."""

    name: str
    stated: float
    expected: float


def contradicting_rates(data: dict[str, Any], whole: Summary) -> Iterator[ContradictingRate]:
    """The rates that the file states and that its counts over its duration contradict."""
    if whole.requests_per_s <= 0 or whole.duration_s <= 0:
        return
    for name, key, expected in (
        ("requests/s", "request_throughput", whole.completed / whole.duration_s),
        ("output tokens/s", "output_throughput", whole.output_tokens_per_s),
        ("tokens/s", "total_token_throughput", whole.total_tokens_per_s),
    ):
        stated = number(data.get(key))
        if stated and expected and abs(stated / expected - 1) > RATE_SLACK:
            yield ContradictingRate(name, stated, expected)


class ResidenceTime(NamedTuple):
    """Mean time of a request in the system, s, between two estimates."""

    low: float
    high: float


def residence_time(whole: Summary) -> ResidenceTime | None:
    """From the level's own figures; None if they are not enough.

    It is the mean E2EL. Without that, it is TTFT plus the gaps of a mean answer, by the mean TPOT (over requests) and
    by the mean ITL (over chunks). The two agree if all answers have one length.
    """
    if whole.e2el is not None and whole.e2el.mean_s is not None:
        return ResidenceTime(whole.e2el.mean_s, whole.e2el.mean_s)
    if whole.ttft is None or whole.ttft.mean_s is None or not whole.requests_per_s:
        return None
    gaps = whole.output_tokens_per_s / whole.requests_per_s - 1
    if gaps <= 0:
        return ResidenceTime(whole.ttft.mean_s, whole.ttft.mean_s)
    gaps_s = [each.mean_s for each in (whole.tpot, whole.itl) if each is not None and each.mean_s is not None]
    if whole.tpot is None or not gaps_s:
        return None
    return ResidenceTime(whole.ttft.mean_s + gaps * min(gaps_s), whole.ttft.mean_s + gaps * max(gaps_s))


def _load(file: Path, data: dict[str, Any], name: FileName) -> tuple[Load, list[Finding]]:
    """The load of one level, and a finding if the file's name contradicts its content (the content counts).

    A run with a request rate is a run at that rate, whatever its max_concurrency. A ramp is a ramp, whatever its rate.
    """
    ramp = _ramp(file, data)
    if ramp is not None:
        return ramp, []
    rate = number(data.get("request_rate"))
    concurrency = number(data.get("max_concurrency"))
    if rate is not None and rate >= UNLIMITED_RPS:
        rate = None
    rate = name.rate_rps if rate is None else rate
    if rate is not None and rate < 0:
        raise StoreError(f"{file}: request_rate is {rate:g}; expected a number above 0")
    if rate:
        return Open(rate_rps=rate, burstiness=_burstiness(file, data)), _contradiction(
            "request rate", name.rate_rps, rate
        )
    concurrency = name.concurrency if concurrency is None else concurrency
    if concurrency is not None and not concurrency >= 1:
        raise StoreError(f"{file}: max_concurrency is {concurrency:g}; expected a whole number from 1")
    if not concurrency:
        raise StoreError(f"{file}: neither a request rate nor max_concurrency; name it concN.json or concN_rrR.json")
    return Closed(concurrency=int(concurrency)), _contradiction("concurrency", name.concurrency, concurrency)


def _ramp(file: Path, data: dict[str, Any]) -> Ramp | None:
    shape = data.get("ramp_up_strategy")
    if shape is None:
        return None
    if shape not in ("linear", "exponential"):
        raise StoreError(f"{file}: ramp_up_strategy is {shape!r:.40}; expected linear or exponential")
    ends = {key: number(data.get(key)) for key in ("ramp_up_start_rps", "ramp_up_end_rps")}
    for key, rate in ends.items():
        if rate is None or not rate > 0:
            raise StoreError(f"{file}: a ramp whose {key} is {data.get(key)!r:.40}; expected a number above 0")
    start, end = ends.values()
    assert start is not None and end is not None
    return Ramp(start_rps=start, end_rps=end, shape=shape, burstiness=_burstiness(file, data))


def _burstiness(file: Path, data: dict[str, Any]) -> float:
    burstiness = number(data.get("burstiness"))
    if burstiness is not None and burstiness <= 0:
        raise StoreError(f"{file}: burstiness is {burstiness:g}; expected a number above 0")
    return 1.0 if burstiness is None else burstiness


class _TokenTotals(NamedTuple):
    input: float
    output: float
    faults: tuple[Finding, ...] = ()


def _tokens(file: Path, data: dict[str, Any], completed: int, folder: FolderName, name: FileName) -> _TokenTotals:
    """Tokens of all requests: the file's counts, else the lengths in a name. Without either they are 0, with a fault if
    requests were answered.

    A prompt has at least one token, so 0 input tokens were not counted.
    """
    totals: dict[str, float] = {}
    faults: list[Finding] = []
    for side in ("input", "output"):
        key = f"total_{side}_tokens"
        counted = _count(file, data, key) if data.get(key) is not None else None
        if counted is None or (side == "input" and not counted and completed):
            of_name = getattr(name, f"{side}_tokens") or getattr(folder, f"{side}_tokens")
            counted = (of_name or 0.0) * completed
            if not of_name and completed:
                faults.append(found("file_no_lengths", side=side))
        totals[side] = counted
    return _TokenTotals(totals["input"], totals["output"], tuple(faults))


class _Lengths(NamedTuple):
    workload: Workload
    requested: tuple[float, float] | None
    faults: tuple[Finding, ...]
    notes: tuple[Finding, ...]


def _lengths(folder: FolderName, file: FileName, completed: int, input_tokens: float, output_tokens: float) -> _Lengths:
    """The workload by the file's own token counts; a name gives the round number if it agrees with them.

    Answers that ended before the length in the name are no contradiction: the model ended them.
    """
    named: dict[str, int | None] = {
        "input": folder.input_tokens if file.input_tokens is None else file.input_tokens,
        "output": folder.output_tokens if file.output_tokens is None else file.output_tokens,
    }
    if not completed and not any(named.values()):
        return _Lengths(NO_LENGTHS, None, (), ())
    if not completed:
        inputs, outputs = (max(1, tokens or 1) for tokens in named.values())
        of_names = folder.mode or _mode(inputs, outputs)
        return _Lengths(Workload(input_tokens=inputs, output_tokens=outputs, mode=of_names), None, (), ())
    sent = {"input": max(1, round(input_tokens / completed)), "output": max(1, round(output_tokens / completed))}
    alone = {"prefill-only": "output", "decode-approx": "input"}.get(folder.mode or "")  # this side has one token
    mode = folder.mode
    if mode is None or (alone is not None and not _agree(1, sent[alone])):
        mode = _mode(sent["input"], sent["output"])
    nominal, requested = dict(sent), None
    faults: list[Finding] = []
    notes: list[Finding] = []
    for side, tokens in named.items():
        expected = 1 if side == alone else tokens
        if expected is None:
            continue
        if _agree(expected, sent[side]):
            nominal[side] = max(1, tokens or expected)
        elif side == "output" and sent[side] < expected:
            requested = (float(nominal["input"]), float(expected))
            notes.append(found("answers_ended_early", requested=expected, actual=output_tokens / completed))
        else:
            whose = "file" if getattr(file, f"{side}_tokens") is not None else "folder"
            faults.append(found("file_tokens_differ", whose=whose, side=side, named=expected, actual=sent[side]))
    workload = Workload(input_tokens=nominal["input"], output_tokens=nominal["output"], mode=mode)
    return _Lengths(workload, requested, tuple(faults), tuple(notes))


def _drawn_lengths(
    tool: str, data: dict[str, Any], completed: int, input_tokens: float, output_tokens: float
) -> Workload | None:
    """The lengths that SGLang's client drew: each uniform from ``random_range_ratio`` times the given length up to it.
    None: another client or dataset, lengths that do not vary, or counts that do not follow from them."""
    share = number(data.get("random_range_ratio"))
    longest = [number(data.get(f"random_{side}_len")) for side in ("input", "output")]
    of_random = tool == OF_SGLANG and str(data.get("dataset_name", "")).startswith("random")
    if not of_random or share is None or not 0 <= share < 1 or not completed or not all(longest):
        return None
    inputs, outputs = (int(each or 0) for each in longest)
    if min(inputs, outputs) < 1:
        return None
    workload = Workload(input_tokens=inputs, output_tokens=outputs, lengths=Uniform(low=share, high=1.0))
    sides = zip((inputs, outputs), workload.mean_tokens, (input_tokens, output_tokens), strict=True)
    for most, mean, total in sides:
        chance = DEVIATIONS * (1 - share) * most / math.sqrt(12 * completed)
        if abs(total / completed - mean) > chance + max(1.0, NAME_SLACK * mean):
            return None
    return workload


def _speculation(data: dict[str, Any]) -> SpeculativeDecoding | None:
    """Speculative decoding, by the keys of vLLM's, of SGLang's or of InferenceX's client; None: none."""
    accepted = number(data.get("spec_decode_acceptance_length", data.get("accept_length")))
    if accepted is None and str(data.get("spec_decoding") or "none").lower() not in NO_SPECULATION:
        return SpeculativeDecoding()
    if accepted is None or accepted <= 1:
        return None
    drafts, guesses = (number(data.get(f"spec_decode_{name}")) for name in ("num_drafts", "draft_tokens"))
    return SpeculativeDecoding(
        accepted_tokens=accepted, guessed_tokens=guesses / drafts if drafts and guesses else None
    )


def _engine(tool: str, data: dict[str, Any]) -> EngineName | None:
    """The engine that the file names; None: unknown. The ``backend`` of vLLM's client is the form of the requests, and
    vllm fits every server with the interface of OpenAI."""
    words = f"{data.get('framework', '')} {data.get('engine', '')} {data.get('backend', '')}".lower()
    names: dict[str, EngineName] = {"sglang": "sglang", "trt": "trtllm", "tensorrt": "trtllm"}
    if tool == OF_SGLANG or data.get("framework") or data.get("engine"):
        names["vllm"] = "vllm"
    return next((engine for part, engine in names.items() if part in words), None)


def _agree(expected: int, actual: int) -> bool:
    return abs(expected - actual) <= max(1, NAME_SLACK * expected)


def _mode(input_tokens: int, output_tokens: int) -> WorkloadMode:
    return "prefill-only" if output_tokens == 1 else "decode-approx" if input_tokens == 1 else "mixed"


def _contradiction(name: str, named: float | None, actual: float) -> list[Finding]:
    if named is None or math.isclose(named, actual, rel_tol=1e-6):
        return []
    return [found("file_name_differs", name=name, named=named, actual=actual)]


def _no_latencies(data: dict[str, Any]) -> list[Finding]:
    latencies = {key: value for key, value in data.items() if key.endswith("_ms") or _LATENCY.fullmatch(key)}
    wrong = [key for key, value in latencies.items() if is_invalid_figure(value)]
    if not wrong:
        return []
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return [found("file_no_latency", name=wrong[0], value=f"{data[wrong[0]]!r:.40}", more=more)]


def _recounted(data: dict[str, Any], completed: int, output_tokens: float) -> list[Finding]:
    """Whether the client tokenized the answers again and got another number of tokens than the server wrote."""
    server = number(data.get("server_output_tokens"))
    if not server or not completed or abs(output_tokens - server) <= NAME_SLACK * server:
        return []
    return [found("file_tokens_recounted", client=output_tokens / completed, server=server / completed)]


def is_invalid_figure(value: Any) -> bool:
    """Whether a number is not finite, or below 0."""
    if not isinstance(value, float | int) or isinstance(value, bool):
        return False
    known = number(value)
    return known is None or known < 0


def _latencies(file: Path, data: dict[str, Any], duration_s: float, gaps: float) -> dict[str, Distribution]:
    """Metric -> its figures in the file. Keys without ``_ms`` are in seconds, as some clients write them.

    Clients write 0 for what they did not measure. ``gaps``: between the tokens of a mean answer. Raises StoreError if a
    value cannot be in seconds because a request would take longer than the run.
    """
    means: dict[str, float] = {}
    percentiles: dict[str, dict[str, float]] = {}
    in_ms = {key.removesuffix("_ms") for key in data if key.endswith("_ms")}
    for key, value in data.items():
        match, known = _LATENCY.fullmatch(key), number(value)
        if match is None or not known:
            continue
        if match["unit"] != "_ms":
            if key.removesuffix("_s") in in_ms:
                continue
            of_answer = match["metric"] == "tpot" and match["statistic"] in ("mean", "median")
            if known * (max(gaps, 1.0) if of_answer else 1.0) > duration_s:
                takes = f", so that an answer of {gaps + 1:.0f} tokens takes" if of_answer else " and is"
                raise StoreError(
                    f"{file}: {key} is {known:g}, which is read in seconds{takes} longer than the run of "
                    f"{duration_s:g} s; a key in milliseconds ends in _ms"
                )
        seconds = known / 1000 if match["unit"] == "_ms" else known
        metric = _METRIC.get(match["metric"], match["metric"])
        if match["statistic"] == "mean":
            means[metric] = seconds
        else:
            percent = float(match["percent"]) if match["percent"] else 50.0
            if percent <= 100:
                percentiles.setdefault(metric, {})[f"p{percent:g}"] = seconds
    return {
        metric: Distribution(mean_s=means.get(metric), percentiles_s=percentiles.get(metric, {}))
        for metric in {*means, *percentiles}
    }


def _text(data: dict[str, Any], key: str) -> str | None:
    """The text of ``key``; None if there is none."""
    value = data.get(key)
    return value if isinstance(value, str) and value else None


def _count(file: Path, data: dict[str, Any], key: str) -> float:
    value = number(data.get(key))
    if value is None or value < 0:
        raise StoreError(f"{file}: {key} is {data.get(key)!r:.40}; expected a number from `vllm bench serve`")
    return value
