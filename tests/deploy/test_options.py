"""Flags and files make the deployment that they say."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdlab.cli import launch as launch_gptoss
from pdlab.core.catalog import local_cluster, resolve_model
from pdlab.core.deployment import Deployment, Disaggregated, Fluid, Pool, Transport, parse_label
from pdlab.core.errors import PlacementError, UsageError
from pdlab.core.named_values import engine_args
from pdlab.core.schema import load_yaml, to_yaml
from pdlab.core.settings import parse
from pdlab.core.vllm_limits import check_divisibility
from pdlab.deploy import launch
from pdlab.deploy.options import (
    LOCAL_WORKLOAD,
    LaunchRequest,
    LaunchSettings,
    deployment_from,
    request_from,
    request_from_json,
    request_to_json,
)
from pdlab.deploy.prepared import prepare_deployment


def made(*words: str) -> Deployment:
    return deployment_from(parse(LaunchSettings, words))


@pytest.mark.parametrize(
    ("line", "label"),
    [
        ("--collocated", "collocated-1xtp4"),
        ("--collocated --num 8 --tp 1", "collocated-8xtp1"),
        ("--mode collocated --tp 8", "collocated-1xtp8"),
        ("--collocated --tp 2 --dp 2 --pp 2 --ep", "collocated-1xtp2pp2dp2ep"),
        ("--pd-pack", "pd-pack-p1xtp4-d1xtp4"),
        ("--mode pd-spread --p-num 3 --p-tp 1", "pd-spread-p3xtp1-d1xtp4"),
        ("--pd-spread --p-tp 1 --p-dp 32 --p-ep --d-tp 1 --d-dp 72 --d-ep", "pd-spread-p1xdp32ep-d1xdp72ep"),
        ("--pd-spread --local", "pd-spread-p1xtp1-d1xtp1"),
        ("--collocated --num 2 --local 3", "collocated-2xtp1"),
        ("--config pd-pack-p1xtp4-d1xtp4", "pd-pack-p1xtp4-d1xtp4"),
        ("--config pd-pack-p1xtp4-d1xtp4 --pd-spread --d-num 2", "pd-spread-p1xtp4-d2xtp4"),
        ("--config pd-pack-p2xtp2-d1xtp4 --collocated", "collocated-1xtp4"),
        ("--config pd-spread-p1xdp32ep-d1xdp72ep --no-d-ep", "pd-spread-p1xdp32ep-d1xdp72"),
    ],
)
def test_label(line: str, label: str) -> None:
    assert made(*line.split()).label == label


@pytest.mark.parametrize(
    ("line", "backends"),
    [
        ("--pd-pack", ("UCX",)),
        ("--pd-pack --use-ucx", ("UCX",)),
        ("--pd-pack --use-libfabric", ("LIBFABRIC",)),
        ("--pd-pack --kv-backend UCX,LIBFABRIC", ("UCX", "LIBFABRIC")),
    ],
)
def test_backends(line: str, backends: tuple[str, ...]) -> None:
    topology = made(*line.split()).topology
    assert isinstance(topology, Disaggregated) and topology.transport.backends == backends


@pytest.mark.parametrize(
    ("line", "guard", "deadline_s"),
    [
        ("", True, 10.0),
        ("--no-kv-guard", False, 10.0),
        ("--kv-guard --kv-deadline-s 2.5", True, 2.5),
    ],
)
def test_the_kv_guard_is_on_unless_told_otherwise(line: str, guard: bool, deadline_s: float) -> None:
    topology = made("--pd-spread", *line.split()).topology
    assert isinstance(topology, Disaggregated)
    assert (topology.transport.kv_guard, topology.transport.kv_deadline_s) == (guard, deadline_s)


def test_engine_args_are_yaml() -> None:
    pairs = ["gpu-memory-utilization=0.85", "enforce_eager=true", "--max-num-seqs=64", "hf_overrides={a: [1, b]}", "x="]
    assert engine_args(pairs, "--engine-arg") == {
        "gpu_memory_utilization": 0.85,
        "enforce_eager": True,
        "max_num_seqs": 64,
        "hf_overrides": {"a": [1, "b"]},
        "x": None,
    }


@pytest.mark.parametrize(
    ("text", "value"), [("4e9", 4_000_000_000), ("1E-3", 0.001), ("2.5e-1", 0.25), ("'4e9'", "4e9"), ("e9", "e9")]
)
def test_numbers_with_an_exponent_are_numbers(text: str, value: object) -> None:
    parsed = engine_args([f"x={text}"], "--engine-arg")["x"]
    assert parsed == value and type(parsed) is type(value)


def test_ep_divides_experts_and_their_copies() -> None:
    words = ["--pd-spread", "--model", "deepseek-v3", "--p-tp", "1", "--p-dp", "32", "--p-ep", "--d-tp", "1"]
    words += ["--d-dp", "72", "--d-ep"]
    shape, _ = resolve_model("deepseek-v3")
    with pytest.raises(UsageError, match=r"decode EP over TP 1 x DP 72 .*num_redundant_experts: 32"):
        check_divisibility(made(*words), shape)
    eplb = ["enable_eplb=true", "eplb_config={num_redundant_experts: 32}"]
    copies = [word for pair in eplb for word in ("--engine-arg", pair)]
    assert check_divisibility(made(*words, *copies), shape) == []
    with pytest.raises(UsageError, match="and 32 redundant ones"):
        check_divisibility(made(*[word.replace("72", "71") for word in words], *copies), shape)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--collocated --tp 1 --ep", r"^--ep: tiny-llama has no experts, .*; leave --ep out$"),
        ("--collocated --tp 4 --ep", r"^--ep: tiny-llama has no experts, .*; leave --ep out$"),
        ("--pd-pack --p-tp 1 --d-tp 1 --d-dp 2 --d-ep", r"^--d-ep: tiny-llama has no experts"),
    ],
)
def test_a_model_without_experts_has_no_expert_parallel(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_divisibility(made(*line.split()), resolve_model("tiny-llama").shape)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tp 4 --engine-arg enable_eplb=true", "enable_eplb=true: vLLM .* add --ep, or"),
        ("--tp 1 --ep --engine-arg enable_eplb=true", "there is one rank"),
        ("--tp 4 --ep --engine-arg 'eplb_config={num_redundant_experts: 4}'", "add --engine-arg enable_eplb=true"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_experts_are_balanced_only_where_vllm_can(line: str, message: str, known: bool) -> None:
    with pytest.raises(UsageError, match=message):
        check_divisibility(
            made(*shlex.split(f"--collocated {line}")), resolve_model("gpt-oss-120b").shape if known else None
        )


def test_a_plan_waits_for_what_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = local_cluster(2)
    busy = busy.model_copy(update={"nodes": tuple(n.model_copy(update={"free_cpus": 0.0}) for n in busy.nodes)})
    views = iter([busy, busy, local_cluster(2)])
    monkeypatch.setattr(launch, "RELEASE_POLL_S", 0.0)
    assert launch._free_view(lambda: next(views), made("--pd-spread", "--local"), 30.0) == local_cluster(2)
    still_busy = launch._free_view(lambda: busy, made("--pd-spread", "--local"), 0.0)
    with pytest.raises(PlacementError):
        prepare_deployment(made("--pd-spread", "--local"), still_busy, None, "SOURCE", LOCAL_WORKLOAD)


def test_a_changed_file_loses_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(to_yaml(made("--pd-pack").model_copy(update={"name": "mine"})), encoding="utf-8")
    assert made("--config", str(path)).name == "mine"
    assert made("--config", str(path), "--engine-arg", "seed=1").name == "mine"
    assert made("--config", str(path), "--d-num", "2").name is None


def test_an_export_says_what_is_pinned_to_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are found again on a node that replaces another; Ray's ids are not."""
    pinned = {}
    for label in ("ray.io/node-id", "pdlab/node"):
        file = tmp_path / "cluster.yaml"
        file.write_text(f"nodes:\n- {{id: w, gpus: 8, cpus: 99, labels: {{{label}: abc}}}}\n")
        assert launch_gptoss.main(["--collocated", "--cluster", str(file), "--export", "-"]) == 0
        captured = capsys.readouterr()
        text = "pinned to Ray's node ids: collocated to w"
        pinned[label] = (text in captured.err, text in " ".join(captured.out.replace("#", " ").split()))
        args = yaml.safe_load(captured.out)["applications"][0]["args"]["llm_configs"][0]
        assert args["deployment_config"]["placement_group_bundle_label_selector"] == [{label: "abc"}] * 4
    assert pinned == {"ray.io/node-id": (True, True), "pdlab/node": (False, False)}


def test_flags_win_over_the_file_and_pools_keep_their_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    words = "--pd-pack --engine-arg seed=1 --engine-arg max_num_seqs=1 --p-engine-arg watermark=0.1 --model-id m"
    base = made(*words.split())
    path.write_text(to_yaml(base), encoding="utf-8")
    assert load_yaml(path, Deployment) == base
    more = "--engine-arg max_num_seqs=2 --p-engine-arg stream_interval=2 --ingress-replicas 3"
    both = made("--config", str(path), *more.split())
    assert both.engine_kwargs == {"seed": 1, "max_num_seqs": 2}
    assert both.pools["prefill"].engine_kwargs == {"watermark": 0.1, "stream_interval": 2}
    assert both.pools["decode"].engine_kwargs == {}
    assert (both.model_id, both.ingress_replicas) == ("m", 3)


def test_local_takes_the_tiny_model_unless_told_otherwise() -> None:
    assert made("--config", "pd-pack-p1xtp1-d1xtp2", "--local").model == "tiny-gptoss"
    assert made("--collocated", "--local", "--model", "./mine").model == "./mine"
    assert made("--collocated").model == "gpt-oss-120b"


def test_plan_warns(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pd-pack", "--d-tp", "2", "--verbose", "--host", "0.0.0.0", "--cluster", "p5.48xlarge-x2", "--dry-run"]
    words += ["--no-api-key"]
    assert launch_gptoss.main(words) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 3 and all(line.startswith("warning: ") for line in warnings)
    assert "canary" in warnings[0] and "5 to 10 times" in warnings[1] and "0.0.0.0" in warnings[2]


def test_the_command_that_follows_is_the_one_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "app.yaml")
    words = ["--dry-run", "--pd-pack", "--export", file, "--cluster", "p5.48xlarge-x2", "--ucx-tls", "tcp,cuda"]
    assert launch_gptoss.main(words) == 0
    out = capsys.readouterr().out
    assert "python launch_gptoss.py --pd-pack --cluster p5.48xlarge-x2 --ucx-tls tcp,cuda\n" in out
    assert "./run_bm.sh -e pd-pack-p1xtp4-d1xtp4 " in out and "viz.py --exps bm_results/pd-pack-p1xtp4-d1xtp4" in out


@pytest.mark.parametrize(
    ("host", "url"), [("::", "http://[::1]:8123"), ("0.0.0.0", "http://127.0.0.1:8123"), ("h", "http://h:8123")]
)
def test_a_dry_run_shows_an_address_that_clients_reach(host: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pd-pack", "--host", host, "--port", "8123", "--cluster", "p5.48xlarge-x2", "--no-api-key", "--dry-run"]
    assert launch_gptoss.main(words) == 0
    out = capsys.readouterr().out
    assert f"served as gpt-oss-120b at {url}/v1\n" in out and f"-u {shlex.quote(url)} " in out


class FakeCluster:
    """Stands in for pdlab.deploy.launch: keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def launch(self, request: LaunchRequest) -> None:
        self.calls.append(request)

    def shutdown(self, **where: Any) -> None:
        self.calls.append(where)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    import sys

    from pdlab import deploy

    fake = FakeCluster()
    monkeypatch.setitem(sys.modules, "pdlab.deploy.launch", fake)
    monkeypatch.setattr(deploy, "launch", fake, raising=False)
    return fake


def test_request(cluster: FakeCluster) -> None:
    assert launch_gptoss.main(["--pd-spread", "--local", "3", "--port", "8123", "--no-wait", "--timeout-s", "60"]) == 0
    (request,) = cluster.calls
    assert request.deployment.topology == parse_label("pd-spread-p1xtp1-d1xtp1")
    assert (request.local_nodes, request.cluster, request.port, request.timeout_s) == (3, None, 8123, 60.0)
    assert request.detach and not request.wait, "a launcher that does not wait cannot hold the deployment"


def stdin(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))


def test_a_request_from_standard_input_is_launched_as_its_flags_would_be(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("PDLAB_API_KEY", raising=False)
    for words in (
        ["--pd-spread", "--local", "2", "--two-hosts", "--link-rate", "1gbit", "--link-delay-ms", "0.5", "--detach"],
        ["--config", "pd-spread-p3xdp24ep-d1xdp32ep", "--cluster", "p5.48xlarge-x13", "--host", "0.0.0.0"],
        ["--pd-pack", "--use-libfabric", "--engine-arg", "gpu_memory_utilization=0.85", "--verbose", "--no-wait"],
    ):
        monkeypatch.setattr(launch_gptoss, "require", lambda: None)
        cluster.calls.clear()
        assert launch_gptoss.main(words) == 0
        printed = capsys.readouterr().err
        stdin(monkeypatch, request_to_json(request_from(parse(LaunchSettings, words), words)).encode())
        assert launch_gptoss.main(["--request-from-stdin"]) == 0
        by_flags, by_request = cluster.calls
        assert by_request == by_flags and by_request.command == (f"python launch_gptoss.py {' '.join(words)}",)
        assert capsys.readouterr().err == printed, "the same warnings, and where the key is"
        assert (by_request.api_key_file is not None) == ("0.0.0.0" in words)


def test_a_request_that_cannot_be_launched_is_one_line(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    too_large = ["--pd-pack", "--local", "--p-num", "9"]
    text = request_to_json(request_from(parse(LaunchSettings, too_large), too_large)).encode()
    for words, key_file, message in (
        ([], text, "does not fit local-2"),
        ([], b"", "standard input is no launch request in JSON: Invalid JSON"),
        ([], b"\xff", "standard input is no launch request in JSON: Invalid JSON"),
        ([], b'{"deployment": 3}', "standard input is no launch request in JSON: deployment: "),
        (["--port", "8001"], text, "--request-from-stdin takes no other flag"),
    ):
        stdin(monkeypatch, key_file)
        assert launch_gptoss.main(["--request-from-stdin", *words]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and message in err and err.count("\n") == 1
    monkeypatch.setattr("sys.stdin", None)
    assert launch_gptoss.main(["--request-from-stdin"]) == 2, "standard input is closed"
    sys.stdin.close()  # the null device
    assert cluster.calls == []


def test_a_request_that_cannot_fit_never_reaches_the_cluster(cluster: FakeCluster) -> None:
    assert launch_gptoss.main(["--pd-pack", "--local", "--p-num", "9"]) == 2
    assert cluster.calls == []


def test_shutdown(cluster: FakeCluster) -> None:
    assert launch_gptoss.main(["--shutdown", "--port", "8123"]) == 0
    assert cluster.calls == [{"host": "127.0.0.1", "port": 8123}]


def test_ctrl_c(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(request: LaunchRequest) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "launch", interrupted)
    assert launch_gptoss.main(["--collocated", "--local"]) == 130


def test_lengths_of_a_file_pass_to_another_machine_without_it(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("input_tokens,output_tokens\n500,20\n9000,10\n")
    words = ["--collocated", "--local", "--lengths", f"file:{path}"]
    request = request_from(parse(LaunchSettings, words), words)
    path.unlink()
    there = request_from_json(request_to_json(request))
    assert there == request and there.workload.longest == (9000, 10)


def test_what_follows_a_failed_prefill() -> None:
    assert made("--pd-spread").serving.on_prefill_failure == ("retry", "local")
    serving = made(
        "--pd-spread", "--prefill-timeout-s", "7.5", "--prefill-absent-s", "2", "--on-prefill-failure", "retry, fail"
    ).serving
    assert (serving.prefill_timeout_s, serving.prefill_absent_s) == (7.5, 2)
    assert serving.on_prefill_failure == ("retry", "fail")
    request = request_from(parse(LaunchSettings, ["--pd-spread", "--on-prefill-failure", "local"]), [])
    assert request_from_json(request_to_json(request)).deployment.serving.on_prefill_failure == ("local",)


@pytest.mark.parametrize(
    ("line", "fluid"),
    [
        ("--pd-fluid --num 8 --tp 2", Fluid(pool=Pool(replicas=8, tp=2))),
        ("--pd-fluid --local", Fluid(pool=Pool(replicas=2))),
        ("--pd-fluid --num 8 --tp 2 --roles 3:5", Fluid(pool=Pool(replicas=8, tp=2), roles="3:5")),
        (
            "--mode pd-fluid --num 8 --tp 2 --p-min 2 --d-min 3 --slo-ttft-ms 1500 --slo-tpot-ms 20",
            Fluid(pool=Pool(replicas=8, tp=2), p_min=2, d_min=3, slo_ttft_s=1.5, slo_tpot_s=0.02),
        ),
        (
            "--config pd-fluid-8xtp2 --roles 2:6 --prefill-locally-below 300",
            Fluid(pool=Pool(replicas=8, tp=2), roles="2:6", prefill_locally_below=300),
        ),
        (
            "--pd-fluid --num 4 --tp 2 --prefill-locally-below auto --no-kv-guard",
            Fluid(pool=Pool(replicas=4, tp=2), prefill_locally_below="auto", transport=Transport(kv_guard=False)),
        ),
        ("--pd-fluid --num 4 --prefix-affinity", Fluid(pool=Pool(replicas=4, tp=4), prefix_affinity=True)),
        ("--config pd-fluid-8xtp2 --no-prefix-affinity", Fluid(pool=Pool(replicas=8, tp=2))),
        (
            "--pd-fluid --num 4 --tp 2 --min 2 --max 8 --down-after-s 300",
            Fluid(pool=Pool(replicas=4, tp=2), min_replicas=2, max_replicas=8, down_after_s=300),
        ),
        ("--pd-fluid --min 3 --max 8 --tp 2", Fluid(pool=Pool(replicas=3, tp=2), min_replicas=3, max_replicas=8)),
        ("--config pd-fluid-8xtp2 --max 9", Fluid(pool=Pool(replicas=8, tp=2), max_replicas=9)),
    ],
)
def test_fluid_engines(line: str, fluid: Fluid) -> None:
    deployment = made(*line.split())
    assert deployment.topology == fluid
    assert deployment.serving.tokenize_once


def test_fluid_engines_have_one_pipeline_stage() -> None:
    with pytest.raises(UsageError, match=r"fluid PP 2: .* use --pp 1 with a larger --tp"):
        check_divisibility(made("--pd-fluid", "--num", "4", "--pp", "2"), None)
