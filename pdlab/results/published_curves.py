"""The files of one published folder -> its curves: files that differ in more than their load are no repeats.

Two files of one load are repeats of each other if all of these agree: the model, the lengths of their requests (within
`SAME_LENGTHS`), their metadata and settings, and the deployment and other words in their names. Files measured more
than a day apart are no repeats, unless their names count repeats. The date is that in the file, else in its name.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from pdlab.core.workload import Open, Ramp, Workload
from pdlab.results.curve_names import grouped, short_names
from pdlab.results.published_files import PublishedLevel
from pdlab.results.published_names import deployment_in, is_of_deployment, is_size_of_deployment

# Levels that sample one dataset differ in mean length by less than two workloads do.
SAME_LENGTHS = 1.25
# Levels of one load that are further apart had another start or another version.
ONE_SESSION = timedelta(days=1)

DEPLOYMENT = "the deployment in the file's name"
DESCRIBED = "its description"
_BURSTINESS = "burstiness"
_MODEL, _LENGTHS, _NOMINAL, _WORDS, _DATE = (
    "model_id",
    "lengths",
    "lengths in the file's name",
    "the file's name",
    "date",
)
# Their values need no key beside them.
BARE = (_MODEL, _LENGTHS, _NOMINAL, DEPLOYMENT, DESCRIBED, _WORDS, _DATE)
# Text about the load, the run or its result, which every client writes and which distinguishes no curves.
_OF_THE_RUN = frozenset(
    {
        "date",
        "invalid",
        "model_id",
        "request_rate",
        "burstiness",
        "ramp_up_strategy",
        "timestamp",
        "time",
        "start_time",
        "end_time",
        "counts_unknown",
        "steady",
        "_benchmark_name",  # of a combination in vLLM's sweep, whose parameters count
    }
    | {"host", "hostname", "id", "run_id", "uuid", "seed", "run", "repeat", "trial"}
    | {"concurrency", "max_concurrency", "conc", "qps", "rate", "rps", "num_prompts", "duration"}
)
# Numbers under these keys are settings, as are those that a reader calls so; all other numbers are figures.
_SETTINGS = frozenset(
    {"tag", "label", "random_input_len", "random_output_len", "random_range_ratio"}
    | {"sharegpt_output_len", "tp", "pp", "dp", "ep", "num_gpus"}
)


class Difference(NamedTuple):
    """A key that separates the files of a folder into several curves; ``values``: file name -> value, as text."""

    key: str
    values: dict[str, str]

    @property
    def text(self) -> str:
        """``tag is a in x.json, b in y.json``, of the first two values."""
        shown: dict[str, str] = {}
        for file, value in self.values.items():
            shown.setdefault(value, file)
        return f"{self.key} is {', '.join(f'{value} in {file}' for value, file in list(shown.items())[:2])}"

    @property
    def of_deployment(self) -> bool:
        """Whether this key shows that the files are of several deployments, which may have different sizes."""
        if self.key in (_MODEL, _LENGTHS, _NOMINAL, _WORDS, _DATE):
            return False
        return self.key == DEPLOYMENT or is_of_deployment(self.key) or any(map(deployment_in, self.values.values()))


class PublishedCurve(NamedTuple):
    """Files of one curve. ``part`` distinguishes it from others of its folder (empty: it is the only one).
    ``settings``: key -> value in its files, if the folder holds several curves."""

    part: str
    levels: tuple[PublishedLevel, ...]
    settings: dict[str, str]


class SeparatedCurves(NamedTuple):
    """The curves of a folder, and the differences between its files."""

    curves: tuple[PublishedCurve, ...]
    differences: tuple[Difference, ...]


def separated(levels: Sequence[PublishedLevel]) -> SeparatedCurves:
    """The curves in the files of one folder, in the order of their first files."""
    values = [_values(level) for level in levels]
    for value, arrivals, lengths in zip(values, _arrivals(levels), _lengths(levels), strict=True):
        value.update(arrivals)
        value[_LENGTHS] = lengths
    groups = grouped(range(len(levels)), lambda i: tuple(sorted(values[i].items())))
    names, sessions = {}, {}
    for group in groups:
        if not _repeats(levels[i] for i in group):
            continue
        by_words = grouped(group, lambda i: frozenset(levels[i].name.words))
        for part in by_words:
            common = set.intersection(*(set(levels[i].name.words) for i in group))
            if len(by_words) > 1:
                own = [word for word in levels[part[0]].name.words if word not in common]
                names.update(dict.fromkeys(part, " ".join(own) or "no other word"))
            sessions.update(_sessions({i: levels[i] for i in part}))
    for i, value in enumerate(values):
        value.update({_WORDS: names[i]} if i in names else {})
        value.update({_DATE: sessions[i]} if i in sessions else {})
    keys = [key for key in dict.fromkeys(key for value in values for key in value) if _differ(key, values)]
    files = [level.shown for level in levels]
    differences = [
        Difference(key, {file: value.get(key, "not given") for file, value in zip(files, values, strict=True)})
        for key in keys
    ]
    parts = grouped(range(len(levels)), lambda i: tuple(values[i].get(key) for key in keys))
    known = _first_workload(levels)
    curves = [
        PublishedCurve(name, _of_its_workload([levels[i] for i in group], known), values[group[0]] if keys else {})
        for name, group in zip(short_names([values[group[0]] for group in parts], keys, BARE), parts, strict=True)
    ]
    return SeparatedCurves(tuple(curves), tuple(differences))


def _first_workload(levels: Iterable[PublishedLevel]) -> Workload | None:
    """The workload of the first level with answers; None: no level has any."""
    return next((level.run.workload for level in levels if level.run.completed), None)


def _of_its_workload(levels: Sequence[PublishedLevel], of_folder: Workload | None) -> tuple[PublishedLevel, ...]:
    """The levels of a curve. Those without answers, whose tokens nobody counted, have the workload of its other levels,
    else the one that a file's name gives, else that of the folder."""
    own = _first_workload(levels)

    def filled(level: PublishedLevel) -> PublishedLevel:
        workload = own or (None if level.name.input_tokens is not None else of_folder)
        if level.run.completed or workload is None:
            return level
        return level._replace(run=level.run.model_copy(update={"workload": workload}))

    return tuple(map(filled, levels))


def unmarked_repeats(levels: Iterable[PublishedLevel]) -> list[tuple[str, ...]]:
    """The levels of one curve that count as repeats of one load though numbers or letters in their names differ, which
    may be settings: for each load their paths."""
    by_load: dict[Hashable, dict[tuple[str, ...], str]] = defaultdict(dict)
    for level in levels:
        by_load[level.run.key.kind, level.run.key.value].setdefault(level.name.counts, level.shown)
    return [tuple(names.values()) for names in by_load.values() if len(names) > 1]


def _values(level: PublishedLevel) -> dict[str, str]:
    """The values in a file that must be equal in repeats, as text."""
    values = {_MODEL: level.run.model} if level.run.model else {}
    metadata = level.data.get("metadata")
    stated = metadata if isinstance(metadata, dict) else {}
    for key, value in level.stated_words.items():
        text = (isinstance(value, str | bool) or key in stated) and key not in _OF_THE_RUN
        known = key in _SETTINGS or (isinstance(value, int) and is_size_of_deployment(key))
        if isinstance(value, str | int | float) and (text or known):
            values[key] = _as_text(value)
    values |= {key: _as_text(value) for key, value in level.settings.items()}
    if "backend" in values:
        values.pop("endpoint_type", None)  # vLLM writes the backend under both keys
    if level.name.deployment is not None:
        values[DEPLOYMENT] = level.name.deployment
    if level.run.speculation is not None:
        values.setdefault("spec_decoding", "on")
    if any(level.stated[:3]):
        values[DESCRIBED] = level.stated.label or level.stated.deployment or f"{level.stated.gpus} GPUs"
    if level.name.input_tokens is not None:
        values[_NOMINAL] = f"{level.name.input_tokens}:{level.name.output_tokens}"
    return values


def _as_text(value: Any) -> str:
    """One text for one value, whether a JSON file or a table has it."""
    if isinstance(value, bool) or value in ("True", "False"):
        return str(value).lower()
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _arrivals(levels: Sequence[PublishedLevel]) -> list[dict[str, str]]:
    """Per level, how its requests arrived beyond its load's key, if the open loops of the folder differ in it.

    Open loops may differ in burstiness, ramps to one rate also in their begin and shape.
    """
    found: list[dict[str, str]] = [{} for _ in levels]
    open_loops = {i: load for i, level in enumerate(levels) if isinstance(load := level.run.load, Open | Ramp)}
    if len({load.burstiness for load in open_loops.values()}) > 1:
        for i, load in open_loops.items():
            found[i][_BURSTINESS] = str(load.burstiness)
    ramps = {i: load for i, load in open_loops.items() if isinstance(load, Ramp)}
    begins = {(load.start_rps, load.shape, load.end_rps) for load in ramps.values()}
    if len(begins) > len({load.end_rps for load in ramps.values()}):
        for i, load in ramps.items():
            found[i]["ramp"] = f"{load.shape} {load.start_rps:g} to {load.end_rps:g}/s"
    return found


def _lengths(levels: Sequence[PublishedLevel]) -> list[str]:
    """Per level, the lengths of the first level with the same lengths within `SAME_LENGTHS`.

    A level without answers has no lengths and takes the first known ones.
    """

    def classes(tokens: Sequence[int]) -> dict[int, int]:
        least: dict[int, int] = {}
        first = 0
        for count in sorted(set(tokens)):
            if not least or count > SAME_LENGTHS * first:
                first = count
            least[count] = first
        return least

    known = [level.run.workload for level in levels if level.run.completed]
    inputs = classes([workload.sent_input_tokens for workload in known])
    outputs = classes([workload.sent_output_tokens for workload in known])
    shown: dict[Hashable, str] = {}
    texts = []
    for level in levels:
        workload = level.run.workload
        if not level.run.completed:  # without lengths it takes the first known ones
            texts.append("")
            continue
        key = (inputs[workload.sent_input_tokens], outputs[workload.sent_output_tokens])
        texts.append(shown.setdefault(key, workload.label))
    return [text or next(filter(None, texts), "") for text in texts]


def _repeats(levels: Iterable[PublishedLevel]) -> bool:
    counts = Counter((level.run.key.kind, level.run.key.value) for level in levels)
    return any(count > 1 for count in counts.values())


def _sessions(levels: dict[int, PublishedLevel]) -> dict[int, str]:
    """File -> the day on which its session began; empty if all are one session.

    A new session begins where a load was measured more than a day after its last measurement in this session. It then
    also begins after a day without any file. A file without a date is in the first session. Names that count repeats
    are of one session.
    """
    unmarked = {
        i: _date(level.data.get("date")) or level.name.day for i, level in levels.items() if not level.name.repeat
    }
    dates = {i: date for i, date in unmarked.items() if date is not None}
    by_load: dict[Hashable, list[datetime]] = defaultdict(list)
    for i, date in dates.items():
        by_load[levels[i].run.key].append(date)
    if not any(max(each) - min(each) > ONE_SESSION for each in by_load.values()):
        return {}
    ordered = sorted(dates, key=lambda i: dates[i])
    begins = [ordered[0]]
    session: dict[int, int] = {}
    measured: dict[Hashable, datetime] = {}
    previous = dates[ordered[0]]
    for i in ordered:
        date, load = dates[i], levels[i].run.key
        if date - previous > ONE_SESSION or date - measured.get(load, date) > ONE_SESSION:
            begins.append(i)
            measured = {}
        measured.setdefault(load, date)
        previous = date
        session[i] = begins[-1]
    return {i: f"{dates[session.get(i, ordered[0])]:%Y-%m-%d}" for i in levels}


def _date(value: object) -> datetime | None:
    """``20251010-164316`` as vLLM writes it, or ISO 8601; None for anything else."""
    if not isinstance(value, str):
        return None
    try:
        date = datetime.strptime(value, "%Y%m%d-%H%M%S")
    except ValueError:
        try:
            date = datetime.fromisoformat(value)
        except ValueError:
            return None
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)


def _differ(key: str, values: Sequence[dict[str, str]]) -> bool:
    return len({value.get(key) for value in values}) > 1
