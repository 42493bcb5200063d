"""What is stored reads again as it was."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError
from support import records as made
from support import timelines as made_timelines

from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import StoreError
from pdlab.core.findings import CODES, found
from pdlab.core.workload import Open
from pdlab.results.schema import Experiment, Manifest, Validity
from pdlab.results.store import Store, experiment_folders

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def convert() -> ModuleType:
    return importlib.import_module("convert_results")


def test_sentences_without_findings_never_read_as_a_valid_level() -> None:
    with pytest.raises(ValidationError, match="reasons without findings"):
        Validity.model_validate({"reasons": ["3 KV transfers failed"], "failed_gates": ["kv_transfers"]})
    assert Validity.model_validate({"reasons": [], "failed_gates": []}) == Validity()


@pytest.mark.parametrize("stored", [{}, {"model": "org/one", "tokenizer": "/t/one"}])
def test_the_model_of_a_server_that_pdlab_did_not_launch(stored: dict[str, str]) -> None:
    manifest = Manifest.model_validate({"origin": "measured", "label": "free", **stored})
    assert Experiment(name="free", manifest=manifest, runs=()).model == stored.get("model")
    launched = manifest.model_copy(
        update={"deployment": Deployment(model="org/two", topology=parse_label("collocated-1xtp1"))}
    )
    assert Experiment(name="free", manifest=launched, runs=()).model == "org/two"


def old(reasons: list[str], gates: list[str]) -> dict[str, Any]:
    """A level as it was kept before findings had codes."""
    level = made.run((), Open(rate_rps=4))
    validity = {"reasons": reasons, "failed_gates": gates, "unchecked": {}, "notes": []}
    return json.loads(level.model_dump_json()) | {"validity": validity}


def test_a_level_of_sentences_is_converted_to_findings(convert: ModuleType) -> None:
    reasons = [
        "load generator saturated: event loop late by 106 ms (p95, limit 50 ms)",
        "clock: the wall clock moved 1",
    ]
    level = convert.converted(old(reasons, ["client_saturation", "clock"]))
    assert [finding.code for finding in level.validity.findings] == ["client_lag", "clock_set"]
    assert level.validity.reasons == tuple(reasons) and level.validity.failed_gates == ("client_saturation", "clock")
    assert convert.converted(json.loads(level.model_dump_json())) == level, "twice is once"
    with pytest.raises(ValueError, match="no code of clock has a sentence like 'what'"):
        convert.converted(old(["what"], ["clock"]))


def test_a_manifest_without_a_kv_guard_had_none(convert: ModuleType) -> None:
    for label, guarded in (("pd-pack-p1xtp1-d1xtp1", False), ("collocated-1xtp1", None)):
        today = Manifest(origin="measured", label="x", deployment=Deployment(topology=parse_label(label)))
        assert convert.converted(json.loads(today.model_dump_json())) == today
        stored = json.loads(today.model_dump_json())
        stored["deployment"]["topology"].get("transport", {}).pop("kv_guard", None)
        deployment = convert.converted(stored).deployment
        assert (deployment.transport and deployment.transport.kv_guard) is guarded


def test_variables_of_ucx_were_the_transports(convert: ModuleType) -> None:
    today = Manifest(origin="measured", label="x", deployment=Deployment(topology=parse_label("pd-pack-p1xtp1-d1xtp1")))
    stored = json.loads(today.model_dump_json())
    stored["deployment"]["topology"]["transport"]["ucx_env"] = {"UCX_A": "1"}
    assert convert.converted(stored).deployment.env == {"UCX_A": "1"}


def test_requests_of_0_1_0_have_the_keys_of_today(convert: ModuleType, tmp_path: Path) -> None:
    store = Store(tmp_path / "x")
    records = tuple(made.record(n / 4, requested=(1, n + 1)) for n in range(4))
    level = store.write(made.run(records, Open(rate_rps=4), requested_tokens=(1.0, 2.5)), records)
    older = {new: old for old, new in convert.RENAMED.items()}
    with gzip.open(store.records_path(level.key), "rt") as file:
        lines = file.read().replace('"requested"', '"asked"')
    with gzip.open(store.records_path(level.key), "wt") as file:
        file.write(lines)
    path = store.path(level.key)
    path.write_text(path.read_text().replace('"requested_tokens"', f'"{older["requested_tokens"]}"'))
    with pytest.raises(StoreError):
        store.read_records(level.key)
    with pytest.raises(StoreError, match=rf"asked_tokens.*: python benchmarks/convert_results\.py {store.folder}$"):
        next(store.runs())
    (store.folder / "slo-1.json").write_text('{"asked_s": 3.0}')
    assert convert.main([str(store.folder)]) == 0
    assert store.read_records(level.key) == records and next(store.runs()) == level
    assert json.loads((store.folder / "slo-1.json").read_text()) == {"requested_s": 3.0}
    store.check_records(level)


def test_timelines_of_0_1_0_have_the_marks_of_today(convert: ModuleType, tmp_path: Path) -> None:
    store = Store(tmp_path / "x")
    records = (made.record(0.0),)
    timelines = (made_timelines.pd(0, 0.0, made_timelines.PD_MS),)
    level = store.write(made.run(records, Open(rate_rps=4)), records, timelines)
    kept = store.timelines_path(level.key)
    with gzip.open(kept, "rt") as file:
        lines = file.read()
    assert '"reported"' in lines
    with gzip.open(kept, "wt") as file:
        file.write(lines.replace('"reported"', '"told"'))
    with pytest.raises(StoreError, match=r"the mark told is reported today: .*convert_results\.py"):
        store.read_timelines(level.key)
    assert convert.main([str(store.folder)]) == 0
    assert store.read_timelines(level.key) == timelines


def test_a_stored_finding_keeps_its_code_its_numbers_and_its_sentence() -> None:
    finding = found("few_requests", needed=9, finished=3, window="3 requests finish in it", more="give more")
    validity = Validity(unchecked={"roles": found("role_board_unreachable")}).failing(finding, finding).failing(finding)
    assert validity.findings == (finding,) and not validity.valid
    stored = json.loads(validity.model_dump_json())
    assert stored["reasons"] == [finding.text] and stored["failed_gates"] == ["few_requests"], "for other readers"
    stored["findings"][0]["what"] = "as an earlier version worded it"
    again = Validity.model_validate(stored)
    assert again.reasons == ("as an earlier version worded it; give more",)
    assert again.findings[0].numbers == finding.numbers and again.failed_gates == ("few_requests",)


def test_shipped_results_need_no_conversion() -> None:
    folders = experiment_folders(path for path in (ROOT / "bm_results").iterdir() if path.is_dir())
    levels = [run for folder in folders for run in Store(folder).load().runs]
    invalid = [run.validity for run in levels if not run.validity.valid]
    assert len(levels) > 50 and invalid
    assert {finding.code for validity in invalid for finding in validity.findings} <= set(CODES)
