"""Folders of results of replays, as run_bm.sh leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from support import records as made

from pdlab.bench.traffic import read_traffic
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.replayed import COMPILED
from pdlab.core.workload import Replay, Workload
from pdlab.results.schema import Manifest, RequestRecord
from pdlab.results.store import Store
from pdlab.traffic.requests import TrafficHead, TrafficRequest, write_requests


def write_replay(
    folder: Path,
    label: str,
    requests: Sequence[TrafficRequest],
    records: Sequence[RequestRecord],
    *,
    engine_kwargs: Mapping[str, object] = MappingProxyType({}),
) -> Path:
    """One replay of the requests, with the records of it and the compiled workload."""
    folder.mkdir(parents=True)
    path = folder / COMPILED
    with path.open("w") as stream:
        write_requests(stream, TrafficHead(source="chat.yaml"), requests)
    workload = Workload(lengths=read_traffic(path))
    deployment = Deployment(model="gpt-oss-120b", topology=parse_label(label), engine_kwargs=dict(engine_kwargs))
    run = made.run(records, Replay(), label=label, workload=workload)
    store = Store(folder)
    store.write_manifest(
        Manifest(origin="measured", label=label, deployment=deployment, gpus=deployment.gpus, workload=workload)
    )
    store.write(run, records)
    return folder
