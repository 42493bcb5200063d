"""Find obstacles to a fast and correct KV transfer in facts of nodes (`pdlab.remote.node`). Pure.

Every finding has its evidence, impact and fix. ``error``: a PD deployment fails, or transfers are wrong or many times
too slow. ``warning``: it is slower, or fails under some conditions. ``note``: information. A rule without its facts
finds nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from pdlab.core.findings import Severity
from pdlab.core.text import counted
from pdlab.transfer.doctor import engine_rules, fabric_rules, settings_rules, software_rules
from pdlab.transfer.doctor.fabric_rules import fabric_of, fabric_text
from pdlab.transfer.doctor.findings import SPANNING, Concern, DoctorFinding, Facts, Rule

ORDER: tuple[Severity, ...] = ("error", "warning", "note")
RULES = (*engine_rules.RULES, *fabric_rules.RULES, *software_rules.RULES, *settings_rules.RULES)


def diagnose(
    facts: Facts,
    *,
    query_clock: settings_rules.QueryClock | None = None,
    rules: Sequence[Rule] = RULES,
    concerns: Collection[Concern] | None = None,
) -> list[DoctorFinding]:
    """All findings, worst first. With ``query_clock`` also those of clocks that differ.

    ``concerns``: of the deployment. Findings that matter only to other deployments are left out (None: nothing is left
    out).
    """
    findings = [finding for rule in rules for finding in rule(facts)]
    if query_clock is not None:
        findings += settings_rules.clocks(facts, query_clock)
    if concerns is not None:
        findings = [each for each in findings if not each.concerns or set(each.concerns) & set(concerns)]
    return sorted(_joined(findings), key=lambda finding: (ORDER.index(finding.severity), finding.topic))


def concerns_of(facts: Facts, placement: Literal["pack", "spread"]) -> frozenset[Concern]:
    """Concerns of PD deployments with that placement: the wire that all nodes have, and for a spread engines over
    several nodes. If some nodes have GPUs, only these have engines."""
    on_gpus = [fact for fact in facts.values() if fact.get("gpus")]
    if placement == "pack":
        return frozenset({"gpu peer" if on_gpus else "shared memory"})
    fabrics = [fabric_of(fact) for fact in on_gpus or facts.values()]
    wires: set[Concern] = {fabric.wire if fabric else "tcp" for fabric in fabrics}
    return frozenset({wires.pop() if len(wires) == 1 else "tcp", SPANNING})


def _joined(findings: Sequence[DoctorFinding]) -> list[DoctorFinding]:
    """Merge equal findings of several nodes."""
    merged: dict[tuple[str, ...], DoctorFinding] = {}
    for finding in findings:
        key = (finding.severity, finding.topic, finding.evidence, finding.consequence, finding.fix)
        known = merged.get(key)
        merged[key] = replace(finding, nodes=(*known.nodes, *finding.nodes)) if known else finding
    return list(merged.values())


def render(facts: Facts, findings: Sequence[DoctorFinding]) -> str:
    """Text: nodes, findings with impact and fix, a one-line summary."""
    lines = []
    for node, fact in facts.items():
        versions = ", ".join(f"{name} {version or '-'}" for name, version in fact.get("versions", {}).items())
        loaded = fact.get("loaded") or {}
        ucx = f", UCX {loaded['ucx']} ({_library_origin(loaded['libraries'])})" if loaded.get("ucx") else ""
        lines.append(
            f"{node}  {fact.get('host')}: {versions}{ucx}; {counted(fact.get('gpus', 0), 'GPU')}, {fabric_text(fact)}"
        )
        works = [name for name, why in loaded.get("backends", {}).items() if why is None]
        if loaded:
            lines.append(f"  NIXL backends that load: {', '.join(works) or 'none'}")
        if loaded.get("transports") is not None:
            lines.append(f"  UCX finds: {', '.join(_by_device(loaded['transports'])) or 'nothing'}")
    for finding in findings:
        where = ", ".join(finding.nodes) if len(finding.nodes) < len(facts) or len(facts) == 1 else "every node"
        lines += ["", f"{finding.severity.upper()}  {finding.topic}  [{where}]", f"  evidence: {finding.evidence}"]
        lines += [f"  impact:   {finding.consequence}", f"  fix:      {finding.fix}"]
        if finding.concerns:
            lines.append(f"  matters:  to deployments with {' or '.join(finding.concerns)}")
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Sequence[DoctorFinding]) -> str:
    """One line with the number of findings by severity."""
    counts = [(severity, sum(f.severity == severity for f in findings)) for severity in ORDER]
    count_texts = ", ".join(counted(number, severity) for severity, number in counts if number)
    return f"doctor: {count_texts or 'no findings'}"


def as_json(facts: Facts, findings: Sequence[DoctorFinding]) -> dict[str, Any]:
    """All facts and findings, for scripts."""
    return {"nodes": dict(facts), "findings": [{**asdict(finding), "topic": finding.topic} for finding in findings]}


def _by_device(transports: Sequence[str]) -> list[str]:
    """UCX's transports as ``rc_mlx5 on 8 devices``, or the name if there is one device."""
    devices: dict[str, int] = {}
    for name in transports:
        transport = name.split("/")[0]
        devices[transport] = devices.get(transport, 0) + 1
    return [name if count == 1 else f"{name} on {counted(count, 'device')}" for name, count in devices.items()]


def _library_origin(libraries: Sequence[str]) -> str:
    paths = [path for path in libraries if "libucp" in path]
    return "bundled with nixl" if paths and "nixl_cu" in paths[0] else paths[0] if paths else "?"
