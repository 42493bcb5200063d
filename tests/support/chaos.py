"""Made-up results of faults under load."""

from __future__ import annotations

from pathlib import Path

from pdlab.results import chaos
from pdlab.results.chaos import Chaos, ChaosRequest, ChaosRun, ChaosSample, InjectedFault, Leftovers, RequestOutcome
from pdlab.results.schema import Manifest


def request(
    number: int, sent_s: float, end_s: float, outcome: RequestOutcome = "right", detail: str | None = None
) -> ChaosRequest:
    right = outcome == "right"
    return ChaosRequest(
        number=number, prompt=0, sent_s=sent_s, end_s=end_s, first_token_s=sent_s if right else None,
        status=200 if right else None, tokens=16 if right else 0, outcome=outcome, detail=detail,
    )  # fmt: skip


def fault(number: int, kind: str, began_s: float, ended_s: float, *, spared: bool = False) -> InjectedFault:
    return InjectedFault(
        number=number, kind=kind, planned_s=began_s, began_s=began_s, ended_s=ended_s, outcome="injected",
        targets=(f"{kind} (process {number} on local-1)",), spared=spared,
    )  # fmt: skip


def run(**more: object) -> ChaosRun:
    fields: dict[str, object] = {
        "label": "pd-spread-p1xtp1-d1xtp1", "plan": "short", "seed": 7, "concurrency": 2, "limit_s": 30.0, "answers": 3,
        "lease_s": 30.0, "loaded_s": 40.0, "started_at": "2026-01-01T00:00:00+00:00",
        "finished_at": "2026-01-01T00:01:00+00:00", "command": "python -m pdlab chaos short",
    }  # fmt: skip
    return ChaosRun.model_validate({**fields, **more})


def example() -> Chaos:
    """Forty seconds: a kill with two errors and a wrong answer, 6 s to recover; a stop with a hang; a client leaves."""
    requests = [request(i, i * 0.5, i * 0.5 + 0.4) for i in range(20)]
    requests += [request(20, 9.9, 10.3, "error", "HTTP 500: gone"), request(21, 10.4, 11.0, "error", "closed")]
    requests += [request(22, 11.0, 15.8, "wrong", "token 3 is 7 in place of 5")]
    requests += [request(23 + i, 15.9 + i * 0.5, 16.3 + i * 0.5) for i in range(8)]
    requests += [request(31, 21.0, 51.0, "hang", "0 of 16 tokens within the limit"), request(32, 21.1, 21.6, "left")]
    requests += [request(33 + i, 26.0 + i * 0.5, 26.4 + i * 0.5) for i in range(20)]
    faults = (
        fault(1, "kill_prefill_before_read", 10.0, 12.5),
        fault(2, "stop_prefill_engine", 20.5, 25.5),
        InjectedFault(
            number=3, kind="kill_decode_engine", planned_s=30.0, began_s=30.1, ended_s=30.1, outcome="skipped",
            detail="no decode engine core is there at this moment",
        ),
    )  # fmt: skip
    samples = tuple(
        ChaosSample(at_s=5.0 * i, rss_mib={"prefill engine core": 500.0 + i, "other": 300.0}) for i in range(9)
    )
    left = Leftovers(kv_use={"decode a1": 0.0, "prefill b2": 0.0}, kv_free_after_s=1.25, kv_limit_s=35.0)
    counters = {"nixl_num_failed_transfers": 1.0, "nixl_num_kv_expired_reqs": 0.0}
    return Chaos(
        name="chaos-pd-spread-p1xtp1-d1xtp1",
        run=run(leftovers=left, counters=counters, impossible={"link_down": "there is no link between two hosts here"}),
        manifest=Manifest(origin="measured", label="pd-spread-p1xtp1-d1xtp1"),
        requests=tuple(requests),
        faults=faults,
        samples=samples,
    )


def write(parent: Path, made: Chaos) -> Path:
    """The folder of it."""
    folder = chaos.new_folder(parent, made.run.label)
    chaos.append(folder, [*made.requests, *made.faults, *made.samples])
    chaos.finish(folder, made.run, made.manifest)
    return folder
