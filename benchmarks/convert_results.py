"""Rewrite result folders of 0.1.0 and before in the form that pdlab reads.

    python benchmarks/convert_results.py bm_results/NAME/LABEL [...]

Requests and figures stay as they are. What changes:

- A level kept the sentences of its failed gates. It gets their findings, with the code whose sentence begins alike. The
  numbers in a sentence are not read back.
- Keys have new names: ``asked`` of a request, ``asked_tokens`` and ``asked_s`` of a level, ``told`` of a timeline
  (`RENAMED`).
- A manifest that does not mention a KV guard is of a deployment that had none. The variables of UCX move from the
  transport to the deployment's ``env``.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.core.files import replace  # noqa: E402
from pdlab.core.findings import CODES, Finding  # noqa: E402
from pdlab.core.schema import Frozen  # noqa: E402
from pdlab.results.schema import Manifest, RequestRecord, Run  # noqa: E402
from pdlab.results.store import MANIFEST, Store  # noqa: E402
from pdlab.results.timeline import RENAMED_MARKS, RequestTimeline  # noqa: E402

RENAMED = {"asked": "requested", "asked_tokens": "requested_tokens", "asked_s": "requested_s", **RENAMED_MARKS}


def classified(reason: str, gates: list[str]) -> Finding:
    """The finding of one of those gates whose sentence begins like ``reason``. Raises ValueError without one."""
    begins = {code: row.template.partition("{")[0] for code, row in CODES.items() if row.gate in gates}
    fitting = [code for code, text in begins.items() if text and reason.startswith(text)]
    if not fitting:
        raise ValueError(f"no code of {', '.join(gates) or 'any gate'} has a sentence like {reason!r}")
    code = max(fitting, key=lambda code: len(begins[code]))
    return Finding(code=code, gate=CODES[code].gate, what=reason)


def renamed(data: Any) -> Any:
    """The same JSON with the keys of today, at every depth."""
    if isinstance(data, list):
        return [renamed(each) for each in data]
    if isinstance(data, dict):
        return {RENAMED.get(key, key): renamed(value) for key, value in data.items()}
    return data


def converted(data: dict[str, Any]) -> Frozen:
    """The content of a level's or a manifest's file as it is read today. Raises ValueError."""
    data = renamed(data)
    if "key" in data:
        validity = data["validity"]
        if "findings" not in validity:
            found = [classified(reason, validity["failed_gates"]) for reason in validity["reasons"]]
            data = {**data, "validity": {**validity, "findings": [finding.model_dump() for finding in found]}}
        return Run.model_validate(data)
    deployment = data.get("deployment") or {}
    transport = deployment.get("topology", {}).get("transport")
    if transport is not None:
        transport.setdefault("kv_guard", False)
        deployment["env"] = {**transport.pop("ucx_env", {}), **deployment.get("env", {})}
    return Manifest.model_validate(data)


def main(folders: list[str]) -> int:
    for folder in map(Path, folders):
        store = Store(folder)
        for path in sorted(folder.glob("*.json")):
            data = json.loads(path.read_bytes())
            if "key" not in data and path.name != MANIFEST:
                replace(path, json.dumps(renamed(data), indent=2).encode())
                print(path)
                continue
            read = converted(data)
            if isinstance(read, Run) and store.records_path(read.key).exists():
                with gzip.open(store.records_path(read.key)) as lines:
                    requests = [RequestRecord.model_validate(renamed(json.loads(line))) for line in lines]
                timelines: list[RequestTimeline] = []
                if (kept := store.timelines_path(read.key)).exists():
                    with gzip.open(kept) as lines:
                        timelines = [RequestTimeline.model_validate(renamed(json.loads(line))) for line in lines]
                store.write(read, requests, timelines, force=True)
            else:
                replace(path, read.model_dump_json(indent=2).encode())
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
