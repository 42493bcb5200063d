"""Two hosts on this machine, as far as that goes without making any: shapes, commands, records, bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.launched import running

from pdlab.cli import launch
from pdlab.cli import two_hosts as cli_two_hosts
from pdlab.cluster import connection as cluster
from pdlab.cluster import local_nodes, namespaces, run_on_host, two_hosts
from pdlab.cluster.local_nodes import MARKER, LocalNodes
from pdlab.cluster.namespaces import INSIDE
from pdlab.cluster.two_hosts import Host, TwoHosts, shaper
from pdlab.core.catalog import two_hosts_cluster
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import CanaryError, ClusterError, DeployError, UsageError
from pdlab.core.failure import attached_logs
from pdlab.core.nodes import LinkShape
from pdlab.core.schema import load_yaml, to_yaml, validate
from pdlab.core.settings import FlagsOf, part_words
from pdlab.deploy.endpoint import OnHost, Running, clear_on_host, load_running, reach, reshape_on_host, save_running
from pdlab.placement.place import link_kind, links, place

NOBODY = 2**22 + 1  # a process number that Linux does not give
PAIR = TwoHosts(
    hosts=(
        Host(name="pdlab-a", address="10.77.0.1", pid=NOBODY),
        Host(name="pdlab-b", address="10.77.0.2", pid=NOBODY),
    ),
    shape=LinkShape(gbit_per_s=1),
)


class TestShape:
    @pytest.mark.parametrize(
        ("rate", "gbit_per_s"),
        [("1gbit", 1), ("20mbit", 0.02), ("1500kbit", 0.0015), ("2.5GBit", 2.5), ("none", None), (None, None)],
    )
    def test_rates(self, rate: str | None, gbit_per_s: float | None) -> None:
        read = LinkShape.model_validate({"gbit_per_s": rate}).gbit_per_s
        assert read == (gbit_per_s if gbit_per_s is None else pytest.approx(gbit_per_s))
        word = part_words(LinkShape(gbit_per_s=read), FlagsOf(LinkShape))[1:]
        assert LinkShape.model_validate({"gbit_per_s": word[0] if word else None}).gbit_per_s == read

    @pytest.mark.parametrize(
        "rate", ["1", "", "fast", "1gb", "10mbps", "-1gbit", "0gbit", "999gbit", "1kbit", "nan gbit"]
    )
    def test_what_is_no_rate(self, rate: str) -> None:
        with pytest.raises(UsageError, match=r"is not a rate from 1mbit to 100gbit, for example 1gbit"):
            validate(LinkShape, {"gbit_per_s": rate}, where="x")

    @pytest.mark.parametrize(
        ("shape", "text"),
        [
            (LinkShape(), "unshaped"),
            (LinkShape(gbit_per_s=0.02, delay_s=0.005), "20 Mbit/s each way, 5 ms one way"),
            (LinkShape(gbit_per_s=1), "1 Gbit/s each way"),
        ],
    )
    def test_in_words(self, shape: LinkShape, text: str) -> None:
        assert str(shape) == text

    @pytest.mark.parametrize(
        ("gbit_per_s", "rate", "burst_ms", "queue_ms"), [(1, "1000000000bit", 1, 50), (10, "10000000000bit", 1, 50)]
    )
    def test_the_shaper(self, gbit_per_s: float, rate: str, burst_ms: float, queue_ms: float) -> None:
        words = shaper(gbit_per_s)
        assert words[:6] == ["tc", "qdisc", "add", "dev", two_hosts.INTERFACE, "root"]
        values = dict(zip(words[7::2], words[8::2], strict=True))
        bytes_per_ms = gbit_per_s * 1e9 / 8 / 1000
        assert values["rate"] == rate and int(values["burst"]) == round(burst_ms * bytes_per_ms)
        assert int(values["limit"]) - int(values["burst"]) == round(queue_ms * bytes_per_ms)

    def test_a_slow_shaper_still_passes_a_packet(self) -> None:
        values = dict(zip(shaper(0.001)[7::2], shaper(0.001)[8::2], strict=True))
        assert int(values["burst"]) > two_hosts.MTU_BYTES
        assert int(values["limit"]) >= int(values["burst"]) + 2 * two_hosts.MTU_BYTES


class TestView:
    def test_spread_crosses_the_link_and_pack_does_not(self) -> None:
        view = two_hosts_cluster(LinkShape(gbit_per_s=0.02))
        assert [node.machine for node in view.nodes] == ["pdlab-a", "pdlab-b"]
        for label, kind in (
            ("pd-spread-p1xtp1-d1xtp1", "TCP, 20 Mbit/s"),
            ("pd-pack-p1xtp1-d1xtp1", "shared memory (cma)"),
        ):
            link_groups = links(place(Deployment(topology=parse_label(label)), view), view)
            assert [link.kind for link in link_groups] == [kind]

    def test_an_unshaped_link_has_no_line_rate(self) -> None:
        one, two = two_hosts_cluster(LinkShape()).nodes
        assert one.nic.gbit_per_s is None and link_kind(one, two) == "TCP"

    def test_the_slower_end_counts(self) -> None:
        (one, _), (_, two) = (two_hosts_cluster(LinkShape(gbit_per_s=rate)).nodes for rate in (10, 1))
        assert link_kind(one, two) == link_kind(two, one) == "TCP, 1 Gbit/s"

    def test_live_nodes_are_seen_alike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nodes = LocalNodes(id="x", count=2, gcs_port=1, temp_dir="/nowhere", pids=(), two_hosts=PAIR)
        assert nodes.address == "10.77.0.1:1"
        alive = [{"NodeID": f"n{i}", "NodeManagerAddress": f"10.77.0.{i}"} for i in (2, 1)]
        connection = cluster.Cluster(nodes)
        monkeypatch.setattr(connection, "alive", lambda: alive)
        nic = {"kind": "ethernet", "gbit_per_s": 1.0}
        facts = connection._local_facts()
        assert facts == {"n1": {"host": "pdlab-a", "nic": nic}, "n2": {"host": "pdlab-b", "nic": nic}}

    def test_metrics_pages_have_urls_also_of_nodes_with_ipv6_addresses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        alive = [{"NodeManagerAddress": address, "MetricsExportPort": 80} for address in ("10.77.0.1", "fd00::1")]
        connection = cluster.Cluster(None)
        monkeypatch.setattr(connection, "alive", lambda: alive)
        assert connection.metrics_urls() == ("http://10.77.0.1:80/metrics", "http://[fd00::1]:80/metrics")

    def test_the_refusal_of_a_driver_outside_names_the_command(self) -> None:
        nodes = LocalNodes(id="x", count=2, gcs_port=1, temp_dir="/nowhere", pids=(), two_hosts=PAIR)
        with (
            pytest.raises(ClusterError, match=r"run the command there: .* two-hosts shell -- COMMAND"),
            cluster.Cluster(nodes),
        ):
            pass


class TestRequirements:
    def test_another_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        assert namespaces.unavailable() == "namespaces are Linux's, this is darwin"

    def test_not_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert "requires root" in (namespaces.unavailable() or "")

    def test_a_container_without_the_right(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> None:
            raise OSError(1, "unshare: Operation not permitted")

        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(namespaces, "_unshare", refused)
        assert "SYS_ADMIN" in (namespaces.unavailable() or "")

    def test_no_tools(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(two_hosts, "unavailable", lambda: None)
        monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else "/x")
        with pytest.raises(UsageError, match="two hosts on this machine: tc not found: install iproute2"):
            two_hosts.require()


class TestCommandLines:
    @pytest.mark.usefixtures("cache")
    @pytest.mark.parametrize(
        ("words", "messages"),
        [
            ([], ["up|down|shape|shell"]),
            (["up", "--rate", "5"], ["'5'", "1gbit"]),
            (["up", "--delay-ms", "x"], ["--delay-ms", "'x'"]),
            (["shape", "--delay-ms", "-1"], ["--delay-ms", "'-1'"]),
            (["shape", "--rate", "1gbit"], ["no two hosts are up", "two-hosts up"]),
            (["shell", "--", "true"], ["no two hosts are up"]),
            (["shell", "--host", "c"], ["--host", "'c'"]),
            (["sideways"], ["sideways"]),
        ],
        ids=" ".join,
    )
    def test_mistakes(
        self, words: list[str], messages: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(two_hosts, "unavailable", lambda: None)
        monkeypatch.setattr(shutil, "which", lambda _: "/x")
        assert cli_two_hosts.main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        assert all(word in err for word in messages), err

    def test_on_one_of_the_hosts(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv(INSIDE, "pdlab-a")
        monkeypatch.setattr(two_hosts, "require", lambda: None)
        assert cli_two_hosts.main(["down"]) == 2
        assert "this is pdlab-a, one of the two hosts" in capsys.readouterr().err

    def test_shutdown_on_one_of_the_hosts(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(INSIDE, "pdlab-b")
        assert launch.main(["--shutdown"]) == 2
        assert "--shutdown on pdlab-b, one of the two hosts, would end itself" in capsys.readouterr().err

    def test_down_leaves_plain_local_nodes_alone(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        nodes = LocalNodes(id="x", count=2, gcs_port=1, temp_dir=str(cache / "t"), pids=(os.getpid(),))
        (cache / "local.yaml").write_text(to_yaml(nodes))
        monkeypatch.setattr(two_hosts, "require", lambda: None)
        monkeypatch.setattr(local_nodes, "_belongs", lambda *_: True)
        assert cli_two_hosts.main(["down"]) == 2
        assert "are not on two hosts; launch_gptoss.py --shutdown stops them" in capsys.readouterr().err
        assert (cache / "local.yaml").exists()

    def test_the_launchers_plan(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--pd-spread", "--local", "--two-hosts", "--link-rate", "20mbit", "--dry-run"]
        assert launch.main(words) == 0
        assert "TCP, 20 Mbit/s" in capsys.readouterr().out


@pytest.mark.usefixtures("cache")
def test_strays_are_found_by_their_owner() -> None:
    """What stands for PID 1 of a host: its program, the folder of its files and the owner are words of its command."""
    program = str(Path(two_hosts.__file__).with_name("namespace_init.py"))
    up = "import time; print(flush=True); time.sleep(600)"
    words = [sys.executable, "-c", up, program, "/tmp/its files", "/home/me/owner"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()  # between the fork and the program's start it has no words
        assert two_hosts.strays("/home/me/owner") == {process.pid: Path("/tmp/its files")}
        assert two_hosts.strays("/home/me") == {}
    finally:
        process.kill()
        process.communicate()
    assert two_hosts.strays("/home/me/owner") == {}


@pytest.mark.usefixtures("cache")
class TestRecords:
    URL = "http://127.0.0.1:8000"

    def served(self, host: OnHost | None) -> Running:
        deployment = Deployment(topology=parse_label("pd-spread-p1xtp1-d1xtp1"), model="tiny-gptoss")
        served = running(self.URL, deployment=deployment, gpus=2, cluster=two_hosts_cluster(LinkShape(gbit_per_s=1)))
        served = served.model_copy(update={"on_host": host})
        save_running(served)
        return served

    @pytest.mark.parametrize(
        ("program", "message"), [("", "it printed nothing"), ("echo >&2; echo broken >&2", "broken")]
    )
    def test_the_error_of_a_helper_that_ends_at_once_has_its_last_line(
        self, program: str, message: str, tmp_path: Path
    ) -> None:
        log = tmp_path / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, stderr=errors) as process,
            pytest.raises(ClusterError, match=f"^the host does not start: {message}$"),
        ):
            two_hosts._await_ready(process, log, "the host")

    def test_round_trip(self, tmp_path: Path) -> None:
        nodes = LocalNodes(id="x", count=2, gcs_port=1, temp_dir="/nowhere", pids=(1, 2), two_hosts=PAIR)
        (tmp_path / "n.yaml").write_text(to_yaml(nodes))
        assert load_yaml(tmp_path / "n.yaml", LocalNodes) == nodes
        served = self.served(OnHost(pid=NOBODY, mark="A=b"))
        assert load_running(self.URL) == served

    def test_another_link_is_another_line_rate_in_the_manifest(self) -> None:
        self.served(OnHost(pid=NOBODY, mark="A=b"))
        reshape_on_host(NOBODY, LinkShape(gbit_per_s=0.02))
        changed = load_running(self.URL)
        assert changed is not None and changed.manifest.cluster is not None
        assert [node.nic.gbit_per_s for node in changed.manifest.cluster.nodes] == [0.02, 0.02]
        reshape_on_host(NOBODY + 1, LinkShape(gbit_per_s=5))
        assert load_running(self.URL) == changed

    def test_forgotten_with_its_hosts(self) -> None:
        self.served(OnHost(pid=NOBODY, mark="A=b"))
        clear_on_host(NOBODY + 1)
        assert load_running(self.URL) is not None
        clear_on_host(NOBODY)
        assert load_running(self.URL) is None

    @pytest.mark.parametrize("host", [None, OnHost(pid=NOBODY, mark="A=b")])
    def test_nowhere_to_go(self, host: OnHost | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is served on this machine's own network, and what a process on the host itself reaches."""
        if host:
            monkeypatch.setenv(INSIDE, "pdlab-a")
        self.served(host)
        before = os.readlink("/proc/self/ns/net")  # noqa: PTH115
        with reach(self.URL):
            assert os.readlink("/proc/self/ns/net") == before  # noqa: PTH115

    @pytest.mark.parametrize("pid", [NOBODY, os.getpid()], ids=["gone", "another process of that number"])
    def test_hosts_that_are_gone(self, pid: int) -> None:
        self.served(OnHost(pid=pid, mark=f"{MARKER}=abc"))
        with (
            pytest.raises(UsageError, match=r"two hosts that http://127.* was on are gone; launch it again"),
            reach(self.URL),
        ):
            pass

    def test_a_process_on_a_host_trusts_the_record(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """There, process numbers are others."""
        nodes = LocalNodes(id="abc", count=2, gcs_port=1, temp_dir=str(tmp_path / "x"), pids=(NOBODY,), two_hosts=PAIR)
        local_nodes._write(nodes)
        monkeypatch.setenv(MARKER, "abc")
        monkeypatch.setenv(INSIDE, "pdlab-a")
        assert local_nodes.running() == nodes
        monkeypatch.delenv(INSIDE)
        assert local_nodes.running() is None


class TestCall:
    """The near side: `run_on_host.call`, with a plain process where the host's would be."""

    IMPORTS = "import sys, time\nfrom pdlab.cluster import run_on_host\n"
    WAITS = "sys.exit(run_on_host.answering(lambda text: time.sleep(60)))\n"

    @staticmethod
    def call(
        folder: Path,
        patch: pytest.MonkeyPatch,
        program: str,
        started: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
    ) -> None:
        """Call a module with that text; ``started`` gets its process. Its standard error is the file ``errors``."""
        (folder / "on_host.py").write_text(program)

        def spawn(_: int, command: list[str], *, dies_with_parent: bool, **options: Any) -> subprocess.Popen[bytes]:
            assert dies_with_parent
            with (folder / "errors").open("wb") as errors:
                child = subprocess.Popen(command, stderr=errors, **options)
            started(child)
            return child

        patch.setattr(run_on_host, "spawn_in", spawn)
        path = f"{folder}:{Path(run_on_host.__file__).parents[2]}"
        run_on_host.call(1, "on_host", "decode", {**os.environ, "PYTHONPATH": path})

    @pytest.fixture
    def other_thread(self) -> Iterator[threading.Thread]:
        """A thread that could take a signal."""
        ends = threading.Event()
        thread = threading.Thread(target=ends.wait)
        thread.start()
        yield thread
        ends.set()
        thread.join()

    @pytest.mark.usefixtures("other_thread")
    def test_an_interrupt_while_the_child_still_imports(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        children: list[subprocess.Popen[bytes]] = []

        def started(child: subprocess.Popen[bytes]) -> None:
            children.append(child)
            os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            self.call(tmp_path, monkeypatch, f"import time; time.sleep(0.5)\n{self.IMPORTS}{self.WAITS}", started)
        assert children[0].returncode == run_on_host.INTERRUPTED and (tmp_path / "errors").read_text() == ""
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & run_on_host.HELD
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_an_interrupt_that_another_thread_takes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_thread: threading.Thread
    ) -> None:
        # The kernel chose it while this thread held the signal back, and gave it the core when it no longer did.
        late = threading.Timer(1.0, lambda: signal.pthread_kill(other_thread.ident or 0, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            self.call(tmp_path, monkeypatch, self.IMPORTS + self.WAITS, lambda _: late.start())
        late.join()

    def test_an_error_comes_back_with_the_logs_that_explain_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = (
            "import pathlib\n"
            "from pdlab.core import errors, failure\n"
            "def work(text):\n"
            "    error = errors.DeployError(f'{text} died')\n"
            "    failure.attach_logs(error, pathlib.Path('/kept'))\n"
            "    raise error\n"
            "sys.exit(run_on_host.answering(work))\n"
        )
        with pytest.raises(DeployError, match=r"^decode died$") as raised:
            self.call(tmp_path, monkeypatch, self.IMPORTS + program)
        assert attached_logs(raised.value) == Path("/kept")


class TestAnswering:
    """The far side of `run_on_host.call`."""

    @pytest.mark.parametrize(
        ("trouble", "code", "message"),
        [
            (None, 0, ""),
            (KeyboardInterrupt(), 130, ""),
            (CanaryError("wrong"), 1, '["CanaryError", "wrong", null]'),
            (UsageError("no\nway"), 2, json.dumps(["UsageError", "no\nway", None])),
        ],
        ids=repr,
    )
    def test_errors_go_back(
        self, trouble: BaseException | None, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "in").write_text("request")
        channel = os.open(tmp_path / "out", os.O_CREAT | os.O_RDWR)

        def work(text: str) -> None:
            assert text == "request"
            if trouble:
                raise trouble

        with (tmp_path / "in").open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            monkeypatch.setattr(sys, "argv", ["module", str(channel)])
            assert run_on_host.answering(work) == code
        assert (tmp_path / "out").read_text() == message
        if not message:
            os.close(channel)

    def test_other_exceptions_stay_exceptions(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def work(_: str) -> None:
            raise ZeroDivisionError

        (tmp_path / "in").touch()
        with (tmp_path / "in").open() as stdin, (tmp_path / "out").open("w") as out:
            monkeypatch.setattr(sys, "stdin", stdin)
            monkeypatch.setattr(sys, "argv", ["module", str(out.fileno())])
            with pytest.raises(ZeroDivisionError):
                run_on_host.answering(work)
