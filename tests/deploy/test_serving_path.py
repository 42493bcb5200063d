"""Which serving path is chosen where nobody chooses, what it needs, and what is said of it."""

from __future__ import annotations

import pytest

from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.schema import to_yaml
from pdlab.core.settings import parse
from pdlab.deploy import serving_path
from pdlab.deploy.options import LaunchRequest, LaunchSettings, request_from

HOSTS = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "10.0.0.5", "node-1.example")


def request(*words: str) -> LaunchRequest:
    return request_from(parse(LaunchSettings, list(words)), words)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("local", [(), ("--local",)], ids=["cluster", "local"])
def test_direct_streaming_where_every_node_is_reached(host: str, local: tuple[str, ...]) -> None:
    """Ray Serve's one address is HAProxy's and the replicas': a node cannot listen at another one's, nor be called at
    its loopback; on its own node HAProxy calls 127.0.0.1."""
    launch_request = request("--pd-spread", "--host", host, *local)
    direct = host == "0.0.0.0" or (bool(local) and host in ("127.0.0.1", "localhost"))
    assert launch_request.deployment.serving.direct_streaming is direct
    assert launch_request.serving_path.startswith(
        "direct streaming: " if direct else f"{2 if local else 4} ingress replicas "
    )
    assert launch_request.deployment.serving.stream_batching_ms == 0, "no chunk is held back"
    env = serving_path.environment(launch_request.deployment, host)
    assert ("RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING" in env) is direct
    assert ("RAY_SERVE_ENABLE_HA_PROXY" in env) is (host in ("127.0.0.1", "localhost", "0.0.0.0"))


@pytest.mark.parametrize("cluster", ["p5.48xlarge", "p5.48xlarge-x2"])
def test_the_reason_holds_for_any_number_of_nodes(cluster: str) -> None:
    """A cluster of one node has no other nodes that could not be reached."""
    words = request("--collocated", "--num", "8", "--tp", "1", "--cluster", cluster).serving_path
    assert "could not be reached" not in words
    assert "before the nodes are known" in words and "on the head node only" in words


@pytest.mark.parametrize("port", ["9101", "8404", "30000", "31000"])
@pytest.mark.parametrize("host", HOSTS)
def test_the_ports_behind_haproxy_are_its_own(host: str, port: str) -> None:
    """Beside them HAProxy does not start, or shares the port with a replica. Local nodes choose free ones."""
    if host in ("127.0.0.1", "localhost", "0.0.0.0"):
        with pytest.raises(UsageError, match=f"^--port {port}: .*give another"):
            request("--pd-spread", "--host", host, "--port", port)
    else:
        assert request("--pd-spread", "--host", host, "--port", port).port == int(port)
    for words in (("--local",), ("--rehearse",)):
        assert request("--pd-spread", "--host", host, "--port", port, *words).port == int(port)


@pytest.mark.parametrize("port", ["9100", "8405", "29999", "31001", "8000"])
def test_the_ports_beside_them_are_free(port: str) -> None:
    assert request("--pd-spread", "--host", "0.0.0.0", "--port", port).port == int(port)


def test_local_direct_streaming_needs_haproxys_own_address() -> None:
    with pytest.raises(UsageError, match=r"HAProxy calls the replicas at 127\.0\.0\.1"):
        request("--collocated", "--local", "--direct-streaming", "--host", "10.0.0.5")
    assert request("--collocated", "--local", "--direct-streaming").deployment.serving.direct_streaming


@pytest.mark.parametrize(
    ("label", "count"),
    [
        ("collocated-1xtp1", 2),
        ("collocated-2xtp4", 8),
        ("pd-spread-p4xtp4-d1xtp1", 2),
        ("pd-spread-p1xtp4-d1xtp4", 4),
        ("pd-spread-p1xdp32ep-d1xdp72ep", 16),
    ],
)
def test_ingress_replicas_follow_the_pool_that_answers(label: str, count: int) -> None:
    assert serving_path.ingress_replicas(parse_label(label)) == count


def test_what_is_given_wins_over_what_is_chosen() -> None:
    launch_request = request(
        "--pd-pack", "--ingress-replicas", "1", "--stream-batching-ms", "50", "--no-tokenize-once"
    ).deployment
    assert (
        launch_request.ingress_replicas == 1
        and launch_request.serving.stream_batching_ms == 50
        and not launch_request.serving.tokenize_once
    )
    assert request("--pd-pack").deployment.serving.tokenize_once
    assert not request("--collocated").deployment.serving.tokenize_once
    kept = request("--pd-pack", "--local", "--no-direct-streaming")
    assert not kept.deployment.serving.direct_streaming and "by --no-direct-streaming" in kept.serving_path


def test_a_file_says_only_what_it_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("files") / "mine.yaml"
    silent = "topology: {kind: collocated, pool: {tp: 2}}\nserving: {requests: {max_prompts: 8}}\n"
    path.write_text(silent, encoding="utf-8")
    for words, direct, count in (((), False, 2), (("--host", "0.0.0.0"), True, 1)):
        made = request("--config", str(path), *words).deployment
        assert (made.serving.direct_streaming, made.ingress_replicas) == (direct, count)
        assert made.serving.requests.max_prompts == 8
    path.write_text(silent + "ingress_replicas: 3\n", encoding="utf-8")
    assert request("--config", str(path)).deployment.ingress_replicas == 3
    path.write_text(
        "topology: {kind: collocated, pool: {}}\nserving: {direct_streaming: false, stream_batching_ms: 5}\n"
    )
    made = request("--config", str(path), "--host", "0.0.0.0").deployment
    assert not made.serving.direct_streaming and made.serving.stream_batching_ms == 5
    path.write_text("topology: {kind: collocated, pool: {}}\nserving: {direct_streaming: true}\n")
    with pytest.raises(UsageError, match="could not be reached"):
        request("--config", str(path))


def test_a_made_deployment_comes_back_equal(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("files") / "mine.yaml"
    made = request("--pd-spread", "--host", "0.0.0.0").deployment
    path.write_text(to_yaml(made), encoding="utf-8")
    assert request("--config", str(path), "--host", "0.0.0.0").deployment == made


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("local", [True, False])
def test_one_line_says_the_path_and_why(host: str, local: bool) -> None:
    for direct in (True, False):
        made = Deployment(topology=parse_label("collocated-1xtp1"))
        made = made.model_copy(update={"serving": made.serving.model_copy(update={"direct_streaming": direct})})
        text = serving_path.describe(made, host, local=local)
        assert "\n" not in text and text.endswith(")")
        assert ("--host 0.0.0.0 gives direct streaming" in text) is (
            not direct and not serving_path.reaches_engines(host, local=local)
        )
