"""What is being served right now: written by the launcher, read by the sweep; and its NIXL counters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from pydantic import Field

from pdlab.errors import StoreError, UsageError
from pdlab.namespaces import INSIDE, network_of
from pdlab.nodes import LinkShape
from pdlab.prometheus import read_pages, samples
from pdlab.results import Manifest, NixlCounters
from pdlab.spec import Frozen, load_yaml


class OnHost(Frozen):
    """A host made of namespaces: its PID 1, and a line of that process's environment that tells it from others."""

    pid: int
    mark: str


class Running(Frozen):
    """A deployment that answers at ``base_url``.

    ``manifest`` is the experiment's manifest as far as the launcher knows it (deployment, cluster,
    placement as it came out, versions, hardware, canary). ``tokenizer`` is a folder or a Hugging
    Face id. ``metrics_urls`` are Prometheus pages, one per Ray node; ``replicas`` are the Ray Serve
    replicas of this deployment, for a page goes on showing the counters of replicas that are gone;
    ``pools`` says which pool each is of: collocated, prefill, decode. ``on_host``: the host in whose
    network all these addresses are (None: this machine's own); see `reach`.
    """

    base_url: str
    model_id: str
    tokenizer: str
    manifest: Manifest
    metrics_urls: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    on_host: OnHost | None = None
    pools: dict[str, str] = Field(default_factory=dict)


def cache_dir() -> Path:
    """The user's cache folder of pdlab: $PDLAB_CACHE_DIR, or pdlab under $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("PDLAB_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdlab"


def save_running(running: Running) -> None:
    """Publish what is being served, for the sweep on this machine."""
    path = _path(running.base_url)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Defaults are written too: without its "kind" a topology inside the manifest cannot be read back.
    text = yaml.safe_dump(running.model_dump(mode="json"), sort_keys=False)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def load_running(base_url: str) -> Running | None:
    """What the launcher said of ``base_url``; None when no launcher on this machine spoke of it."""
    path = _path(base_url)
    return load_yaml(path, Running) if path.exists() else None


def clear_running(base_url: str) -> None:
    """Forget ``base_url``: it is no longer served."""
    _path(base_url).unlink(missing_ok=True)


def clear_on_host(pid: int) -> None:
    """Forget everything that was served on that host."""
    for running in _on_host(pid):
        clear_running(running.base_url)


def reshape_on_host(pid: int, link: LinkShape) -> None:
    """The link of the two hosts is another now: what is recorded of their NICs follows, for the manifests to come."""
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
    found = []
    for path in (cache_dir() / "running").glob("*.yaml"):
        with contextlib.suppress(UsageError):  # damaged: whoever needs it will say so
            running = load_yaml(path, Running)
            if running.on_host is not None and running.on_host.pid == pid:
                found.append(running)
    return found


@contextlib.contextmanager
def reach(base_url: str) -> Iterator[None]:
    """Within the block this thread, and what it starts, is in the network in which ``base_url`` answers.

    That is another one only for a deployment on two hosts of this machine. Raises UsageError where they
    are gone, or where this process may not enter.
    """
    running = load_running(base_url)
    host = None if running is None or INSIDE in os.environ else running.on_host
    with contextlib.ExitStack() as network:
        if host is not None:
            try:
                marks = Path(f"/proc/{host.pid}/environ").read_bytes().split(b"\0")
                if host.mark.encode() not in marks:
                    raise FileNotFoundError
                network.enter_context(network_of(host.pid))
            except PermissionError as error:
                raise UsageError(
                    f"{base_url} is on one of two hosts of this machine: it takes root to go there"
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
    # What listens everywhere is asked for at the loopback address.
    host = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return cache_dir() / "running" / f"{host}_{port}.yaml"


_FIELDS = {
    "nixl_bytes_transferred_sum": "bytes_transferred",
    "nixl_xfer_time_seconds_count": "transfers",
    "nixl_num_failed_transfers": "failed_transfers",
    "nixl_num_failed_notifications": "failed_notifications",
    "nixl_num_kv_expired_reqs": "kv_expired_requests",
}


def parse_counters(pages: Iterable[str], replicas: Collection[str] = ()) -> NixlCounters:
    """Sum vLLM's NIXL metrics over Prometheus pages, under vLLM's names or Ray's (``ray_vllm_...``).

    With ``replicas`` only samples of those Ray Serve replicas count.

    A counter that no page has is None, unless transfers are counted: vLLM creates its failure
    counters at the first failure, so beside counted transfers their absence is a true zero.
    """
    total: dict[str, float] = {}
    for sample in (sample for page in pages for sample in samples(page)):
        field = _FIELDS.get(sample.name)
        if field and (not replicas or sample.label("ReplicaId") in replicas):
            total[field] = total.get(field, 0.0) + sample.value
    if "transfers" in total:
        for field in ("failed_transfers", "failed_notifications", "kv_expired_requests"):
            total.setdefault(field, 0.0)
    return NixlCounters(**total)


def scrape_counters(metrics_urls: Iterable[str], replicas: Collection[str] = ()) -> NixlCounters:
    """Read the NIXL counters of a running deployment. Raises ClusterError when a page does not answer."""
    return parse_counters(read_pages(metrics_urls), replicas)
