"""A workload file as a replay: the facts about its requests, and the compiled file for load generators."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pdlab.core.errors import UsageError
from pdlab.core.files import replacing
from pdlab.core.replayed import COMPILED, Replayed
from pdlab.core.workload import Workload
from pdlab.traffic.bounded import LatestKeys
from pdlab.traffic.compiled import compiled
from pdlab.traffic.groups import Groups
from pdlab.traffic.requests import TrafficHead, TrafficRequest, write_requests


class _Counted:
    """Facts about requests, counted in one pass."""

    def __init__(self) -> None:
        self.requests = 0
        self.groups = Groups()
        self.longest, self.inputs, self.outputs = (1, 1), [0, 0], 0
        self.fewest = 0
        self.last_s = self.chained_s = 0.0
        self._whole: LatestKeys[str, int] = LatestKeys()
        self._pauses_s: LatestKeys[str, float] = LatestKeys()

    def passing(self, requests: Iterable[TrafficRequest]) -> Iterator[TrafficRequest]:
        for request in requests:
            self._count(request)
            yield request

    def _count(self, request: TrafficRequest) -> None:
        self.requests += 1
        self.groups.add(request)
        before = self._whole[request.continues] if request.continues is not None else 0
        prompt = before + request.new_tokens
        self._whole[request.id] = prompt + request.out
        self.longest = max(self.longest, (prompt, request.out), key=sum)
        self.fewest = min(self.fewest or prompt, prompt)
        self.inputs = [self.inputs[0] + prompt, max(self.inputs[1], prompt)]
        self.outputs += request.out
        pauses_s = max((self._pauses_s[other] for other in request.after), default=0.0) + request.gap_s
        self._pauses_s[request.id] = max(request.at_s or 0.0, pauses_s)
        self.last_s = max(self.last_s, request.at_s or 0.0)
        self.chained_s = max(self.chained_s, self._pauses_s[request.id])


def read_traffic(path: Path) -> Replayed:
    """The replay of a workload file, a trace or a compiled workload. Raises UsageError, also for a file without a
    request.
    """
    head, requests = compiled(path)
    counted = _Counted()
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        digest = write_requests(nowhere, head, counted.passing(requests))
    return Replayed(
        name=path.name,
        sha256=digest,
        requests=counted.requests,
        sessions=counted.groups.sessions,
        groups=counted.groups.count,
        endpoint=head.endpoint,
        speed=head.speed,
        last_s=counted.last_s,
        chained_s=counted.chained_s,
        mean_tokens=(counted.inputs[0] / counted.requests, counted.outputs / counted.requests),
        longest_request=counted.longest,
        input_range=(counted.fewest, counted.inputs[1]),
        path=str(path),
    )


def replayed(workload: Workload) -> Replayed | None:
    """The compiled workload that a workload replays; None: it replays none."""
    return workload.lengths if isinstance(workload.lengths, Replayed) else None


def keep_plan(folder: Path, lengths: Replayed) -> TrafficHead:
    """Write the compiled workload into a folder of results, for load generators and for those who read the results.

    Raises UsageError if the file has changed since it was read; WriteError if it cannot be written.
    """
    if lengths.path is None:
        raise UsageError(f"{lengths.label}: where the file is is not kept with results; give --workload {lengths.name}")
    head, requests = compiled(Path(lengths.path))
    with replacing(folder / COMPILED) as file, io.TextIOWrapper(file, encoding="utf-8") as stream:
        digest = write_requests(stream, head, requests)
        if digest != lengths.sha256:
            raise UsageError(
                f"{lengths.path}: was changed since it was read (SHA-256 {digest[:8]}..., it was "
                f"{lengths.sha256[:8]}...); start again"
            )
    return head
