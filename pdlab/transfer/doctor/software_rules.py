"""Rules of the doctor: packages and libraries, and whether they load. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pdlab.core.commands import INSTALL_WHEEL
from pdlab.transfer.doctor.fabric_rules import fabric_of
from pdlab.transfer.doctor.findings import FABRIC, DoctorFinding, Facts, Rule


def _versions(facts: Facts) -> Iterator[DoctorFinding]:
    names = sorted({name for fact in facts.values() for name in fact.get("versions", {})})
    for name in names:
        by_node = {node: fact["versions"].get(name) for node, fact in facts.items() if "versions" in fact}
        if len(set(by_node.values())) > 1:
            version_list = ", ".join(f"{node} {version or 'none'}" for node, version in by_node.items())
            yield DoctorFinding(
                "error" if name in ("vllm", "nixl") else "warning",
                "package_version",
                tuple(by_node),
                version_list,
                "the NIXL handshake compares hashes of vLLM and connector: transfers are refused"
                if name in ("vllm", "nixl")
                else "nodes behave differently",
                f"install the same {name} on every node (requirements.txt)",
                name=name,
            )
        elif name in ("vllm", "nixl") and set(by_node.values()) == {None}:
            yield DoctorFinding(
                "error",
                "package_version",
                tuple(by_node),
                f"{name} is not installed for the Python that Ray runs",
                "no engine starts" if name == "vllm" else "no KV transfer is possible",
                "make setup-gpu on the node, in the environment of `ray start`",
                name=name,
            )


def _ucx_versions(facts: Facts) -> Iterator[DoctorFinding]:
    ucx_versions = {
        node: fact["loaded"].get("ucx") for node, fact in facts.items() if fact.get("loaded", {}).get("ucx")
    }
    if len(set(ucx_versions.values())) > 1:
        version_list = ", ".join(f"{node} {version}" for node, version in ucx_versions.items())
        yield DoctorFinding(
            "error",
            "ucx_version",
            tuple(ucx_versions),
            version_list,
            "UCX of different versions may choose different protocols, or fail to connect",
            f"use the same UCX on every node: unset LD_LIBRARY_PATH, or {INSTALL_WHEEL}",
        )
    for node, version in ucx_versions.items():
        old = tuple(int(number) for number in version.split(".")[:2]) < (1, 20)
        fabric = fabric_of(facts[node])
        if old and fabric and fabric.wire == "efa":
            yield DoctorFinding(
                "error",
                "ucx_version",
                (node,),
                f"UCX {version} with EFA devices",
                "SRD without zero-copy get: every read is emulated in software",
                "UCX 1.20 or later: debug/build_nixl_ucx_efa.sh",
                ("efa",),
            )


def _system_ucx(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        loaded = [path for path in fact.get("loaded", {}).get("libraries", ()) if "libucp" in path]
        outside = [path for path in loaded if "nixl_cu" not in path]
        if outside and len(loaded) > 1:
            yield DoctorFinding(
                "error",
                "ucx_twice",
                (node,),
                ", ".join(loaded),
                "two copies of UCX in one process crash, or settings reach only one of them",
                "unset LD_LIBRARY_PATH and LD_PRELOAD, or use a NIXL built against the system's UCX",
            )
        elif outside:
            yield DoctorFinding(
                "note",
                "ucx_of_the_system",
                (node,),
                outside[0],
                "NIXL runs on this UCX instead of the one in its wheel",
                "none if you built it (debug/build_nixl_ucx_efa.sh) and every node has it",
            )


def _duplicates(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        libraries = fact.get("loaded", {}).get("libraries", ())
        by_name: dict[str, set[str]] = {}
        for path in libraries:
            match = re.match(r"(lib(?:ibverbs|efa|nl-3|nl-route-3|rdmacm))", Path(path).name)
            if match:
                by_name.setdefault(match[1], set()).add(path)
        for name, paths in by_name.items():
            if len(paths) > 1:
                yield DoctorFinding(
                    "error",
                    "library_twice",
                    (node,),
                    ", ".join(sorted(paths)),
                    "two copies keep two lists of devices: UCX sees none, falls back to TCP and logs nothing",
                    "build NIXL and UCX against the system's rdma-core (debug/build_nixl_ucx_efa.sh)",
                    FABRIC,
                    name=name,
                )


def hashes(facts: Facts) -> dict[str, dict[str, str]]:
    """Library -> node -> hash of the file that NIXL loads there, for nodes that load it."""
    digests: dict[str, dict[str, str]] = {}
    for node, fact in facts.items():
        for path, digest in ((fact.get("loaded") or {}).get("digests") or {}).items():
            # libucp-bcc5ee2e.so.0.0.0: in a wheel the name has a hash
            digests.setdefault(re.split(r"(?:-[0-9a-f]{8})?\.so", Path(path).name)[0], {})[node] = digest
    return digests


def loads_alike(facts: Facts) -> str | None:
    """None if every node loads the same libraries and every backend; else the first difference, with its node."""
    for node, fact in facts.items():
        loaded = fact.get("loaded") or {"error": "no answer"}
        failed = [f"{name}: {why}" for name, why in loaded.get("backends", {}).items() if why]
        if loaded.get("error") or failed:
            return f"{node}: {loaded.get('error') or failed[0]}"
    for library, nodes in hashes(facts).items():
        if len(set(nodes.values())) > 1 or len(nodes) < len(facts):
            return f"{library}: " + ", ".join(f"{node} {nodes.get(node, 'does not load it')}" for node in facts)
    return None


def _builds(facts: Facts) -> Iterator[DoctorFinding]:
    """Compares hashes, because two builds of one version may differ."""
    differing = {library: nodes for library, nodes in hashes(facts).items() if len(set(nodes.values())) > 1}
    if differing:
        library, nodes = next(iter(differing.items()))
        yield DoctorFinding(
            "warning",
            "builds_differ",
            tuple(dict.fromkeys(node for nodes in differing.values() for node in nodes)),
            f"{', '.join(differing)}; hashes of {library}: "
            + ", ".join(f"{n} {digest}" for n, digest in nodes.items()),
            "different builds may choose different protocols, or find different devices",
            f"install the same wheel on every node: {INSTALL_WHEEL}",
        )


def _backends(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        loaded = fact.get("loaded")
        if not loaded:
            continue
        if loaded.get("error"):
            yield DoctorFinding(
                "error",
                "nixl_does_not_load",
                (node,),
                loaded["error"],
                "no KV transfer is possible",
                "reinstall nixl for this Python (requirements.txt); see the log in --json",
            )
        for name, why in loaded.get("backends", {}).items():
            if why:
                yield DoctorFinding(
                    "error",
                    "nixl_backend",
                    (node,),
                    why,
                    "the backend does not load: a deployment that uses it fails",
                    "use another --kv-backend, or install the libraries that the plugin needs (docs/debugging.md)",
                    name=name,
                )


def _shadowed(facts: Facts) -> Iterator[DoctorFinding]:
    for name in ("vllm", "nixl"):
        module_paths = {node: fact.get("modules", {}).get(name) for node, fact in facts.items()}
        for node, path in module_paths.items():
            if path and "site-packages" not in path and "dist-packages" not in path:
                yield DoctorFinding(
                    "warning",
                    "library_from_elsewhere",
                    (node,),
                    path,
                    "the imported package is not the installed one: the versions above may not be those that run",
                    "check PYTHONPATH and the working directory of `ray start`",
                    name=name,
                )


RULES: tuple[Rule, ...] = (
    _versions,
    _ucx_versions,
    _system_ucx,
    _duplicates,
    _builds,
    _backends,
    _shadowed,
)
