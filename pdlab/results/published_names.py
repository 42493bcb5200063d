"""Parses the names of published folders and files. Only this module interprets names.

By the published convention a folder is one experiment, and its name ends in the configuration
(``gptoss_itl5000_otl250_mixed_1xtp2-1xtp2``). A file is one level (``conc8.json``, ``conc128_rr4.json``). Other people
put more into a file's name (``1p3d_conc32_in2048_out128.json``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import NamedTuple

from pdlab.core.deployment import POOL_TEXT, Collocated, Disaggregated, PlacementKind, Pool, mode_of, parse_pool
from pdlab.core.errors import UsageError
from pdlab.core.workload import WorkloadMode

# The published experiments ran on nodes of 8 GPUs; a larger PD group cannot be packed.
PUBLISHED_NODE_GPUS = 8

_TOPOLOGY = re.compile(
    rf"(?:^|[_-])p?(?P<first>{POOL_TEXT})(?:-d?(?P<second>{POOL_TEXT}))?(?P<tail>(?:[-_][a-z0-9.]+)*)$", re.IGNORECASE
)
# Other notations: 4ptp1-2dtp2 for two pools; 2xtpep4 for one pool of TP 4 with expert parallelism.
_TWO_POOLS = re.compile(
    r"(?<![a-z0-9])(?P<p>\d+)p[-_]?tp(?P<p_tp>\d+)[-_](?P<d>\d+)d[-_]?tp(?P<d_tp>\d+)(?![a-z0-9])", re.IGNORECASE
)
_TP_EP = re.compile(r"(?<![a-z0-9])(?P<replicas>\d*)x?tp_?ep(?P<tp>\d+)(?![a-z0-9])", re.IGNORECASE)
# A degree among the other words: pp2, pp_2, dp2ep.
_DEGREES = re.compile(r"(?<![a-z0-9])(?:(?:tp|pp|dp)[-_=]?\d+|ep\d*)+(?![a-z0-9])", re.IGNORECASE)
_DEGREE = re.compile(r"(?P<name>tp|pp|dp|ep)[-_=]?(?P<value>\d*)", re.IGNORECASE)
# The largest degree that a word beside a configuration means: llama.cpp's pp512 is a prompt of 512 tokens.
_MOST_BESIDE = {"tp": 64, "pp": 16, "dp": 512}
_NO_EP = r"(?<![a-z0-9])(?:(?:no|non|not|without)[-_ ]?ep|ep[-_=]?(?:off|false|none|disabled|0))(?![a-z0-9])"
_WITHOUT_EP = re.compile(_NO_EP, re.IGNORECASE)
_OWN_FLUID = re.compile(r"pd[-_]fluid")  # a label of `pdlab.core.deployment.Fluid`, whose roles move
_COUNTS = re.compile(r"(?<![a-z0-9])(?:(?P<p>\d+)p(?P<d>\d+)d|p(?P<p2>\d+)d(?P<d2>\d+))(?![a-z0-9])", re.IGNORECASE)
_ANY_POOL = re.compile(r"(?<![a-z0-9])[pd]?\d+x(?:tp|pp|dp|ep)", re.IGNORECASE)
_LENGTHS = re.compile(
    r"(?<![a-z0-9])(?:itl|isl|input|in|i)[_=]?(?P<input>\d+)[_-](?:otl|osl|output|out|o)[_=]?(?P<output>\d+)(?!\d)",
    re.IGNORECASE,
)
_MODE = re.compile(r"(?P<mode>mixed|prefill[-_]only|decode[-_]only)", re.IGNORECASE)
_LEVEL = re.compile(r"conc(?P<concurrency>\d+)(?:_rr(?P<rate>\d+(?:\.\d+)?))?(?:[-_]r\d+)?", re.IGNORECASE)

# Abbreviations of a deployment: 1p3d, p1d3, 4xtp2, xtpep4, tp8, spread.
_DEPLOYMENT = re.compile(
    rf"{_NO_EP}"
    r"|(?<![a-z0-9])(?:\d+p\d+d|p\d+d\d+|\d+p[-_]?tp\d+[-_]\d+d[-_]?tp\d+|\d*x?tp_?ep\d+|[pd]?\d*x?(?:(?:tp|pp|dp|ep)\d*)+"
    r"|\d+[-_]?(?:prefills?|decodes?|gpus?)|(?:prefills?|decodes?|gpus?)[-_=]?\d+"
    r"|pd|pack|spread|coll?ocated|disagg(?:regated)?|agg(?:regated)?)(?![a-z0-9])"
)
_DEPLOYMENT_KEY = re.compile(
    r"(?<![a-z0-9])(?:tp|pp|dp|ep|gpus?|nodes?|replicas?|instances?|workers?|prefill|decode|parallel|parallelism"
    r"|topology|deployment|num[-_ ]?gpus?|hardware|accelerator)(?![a-z0-9])"
)
_OF_MEMORY = re.compile(r"memory|utilization|blocks?|loading")  # gpu_memory_utilization is of no other number of GPUs
# Keys of a count or of a group's size; not of a figure per item, nor of the client.
_SIZE_KEY = re.compile(
    r"(?<![a-z0-9])(?:tp|pp|dp|ep|parallel|parallelism|gpus?|nodes|replicas|instances"
    r"|(?:prefill|decode) (?:workers?|engines?|servers?))(?: (?:size|count|degree|num))?$"
)
_LOAD = re.compile(
    r"(?<![a-z0-9])(?:max[-_]?)?(?:conc?(?:urrency)?|c|rr|rate|qps|rps|bs|batch|users|prompts|n)[-_=]?\d+(?:\.\d+)?(?!\d)"
    r"|(?<![a-z0-9])(?:\d+(?:\.\d+)?|inf)(?:qps|rps)(?![a-z0-9])"
)
_REPEAT = re.compile(r"(?<![a-z0-9])(?:r|run|rep|repeat|trial|iter|seed|try|attempt|take)[-_=]?\d{1,3}(?![a-z0-9])")
_DATE = re.compile(r"(?<!\d)\d{4}-\d\d-\d\d(?:[t_ -]?\d\d[-:.]?\d\d[-:.]?\d\d)?z?")
_DAY = re.compile(r"(?<!\d)(20[123]\d)-?(\d\d)-?(\d\d)(?!\d)")
# A version as one word: v0.11, vllm-0.11.0; a time such as 12.30.45 has no word before it.
_VERSION = re.compile(
    r"(?:(?<![a-z0-9])v|(?<=[a-z])[-_]?v?(?=\d+\.\d+\.\d))(?P<version>\d+(?:\.\d+){1,2}(?:rc\d+)?)(?!\.?\d)"
)
_DAY_AND_TIME = re.compile(rf"{_DAY.pattern}(?:[-_t]?\d{{4,6}}(?!\d))?")
# Words of a name that say nothing about the engines.
_PLAIN = {"baseline", "bench", "benchmark", "bm", "exp", "experiment", "mixed", "results", "run", "sweep", "test"}
_OF_MODE = {  # word of a name -> the modes that it fits
    **dict.fromkeys(("collocated", "colocated", "aggregated", "agg", "coll"), ("collocated",)),
    **dict.fromkeys(("pd", "disaggregated", "disagg"), ("pd-pack", "pd-spread")),
    **{word: (f"pd-{word}",) for word in ("pack", "spread")},
}
_SETTING = re.compile(r"\d{1,5}|[a-z]\d{0,2}")  # not a hash
_NO_NAME = re.compile(r"\d+|[a-z]\d{0,2}|(?=[a-f]*\d)[0-9a-f]{6,}")  # a number, a letter, a hash


class NamedConfiguration(NamedTuple):
    """The configuration in a name: one pool, or prefill and decode. ``bare``: these without the degrees beside them.

    ``others``: the other words in lower case. Lengths and `FolderName.mode` are left out, and words that say nothing
    about the engines: dates, counts of repeats, and words such as baseline.
    """

    name: str
    pools: tuple[Pool, ...]
    bare: tuple[Pool, ...]
    others: tuple[str, ...] = ()

    @property
    def topology(self) -> Collocated | Disaggregated:
        if len(self.pools) == 1:
            return Collocated(pool=self.pools[0])
        prefill, decode = self.pools
        return Disaggregated(prefill=prefill, decode=decode, placement=placement_in(self.name, self.pools))


class ContradictingName(UsageError):
    """A name has a configuration, and other words that contradict it."""


class Configured(NamedTuple):
    """The configuration of a name; None if it has none, or contradicts itself (``contradiction``: how)."""

    found: NamedConfiguration | None = None
    contradiction: str = ""


class FolderName(NamedTuple):
    """What a folder's name gives; None if it gives nothing."""

    configured: Configured
    input_tokens: int | None
    output_tokens: int | None
    mode: WorkloadMode | None

    @property
    def topology(self) -> Collocated | Disaggregated | None:
        return self.configured.found.topology if self.configured.found else None


class ReplicaCounts(NamedTuple):
    """The numbers of prefill and decode replicas in a name, without their size."""

    prefill: int
    decode: int


class FileName(NamedTuple):
    """What a file's path in its folder gives, without its suffix; None if it gives nothing.

    ``deployment``: the words that name a deployment. ``configured``: its configuration, if these words give it in full.
    ``repeat``: the name counts repeats, such as _r1 and run2. ``day``: its first date, at midnight UTC. ``words``: all
    other names, versions included; no numbers, single letters or hashes. ``counts``: these numbers and letters, which
    may be settings or may count repeats.
    """

    concurrency: int | None
    rate_rps: float | None
    input_tokens: int | None
    output_tokens: int | None
    deployment: str | None
    configured: Configured
    repeat: bool
    words: tuple[str, ...]
    day: datetime | None = None
    counts: tuple[str, ...] = ()


def parse_name(name: str) -> FolderName:
    """What a published folder's name gives. Raises UsageError on an invalid configuration.

    By the published convention the last part is the configuration, ``4xtp2`` (collocated) or ``1xtp2-1xtp2``
    (prefill-decode), then free words. Degrees among these, such as PP 2 in ``1xtp4_pp2``, are of every pool. The word
    ``spread`` means spread. Without it prefill and decode shared a node, unless they need more than one.
    """
    lengths, mode = _LENGTHS.search(name), _MODE.search(name)
    return FolderName(
        configured=_configured(name),
        input_tokens=int(lengths["input"]) if lengths else None,
        output_tokens=int(lengths["output"]) if lengths else None,
        mode=_as_mode(mode["mode"]) if mode else None,
    )


def parse_file_name(stem: str) -> FileName:
    """What a published file's name or its path in the folder (``1p3d/conc8``) gives. Raises UsageError on an invalid
    configuration."""
    level = next(filter(None, map(_LEVEL.fullmatch, reversed(stem.split("/")))), None)
    stem = stem.replace("/", "_")
    lengths, rest = _LENGTHS.search(stem), _DATE.sub(" ", stem.lower())
    deployment = deployment_in(rest)
    repeat = _REPEAT.search(rest) is not None
    for known in (_MODE, _LENGTHS, _LOAD, _REPEAT, _DEPLOYMENT):
        rest = known.sub(" ", rest)
    versions = [match["version"] for match in _VERSION.finditer(rest)]
    others = re.split(r"[^a-z0-9]+", _DAY_AND_TIME.sub(" ", _VERSION.sub(" ", rest)))
    words = dict.fromkeys([*(word for word in others if word and not _NO_NAME.fullmatch(word)), *versions])
    return FileName(
        concurrency=int(level["concurrency"]) if level else None,
        rate_rps=float(level["rate"]) if level and level["rate"] else None,
        input_tokens=int(lengths["input"]) if lengths else None,
        output_tokens=int(lengths["output"]) if lengths else None,
        deployment=deployment,
        configured=_configured(stem) if deployment else Configured(),
        repeat=repeat,
        words=tuple(words),
        counts=tuple(word for word in others if _SETTING.fullmatch(word)),
        day=_day_in(stem),
    )


def _day_in(text: str) -> datetime | None:
    for match in _DAY.finditer(text):
        try:
            return datetime(int(match[1]), int(match[2]), int(match[3]), tzinfo=timezone.utc)
        except ValueError:
            continue  # eight digits, but no date
    return None


def is_load(word: str, value: float) -> bool:
    """Whether a word of a name is that load, as a concurrency of 8 or a rate of 8 requests/s for 8."""
    number = re.search(r"\d+(?:\.\d+)?", word)
    return _LOAD.fullmatch(word) is not None and number is not None and float(number[0]) == value


def deployment_in(text: str) -> str | None:
    """The words of a text that name a deployment; None if none does."""
    return " ".join(match[0] for match in _DEPLOYMENT.finditer(text.lower())) or None


def replica_counts(text: str) -> ReplicaCounts | None:
    """``1p3d`` and ``p1d3``: 1 prefill and 3 decode replicas of unknown size."""
    match = _COUNTS.search(text)
    return ReplicaCounts(int(match["p"] or match["p2"]), int(match["d"] or match["d2"])) if match else None


def is_of_deployment(key: str) -> bool:
    """Whether a key of metadata describes the deployment, and so the number of GPUs."""
    words = key.lower().replace("_", " ")
    return _DEPLOYMENT_KEY.search(words) is not None and not _OF_MEMORY.search(words)


def is_size_of_deployment(key: str) -> bool:
    """Whether a whole number or boolean under that key of metadata describes the deployment.

    prefill_gpus, tensor_parallel_size and enable_ep do; tokens_per_gpu does not.
    """
    words = key.lower().replace("_", " ").replace("-", " ")
    return _SIZE_KEY.search(words) is not None and " per " not in f" {words} "


def configuration_in(name: str) -> NamedConfiguration | None:
    """The configuration in a name, with the degrees among its other words: ``1xtp4-pp2`` is ``1xtp4pp2``. None if there
    is none, or several. Raises UsageError on an invalid configuration, ContradictingName if other words contradict it.
    """
    found = _pools_in(name)
    if found is None:
        return None
    try:
        bare = tuple(parse_pool(text.lower()) for text in found.pools)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    rest = _DAY_AND_TIME.sub(" ", _DATE.sub(" ", found.rest.lower()))
    if (off := _WITHOUT_EP.search(rest)) and any(pool.expert_parallel for pool in bare):
        raise _contradiction(name, off[0], bare)
    rest = _WITHOUT_EP.sub(" ", rest)
    degrees = [degree for word in _DEGREES.finditer(rest) for degree in _DEGREE.finditer(word[0])]
    pools, unread = bare, []
    for degree in sorted(degrees, key=lambda each: each["name"] == "ep"):  # its size is that of the others
        changed = _with_degree(pools, bare, degree, name)
        pools = changed or pools
        if changed is None:
            unread.append(degree[0])
    if all(pool.dp == 1 for pool in pools):
        unread += [degree[0] for degree in degrees if degree["name"] == "dp" and int(degree["value"]) > 1]
    others = rest
    for known in (_DEGREES, _REPEAT, _LENGTHS, _MODE):
        others = known.sub(" ", others)
    named = NamedConfiguration(name, pools, bare)
    if _OWN_FLUID.search(rest):
        label = named.topology.label
        raise ContradictingName(f"{name}: fluid contradicts the fixed roles of {label}; give the whole label")
    mode = mode_of(named.topology)
    words = (word for word in re.split(r"[^a-z0-9.]+", others) if word)
    unlike = (word for word in words if word not in _PLAIN and mode not in _OF_MODE.get(word, ()))
    return named._replace(others=tuple(dict.fromkeys((*unread, *unlike))))


class _Pools(NamedTuple):
    """The texts of one pool or two in a name, and its other words."""

    pools: tuple[str, ...]
    rest: str


def _pools_in(name: str) -> _Pools | None:
    """The pools of a name; None if it has none, or several configurations."""
    if two := _TWO_POOLS.search(name):
        pools = tuple(f"{two[pool]}xtp{two[f'{pool}_tp']}" for pool in ("p", "d"))
        return _Pools(pools, _around(name, two.start(), two.end()))
    if experts := _TP_EP.search(name):
        pool = f"{experts['replicas'] or 1}xtp{experts['tp']}ep"
        return _Pools((pool,), _around(name, experts.start(), experts.end()))
    match = _TOPOLOGY.search(name)
    if not match or len(_ANY_POOL.findall(name)) != (2 if match["second"] else 1):
        return None
    pools = tuple(text for text in (match["first"], match["second"]) if text)
    return _Pools(pools, _around(name, match.start(), match.start("tail")))


def _around(name: str, start: int, end: int) -> str:
    return f"{name[:start]} {name[end:]}"


def _with_degree(
    pools: tuple[Pool, ...], bare: tuple[Pool, ...], degree: re.Match[str], name: str
) -> tuple[Pool, ...] | None:
    """The pools with one degree of a name's other words; None if that word is no degree of theirs. Raises
    ContradictingName if they have another one."""
    field, size = degree["name"], int(degree["value"] or 0)
    if field == "ep":
        return _with_experts(pools, bare, size if degree["value"] else None)
    if not 1 <= size <= _MOST_BESIDE[field]:
        return None
    own = [getattr(pool, field) for pool in pools]
    if field == "tp" and size in own:
        return pools
    if field == "tp" or any(each not in (1, size) for each in own):
        raise _contradiction(name, degree[0], pools)
    return tuple(pool.model_copy(update={field: size}) for pool in pools)


def _with_experts(pools: tuple[Pool, ...], bare: tuple[Pool, ...], size: int | None) -> tuple[Pool, ...] | None:
    """The pools with experts over ``size`` ranks (None: over all), in those that have as many; None if none has.

    SGLang counts ranks of DP attention among those of TP: with as many experts' ranks as TP ranks, the DP degree beside
    the pool is of attention.
    """
    if size in (0, 1):
        return pools
    spread = {"expert_parallel": True}
    if any(size in (None, pool.tp * pool.dp) for pool in pools):
        return tuple(p.model_copy(update=spread) if size in (None, p.tp * p.dp) else p for p in pools)
    changed = tuple(
        pool.model_copy(update={**spread, "dp": own.dp})
        if size == pool.tp * own.dp and pool.tp % pool.dp == 0
        else pool
        for pool, own in zip(pools, bare, strict=True)
    )
    return changed if changed != pools else None


def _contradiction(name: str, word: str, pools: tuple[Pool, ...]) -> ContradictingName:
    labels = "-".join(pool.label for pool in pools)
    return ContradictingName(f"{name}: {word} contradicts {labels}; name one of them")


def _configured(name: str) -> Configured:
    """The configuration of a folder or a file."""
    try:
        return Configured(configuration_in(name))
    except ContradictingName as error:
        return Configured(contradiction=str(error))


def placement_in(name: str, pools: Sequence[Pool]) -> PlacementKind:
    """The placement in a name: spread if it has that word, or if a node of the published experiments cannot hold the
    pools."""
    words = re.split(r"[-_/]", name.lower())
    if "spread" in words or ("pack" not in words and sum(pool.gpus for pool in pools) > PUBLISHED_NODE_GPUS):
        return "spread"
    return "pack"


def _as_mode(text: str) -> WorkloadMode:
    modes: dict[str, WorkloadMode] = {"prefill": "prefill-only", "decode": "decode-approx"}
    return modes.get(text.lower()[:-5], "mixed")
