"""What came out: ``RequestRecord``, ``Run``, ``Manifest``, and the store of them on disk.

An experiment is a folder ``bm_results/<label>/``: ``manifest.json`` (what was run, where and
with what), one ``<kind><value>[-r<repeat>].json`` per finished level (a ``Run``), and beside it
``<same>.records.json.gz`` with every request. A measured level is never overwritten silently.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from pdlab.errors import StoreError, UsageError
from pdlab.nodes import ClusterView, Placement
from pdlab.spec import Deployment, Frozen, validate
from pdlab.workload import Load, RunKey, Workload

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
PERCENTILES = (50, 90, 95, 99)

M = TypeVar("M", "Run", "Manifest")

Origin = Literal["measured", "simulated", "imported"]


class RequestRecord(Frozen):
    """One request, times in seconds since the level began; None where it did not get that far.

    ``itl_s`` are the gaps between received chunks. TTFT, TPOT and E2EL are defined here once.
    """

    arrival_s: float
    first_token_s: float | None = None
    finish_s: float | None = None
    input_tokens: int
    output_tokens: int
    itl_s: tuple[float, ...] = ()
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.finish_s is not None and self.first_token_s is not None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: first_token - arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> float | None:
        """End-to-end latency: finish - arrival."""
        return None if self.finish_s is None else self.finish_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (E2EL - TTFT) / (n - 1); None for n < 2."""
        ttft_s, e2el_s = self.ttft_s, self.e2el_s
        if ttft_s is None or e2el_s is None or self.output_tokens < 2:
            return None
        return (e2el_s - ttft_s) / (self.output_tokens - 1)


class Distribution(Frozen):
    """Summary of one latency in seconds; ``percentiles_s`` is keyed ``p50``, ``p90``, ..."""

    mean_s: float
    percentiles_s: dict[str, float]

    @property
    def p50_s(self) -> float:
        return self.percentiles_s["p50"]


class Summary(Frozen):
    """Figures of one window of a run. None: not known (imported runs) or not defined (TPOT of one token).

    Rates are per second over ``duration_s``, whole deployment, not normalised.
    """

    duration_s: float
    completed: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Distribution | None = None
    tpot: Distribution | None = None
    itl: Distribution | None = None
    e2el: Distribution | None = None

    @property
    def total_tokens_per_s(self) -> float:
        return self.input_tokens_per_s + self.output_tokens_per_s


class Validity(Frozen):
    """``reasons`` names every gate that the level failed; empty means valid."""

    reasons: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        return not self.reasons


class NixlCounters(Frozen):
    """vLLM's NIXL counters summed over the decode engines (None: not exported yet).

    ``bytes_transferred`` counts KV bytes pulled, ``transfers`` finished pulls.
    """

    bytes_transferred: float | None = None
    transfers: float | None = None
    failed_transfers: float | None = None
    failed_notifications: float | None = None
    kv_expired_requests: float | None = None


class Run(Frozen):
    """One level as it came out: whole-run and steady-state figures, validity, provenance.

    ``steady`` is the window without ramp-up and drain (rule in docs/metrics.md); None when the
    level is too short for one. ``raw_sha256`` is over the uncompressed records.
    """

    schema_version: Literal[1] = 1
    origin: Origin
    label: str
    key: RunKey
    workload: Workload
    load: Load
    num_requests: int
    seed: int | None = None
    completed: int
    failed: int
    whole: Summary
    steady: Summary | None = None
    validity: Validity = Validity()
    nixl_before: NixlCounters | None = None
    nixl_after: NixlCounters | None = None
    client_cpu_share: float | None = None
    started_at: str | None = None
    finished_at: str | None = None
    raw_sha256: str | None = None


class CanaryResult(Frozen):
    """``equal`` is None when there was no reference to compare with ("not compared")."""

    equal: bool | None
    compared: int = 0
    detail: str


class Manifest(Frozen):
    """What an experiment ran on. ``placement`` is as it really came out; times are ISO 8601, UTC."""

    schema_version: Literal[1] = 1
    origin: Origin
    label: str
    deployment: Deployment | None = None
    cluster: ClusterView | None = None
    placement: Placement | None = None
    gpus: int | None = None
    local: bool = False
    workload: Workload | None = None
    commands: tuple[str, ...] = ()
    git_commit: str | None = None
    git_dirty: bool | None = None
    versions: dict[str, str | None] = Field(default_factory=dict)
    hardware: dict[str, str | int | float | None] = Field(default_factory=dict)
    transport_env: dict[str, str] = Field(default_factory=dict)
    canary: CanaryResult | None = None
    started_at: str | None = None
    finished_at: str | None = None


class Experiment(Frozen):
    """A manifest and its runs, ordered by (kind, value, repeat)."""

    name: str
    manifest: Manifest
    runs: tuple[Run, ...]


class Store:
    """One experiment folder. Writes are atomic: a reader or a crash never sees half a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: RunKey) -> Path:
        return self.folder / f"{key.stem}.json"

    def records_path(self, key: RunKey) -> Path:
        return self.folder / f"{key.stem}.records.json.gz"

    def has(self, key: RunKey) -> bool:
        """Whether that level is finished and kept."""
        return self.path(key).exists()

    def write_manifest(self, manifest: Manifest) -> None:
        """Write or replace the manifest (it grows while an experiment runs)."""
        _write(self.folder / MANIFEST, manifest.model_dump_json(indent=2).encode())

    def read_manifest(self) -> Manifest:
        """Raises StoreError when there is none or it is not readable."""
        return _read(self.folder / MANIFEST, Manifest)

    def write(self, run: Run, records: Iterable[RequestRecord], *, force: bool = False) -> Run:
        """Keep one level: records first, then the run that points to them; returns it with its hash.

        Raises StoreError when the level is already there and ``force`` is not set.
        """
        if self.has(run.key) and not force:
            raise StoreError(
                f"{self.path(run.key)} is already measured; use --resume to skip it or --force to replace it"
            )
        raw = "\n".join(record.model_dump_json(exclude_defaults=True) for record in records).encode()
        kept = run.model_copy(update={"raw_sha256": hashlib.sha256(raw).hexdigest()})
        _write(self.records_path(run.key), gzip.compress(raw, mtime=0))
        _write(self.path(run.key), kept.model_dump_json(indent=2).encode())
        return kept

    def read_records(self, key: RunKey) -> tuple[RequestRecord, ...]:
        """Every request of one level. Raises StoreError."""
        path = self.records_path(key)
        try:
            text = gzip.decompress(path.read_bytes()).decode()
            return tuple(RequestRecord.model_validate_json(line) for line in text.splitlines())
        except (OSError, EOFError, ValueError) as error:
            raise StoreError(f"{path}: records cannot be read ({error})") from error

    def runs(self) -> Iterator[Run]:
        """All finished levels, ordered by (kind, value, repeat). Raises StoreError on a damaged file."""
        found = [_read(path, Run) for path in sorted(self.folder.glob("*.json")) if path.name != MANIFEST]
        yield from sorted(found, key=lambda run: (run.key.kind, run.key.value, run.key.repeat))

    def load(self) -> Experiment:
        """Manifest and runs together. Raises StoreError."""
        return Experiment(name=self.folder.name, manifest=self.read_manifest(), runs=tuple(self.runs()))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)


def _read(path: Path, kind: type[M]) -> M:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        pass  # The slow way below says what is wrong in one line.
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    try:
        return validate(kind, data, where=str(path))
    except UsageError as error:
        raise StoreError(str(error)) from error
