"""The audit finds every planted fault, names its file, and is silent on what is clean. It never writes."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import golden
from support.validity import failing

from pdlab.analysis import loading
from pdlab.analysis.audit import content_rules, registry
from pdlab.analysis.audit.registry import AuditFinding
from pdlab.analysis.audit.rules import audit, hard, render
from pdlab.cli import viz
from pdlab.core.deployment import Collocated, Deployment, Pool
from pdlab.core.findings import CODES
from pdlab.core.lengths import Uniform
from pdlab.core.mixes import parse_mixes
from pdlab.core.nodes import Placement, ReplicaPlacement, TpGroup
from pdlab.core.workload import Closed, Open, RunKey, Slo, Workload
from pdlab.results import metrics
from pdlab.results.level_data import LevelData
from pdlab.results.schema import CanaryResult, Distribution, Manifest, RequestRecord, Run, SloSearch, Summary
from pdlab.results.store import Store

TTFT_S, TPOT_S, ITL, OTL = 0.2, 0.010, 512, 64


def summary(concurrency: int, count: int, slower: float = 1.0) -> Summary:
    """A closed loop that is always full: rates by Little's law."""
    stays_s = (TTFT_S + TPOT_S * (OTL - 1)) * slower
    rps = concurrency / stays_s
    same = {"p50": TTFT_S}
    return Summary(
        duration_s=count / rps,
        completed=count,
        requests_per_s=rps,
        input_tokens_per_s=rps * ITL,
        output_tokens_per_s=rps * OTL,
        ttft=Distribution(mean_s=TTFT_S, percentiles_s=same),
        tpot=Distribution(mean_s=TPOT_S, percentiles_s={"p50": TPOT_S}),
    )


def run(concurrency: int, seed: int, **changes: Any) -> Run:
    count = changes.pop("count", 20 * concurrency)
    usual: dict[str, Any] = {
        "label": "collocated-2xtp1",
        "key": RunKey(kind="concurrency", value=concurrency),
        "workload": Workload(input_tokens=ITL, output_tokens=OTL),
        "load": Closed(concurrency=concurrency),
        "completed": count,
        "whole": summary(concurrency, count),
        "steady": metrics.steady(LevelData.of(requests(concurrency, count)), Closed(concurrency=concurrency)),
    }
    return Run(origin="measured", num_requests=count, seed=seed, failed=0, **{**usual, **changes})


def deployment() -> Deployment:
    return Deployment(model="tiny-gptoss", topology=Collocated(pool=Pool(replicas=2, tp=1)))


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "origin": "measured",
        "label": "collocated-2xtp1",
        "deployment": deployment(),
        "gpus": 2,
        "git_commit": "abc",
        "versions": {"ray": "2.60.0"},
        "hardware": {"cpu": "a CPU"},
        "canary": CanaryResult(equal=None, detail="reference"),
        "started_at": "2026-01-01T00:00:00+00:00",
    }
    return Manifest(**{**values, **changes})


def ours(folder: Path, runs: list[Run] | None = None, **changes: Any) -> Path:
    """A folder of ours; every level has records of its own."""
    store = Store(folder)
    store.write_manifest(manifest(**changes))
    for made in runs or [run(4, 1), run(8, 2)]:
        loop = requests(int(made.load.value), made.num_requests, shift_s=sum(folder.name.encode()) / 1000)
        store.write(made, loop)
        if made.whole != summary(int(made.load.value), made.num_requests) or not as_measured(made, loop):
            store.records_path(made.key).unlink()  # figures that were planted have no requests
    return folder


def as_measured(made: Run, loop: list[RequestRecord]) -> bool:
    again = metrics.steady(LevelData.of(loop), made.load)
    return (made.steady and made.steady.output_tokens_per_s) == pytest.approx(again and again.output_tokens_per_s)


def requests(concurrency: int, count: int, shift_s: float = 0.0) -> list[RequestRecord]:
    """The closed loop that `summary` has the figures of: every slot busy, one request after another."""
    stays_s = TTFT_S + TPOT_S * (OTL - 1)
    arrivals = [shift_s + number // concurrency * stays_s for number in range(count)]
    return [
        RequestRecord(
            arrival_s=arrival_s,
            first_token_s=arrival_s + TTFT_S,
            finish_s=arrival_s + stays_s,
            input_tokens=ITL,
            output_tokens=OTL,
            itl_s=(TPOT_S,) * (OTL - 1),
        )
        for arrival_s in arrivals
    ]


def published(folder: Path, levels: dict[str, dict[str, Any]]) -> Path:
    """A folder of the published form, written here: one summary per level."""
    folder.mkdir(parents=True)
    for name, changes in levels.items():
        concurrency = changes.get("max_concurrency", 4)
        count = changes.get("num_prompts", 20 * concurrency)
        whole = summary(concurrency, count)
        content = {
            "date": f"20260101-0000{len(list(folder.iterdir())):02d}",
            "model_id": "openai/gpt-oss-120b",
            "num_prompts": count,
            "request_rate": 1e9,
            "burstiness": 1.0,
            "max_concurrency": concurrency,
            "duration": whole.duration_s,
            "completed": count,
            "total_input_tokens": count * ITL,
            "total_output_tokens": count * OTL,
            "request_throughput": whole.requests_per_s,
            "output_throughput": whole.output_tokens_per_s,
            "max_output_tokens_per_s": whole.output_tokens_per_s * 1.1,
            "max_concurrent_requests": concurrency + 1,
            **{f"{stat}_ttft_ms": 1000 * TTFT_S for stat in ("mean", "median")},
            **{f"{stat}_tpot_ms": 1000 * TPOT_S for stat in ("mean", "median")},
            **changes,
        }
        (folder / name).write_text(json.dumps(content))
    return folder


def kinds(findings: list[AuditFinding]) -> list[str]:
    return [finding.kind for finding in findings]


def test_silent_on_clean_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [ours(tmp_path / name) for name in ("one", "two")]
    assert audit(folders) == []
    assert viz.main(["--audit", *map(str, folders)]) == 0
    assert capsys.readouterr().out == "audit: 2 folders, no findings\n"


def test_an_slo_search_is_no_level(tmp_path: Path) -> None:
    folder = ours(tmp_path / "one")
    search = SloSearch(
        label="x",
        slo=Slo(ttft_s=1.0),
        confidence=0.95,
        resolution=0.1,
        low_rps=1.0,
        high_rps=2.0,
        best_rps=1.0,
        points=(),
        finished=True,
        detail="between 1 and 2 requests/s",
        error_shares=1,
    )
    (folder / f"{search.stem}.json").write_text(search.model_dump_json())
    assert audit([folder]) == []


def test_looks_of_a_search_are_levels_of_their_own(tmp_path: Path) -> None:
    again = run(4, 3, key=RunKey(kind="concurrency", value=4, look=1))
    folder = ours(tmp_path / "one", [run(4, 1), run(8, 2), again])
    assert (folder / "concurrency4-look1.json").exists()
    assert not [finding for finding in audit([folder]) if "rename it back" in finding.fix]


def test_never_writes(tmp_path: Path) -> None:
    folder = ours(tmp_path / "one")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.iterdir())}
    audit([folder])
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.iterdir())} == before


def test_the_same_bytes_under_two_labels(tmp_path: Path) -> None:
    one = published(tmp_path / "itl512_otl64_4xtp2", {"conc4.json": {}})
    other = tmp_path / "itl512_otl64_1xtp4"
    other.mkdir()
    (other / "conc4.json").write_bytes((one / "conc4.json").read_bytes())
    identical = [finding for finding in audit([one, other]) if finding.kind == "identical"]
    assert [finding.files for finding in identical] == [("itl512_otl64_1xtp4/conc4.json",)]
    assert identical[0].percent == pytest.approx(100), "8 GPUs against 4"


def test_the_same_records_under_two_labels_of_ours(tmp_path: Path) -> None:
    one = ours(tmp_path / "one")
    other = ours(tmp_path / "two")
    for name in ("concurrency4.json", "concurrency4.records.json.gz"):
        (other / name).write_bytes((one / name).read_bytes())
    assert kinds(audit([one, other])) == ["identical"]


PLANTED_IN_PUBLISHED: list[tuple[str, dict[str, dict[str, Any]], str]] = [
    ("name_contradicts", {"conc8.json": {"max_concurrency": 4}}, "concurrency"),
    ("name_contradicts", {"conc4.json": {"total_output_tokens": 80 * 128, "output_throughput": None}}, "output tokens"),
    ("early_ends", {"conc4.json": {"total_output_tokens": 80 * 32, "output_throughput": None}}, "the answers 32"),
    ("peak_contradicts", {"conc4.json": {"max_concurrent_requests": 1}}, "in flight"),
    (
        "rate_not_offered",
        {"conc4_rr99.json": {"request_rate": 99.0, "max_concurrency": 4, "max_concurrent_requests": 5}},
        "the client stopped at 4 in flight",
    ),
    (
        "rates_share_a_limit",
        {f"conc64_rr{r}.json": {"request_rate": r, "max_concurrency": 64, "num_prompts": 640} for r in (1, 2)},
        "max_concurrency",
    ),
    ("loads_repeat", {"conc4.json": {}, "conc4_r1.json": {"duration": 9.0}}, "same load"),
    ("few_prompts", {"conc4.json": {"num_prompts": 20}}, "5.0 requests per unit"),
    ("few_arrivals", {"conc9_rr2.json": {"request_rate": 2.0, "num_prompts": 16}}, "16 requests in an open loop"),
    ("ramp", {"conc4.json": {"max_output_tokens_per_s": 10_000.0}}, "mean output rate"),
    ("too_many_in_flight", {"conc4.json": {"mean_tpot_ms": 30.0, "median_tpot_ms": 30.0}}, "Little"),
    ("rate_impossible", {"conc4.json": {"request_throughput": 99.0}}, "stated requests/s"),
    ("rate_impossible", {"conc4.json": {"total_token_throughput": 99.0}}, "stated tokens/s"),
    ("latencies_impossible", {"conc4.json": {"p99_ttft_ms": 1.0}}, "do not rise"),
    ("latencies_impossible", {"conc4.json": {"mean_itl_ms": -1.0}}, "mean_itl_ms is -1.0"),
    ("too_few_in_flight", {"conc4.json": {"mean_tpot_ms": 3.0, "median_tpot_ms": 3.0}}, "but the load is 4"),
    ("requests_miscounted", {"conc4.json": {"completed": 90}}, "80 requests were sent, 90 answered"),
    ("reused_default_seed", {"conc4.json": {}, "conc8.json": {"max_concurrency": 8}}, "50 %"),
]


@pytest.mark.parametrize(("code", "levels", "message"), PLANTED_IN_PUBLISHED, ids=lambda value: str(value)[:20])
def test_a_fault_planted_in_the_published_form(
    code: str, levels: dict[str, dict[str, Any]], message: str, tmp_path: Path
) -> None:
    findings = audit([published(tmp_path / "itl512_otl64_4xtp2", levels)])
    hits = [finding for finding in findings if finding.code == code and message in finding.evidence]
    assert hits, findings
    assert all(name.startswith("itl512_otl64_4xtp2/") for name in hits[0].files)


def test_the_published_form_lacks_a_manifest_and_nothing_else(tmp_path: Path) -> None:
    assert kinds(audit([published(tmp_path / "itl512_otl64_4xtp2", {"conc4.json": {}})])) == ["metadata"]


def test_a_level_without_an_answer_is_not_valid_and_nothing_else(tmp_path: Path) -> None:
    """Nobody was in flight, nothing was cached, and its lengths are those of the others."""
    rates = dict.fromkeys(("request_throughput", "output_throughput", "total_token_throughput"), 0)
    counts = dict.fromkeys(("completed", "total_input_tokens", "total_output_tokens", "max_concurrent_requests"), 0)
    levels: dict[str, dict[str, Any]] = {"conc4.json": {"seed": 1}, "conc8.json": {"max_concurrency": 8, "seed": 2}}
    levels["conc8.json"] |= {"num_prompts": 160, **rates, **counts}
    levels["conc8.json"] |= {
        f"{statistic}_{name}_ms": 0 for statistic in ("mean", "median") for name in ("ttft", "tpot")
    }
    findings = audit([published(tmp_path / "x_4xtp2", levels)])
    assert kinds(findings) == ["metadata", "invalid"]


def changed(**figures: Any) -> Summary:
    return summary(4, 80).model_copy(update=figures)


def stretched(by: float) -> Summary:
    """The same requests in a longer run: ramp-up, drain and stalls."""
    usual = summary(4, 80)
    rates = {
        f"{what}_per_s": getattr(usual, f"{what}_per_s") / by for what in ("requests", "input_tokens", "output_tokens")
    }
    return changed(duration_s=usual.duration_s * by, **rates)


def changed_gpus() -> dict[str, Any]:
    groups = tuple(TpGroup(slots={"a": (number,)}) for number in range(3))
    replicas = tuple(ReplicaPlacement(role="collocated", index=n, groups=(g,)) for n, g in enumerate(groups))
    return {"placement": Placement(device="gpu", replicas=replicas)}


PLANTED_IN_OURS: list[tuple[str, list[Run], dict[str, Any], str]] = [
    ("reused_prompts", [run(4, 1), run(8, 1)], {}, "concurrency8 50 %"),
    ("reused_prompts", [run(4, 1, started_at="2"), run(8, 1, started_at="1")], {}, "concurrency4 100 %"),
    ("few_prompts", [run(4, 1, count=20)], {}, "5.0 requests"),
    ("ramp", [run(4, 1, whole=stretched(1 / 0.72))], {}, "concurrency4 0.71"),
    ("tokens_contradict", [run(4, 1, steady=changed(output_tokens_per_s=400.0))], {}, "gives 83.0"),
    ("level_of_another", [run(4, 1, label="pd-pack-p1xtp1-d1xtp1")], {}, "a level of pd-pack-p1xtp1-d1xtp1 in"),
    ("label_of_another", [run(4, 1, label="a"), run(8, 2, label="a")], {"label": "a"}, "labelled a, its deployment is"),
    ("tokens_contradict", [run(4, 1, workload=Workload(input_tokens=256, output_tokens=OTL))], {}, "512.0"),
    ("tokens_contradict", [run(4, 1, whole=changed(output_tokens_per_s=150.0), steady=None)], {}, "64 output tokens"),
    ("requests_miscounted", [run(4, 1, completed=79)], {}, "80 requests were sent, 79 answered"),
    (
        "too_few_in_flight",
        [run(8, 1, whole=summary(4, 160), steady=None)],
        {},
        "4.0 in flight (Little's law), but the load is 8",
    ),
    ("too_many_in_flight", [run(4, 1, steady=changed(requests_per_s=9.0))], {}, "steady window: 9.00 requests/s"),
    (
        "latencies_impossible",
        [run(4, 1, whole=changed(ttft=Distribution(mean_s=0.2, percentiles_s={"p50": 0.2, "p99": 0.1})))],
        {},
        "do not rise",
    ),
    (
        "more_served_than_arrived",
        [run(4, 1, load=Open(rate_rps=2.0), key=RunKey(kind="rate", value=2.0))],
        {},
        "served where 2 arrived",
    ),
    ("too_many_in_flight", [run(4, 1, whole=summary(4, 80, slower=0.5), steady=None)], {}, "Little"),
    ("invalid", [run(4, 1, validity=failing("3 of 80 requests failed"))], {}, "requests failed"),
    ("metadata", [run(4, 1)], {"git_commit": None}, "git_commit"),
    ("metadata", [run(4, 1)], {"canary": None}, "canary"),
    ("wrong_gpus", [run(4, 1)], changed_gpus(), "places 3"),
]


@pytest.mark.parametrize(("code", "runs", "changes", "message"), PLANTED_IN_OURS, ids=lambda value: str(value)[:20])
def test_a_fault_planted_in_ours_and_nothing_else(
    code: str, runs: list[Run], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    findings = audit([ours(tmp_path / "one", runs, **changes)])
    assert [finding.code for finding in findings] == [code], findings
    assert message in findings[0].evidence


def planted(root: Path) -> list[AuditFinding]:
    """The findings of every fault that is planted in this module, and of copies and damaged files."""
    root.mkdir()
    findings = []
    for number, (_, levels, _) in enumerate(PLANTED_IN_PUBLISHED):
        findings += audit([published(root / f"{number}" / "itl512_otl64_4xtp2", levels)])
    for number, (_, runs, changes, _) in enumerate(PLANTED_IN_OURS):
        findings += audit([ours(root / f"ours{number}" / "one", runs, **changes)])
    near = {"max_concurrency": 8, "total_input_tokens": 160 * 480}
    findings += audit([published(root / "near_4xtp2", {"conc4.json": {}, "conc8.json": near})])
    first = published(root / "itl512_otl64_4xtp2", {"conc4.json": {}})
    for name in ("itl512_otl64_1xtp4", "itl512_otl64_2xtp4"):
        findings += audit([first, shutil.copytree(first, root / name)])
    shutil.copy(first / "conc4.json", first / "conc4_r1.json")
    findings += audit([first])
    clean = ours(root / "one", [run(4, 1)])
    findings += audit([clean, shutil.copytree(clean, root / "two")])
    records, level = clean / "concurrency4.records.json.gz", clean / "concurrency4.json"
    for content in (b"", b"no gzip", gzip.compress(b"{}")):
        records.write_bytes(content)
        findings += audit([clean])
    stored = {**json.loads(level.read_text()), "raw_sha256": hashlib.sha256(b"{}").hexdigest()}
    level.write_text(json.dumps(stored))
    findings += audit([clean])
    Store(clean).write(run(4, 1), requests(4, 80)[:-1], force=True)
    findings += audit([clean])
    level.rename(clean / "concurrency16.json")
    findings += audit([clean])
    (clean / "manifest.json").write_bytes(b"")
    return findings + audit([clean])


@pytest.mark.golden
def test_every_code_of_the_audit_can_be_found_and_has_its_sentences(tmp_path: Path) -> None:
    first = {finding.code: finding for finding in reversed(planted(tmp_path / "planted"))}
    codes = [code for code, row in CODES.items() if row.source == "audit"]
    assert sorted(first) == sorted(codes)
    shown = "\n".join(f"{code}\n{render([first[code]], 1)}\n" for code in codes).replace(str(tmp_path), "FOLDER")
    stored = Path(__file__).parent / "golden" / "sentences.txt"
    golden.compare(shown, stored)


def test_every_code_of_the_audit_has_one_rule() -> None:
    codes = [code for each in registry.registered() for code in each.codes]
    assert sorted([*codes, "unreadable"]) == sorted(code for code, row in CODES.items() if row.source == "audit")
    order = list(CODES)
    assert codes == sorted(codes, key=order.index), "the rows of a rule stand together: they are the order of reports"


@pytest.mark.parametrize(("mixes", "found"), [("512:64@1,512:64@6", False), ("512:64@1,512:64@2", True)])
def test_mixes_arrive_at_rates_of_their_own(mixes: str, found: bool) -> None:
    workload = Workload(lengths=parse_mixes(f"{mixes},every=10"))
    one = run(4, 1, load=Open(rate_rps=1.0), key=RunKey(kind="rate", value=1.0), workload=workload)
    assert 3.5 < one.whole.requests_per_s < 6, "between the busiest mixes of both"
    level: Any = SimpleNamespace(run=one, name="rate1")
    assert bool(list(content_rules.served(level))) is found


class TestVariedLengths:
    """Every request beside its requested tokens, and the level's rates beside their means."""

    WORKLOAD = Workload(input_tokens=ITL, output_tokens=OTL, lengths=Uniform(low=0.5, high=1.5))

    def folder(self, path: Path, requested: tuple[int, int] = (ITL, OTL), **changes: Any) -> Path:
        usual = {"workload": self.WORKLOAD, "requested_tokens": (float(ITL), float(OTL))}
        records = [record.model_copy(update={"requested": requested}) for record in requests(4, 80)]
        whole = metrics.whole(LevelData.of(records))
        steady = metrics.steady(LevelData.of(records), Closed(concurrency=4))
        store = Store(path)
        store.write_manifest(manifest())
        store.write(run(4, 1, **{**usual, "whole": whole, "steady": steady, **changes}), tuple(records))
        return path

    def test_silent_where_they_agree(self, tmp_path: Path) -> None:
        assert audit([self.folder(tmp_path / "one")]) == []

    def test_an_answer_of_another_length_than_its_request(self, tmp_path: Path) -> None:
        (finding,) = audit([self.folder(tmp_path / "one", requested=(ITL, OTL - 1))])
        assert finding.kind == "impossible"
        assert "80 answers do not have the requested token counts" in finding.evidence

    def test_rates_of_other_lengths_than_requested(self, tmp_path: Path) -> None:
        (finding,) = audit([self.folder(tmp_path / "one", requested_tokens=(1.1 * ITL, float(OTL)))])
        assert finding.kind == "contradiction" and "the workload has 563.2 input tokens per request" in finding.evidence


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (gzip.compress(b""), "the hash of the file is not"),
        (gzip.compress(b"{}"), "the hash of the file is not"),
        (b"no gzip", "cannot be read"),
        (gzip.compress(b"x" * 1000)[:-9], "cannot be read"),
    ],
    ids=["empty", "no-lines", "edited", "no-gzip", "cut"],
)
def test_records_that_are_not_those_of_the_level(content: bytes, message: str, tmp_path: Path) -> None:
    folder = ours(tmp_path / "one")
    (folder / "concurrency4.records.json.gz").write_bytes(content)
    findings = audit([folder])
    assert kinds(findings) == ["records"] and message in findings[0].evidence
    assert findings[0].files == ("one/concurrency4.records.json.gz",)
    (folder / "concurrency4.records.json.gz").unlink()
    assert audit([folder]) == [], "records that were not kept are no fault"


def test_records_that_were_read_are_not_read_again_but_judged_by_their_hash(tmp_path: Path) -> None:
    folder = ours(tmp_path / "one")
    path = folder / "concurrency4.records.json.gz"
    (loaded,) = loading.load([folder], {}, every_request=True)
    hashes = loading.hashes([loaded])
    assert path in hashes
    path.write_bytes(b"no gzip")
    assert audit([folder], recompute=False, hashes=hashes) == []
    assert kinds(audit([folder], recompute=False, hashes={**hashes, path: "0" * 64})) == ["records"]
    assert kinds(audit([folder], hashes=hashes)) == ["records"], "to compute figures again they are read"


@pytest.mark.parametrize("name", ["concurrency4.json", "manifest.json"])
def test_an_empty_result_file_makes_a_folder_unreadable(name: str, tmp_path: Path) -> None:
    folder = ours(tmp_path / "one")
    (folder / name).write_bytes(b"")
    findings = audit([folder])
    assert kinds(findings) == ["unreadable"] and name in findings[0].evidence


def test_a_renamed_level_is_seen(tmp_path: Path) -> None:
    folder = ours(tmp_path / "one", [run(4, 1)])
    (folder / "concurrency4.json").rename(folder / "concurrency16.json")
    assert kinds(audit([folder])) == ["contradiction"]


def test_a_manifest_that_counts_other_gpus(tmp_path: Path) -> None:
    (finding,) = audit([ours(tmp_path / "one", gpus=8)])
    assert finding.kind == "GPUs" and "uses 2 GPUs, the manifest states 8" in finding.evidence
    assert finding.percent == pytest.approx(300)


def test_figures_that_the_requests_do_not_give(tmp_path: Path) -> None:
    folder = ours(tmp_path / "one", [run(4, 1)])
    path = folder / "concurrency4.json"
    content = json.loads(path.read_text())
    content["steady"]["tpot"]["percentiles_s"]["p50"] /= 2
    path.write_text(json.dumps(content))
    (finding,) = audit([folder])
    assert finding.kind == "impossible" and "p50 TPOT (s) of the steady window is 0.005" in finding.evidence
    assert finding.percent == pytest.approx(50)


def test_another_number_of_requests_beside_a_level(tmp_path: Path) -> None:
    folder = ours(tmp_path / "one", [run(4, 1)])
    Store(folder).write(run(4, 1), requests(4, 80)[:-1], force=True)
    (finding,) = audit([folder])
    assert finding.kind == "impossible" and "79 requests were recorded, but the level has 80" in finding.evidence


def test_the_same_content_in_another_layout(tmp_path: Path) -> None:
    one = published(tmp_path / "itl512_otl64_4xtp2", {"conc4.json": {}})
    other = tmp_path / "itl512_otl64_1xtp2-2xtp2"
    other.mkdir()
    (other / "conc4.json").write_text(json.dumps(json.loads((one / "conc4.json").read_text()), indent=4))
    identical = [finding for finding in audit([one, other]) if finding.kind == "identical"]
    assert "by content" in identical[0].evidence and identical[0].percent == pytest.approx(100 * (8 / 6 - 1))


def test_one_folder_of_two_workloads(tmp_path: Path) -> None:
    """Two curves: nothing that is drawn is wrong, and nothing is compared with the other workload."""
    changes = {"max_concurrency": 8, "total_input_tokens": 160 * 256}
    folder = published(tmp_path / "unnamed_4xtp2", {"conc4.json": {}, "conc8.json": changes})
    assert {"contradiction", "lengths"}.isdisjoint(kinds(audit([folder])))
    near = {"max_concurrency": 8, "total_input_tokens": 160 * 480}
    findings = audit([published(tmp_path / "near_4xtp2", {"conc4.json": {}, "conc8.json": near})])
    (hit,) = [finding for finding in findings if finding.kind == "lengths"]
    assert "480:64, 512:64" in hit.evidence and hit.percent == pytest.approx(100 * (1 - 480 / 512))
    close = {"max_concurrency": 8, "total_input_tokens": 160 * ITL + 30}
    findings = audit([published(tmp_path / "unnamed_2xtp4", {"conc4.json": {}, "conc8.json": close})])
    assert {"contradiction", "lengths"}.isdisjoint(kinds(findings))


def test_answers_that_end_early_are_no_sign_of_editing(tmp_path: Path) -> None:
    """A client that measured E2EL has the time that requests stayed; a name does not have how long answers were."""
    stays_s, answered = TTFT_S + TPOT_S * 19, 80
    content = {
        "total_output_tokens": answered * 20,
        "duration": answered * stays_s / 4,
        "request_throughput": 4 / stays_s,
        "output_throughput": None,
        "max_output_tokens_per_s": None,
    }
    e2el = {f"{stat}_e2el_ms": 1000 * stays_s for stat in ("mean", "median")}
    for name, more in (("with", e2el), ("without", {})):
        findings = audit([published(tmp_path / f"{name}_itl512_otl64_4xtp2", {"conc4.json": {**content, **more}})])
        assert sorted(kinds(findings)) == ["early ends", "metadata"], findings
        assert not hard(findings)
    double = {**content, **{key: 2 * value for key, value in e2el.items()}}
    findings = audit([published(tmp_path / "double_itl512_otl64_4xtp2", {"conc4.json": double})])
    assert "impossible" in kinds(findings), "8 in flight where the load allows 4, by the E2EL"


def test_gpus_can_be_given_to_an_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = published(tmp_path / "of-tuesday", {"conc4.json": {}})
    assert viz.main(["--audit", str(folder)]) == 3
    assert "--gpus of-tuesday=N" in capsys.readouterr().out
    assert viz.main(["--audit", str(folder), "--gpus", "of-tuesday=8"]) == 3
    assert "unreadable" not in capsys.readouterr().out


def test_the_exit_code_shows_that_something_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert viz.main(["--audit", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert viz.main(["--audit", str(tmp_path)]) == 3
    assert "audit: 1 finding in 1 folder: unreadable" in capsys.readouterr().out
    assert viz.main(["--audit", str(tmp_path), "--exps", str(tmp_path)]) == 2
    assert viz.main([]) == 2


def test_a_level_without_requests_hides_nothing_of_the_others(tmp_path: Path) -> None:
    none = {"completed": 0, "num_prompts": 0, "total_input_tokens": 0, "total_output_tokens": 0, "request_rate": 2.0}
    empty = published(tmp_path / "empty_4xtp2", {"conc4.json": {**none, "request_rate": "inf"}, "conc8_rr2.json": none})
    wrong = ours(tmp_path / "one", [run(4, 1)])
    path = wrong / "concurrency4.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "num_requests": 0}))
    other = published(tmp_path / "itl512_otl64_4xtp2", {"conc4.json": {"max_concurrency": 8}})
    findings = audit([empty, wrong, other])
    assert {"few prompts", "impossible", "contradiction"} <= set(kinds(findings))
    assert any("itl512_otl64_4xtp2/conc4.json" in each.files for each in findings)


def test_a_copy_of_the_same_configuration_is_called_a_copy(tmp_path: Path) -> None:
    one = ours(tmp_path / "one", [run(4, 1)])
    (copied,) = hard(audit([one, shutil.copytree(one, tmp_path / "two")]))
    assert "one is a copy of the other" in copied.consequence and "another configuration" not in copied.consequence


def test_what_many_folders_share_is_reported_once_with_all_of_them(tmp_path: Path) -> None:
    names = ["a_4xtp2", "b_2xtp4", "c_8xtp1"]
    paths = [published(tmp_path / name, {"conc4.json": {"num_prompts": 20 * (n + 4)}}) for n, name in enumerate(names)]
    text = render(audit(paths), len(paths))
    assert text.count("metadata: ") == 1
    assert "metadata: a_4xtp2, b_2xtp4, c_8xtp1\n" in text


def test_what_is_not_recorded_does_not_make_a_plot_wrong(tmp_path: Path) -> None:
    findings = audit([published(tmp_path / "a_4xtp2", {"conc4.json": {}})])
    assert "metadata" in kinds(findings) and "metadata" not in kinds(hard(findings))
