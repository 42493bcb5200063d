"""The manifests of RayServices: three stored ones, the rules that each passes, and mistakes that the rules refuse."""

from __future__ import annotations

import base64
import copy
import functools
import io
import itertools
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import golden, kuberay, kuberay_rules

from pdlab.cli import launch
from pdlab.deploy.kubernetes.code_zip import code, digest
from pdlab.deploy.kubernetes.rules import problems, selectors

GOLDEN = Path(__file__).parent / "golden"
DOCKERFILES = sorted((Path(__file__).resolve().parents[3] / "deploy").glob("Dockerfile.*"))
Documents = list[dict[str, Any]]

ROCE = """nodes:
- {id: gpu-a, gpu_type: H100, gpus: 8, cpus: 128, nic: {kind: roce, count: 8, gbit_per_s: 400}}
- {id: gpu-b, gpu_type: H100, gpus: 8, cpus: 128, nic: {kind: roce, count: 8, gbit_per_s: 400}}
- {id: head, cpus: 16, head: true}
"""
CPU = """nodes:
- {id: cpu-a, cpus: 4, head: true, labels: {node.kubernetes.io/instance-type: m7i.2xlarge}}
- {id: cpu-b, cpus: 4}
"""
FOUR = ROCE.replace("gpu-", "more-gpu-") + ROCE.partition("\n")[2].replace("- {id: head, cpus: 16, head: true}\n", "")
CLUSTERS = {"roce.yaml": ROCE, "cpu.yaml": CPU, "four.yaml": FOUR}
IMAGE = ["--image", "registry.example/pdlab:2.60.0"]
EFA = ["--pd-spread", "--cluster", "p5.48xlarge-x2", *IMAGE]
CASES: dict[str, list[str]] = {
    "p5-efa": [*EFA, "--weights-pvc", "weights", "--hf-secret", "hf-token", "--hugepages", "--pod-memory", "1600Gi"],
    "roce": [
        *("--pd-spread", "--model", "/models/gpt-oss-120b", "--model-id", "gpt-oss-120b", "--cluster", "roce.yaml"),
        *("--weights-pvc", "shared:/models", "--rdma", "dra:rdma.example.com=8", "--k8s-name", "chat", *IMAGE),
    ],
    "cpu": [
        *("--pd-spread", "--p-tp", "1", "--d-tp", "1", "--model", "/weights/tiny-gptoss", "--model-id", "tiny-gptoss"),
        *("--cluster", "cpu.yaml", "--weights-pvc", "weights", "--no-api-key", *IMAGE),
    ],
}
OTHERS: dict[str, list[str]] = {
    "pack": ["--pd-pack", "--cluster", "p5.48xlarge-x2", *IMAGE],
    "collocated": ["--collocated", "--num", "4", "--cluster", "p5.48xlarge-x2", *IMAGE],
    "fluid": ["--pd-fluid", "--num", "4", "--cluster", "p5.48xlarge-x2", *IMAGE],
    "named-resource": ["--pd-spread", "--cluster", "roce.yaml", "--rdma", "rdma/ib=1", *IMAGE],
    "pools": ["--pd-spread", "--p-num", "4", "--d-num", "4", "--cluster", "four.yaml", "--rdma", "rdma/ib=1",
              "--k8s-groups", "pool", *IMAGE],
    "pool-of-both": ["--pd-pack", "--cluster", "p5.48xlarge-x2", "--k8s-groups", "pool", *IMAGE],
}  # fmt: skip


@pytest.fixture(scope="module")
def exported() -> dict[tuple[str, ...], str]:
    """Flags and the clusters' files -> the manifest that was exported with them."""
    return {}


@pytest.fixture
def export(
    exported: dict[tuple[str, ...], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Exports with those flags from a folder that has the clusters' files; the exit code, and the file's text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PDLAB_API_KEY", raising=False)
    for name, text in CLUSTERS.items():
        Path(name).write_text(text)

    def run(*words: str) -> tuple[int, str]:
        made_of = (*words, *(Path(name).read_text() for name in CLUSTERS))
        if made_of not in exported:
            if code_ := launch.main([*words, "--export-k8s", "rayservice.yaml"]):
                return code_, ""
            exported[made_of] = Path("rayservice.yaml").read_text()
            Path("rayservice.yaml").unlink()  # no export writes over a file
        return 0, exported[made_of]

    return run


@functools.cache
def loaded(text: str) -> Documents:
    return list(yaml.safe_load_all(text))


def service(documents: Documents) -> dict[str, Any]:
    (found,) = [each for each in documents if each["kind"] == "RayService"]
    return found


def workers(documents: Documents) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = service(documents)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return groups


def container(group: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = group["template"]["spec"]["containers"][0]
    return found


def application(documents: Documents) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(service(documents)["spec"]["serveConfigV2"])
    return config


@pytest.mark.golden
@pytest.mark.parametrize("name", CASES)
def test_the_stored_manifests(name: str, export: Callable[..., tuple[int, str]]) -> None:
    done, text = export(*CASES[name])
    assert done == 0
    # The code changes with every version, and its name with it.
    text = re.sub(r"pdlab-code-[0-9a-f]{10}", "pdlab-code-DIGEST", text)
    text = re.sub(r"(pdlab-code-DIGEST\.zip: ).{1000,}", r"\1ZIP", text)
    golden.compare(text, GOLDEN / f"{name}.yaml")


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_each_passes_the_rules_and_ray_reads_the_application(name: str, export: Callable[..., tuple[int, str]]) -> None:
    done, text = export(*{**CASES, **OTHERS}[name])
    assert done == 0
    documents = loaded(text)
    assert problems(documents) == [] and kuberay_rules.problems(documents) == []
    given = {
        (key, value)
        for group in workers(documents)
        for key, value in {**group.get("labels", {}), "ray.io/node-group": group["groupName"]}.items()
    }
    wanted = {
        (key, each)
        for selector in selectors(application(documents))
        for key, value in selector.items()
        for each in value.removeprefix("in(").removesuffix(")").split(",")
    }
    assert wanted and wanted <= given
    assert application(documents)["http_options"]["host"] == "0.0.0.0"


@pytest.mark.skipif(not kuberay.DEFINITION.exists(), reason="the definition of a RayService is not at hand")
@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_each_fits_the_definition_made_strict(name: str, export: Callable[..., tuple[int, str]]) -> None:
    done, text = export(*{**CASES, **OTHERS}[name])
    assert done == 0 and kuberay.errors(kuberay.definition(), service(loaded(text))) == []


def test_the_code_is_in_the_file_and_named_by_its_content(export: Callable[..., tuple[int, str]]) -> None:
    documents = loaded(export(*CASES["p5-efa"])[1])
    (held,) = [each for each in documents if each["kind"] == "ConfigMap"]
    assert held["immutable"] is True and held["metadata"]["name"] == f"pdlab-code-{digest(code())}"
    ((name, content),) = held["binaryData"].items()
    zipped = zipfile.ZipFile(io.BytesIO(base64.b64decode(content)))
    assert {each: zipped.read(each) for each in zipped.namelist()} == code()
    pods = [*workers(documents), service(documents)["spec"]["rayClusterConfig"]["headGroupSpec"]]
    for pod in pods:
        spec, env = pod["template"]["spec"], container(pod)["env"]
        (volume,) = [each for each in spec["volumes"] if "configMap" in each]
        assert volume["configMap"] == {"name": held["metadata"]["name"]}
        (mount,) = [each for each in container(pod)["volumeMounts"] if each["name"] == volume["name"]]
        assert {"name": "PYTHONPATH", "value": f"{mount['mountPath']}/{name}"} in env
    assert application(documents)["applications"][0]["args"]["kv_guard"] == {"send_sources": False}


def of_image(path: Path) -> set[str]:
    """Absolute paths that the Dockerfile fills: its folders, those on search paths, and the files it writes."""
    folders = re.findall(r"^WORKDIR (\S+)$", path.read_text(), re.MULTILINE)
    searched = [
        part for value in re.findall(r"^ENV \w+=(\S+)$", path.read_text(), re.MULTILINE) for part in value.split(":")
    ]
    written = re.findall(r"> (/\S+)", path.read_text())
    return {each for each in (*folders, *searched, *written) if each.startswith("/")}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_no_volume_hides_what_the_image_has(name: str, path: Path, export: Callable[..., tuple[int, str]]) -> None:
    """A volume at a folder hides the folder of the image, and all below it."""
    image = of_image(path)
    assert "/opt/pdlab" in image and "/opt/pdlab/.venv/bin" in image
    cluster = service(loaded(export(*{**CASES, **OTHERS}[name])[1]))["spec"]["rayClusterConfig"]
    for pod in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        mounted = [Path(mount["mountPath"]) for mount in container(pod)["volumeMounts"]]
        assert mounted
        for one in mounted:
            others = [Path(each) for each in image] + [other for other in mounted if other is not one]
            assert not [other for other in others if one.is_relative_to(other) or other.is_relative_to(one)]


def size_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * {"Mi": 2**20, "Gi": 2**30}[quantity[-2:]]


def test_every_pod_names_the_port_that_serves(export: Callable[..., tuple[int, str]]) -> None:
    """KubeRay's probe of a worker, as the Service, takes the port with the name serve, or else 8000."""
    documents = loaded(export(*EFA, "--port", "9000")[1])
    assert application(documents)["http_options"]["port"] == 9000
    for group in (service(documents)["spec"]["rayClusterConfig"]["headGroupSpec"], *workers(documents)):
        assert {"name": "serve", "containerPort": 9000} in container(group)["ports"]


def test_only_efa_needs_one_zone(export: Callable[..., tuple[int, str]]) -> None:
    """A node without the label of a zone never takes a pod that requires one, and few nodes of bare metal have it."""
    found = {
        name: [group["template"]["spec"].get("affinity", {}) for group in workers(loaded(export(*words)[1]))]
        for name, words in {**CASES, **OTHERS}.items()
    }
    for name, affinities in found.items():
        for each in affinities:
            required = "requiredDuringSchedulingIgnoredDuringExecution" in str(each)
            assert required is (name not in ("roce", "cpu", "named-resource", "pools"))
            assert ("topology.kubernetes.io/zone" in str(each)) is (name != "cpu")


def shared_and_memory(documents: Documents) -> dict[str, tuple[int, int | None, bool]]:
    """Group -> bytes of /dev/shm, requested bytes of memory, and whether that is a limit."""
    found = {}
    for group in workers(documents):
        (shared,) = [each for each in group["template"]["spec"]["volumes"] if each["name"] == "dshm"]
        resources = container(group)["resources"]
        memory = resources["requests"].get("memory")
        found[group["groupName"]] = (
            size_bytes(shared["emptyDir"]["sizeLimit"]),
            size_bytes(memory) if memory else None,
            "memory" in resources.get("limits", {}),
        )
    return found


def test_shared_memory_has_the_kv_cache_that_leaves_the_gpus(export: Callable[..., tuple[int, str]]) -> None:
    """vLLM maps it in /dev/shm, and writes every page at its start."""
    without = 64 * 2**30
    assert shared_and_memory(loaded(export(*EFA)[1])) == {
        "node-1": (without, None, False),
        "node-2": (without, None, False),
    }
    one = shared_and_memory(loaded(export(*EFA, "--kv-offload-gb", "100")[1]))
    assert one["node-2"] == (without, None, False)
    shared, memory, limit = one["node-1"]
    assert 0 <= shared - without - 100e9 < 2**20 and memory is not None and not limit
    assert 0 <= memory - 100e9 < 2**20
    two = shared_and_memory(loaded(export(*EFA, "--p-num", "2", "--kv-offload-gb", "100")[1]))
    assert 0 <= two["node-1"][0] - without - 200e9 < 2**20
    given = shared_and_memory(loaded(export(*EFA, "--kv-offload-gb", "100", "--pod-memory", "1600Gi")[1]))
    assert given["node-1"] == (shared, 1600 * 2**30, True)
    store = "{kv_connector: OffloadingConnector, kv_connector_extra_config: {cpu_bytes_to_use: 100000000000}}"
    assert shared_and_memory(loaded(export(*EFA, "--kv-connector", store)[1])) == one
    other = "{kv_connector: LMCacheConnectorV1}"
    assert shared_and_memory(loaded(export(*EFA, "--kv-connector", other)[1]))["node-1"] == (without, None, False)
    of_vllm = shared_and_memory(loaded(export(*OTHERS["collocated"], "--engine-arg", "kv_offloading_size=10")[1]))
    assert {each for each in of_vllm.values()} == {(without + 20 * 2**30, 20 * 2**30, False)}
    # Two of the three engines are on one of the nodes, and the pods of a group are alike.
    pool = shared_and_memory(
        loaded(
            export(
                *("--pd-spread", "--p-num", "3", "--d-num", "4", "--cluster", "four.yaml", "--rdma", "rdma/ib=1"),
                *("--k8s-groups", "pool", "--kv-offload-gb", "10", *IMAGE),
            )[1]
        )
    )
    assert 0 <= pool["prefill"][0] - without - 20e9 < 2**20 and pool["decode"][0] == without


def test_copies_of_cpu_engines_are_memory_and_not_shared(export: Callable[..., tuple[int, str]]) -> None:
    found = shared_and_memory(loaded(export(*CASES["cpu"], "--kv-offload-gb", "1")[1]))
    assert [each[0] for each in found.values()] == [4 * 2**30] * 2
    assert found["cpu-b"][1] is None and (found["cpu-a"][1] or 0) >= 1e9


def test_a_pod_without_a_network_device_asks_for_none(export: Callable[..., tuple[int, str]]) -> None:
    mixed = CLUSTERS["roce.yaml"].replace("kind: roce", "kind: efa", 1).replace("kind: roce", "kind: ethernet")
    Path("roce.yaml").write_text(mixed)
    documents = loaded(export("--pd-spread", "--cluster", "roce.yaml", *IMAGE)[1])
    devices = {group["groupName"]: container(group)["resources"]["limits"] for group in workers(documents)}
    assert devices == {
        "gpu-a": {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "8"},
        "gpu-b": {"nvidia.com/gpu": "8"},
    }
    has = {group["groupName"]: "FI_PROVIDER" in str(container(group)["env"]) for group in workers(documents)}
    assert has == {"gpu-a": True, "gpu-b": False}


@pytest.mark.parametrize(
    "label, selects",
    [
        ("topology.kubernetes.io/zone: a", True),
        ("eks.amazonaws.com/nodegroup: p5", True),
        ("cloud.google.com/gke-accelerator: nvidia-h100-80gb", True),
        ("nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3", True),
        ("karpenter.sh/nodepool: gpu", True),
        ("topology.gke.io/zone: us-central1-a", True),
        ("oci.oraclecloud.com/rdma.cluster_id: c1", True),
        ("node.coreweave.cloud/class: gpu", True),
        ("alpha.eksctl.io/nodegroup-name: p5", True),
        ("node.cluster.x-k8s.io/instance-type: h100", True),
        ("nebius.com/gpu: h100", True),
        ("intel.com/gaudi: 'true'", True),
        ("example.org/rack: r1", True),
        ("xray.io/x: y", True),
        ("rack: r1", False),
        ("pdlab/rack: r1", False),
        ("ray.io/region: r1", False),
    ],
)
def test_labels_of_kubernetes_select_nodes(label: str, selects: bool, export: Callable[..., tuple[int, str]]) -> None:
    Path("roce.yaml").write_text(ROCE.replace("gpus: 8", f"labels: {{{label}}}, gpus: 8"))
    for group in workers(loaded(export(*OTHERS["named-resource"])[1])):
        wanted = yaml.safe_load(label) if selects else None
        assert group["template"]["spec"].get("nodeSelector") == wanted


@pytest.mark.parametrize(
    ("label", "valid"),
    [
        ("node-role.kubernetes.io/gpu: ''", True),
        ("example.org/a b: c", False),
        ("example.org/a/b: c", False),
        ("Example_.org/a: c", False),
        ("example.org/a: b c", False),
        (f"example.org/a: {'x' * 64}", False),
    ],
)
def test_a_label_that_kubernetes_refuses_is_one_line(
    label: str, valid: bool, export: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("roce.yaml").write_text(ROCE.replace("gpus: 8", f"labels: {{{label}}}, gpus: 8"))
    assert export(*OTHERS["named-resource"])[0] == (0 if valid else 2)
    name, _, value = label.partition(": ")
    assert valid or f"label {name}={value}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_cpus_of_a_pod(name: str, export: Callable[..., tuple[int, str]]) -> None:
    """No node gives all its CPUs to pods; Ray has as many as the placement counts on."""
    cpus = {"cpu": 4, "roce": 128, "named-resource": 128, "pools": 128}.get(name, 192)
    for group in workers(loaded(export(*{**CASES, **OTHERS}[name])[1])):
        assert 0 < int(container(group)["resources"]["requests"]["cpu"]) < cpus
        assert group["rayStartParams"]["num-cpus"] == str(cpus)


def test_devices_of_a_pod(export: Callable[..., tuple[int, str]]) -> None:
    limits = {
        name: container(workers(loaded(export(*words)[1]))[0])["resources"].get("limits")
        for name, words in {**CASES, **OTHERS}.items()
    }
    efa = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}
    assert limits == {
        "p5-efa": {**efa, "hugepages-2Mi": "5120Mi", "memory": "1600Gi"},
        "roce": {"nvidia.com/gpu": "8"},
        "cpu": None,
        **dict.fromkeys(("pack", "collocated", "fluid", "pool-of-both"), efa),
        "named-resource": {"nvidia.com/gpu": "8", "rdma/ib": "1"},
        "pools": {"nvidia.com/gpu": "8", "rdma/ib": "1"},
    }
    documents = loaded(export(*CASES["roce"])[1])
    (template,) = [each for each in documents if each["kind"] == "ResourceClaimTemplate"]
    device = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    assert (device["deviceClassName"], device["count"]) == ("rdma.example.com", 8)


def test_groups_of_nodes_and_of_pools(export: Callable[..., tuple[int, str]]) -> None:
    groups = {
        name: [(group["groupName"], group["replicas"], group.get("labels")) for group in workers(loaded(text))]
        for name in ("p5-efa", "pools", "pool-of-both")
        for text in [export(*{**CASES, **OTHERS}[name])[1]]
    }
    assert groups == {
        "p5-efa": [(f"node-{n}", 1, {"pdlab/node": f"node-{n}"}) for n in (1, 2)],
        "pools": [("prefill", 2, None), ("decode", 2, None)],
        "pool-of-both": [("prefill-decode", 1, None)],
    }


def test_what_each_kind_needs(export: Callable[..., tuple[int, str]]) -> None:
    documents = {name: loaded(export(*words)[1]) for name, words in {**CASES, **OTHERS}.items()}
    places = {name: application(each)["proxy_location"] for name, each in documents.items()}
    assert places.pop("fluid") == "HeadOnly" and set(places.values()) == {"EveryNode"}
    engine = application(documents["p5-efa"])["applications"][0]["args"]["decode_config"]["engine_kwargs"]
    assert engine["kv_transfer_config"]["kv_connector_extra_config"]["backends"] == ["LIBFABRIC"]
    named = loaded(export(*CASES["p5-efa"], "--kv-backend", "UCX")[1])
    engine = application(named)["applications"][0]["args"]["decode_config"]["engine_kwargs"]
    assert engine["kv_transfer_config"]["kv_connector_extra_config"]["backends"] == ["UCX"]
    for name, each in documents.items():
        spec = service(each)["spec"]
        assert spec["upgradeStrategy"] == {"type": "None"}
        assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}
        head = spec["rayClusterConfig"]["headGroupSpec"]
        assert head["rayStartParams"] == {"num-cpus": "0"} and "nvidia.com/gpu" not in str(head)
        for group in workers(each):
            pod = group["template"]["spec"]
            assert pod["terminationGracePeriodSeconds"] >= 60
            assert "readinessProbe" not in container(group) and "hostNetwork" not in pod
            rdma = container(group).get("securityContext", {}).get("capabilities")
            assert rdma == (None if name == "cpu" else {"add": ["IPC_LOCK"]})
    keys = {name: "PDLAB_API_KEY_SHA256" in str(each) for name, each in documents.items()}
    assert keys.pop("cpu") is False and set(keys.values()) == {True}
    assert workers(documents["cpu"])[0]["template"]["spec"]["nodeSelector"] == {
        "node.kubernetes.io/instance-type": "m7i.2xlarge"
    }


def test_no_value_is_read_as_something_else_than_text(export: Callable[..., tuple[int, str]]) -> None:
    """Go's YAML takes a plain y for true: Ray refuses a variable that is not text."""
    documents = loaded(export(*CASES["p5-efa"], "--kv-backend", "UCX")[1])
    assert "UCX_PROTO_INFO: 'y'" in service(documents)["spec"]["serveConfigV2"]
    plain = {
        token.value
        for token in yaml.scan(service(documents)["spec"]["serveConfigV2"])
        if isinstance(token, yaml.ScalarToken) and token.plain and isinstance(yaml.safe_load(token.value), str)
    }
    assert len(plain) > 20 and [each for each in plain if not re.fullmatch(r"/|[A-Za-z_/][\w ./:,()-]+", each)] == []


REFUSED: list[tuple[str, list[str], str]] = [
    ("rdma-name", ["--pd-spread", "--cluster", "roce.yaml", *IMAGE], "--rdma RESOURCE=N"),
    ("no-efa", ["--pd-spread", "--cluster", "roce.yaml", "--rdma", "efa", *IMAGE], "no EFA"),
    ("folder", [*EFA, "--model", "/weights/x"], "--weights-pvc"),
    ("weights-hide", [*EFA, "--weights-pvc", "weights:/opt"], "/opt"),
    ("weights-in-code", [*EFA, "--weights-pvc", "weights:/opt/pdlab-code/x"], "/opt/pdlab-code"),
    ("weights-of-ray", [*EFA, "--weights-pvc", "weights:/data/../tmp"], "/tmp"),
    ("metrics-port", [*EFA, "--port", "8080"], "--port 8080"),
    ("haproxy-port", [*EFA, "--port", "8404"], "--port 8404"),
    ("replica-port", [*EFA, "--port", "30500"], "--port 30500"),
    ("little-memory", [*EFA, "--kv-offload-gb", "100", "--pod-memory", "128Gi"], "--pod-memory 128Gi"),
    ("other-folder", [*EFA, "--model", "/weightsx/x", "--weights-pvc", "weights"], "--weights-pvc"),
]


@pytest.mark.parametrize("words, text", [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_the_pods_cannot_have_is_one_line(
    words: list[str], text: str, export: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([*words, "--export-k8s", "rayservice.yaml"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert text in line and not Path("rayservice.yaml").exists()


def test_unlike_nodes_are_no_group(export: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str]) -> None:
    Path("four.yaml").write_text(FOUR.replace("more-gpu-b, gpu_type: H100", "more-gpu-b, gpu_type: H200"))
    assert export(*OTHERS["pools"])[0] == 2
    assert "not alike" in capsys.readouterr().err


def test_nodes_with_other_selectors_are_no_group(
    export: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """All pods of a group have one node selector, so that one node would have to take all of them."""
    hosts = re.sub(r"id: ([\w-]+),", r"id: \1, labels: {kubernetes.io/hostname: \1},", FOUR)
    Path("four.yaml").write_text(hosts)
    assert export(*OTHERS["pools"])[0] == 2
    assert "kubernetes.io/hostname" in capsys.readouterr().err
    Path("four.yaml").write_text(re.sub(r"kubernetes.io/hostname: [\w-]+", "kubernetes.io/arch: amd64", hosts))
    done, text = export(*OTHERS["pools"])
    assert done == 0
    assert {str(group["template"]["spec"]["nodeSelector"]) for group in workers(loaded(text))} == {
        "{'kubernetes.io/arch': 'amd64'}"
    }
    # Names of nodes select nothing.
    Path("four.yaml").write_text(re.sub(r"kubernetes.io/hostname", "pdlab/node", hosts))
    assert export(*OTHERS["pools"])[0] == 0


def test_a_pod_takes_all_gpus_of_a_node_and_free_cpus(
    export: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("roce.yaml").write_text(CLUSTERS["roce.yaml"].replace("gpus: 8,", "gpus: 8, free_cpus: 60,"))
    for group in workers(loaded(export(*OTHERS["named-resource"])[1])):
        assert group["rayStartParams"]["num-cpus"] == "60"
        assert container(group)["resources"]["requests"]["cpu"] == "50"
    Path("roce.yaml").write_text(CLUSTERS["roce.yaml"].replace("gpus: 8,", "gpus: 8, free_gpus: [0, 1, 2, 3],"))
    assert export(*OTHERS["named-resource"])[0] == 2
    assert "free_gpus" in capsys.readouterr().err


@pytest.mark.parametrize("label", ["", "ray.io/node-id: 8c1e2f", "rack: r1"])
def test_the_file_names_the_nodes_itself(
    label: str, export: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids of another Ray cluster select nothing in this one, and nobody starts Ray by hand."""
    number = itertools.count()
    text = re.sub(r"gpus: 8", lambda _: f"labels: {{{label and f'{label}{next(number)}'}}}, gpus: 8", ROCE)
    Path("roce.yaml").write_text(text)
    done, text = export(*OTHERS["named-resource"])
    assert done == 0 and "start Ray" not in capsys.readouterr().err
    groups = workers(loaded(text))
    assert [group["labels"] for group in groups] == [{"pdlab/node": "gpu-a"}, {"pdlab/node": "gpu-b"}]
    assert {str(each) for each in selectors(application(loaded(text)))} == {str(group["labels"]) for group in groups}


def changed(config: Callable[[dict[str, Any]], None]) -> Callable[[Documents], None]:
    def change(documents: Documents) -> None:
        spec = service(documents)["spec"]
        inner = yaml.safe_load(spec["serveConfigV2"])
        config(inner)
        spec["serveConfigV2"] = yaml.safe_dump(inner)

    return change


def env_of(documents: Documents) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = container(workers(documents)[0])["env"]
    return found


# What a person or a later change could get wrong -> a word of what is said. Found without the definition.
MISTAKES: dict[str, tuple[Callable[[Documents], object], str]] = {
    "name too long": (lambda d: service(d)["metadata"].update(name="a" * 48), "47"),
    "name with a dot": (lambda d: service(d)["metadata"].update(name="v1.1"), "DNS label"),
    "start value a number": (lambda d: workers(d)[0]["rayStartParams"].update({"num-gpus": 8}), "num-gpus"),
    "labels at start": (lambda d: workers(d)[0]["rayStartParams"].update(labels="a=b"), "rayStartParams.labels"),
    "label with a space": (lambda d: workers(d)[0]["labels"].update({"pdlab/node": "node 1"}), "node 1"),
    "one node name twice": (
        lambda d: workers(d)[1]["labels"].update({"pdlab/node": "node-1"}),
        "two worker groups have the label pdlab/node=node-1",
    ),
    "long group": (lambda d: workers(d)[0].update(groupName="n" * 64), "63 characters"),
    "reserved label": (lambda d: workers(d)[0]["labels"].update({"ray.io/node-id": "x"}), "reserves"),
    "two pods, one name": (lambda d: workers(d)[0].update(replicas=2, maxReplicas=2), "one pod"),
    "replicas text": (lambda d: workers(d)[0].update(replicas="1"), "whole numbers"),
    "no minimum": (lambda d: workers(d)[0].pop("minReplicas"), "whole numbers"),
    "one group twice": (lambda d: workers(d)[1].update(groupName="node-1"), "one name"),
    "group name": (lambda d: workers(d)[1].update(groupName="Node_2"), "groupName"),
    "variable a number": (lambda d: env_of(d).append({"name": "X", "value": 1}), "variable X"),
    "variable twice": (lambda d: env_of(d).append({"name": "HF_HOME", "value": "x"}), "HF_HOME"),
    "bad quantity": (lambda d: container(workers(d)[0])["resources"]["limits"].update(memory="1600 Gi"), "quantity"),
    "request is not limit": (
        lambda d: container(workers(d)[0])["resources"]["requests"].update({"nvidia.com/gpu": "4"}),
        "nvidia.com/gpu",
    ),
    "own probe": (lambda d: container(workers(d)[0]).update(readinessProbe={}), "readinessProbe"),
    "mount without volume": (lambda d: workers(d)[0]["template"]["spec"]["volumes"].pop(0), "/dev/shm"),
    "selector a number": (lambda d: workers(d)[0]["template"]["spec"].update(nodeSelector={"a": 5}), "nodeSelector"),
    "no ConfigMap": (lambda d: d.pop(0), "ConfigMap"),
    "no serve port": (
        lambda d: service(d)["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0][
            "ports"
        ].pop(),
        "serve",
    ),
    "upgrade type": (lambda d: service(d)["spec"].update(upgradeStrategy={"type": "none"}), "'none'"),
    "token without version": (lambda d: service(d)["spec"]["rayClusterConfig"].pop("rayVersion"), "rayVersion"),
    "label of no group": (lambda d: workers(d)[1]["labels"].update({"pdlab/node": "node-3"}), "pdlab/node=node-2"),
    "host": (changed(lambda c: c["http_options"].update(host="127.0.0.1")), "127.0.0.1"),
    "too large": (lambda d: d[0]["binaryData"].update(more="x" * 262_144), "262144"),
}
# What the definition refuses: two mistakes that it alone can tell, and some of the others.
OF_THE_DEFINITION: dict[str, Callable[[Documents], object]] = {
    "misspelt field of a pod": lambda d: container(workers(d)[0]).update(volumeMount=[]),
    "misspelt field of the service": lambda d: service(d)["spec"].update(serveConfig=""),
    **{name: MISTAKES[name][0] for name in ("replicas text", "start value a number", "variable a number")},
    **{name: MISTAKES[name][0] for name in ("variable twice", "selector a number", "bad quantity")},
}


@pytest.fixture
def sound(export: Callable[..., tuple[int, str]]) -> Documents:
    return loaded(export(*CASES["p5-efa"])[1])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, sound: Documents) -> None:
    plant, word = MISTAKES[mistake]
    documents = copy.deepcopy(sound)
    plant(documents)
    found = problems(documents) + kuberay_rules.problems(documents)
    assert any(word in each for each in found), found


@pytest.mark.skipif(not kuberay.DEFINITION.exists(), reason="the definition of a RayService is not at hand")
@pytest.mark.parametrize("mistake", OF_THE_DEFINITION)
def test_the_definition_finds_a_planted_mistake(mistake: str, sound: Documents) -> None:
    documents = copy.deepcopy(sound)
    OF_THE_DEFINITION[mistake](documents)
    assert kuberay.errors(kuberay.definition(), service(sound)) == []
    assert kuberay.errors(kuberay.definition(), service(documents))
