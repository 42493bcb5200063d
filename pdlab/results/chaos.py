"""Results of faults injected under load: requests with outcomes, faults, samples of memory, leftovers.

A folder ``bm_results/chaos-<label>/`` has ``chaos.json`` (a `ChaosRun`) and ``manifest.json``. Three files of JSON
lines grow during the run: ``requests.jsonl``, ``faults.jsonl`` and ``samples.jsonl``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from pdlab.core.errors import StoreError, WriteError, reason_of
from pdlab.core.files import replace
from pdlab.core.schema import Frozen, one_line, read_model
from pdlab.results.schema import Manifest
from pdlab.results.store import CHAOS, MANIFEST

REQUESTS, FAULTS, SAMPLES = "requests.jsonl", "faults.jsonl", "samples.jsonl"

# right: the reference's tokens. error: ended in time with an error for the client (status, error in the stream, closed
# connection). hang: not ended within the limit. wrong: other tokens than the reference's. left: the client went away.
RequestOutcome = Literal["right", "error", "hang", "wrong", "left"]
REQUEST_OUTCOMES: tuple[RequestOutcome, ...] = ("right", "error", "hang", "wrong", "left")
Outcome = Literal["injected", "skipped", "failed"]


class ChaosRequest(Frozen):
    """One request; times in seconds since the load began.

    ``prompt``: number of the fixed prompt. ``status``: of HTTP, None if there was none. ``tokens``: tokens received.
    ``rounded``: right, except for a token within bfloat16's rounding. ``phase``: when the client left on purpose.
    """

    number: int
    prompt: int
    sent_s: float
    first_token_s: float | None = None
    end_s: float
    status: int | None = None
    tokens: int = 0
    outcome: RequestOutcome
    detail: str | None = None
    rounded: bool = False
    phase: str | None = None


class InjectedFault(Frozen):
    """One fault; times in seconds since the load began.

    ``planned_s``: when it was due. ``began_s`` and ``ended_s``: begin of its first act and end of its last.
    ``targets``: the processes or the link, in words. ``outcome``: ``skipped`` if there was no target at that moment,
    ``failed`` if an act failed or did nothing; ``detail`` has the reason. ``spared``: every pool kept a replica that
    the fault did not touch.
    """

    number: int
    kind: str
    planned_s: float
    began_s: float
    ended_s: float
    targets: tuple[str, ...] = ()
    acts: tuple[str, ...] = ()
    outcome: Outcome
    detail: str | None = None
    spared: bool = False


class ChaosSample(Frozen):
    """One moment: resident MiB by part of the deployment, used share of the KV blocks by engine.

    ``running``: engine replicas by role that Ray Serve reports as running; empty: not sampled.
    """

    at_s: float
    rss_mib: dict[str, float] = Field(default_factory=dict)
    kv_use: dict[str, float] = Field(default_factory=dict)
    running: dict[str, int] = Field(default_factory=dict)


class Leftovers(Frozen):
    """What was there at the end and not at the beginning, and the reverse for engines.

    ``kv_use``: by engine, used share of its KV blocks at the last read (None: no value). ``kv_free_after_s``: seconds
    from the end of the load until all engines reported 0 (None: not within the limit). ``actors``, ``processes``,
    ``ports``: how many more than before, by name; ports are counted per kind of process. ``missing``: engine processes
    and running replicas, how many fewer than before, by kind.
    """

    kv_use: dict[str, float | None] = Field(default_factory=dict)
    kv_free_after_s: float | None = None
    kv_limit_s: float
    actors: dict[str, int] = Field(default_factory=dict)
    processes: dict[str, int] = Field(default_factory=dict)
    ports: dict[str, int] = Field(default_factory=dict)
    missing: dict[str, int] = Field(default_factory=dict)

    @property
    def nothing(self) -> bool:
        """Whether nothing is there that was not there before. It does not tell whether something is missing."""
        return self.kv_free_after_s is not None and not (self.actors or self.processes or self.ports)


class ChaosRun(Frozen):
    """What was done. ``plan``: name of the plan. ``answers``: number of right answers in a row that count as recovery.
    ``limit_s``: longer requests hang. ``loaded_s``: duration of the load. ``guarded``: whether the engines had the KV
    guard (None: unknown). ``impossible``: kinds that this deployment cannot have, with the reason. ``interrupted``:
    ended early.

    ``counters``: growth of the engines' counters of failed or expired KV transfers and of the guard's acts. The last
    seconds of an engine before it was killed are missing.
    """

    schema_version: Literal[1] = 1
    label: str
    plan: str
    seed: int
    concurrency: int
    limit_s: float
    answers: int
    lease_s: float
    loaded_s: float
    guarded: bool | None = None
    impossible: dict[str, str] = Field(default_factory=dict)
    counters: dict[str, float] = Field(default_factory=dict)
    leftovers: Leftovers | None = None
    interrupted: bool = False
    command: str = ""
    started_at: str
    finished_at: str


class Chaos(NamedTuple):
    """All contents of a folder."""

    name: str
    run: ChaosRun
    manifest: Manifest
    requests: tuple[ChaosRequest, ...]
    faults: tuple[InjectedFault, ...]
    samples: tuple[ChaosSample, ...]


T = TypeVar("T", ChaosRequest, InjectedFault, ChaosSample)
_FILE_OF: dict[type[Frozen], str] = {ChaosRequest: REQUESTS, InjectedFault: FAULTS, ChaosSample: SAMPLES}


def is_chaos(folder: Path) -> bool:
    """Whether the folder holds faults injected under load."""
    return (folder / CHAOS).is_file()


def new_folder(parent: Path, label: str) -> Path:
    """Make a new folder: ``chaos-<label>``, or the first unused one with a number appended. Raises WriteError."""
    number = 1
    while True:
        folder = parent / (f"chaos-{label}" if number == 1 else f"chaos-{label}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise WriteError(f"{folder} cannot be made ({reason_of(error)}); give another --out") from error


def append(folder: Path, values: Iterable[ChaosRequest | InjectedFault | ChaosSample]) -> None:
    """Add lines to the folder's files. Raises WriteError."""
    for value in values:
        path = folder / _FILE_OF[type(value)]
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(value.model_dump_json(exclude_defaults=True) + "\n")
        except OSError as error:
            raise WriteError(f"{path} cannot be written ({reason_of(error)}): free disk space") from error


def finish(folder: Path, run: ChaosRun, manifest: Manifest) -> None:
    """Write the run and the manifest, which complete the folder. Raises WriteError."""
    replace(folder / MANIFEST, manifest.model_dump_json(indent=2).encode())
    replace(folder / CHAOS, run.model_dump_json(indent=2).encode())


def load(folder: Path) -> Chaos:
    """Raises StoreError, with the file and the rule."""
    return Chaos(
        name=folder.name,
        run=read_model(folder / CHAOS, ChaosRun),
        manifest=read_model(folder / MANIFEST, Manifest),
        requests=_lines(folder / REQUESTS, ChaosRequest),
        faults=_lines(folder / FAULTS, InjectedFault),
        samples=_lines(folder / SAMPLES, ChaosSample),
    )


def _lines(path: Path, kind: type[T]) -> tuple[T, ...]:
    if not path.exists():
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    values: list[T] = []
    for line in lines:
        try:
            values.append(kind.model_validate_json(line))
        except ValidationError as error:
            raise StoreError(f"{path}, line {len(values) + 1}: {one_line(error, kind)}") from error
    return tuple(values)
