"""What stored manifests say when they are read again."""

from __future__ import annotations

from pathlib import Path

from pdlab.core.deployment import Deployment, Disaggregated, parse_label
from pdlab.results.schema import Manifest
from pdlab.results.store import Store

ROOT = Path(__file__).resolve().parents[2]


def test_what_was_kept_before_there_was_a_kv_guard_had_none() -> None:
    stored = Store(ROOT / "bm_results" / "local-pack-vs-spread-network" / "pack").read_manifest()
    assert stored.deployment is not None and isinstance(stored.deployment.topology, Disaggregated)
    assert not stored.deployment.topology.transport.kv_guard
    today = Manifest(origin="measured", label="x", deployment=Deployment(topology=parse_label("pd-pack-p1xtp1-d1xtp1")))
    again = Manifest.model_validate_json(today.model_dump_json())
    assert again == today and again.deployment is not None
    assert isinstance(again.deployment.topology, Disaggregated) and again.deployment.topology.transport.kv_guard
