"""What is being served right now: written by the launcher, read by the sweep."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from pydantic import Field

from pdlab.cluster.namespaces import INSIDE, network_of
from pdlab.core import api_key
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.files import cache_dir, launch_lock, locked, replace
from pdlab.core.nodes import LinkShape
from pdlab.core.schema import Frozen, load_yaml
from pdlab.deploy.canary import CanaryAnswer
from pdlab.remote.kernel_files import inherited
from pdlab.results.schema import Manifest


class OnHost(Frozen):
    """A host made of namespaces: its PID 1, and a line of that process's environment that identifies it."""

    pid: int
    mark: str


class Running(Frozen):
    """A deployment that answers at ``base_url``.

    ``manifest`` is the launcher's part of the experiment's manifest (deployment, cluster, actual placement, versions,
    hardware, canary). ``tokenizer`` is a folder or a Hugging Face id. ``metrics_urls`` are Prometheus pages, one per
    Ray node; ``replicas`` are the Ray Serve replicas of this deployment (a page still shows the counters of replicas
    that are gone); ``pools``: replica -> its pool: collocated, prefill, decode. ``on_host``: the host in whose network
    all these addresses are (None: this machine's own); see `reach`. ``api_key_file`` has the key that clients must send
    (None: no key is needed). ``answers``: its answers to the canary's prompts (empty if these have no meaning).
    """

    base_url: str
    model_id: str
    tokenizer: str
    manifest: Manifest
    metrics_urls: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    on_host: OnHost | None = None
    pools: dict[str, str] = Field(default_factory=dict)
    api_key_file: str | None = None
    answers: tuple[CanaryAnswer, ...] = ()

    @property
    def start(self) -> str:
        """A text that identifies this start of the deployment."""
        return f"{self.manifest.started_at} {' '.join(sorted(self.replicas))}"

    @property
    def key(self) -> str | None:
        """The API key that clients must send; None: no key is needed. Raises UsageError for an unusable file."""
        return api_key.client_key(self.api_key_file, {})


def save_running(running: Running) -> None:
    """Publish what is being served, for the sweep on this machine."""
    # Defaults are written too: without its "kind" a topology inside the manifest cannot be read back.
    text = yaml.safe_dump(running.model_dump(mode="json"), sort_keys=False)
    replace(_path(running.base_url), text.encode())


def publish_replicas(base_url: str, replicas: tuple[str, ...], pools: dict[str, str]) -> None:
    """Publish new replicas of the deployment at ``base_url``, after Ray Serve has replaced some. Prompts of earlier
    sweeps stay used, because they are in the prefix caches of the other replicas. Does nothing if no launcher has
    published the deployment.
    """
    running = load_running(base_url)
    if running is None or (running.replicas, running.pools) == (replicas, pools):
        return
    changed = running.model_copy(update={"replicas": replicas, "pools": pools})
    with contextlib.suppress(FileNotFoundError, ValueError):
        sweeps = _Sweeps.model_validate_json(_sweeps_path(base_url).read_bytes())
        if sweeps.start == running.start:
            moved = sweeps.model_copy(update={"start": changed.start})
            replace(_sweeps_path(base_url), moved.model_dump_json().encode())
    save_running(changed)


def load_running(base_url: str) -> Running | None:
    """What a launcher published for ``base_url``; None: no launcher on this machine did.

    Raises UsageError where its file is damaged, or of another version.
    """
    path = _path(base_url)
    try:
        return load_yaml(path, Running) if path.exists() else None
    except UsageError as error:
        raise UsageError(
            f"{error}; another version of pdlab wrote this file, or it is damaged: if nothing is served at {base_url}, "
            "delete it"
        ) from error


def key_of(base_url: str) -> str | None:
    """The key to send to ``base_url``: PDLAB_API_KEY, else the one that its launcher published; None: no key is known.

    Raises UsageError when the published file is gone or damaged.
    """
    running = load_running(base_url)
    return api_key.client_key(running.api_key_file if running else None, os.environ)


def clear_running(base_url: str) -> None:
    """Forget ``base_url``: it is no longer served."""
    _path(base_url).unlink(missing_ok=True)
    _sweeps_path(base_url).unlink(missing_ok=True)


def measured(base_url: str) -> contextlib.AbstractContextManager[None]:
    """Lock the deployment at ``base_url`` for the block: only one sweep measures it, and no launch replaces it
    meanwhile.

    Raises UsageError, which names the holder. Processes that share this cache folder see the lock.
    """
    return locked(measured_lock(base_url), f"the deployment at {base_url}")


def measured_lock(base_url: str) -> Path:
    """The lock file of `measured`."""
    return _path(base_url).with_suffix(".lock")


@contextlib.contextmanager
def launching(base_url: str, *, local: bool) -> Iterator[None]:
    """Lock launches, on this machine's own nodes or on a cluster, for the block: no other launch begins, no sweep
    measures the replaced deployment, and no sweep begins at ``base_url``. Raises UsageError, which names the holder.
    """
    with contextlib.ExitStack() as locks:
        locks.enter_context(locked(launch_lock(local=local), "the right to launch (another launch is not finished)"))
        served = {running.base_url for running in _published() if running.manifest.on_local_nodes == local}
        for url in sorted(served | {base_url}):
            locks.enter_context(measured(url))
        yield


def next_attempt(base_url: str, stream: str, least: int) -> int:
    """Take a number, at least ``least``, that no earlier sweep of the deployment at ``base_url`` has used for prompts
    of ``stream``.

    After a new start of the deployment the numbers begin again, because its prefix cache is empty. If no launcher has
    published the deployment, its start is unknown, and the numbers continue.
    """
    path = _sweeps_path(base_url)
    running = load_running(base_url)
    start = running.start if running else ""
    taken: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):  # damaged: begin anew
        earlier = _Sweeps.model_validate_json(path.read_bytes())
        taken = earlier.next if earlier.start == start else {}
    attempt = max(least, taken.get(stream, 0))
    replace(path, _Sweeps(start=start, next={**taken, stream: attempt + 1}).model_dump_json().encode())
    return attempt


class _Sweeps(Frozen):
    """The attempt numbers that sweeps against one start of a deployment have used, by stream of prompts."""

    start: str
    next: dict[str, int]


def _sweeps_path(base_url: str) -> Path:
    return _path(base_url).with_suffix(".sweeps.json")


def clear_on_host(pid: int) -> None:
    """Forget everything that was served on that host."""
    for running in _on_host(pid):
        clear_running(running.base_url)


def reshape_on_host(pid: int, link: LinkShape) -> None:
    """Update the recorded NICs of the two hosts after a change of their link, for later manifests."""
    for running in _on_host(pid):
        cluster = running.manifest.cluster
        if cluster is not None:
            nodes = tuple(
                node.model_copy(update={"nic": node.nic.model_copy(update={"gbit_per_s": link.gbit_per_s})})
                for node in cluster.nodes
            )
            manifest = running.manifest.model_copy(update={"cluster": cluster.model_copy(update={"nodes": nodes})})
            save_running(running.model_copy(update={"manifest": manifest}))


def _on_host(pid: int) -> list[Running]:
    return [running for running in _published() if running.on_host is not None and running.on_host.pid == pid]


def _published() -> list[Running]:
    records = []
    for path in (cache_dir() / "running").glob("*.yaml"):
        with contextlib.suppress(UsageError):  # damaged: an error for whoever needs it
            records.append(load_yaml(path, Running))
    return records


@contextlib.contextmanager
def reach(base_url: str) -> Iterator[None]:
    """Enter the network of ``base_url`` for the block, with this thread and the processes that it starts.

    It differs from the current network only for a deployment on two hosts of this machine. Raises UsageError if these
    are gone, or if this process may not enter.
    """
    running = load_running(base_url)
    host = None if running is None or INSIDE in os.environ else running.on_host
    with contextlib.ExitStack() as network:
        if host is not None:
            try:
                if not inherited(host.pid, host.mark):
                    raise FileNotFoundError
                network.enter_context(network_of(host.pid))
            except PermissionError as error:
                raise UsageError(
                    f"{base_url} is on one of two hosts of this machine, which requires root to enter: run it as root "
                    "(sudo)"
                ) from error
            except OSError as error:
                raise UsageError(f"the two hosts that {base_url} was on are gone; launch it again") from error
        yield


def _path(base_url: str) -> Path:
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if not host:
        raise StoreError(f"base URL {base_url!r}: expected http://HOST:PORT, an IPv6 address in brackets")
    # A client reaches what listens everywhere at the loopback address.
    host = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return cache_dir() / "running" / f"{host}_{port}.yaml"
