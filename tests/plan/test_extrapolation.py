"""What lies outside of a fit is named, and nothing of the fit's errors is claimed of it."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support import folders
from support.model_folders import GPT_OSS_20B, GPT_OSS_120B, LLAMA_70B, model_folder
from support.plans import HARDWARE, MODEL, scenario

from pdlab.cli import plan as cli_plan
from pdlab.core.catalog import find_config, load_cluster, require_shape
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.lengths import parse_lengths
from pdlab.core.nodes import ClusterNode, ClusterView, Nic
from pdlab.core.schema import to_yaml
from pdlab.core.workload import Closed, Open, Workload
from pdlab.plan import facts
from pdlab.plan.extrapolation import Platform, in_flight_per_gpu, major_minor, outside_fit
from pdlab.plan.planned_nodes import require_node
from pdlab.plan.planner import Plan, gain, outside, plan
from pdlab.plan.scenario import Scenario
from pdlab.sim.computed_hardware import computed
from pdlab.sim.hardware import Hardware, load_hardware
from pdlab.sim.kv_transfer import on_nodes

ERROR = f"{HARDWARE.error.tpot_percent:g}" if HARDWARE.error is not None else "?"
INTERVAL = re.compile(r"\([+-]\d+ to (more|[+-]\d+)\)")


def named(
    label: str = "collocated-2xtp4",
    workload: Workload | None = None,
    model: str = MODEL,
    ran_on: Platform | None = None,
    loads: tuple[float, ...] = (8.0,),
    hardware: Hardware = HARDWARE,
) -> list[str]:
    deployment = Deployment(topology=parse_label(label))
    found = outside_fit(
        hardware, model, deployment, [workload or Workload()], ran_on=ran_on or Platform(), in_flight_per_gpu=loads
    )
    return [each.dimension for each in found]


@pytest.mark.parametrize(
    "label",
    ["collocated-8xtp1", "collocated-1xtp8", "pd-pack-p1xtp2-d3xtp2", "pd-spread-p1xtp4-d1xtp4", "pd-fluid-8xtp1"],
)
def test_what_was_fitted_is_inside(label: str) -> None:
    assert named(label) == []
    assert named(label, Workload(input_tokens=10000, output_tokens=500)) == []
    assert named(label, Workload(input_tokens=4998, output_tokens=251)) == []
    assert named(label, Workload(lengths=parse_lengths("uniform:0.8-1.0"))) == []
    assert named(label, ran_on=Platform("H100", "vllm", "0.11")) == []


@pytest.mark.parametrize(
    ("label", "dimensions"),
    [
        ("collocated-1xtp16", ["TP"]),
        ("collocated-1xtp8pp2", ["PP"]),
        ("collocated-1xdp8", ["DP"]),
        ("collocated-1xtp8ep", ["EP"]),
        ("pd-spread-p1xdp16ep-d1xtp8", ["DP", "EP"]),
        ("pd-spread-p1xtp8-d1xtp32ep", ["TP", "EP"]),
    ],
)
def test_parallelism_beyond_the_fit(label: str, dimensions: list[str]) -> None:
    assert named(label) == dimensions


def test_engine_arguments_that_no_run_of_the_fit_has() -> None:
    eager = Deployment(topology=parse_label("collocated-2xtp4"), engine_kwargs={"enforce_eager": True})
    (found,) = outside_fit(HARDWARE, MODEL, eager)
    assert found == ("engine arguments", "enforce_eager=true")
    assert HARDWARE.fit is not None
    fit = HARDWARE.fit.model_copy(update={"engine_arguments": ("enforce_eager=true",)})
    assert outside_fit(HARDWARE.model_copy(update={"fit": fit}), MODEL, eager) == ()
    never = HARDWARE.model_copy(update={"fit": None})
    assert [each.dimension for each in outside_fit(never, MODEL, eager)] == ["no fit", "engine arguments"]


def test_every_other_dimension() -> None:
    assert named(model="gpt-oss-20b") == ["model"]
    assert named(ran_on=Platform("H200", "vllm", "0.11")) == ["GPU"]
    assert (
        named(ran_on=Platform("H100", "vllm", "0.29")) == named(ran_on=Platform("H100", "sglang", "0.11")) == ["engine"]
    )
    assert (
        named(workload=Workload(input_tokens=1000)) == named(workload=Workload(input_tokens=20000)) == ["input length"]
    )
    assert (
        named(workload=Workload(output_tokens=1000)) == named(workload=Workload(output_tokens=1)) == ["output length"]
    )
    assert named(workload=Workload(lengths=parse_lengths("lognormal:0.5"))) == ["input length", "output length"]
    assert named(loads=(64.0,)) == ["load"] and named(loads=(0.01,)) == []
    assert named(hardware=HARDWARE.model_copy(update={"error": None})) == ["errors"]
    assert HARDWARE.fit is not None
    collocated = HARDWARE.model_copy(update={"fit": HARDWARE.fit.model_copy(update={"modes": ("collocated",)})})
    assert (
        named("pd-pack-p1xtp2-d1xtp2", hardware=collocated) == ["mode"] == named("pd-fluid-8xtp1", hardware=collocated)
    )
    busy = HARDWARE.fit.model_copy(update={"in_flight_per_gpu": (8.0, 16.0)})
    assert named(loads=(1.0,), hardware=HARDWARE.model_copy(update={"fit": busy})) == ["load"]


def test_the_network_counts_where_kv_cache_crosses_it() -> None:
    spread, pack = "pd-spread-p1xtp4-d1xtp4", "pd-pack-p1xtp4-d1xtp4"
    for other in ("infiniband", "tcp"):
        assert named(spread, ran_on=Platform(network=other)) == ["network"]
    assert named(spread, ran_on=Platform(network="efa")) == named(pack, ran_on=Platform(network="infiniband")) == []
    assert named("collocated-2xtp4", ran_on=Platform(network="infiniband")) == []


@pytest.mark.parametrize("order", [("efa", "ethernet"), ("ethernet", "efa")])
def test_nodes_with_unequal_networks_are_judged_by_the_one_they_share(
    order: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EFA and Ethernet share TCP alone, whichever node comes first in the file."""
    nics = [Nic.model_validate({"kind": kind, "count": 8, "gbit_per_s": 100}) for kind in order]
    nodes = [ClusterNode(id=nic.kind, gpu_type="H100", gpus=8, cpus=96, nic=nic) for nic in nics]
    view = ClusterView(nodes=tuple(nodes))
    file, rows, label = tmp_path / "mine.yaml", tmp_path / "rows.csv", "pd-spread-p1xtp4-d1xtp4"
    file.write_text(to_yaml(view))
    rows.write_text(f"config,concurrency\n{label},8\n")
    explained, ranked = f"--explain {label} --concurrency 8", "--gpus 16 --placement spread --concurrency 16 --top 30"
    for words in (explained, ranked, f"--predict {rows}", "--fluid --gpus 16 --slo-ttft-ms 9000 --slo-tpot-ms 50"):
        assert cli_plan.main([*words.split(), "--node", str(file)]) == 0
        out = capsys.readouterr().out
        assert "network tcp (fit: efa)" in out, words
        if words == ranked:
            crossing = [line for line in out.splitlines() if re.match(r" ?\d+  pd-spread", line)]
            assert crossing and not any(INTERVAL.search(line) for line in crossing)

    deployment = Deployment(model=MODEL, topology=parse_label(label))
    folders.write(tmp_path / "run", deployment, loads=(8,), repeats=1, cluster=view, versions={"vllm": "0.11.0"})
    assert cli_plan.main(["--compare", str(tmp_path / "run")]) == 0
    assert "network tcp (fit: efa)" in capsys.readouterr().out


PCIE_NODE = ClusterNode(
    id="a", gpu_type="H100", gpus=8, cpus=96, gpu_link="pcie", nic=Nic(kind="efa", count=32, gbit_per_s=100)
)


def test_step_times_of_nvlink_say_nothing_of_engines_over_pcie() -> None:
    """One GPU has no link to another, and KV cache of a spread crosses the network."""
    on_pcie = on_nodes(HARDWARE, [PCIE_NODE])
    for label in ("collocated-2xtp4", "pd-spread-p1xtp1-d1xtp2", "pd-pack-p1xtp1-d1xtp1", "pd-fluid-8xtp1"):
        assert (named(label, hardware=on_pcie), named(label)) == (["GPU link"], []), label
    assert named("collocated-8xtp1", hardware=on_pcie) == named("pd-spread-p1xtp1-d1xtp1", hardware=on_pcie) == []
    assert HARDWARE.fit is not None
    fitted = on_pcie.model_copy(update={"fit": HARDWARE.fit.model_copy(update={"gpu_link": "pcie"})})
    assert named(hardware=fitted) == []
    nvlink = on_nodes(fitted, [PCIE_NODE.model_copy(update={"gpu_link": "nvlink"})])
    assert named(hardware=nvlink) == ["GPU link"]


@pytest.mark.usefixtures("tabulated")
def test_tables_of_nvlink_have_no_band_over_pcie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = ["--hardware", "H100", "--engine-version", "0.29", "--without-ray"]
    words = [*tables, "--explain", "collocated-2xtp4", "--concurrency", "8", "--node"]
    for node, noted in ((PCIE_NODE, True), (PCIE_NODE.model_copy(update={"gpu_link": None}), False)):
        file = tmp_path / "mine.yaml"
        file.write_text(to_yaml(ClusterView(nodes=(node,))))
        assert cli_plan.main([*words, str(file)]) == 0
        out = capsys.readouterr().out
        assert ("GPUs of a node are linked by pcie, and step times are of GPUs with nvlink" in out) is noted
        assert ("none of them has pcie between GPUs that have nvlink" in out) is noted


def test_a_model_is_known_by_its_numbers_and_formats(tmp_path: Path) -> None:
    def outside(folder: str) -> list[tuple[str, str]]:
        return list(outside_fit(HARDWARE, require_shape(folder), Deployment(topology=parse_label("collocated-2xtp4"))))

    assert outside(model_folder(tmp_path / "prod-model", GPT_OSS_120B)) == []
    assert outside(model_folder(tmp_path / "openai--gpt-oss-120b", GPT_OSS_120B)) == []
    ((dimension, text),) = outside(model_folder(tmp_path / "prod-20b", GPT_OSS_20B))
    assert (dimension, text) == ("model", "model prod-20b (fit: gpt-oss-120b)")
    for change, words in (({"vocab_size": 200000}, "other numbers"), ({"quantization_config": None}, "other formats")):
        ((_, text),) = outside(model_folder(tmp_path / words / "gpt-oss-120b", GPT_OSS_120B, **change))
        assert text == f"model gpt-oss-120b with {words} (fit: gpt-oss-120b)"


def test_a_fit_keeps_the_numbers_of_a_model_that_has_no_name_here(tmp_path: Path) -> None:
    llama, tuned = (require_shape(model_folder(tmp_path / name, LLAMA_70B)) for name in ("llama", "tuned"))
    other = require_shape(model_folder(tmp_path / "2" / "llama", LLAMA_70B, num_hidden_layers=64))
    assert HARDWARE.fit is not None
    fit = HARDWARE.fit.model_copy(update={"model": "llama", "numbers": llama.numbers, "formats": llama.formats})
    assert [fit.unlike_model(each) for each in (llama, tuned)] == ["", ""]
    assert fit.unlike_model(other) == "llama with other numbers"
    assert fit.unlike_model(tuned.model_copy(update={"weight_dtype": "fp8"})) == "tuned"
    assert fit.unlike_model("gpt-oss-120b") == "gpt-oss-120b"
    by_name = fit.model_copy(update={"numbers": None, "formats": None})
    assert (by_name.unlike_model(llama), by_name.unlike_model(tuned)) == ("", "tuned"), "a file without numbers"


def test_load_is_counted_per_gpu() -> None:
    assert in_flight_per_gpu(Closed(concurrency=64), 8, 1.0, 99.0) == 8
    assert in_flight_per_gpu(Open(rate_rps=4.0), 8, 3.0, 16.0) == 6


def test_versions_are_major_and_minor() -> None:
    assert [major_minor(each) for each in ("0.29.0+cpu", "v0.11", "0.18.1", "simulated (vLLM 0.11)", "")] == [
        "0.29", "0.11", "0.18", None, None,
    ]  # fmt: skip


class TestHardwareFiles:
    def changed(self, folder: Path, **changes: object) -> Hardware:
        data = yaml.safe_load(find_config("catalog", "h100-vllm-0.11", "hardware").read_text())
        for key, value in changes.items():
            *outer, last = key.split("__")
            inner = data
            for name in outer:
                inner = inner[name]
            inner[last] = value
        path = folder / "mine.yaml"
        path.write_text(yaml.safe_dump(data))
        return load_hardware(str(path))

    @pytest.mark.parametrize("name", ["h100-vllm-0.11", "cpu-vllm-0.29"])
    def test_the_shipped_fits_are_of_the_shipped_constants(self, name: str) -> None:
        """After a fit that was meant, pdlab.sim.hardware.signed gives the digest."""
        hardware = load_hardware(name)
        assert hardware.fit is not None and hardware.error is not None

    def test_a_file_that_is_written_and_read_is_the_same(self, tmp_path: Path) -> None:
        (tmp_path / "copy.yaml").write_text(to_yaml(HARDWARE))
        assert load_hardware(str(tmp_path / "copy.yaml")) == HARDWARE
        assert self.changed(tmp_path, name="mine", constants__launch_ms__source="mine").fit == HARDWARE.fit

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("constants__memory_gb__value", 150.8),
            ("constants__launch_ms__value", 4.31),
            ("gpu", "H200 SXM 141 GB"),
            ("gpu_type", "H200"),
            ("stack", "vLLM 0.29"),
            ("hybrid_kv", True),
            ("error__tpot_percent", 0.5),
            ("fit__model", "gpt-oss-20b"),
            ("fit__version", "0.29"),
        ],
    )
    def test_nothing_is_claimed_of_a_file_that_was_changed(self, key: str, value: object, tmp_path: Path) -> None:
        hardware = self.changed(tmp_path, **{key: value})
        assert hardware.fit is None and hardware.error is None
        assert named(hardware=hardware) == ["no fit"]

    def test_a_system_that_the_tables_lack_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "mine.yaml"
        file.write_text(to_yaml(computed("H200")).replace("system: h200_sxm", "system: foo"))
        assert cli_plan.main(["--hardware", str(file), "--gpus", "8"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"{file}: steps.system foo: no GPU of configs/gpus/; " in error
        assert "h200_sxm" in error

    def test_errors_without_a_fit_are_none(self, tmp_path: Path) -> None:
        data = yaml.safe_load(find_config("catalog", "h100-vllm-0.11", "hardware").read_text())
        del data["fit"]
        (tmp_path / "old.yaml").write_text(yaml.safe_dump(data))
        assert load_hardware(str(tmp_path / "old.yaml")).error is None


def planned(model: str, hardware: Hardware = HARDWARE) -> tuple[Plan, Scenario, ClusterView]:
    bounded = replace(scenario(ttft_s=2.0, tpot_s=0.012), hardware=hardware, shape=require_shape(model))
    view = ClusterView(nodes=load_cluster("p5.48xlarge-x2").nodes[:1])
    return plan(bounded, model, view, 8, concurrencies=[16, 32]), bounded, view


class TestPlan:
    def test_at_home_there_are_intervals_and_a_verdict(self) -> None:
        made, bounded, view = planned(MODEL)
        written = facts.ranking_text(made, bounded, view)
        assert INTERVAL.search(written) and "No verdict" not in written and "xtrapolated" not in written
        assert f"TPOT {ERROR} %" in written and facts.regime_map(made, bounded).inside

    @pytest.mark.parametrize(
        ("model", "hardware"),
        [("gpt-oss-20b", HARDWARE), (MODEL, HARDWARE.model_copy(update={"fit": None, "error": None}))],
    )
    def test_outside_there_are_none(self, model: str, hardware: Hardware) -> None:
        made, bounded, view = planned(model, hardware)
        written = facts.ranking_text(made, bounded, view)
        assert not INTERVAL.search(written) and f"{ERROR} %" not in written and "PD pays" not in written
        assert facts.verdict(made, bounded).code == "extrapolated"
        head, *rows = [line for line in written.splitlines() if "over collocated" in line or line.startswith(" 1 ")]
        assert head.endswith("extrapolated") and rows[0].rstrip().endswith("model" if hardware.fit else "no fit")
        base, split = (made.best_candidate(collocated=each) for each in (True, False))
        assert base is not None and split is not None and outside(base, bounded)
        advantage = gain(split, base, bounded)
        assert advantage is not None and advantage.interval is None

    def test_the_ranking_names_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--gpus", "2", "--concurrency", "2", "--top", "1", "--itl", "500"]
        assert cli_plan.main(words) == 0
        assert "\n  # extrapolated: input length 500" in capsys.readouterr().out

    def test_a_picture_has_no_band_around_what_is_extrapolated(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for itl, band in (("5000", True), ("500", False)):
            path = tmp_path / f"{itl}.svg"
            words = ["--gpus", "2", "--concurrency", "2,4", "--itl", itl, "--plot", str(path)]
            assert cli_plan.main(words) == 0
            assert ("Bands: 90" in path.read_text()) is band
        capsys.readouterr()

    def test_an_explanation_names_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--explain", "collocated-1xtp8ep", "--concurrency", "8"]
        assert cli_plan.main(words) == 0
        assert "Extrapolated: EP (fit: no EP)" in capsys.readouterr().out


@pytest.mark.parametrize(("rate", "falls_behind"), [(9, False), (14, True), (30, True)])
def test_rows_of_a_rate_that_is_not_served_say_so_and_have_no_interval(
    rate: float, falls_behind: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefill of the deployment serves 11.4 requests/s. Few requests and many are of one operating point."""
    path = tmp_path / "in.csv"
    path.write_text(
        "config,itl,request_rate,num_prompts,prompts\n"
        + "".join(f"pd-spread-p1xtp4-d1xtp4,5000,{rate},{count},fresh\n" for count in (100, 1680))
    )
    assert cli_plan.main(["--predict", str(path)]) == 0
    for row in csv.DictReader(io.StringIO(capsys.readouterr().out)):
        assert (row["predicted_mean_ttft_ms_high"] == "") is falls_behind
        assert (f"overload: {rate} requests/s arrive" in row["prediction_note"]) is falls_behind
    assert cli_plan.main(["--explain", "pd-spread-p1xtp4-d1xtp4", "--rate", str(rate)]) == 0
    assert (f"overload: {rate} requests/s arrive" in capsys.readouterr().out) is falls_behind


def test_rows_outside_have_a_note_and_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.csv"
    path.write_text(
        "config,itl,concurrency,vllm_version,link\ncollocated-2xtp4,5000,16,0.11.2,\ncollocated-1xtp8ep,5000,16,,\n"
        "collocated-2xtp4,1000,16,,\ncollocated-2xtp4,5000,16,0.18,\ncollocated-1xtp2,5000,64,,\n"
        "pd-spread-p1xtp4-d1xtp4,5000,16,,tcp\n"
    )
    assert cli_plan.main(["--predict", str(path)]) == 0
    home, *away = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert home["prediction_note"] == "" and home["predicted_mean_tpot_ms_low"]
    for row, what in zip(
        away, ("EP", "input length 1000", "vllm 0.18", "requests in flight", "network tcp"), strict=True
    ):
        assert row["prediction_note"].startswith("extrapolated: ") and what in row["prediction_note"]
        assert row["predicted_mean_tpot_ms"] and not row["predicted_mean_tpot_ms_low"]


def test_a_comparison_claims_nothing_of_runs_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folders.write(tmp_path / "own", folders.deployments(1)[0])
    assert cli_plan.main(["--compare", str(path)]) == 0
    out = capsys.readouterr().out
    assert "own is extrapolated: model tiny-gptoss (fit: gpt-oss-120b), vllm 0.29 (fit: vllm 0.11)" in out
    assert "elsewhere" not in out and f"TPOT {ERROR} %" not in out


class TestNodes:
    @pytest.mark.parametrize(
        "changes", [{"gpu_type": "L40S"}, {"gpu_type": "H200"}, {"gpu_type": None}, {"gpus": 4}, {"gpus": 0}]
    )
    def test_a_node_that_the_hardware_is_not_of_is_refused(
        self, changes: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        node = ClusterNode(id="a", gpu_type="H100", gpus=8, head=True, cpus=8)
        require_node(HARDWARE, node, "node")
        other = node.model_copy(update=changes)
        with pytest.raises(UsageError, match=r"8 x H100"):
            require_node(HARDWARE, other, "node")
        path = tmp_path / "cluster.yaml"
        path.write_text(to_yaml(ClusterView(nodes=(node.model_copy(update={"id": "b", "head": False}), other))))
        if other.gpus:  # a head without GPUs takes no engine
            assert cli_plan.main(["--gpus", "8", "--node", str(path)]) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and str(path) in error

    def test_a_file_without_a_type_is_refused(self) -> None:
        node = load_cluster("p5.48xlarge-x2").nodes[0]
        with pytest.raises(UsageError, match="gpu_type is missing"):
            require_node(HARDWARE.model_copy(update={"gpu_type": None}), node, "p5.48xlarge")

    def test_the_cluster_of_a_file_is_planned_and_handed_over(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text(to_yaml(load_cluster("p5.48xlarge-x2")))
        assert cli_plan.main(["--gpus", "2", "--concurrency", "2", "--top", "1", "--node", str(path)]) == 0
        out = capsys.readouterr().out
        assert "(1 x mine)" in out and f"--cluster {path} --dry-run" in out
