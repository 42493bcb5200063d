"""What stored manifests say when they are read again."""

from __future__ import annotations

import json
from pathlib import Path

from pdlab.core.deployment import Deployment, Disaggregated, parse_label
from pdlab.core.findings import UNCLASSIFIED, found
from pdlab.results.schema import Manifest, Run, Validity
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


def test_what_was_kept_before_findings_had_codes_reads_as_it_did() -> None:
    gates = ("kv_transfers", "restarts")
    stored = {"reasons": ["3 KV transfers failed", "a replica died", "x"], "failed_gates": list(gates), "notes": ["n"]}
    validity = Validity.model_validate(stored)
    assert not validity.valid and validity.failed_gates == gates and validity.notes == ("n",)
    assert validity.reasons == tuple(stored["reasons"])
    assert {finding.code for finding in validity.findings} == {UNCLASSIFIED}, "whose sentence was whose is not known"
    assert Validity.model_validate_json(validity.model_dump_json()) == validity
    assert Validity.model_validate({"reasons": [], "failed_gates": []}) == Validity()


def test_a_stored_finding_keeps_its_code_its_numbers_and_its_sentence() -> None:
    finding = found("few_requests", needed=9, finished=3, window="3 requests finish in it", more="give more")
    validity = Validity(unchecked={"roles": "why"}).failing(finding, finding).failing(finding)
    assert validity.findings == (finding,) and not validity.valid
    stored = json.loads(validity.model_dump_json())
    assert stored["reasons"] == [finding.text] and stored["failed_gates"] == ["few_requests"], "for other readers"
    stored["findings"][0]["what"] = "as an earlier version said it"
    again = Validity.model_validate(stored)
    assert again.reasons == ("as an earlier version said it; give more",)
    assert again.findings[0].numbers == finding.numbers and again.failed_gates == ("few_requests",)


def test_shipped_levels_are_as_valid_as_their_files_say() -> None:
    files = [path for path in (ROOT / "bm_results").rglob("*.json") if '"validity"' in path.read_text()]
    levels = [json.loads(path.read_text()) for path in files]
    levels = [level for level in levels if "schema_version" in level and "key" in level]
    assert len(levels) > 50
    for level in levels:
        validity = Run.model_validate(level).validity
        assert list(validity.reasons) == level["validity"]["reasons"]
        assert list(validity.failed_gates) == level["validity"]["failed_gates"]
        assert validity.valid == (not validity.reasons)
