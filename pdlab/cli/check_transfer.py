#!/usr/bin/env python3
"""Check the KV transfer between prefill and decode: integrity, bandwidth and wire. See readme_nixl_ray.md."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdlab.core import defaults
from pdlab.core.errors import ClusterError, PdlabError, TransferError, WriteError
from pdlab.core.exit_code import exit_code
from pdlab.core.files import write_output
from pdlab.core.output_paths import check_picture, check_writable
from pdlab.core.settings import parse
from pdlab.transfer.options import CheckTransferSettings, kv_shape, plan_from

if TYPE_CHECKING:
    from pdlab.transfer.ray_ranks import BackendOutcome


def main(argv: Sequence[str] | None = None) -> int:
    def run() -> int:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        except TransferError as error:
            print(f"CANNOT RUN: {error.kind}: {error}", file=sys.stderr)
            return error.exit_code

    return exit_code(run, dict.fromkeys((PdlabError, ClusterError, WriteError), TransferError.exit_code))


def _run(argv: list[str]) -> int:
    settings = parse(CheckTransferSettings, argv)
    plan = plan_from(settings)
    if settings.json_file is not None:
        check_writable(settings.json_file, "--json")
    if settings.plot is not None:
        check_picture(settings.plot, "--plot")

    from pdlab.core.catalog import load_model
    from pdlab.results.provenance import hardware, now, versions
    from pdlab.transfer import ray_ranks, report
    from pdlab.transfer.check import worst_code

    predicted = load_model(defaults.MODEL)
    assert predicted is not None
    model = kv_shape(predicted)
    command_s = time.process_time()  # the imports until here; they wait only for the CPU
    outcomes = ray_ranks.check(plan, settings.local, lambda text: print(text, file=sys.stderr, flush=True), command_s)
    runs = []
    for outcome in outcomes:
        if outcome.result is None:
            assert outcome.error is not None
            print(report.render_error(outcome.backend, outcome.error))
            runs.append(report.error_json(outcome.backend, outcome.error))
        else:
            print(report.render(plan, outcome.result, model, verbose=settings.verbose))
            runs.append(report.result_json(plan, outcome.result, model) | {"exit_code": outcome.code})
    code = worst_code([outcome.code for outcome in outcomes])
    if settings.json_file:
        facts = {"versions": versions(), "hardware": hardware(), "command": argv, "time": now()}
        text = json.dumps(report.as_json(plan, runs, facts) | {"exit_code": code}, indent=1)
        write_output(settings.json_file, text + "\n", "--json")
    if settings.plot:
        _plot(plan, outcomes, settings.plot)
    return code


def _plot(plan, outcomes: Sequence[BackendOutcome], path: Path) -> None:  # type: ignore[no-untyped-def]
    from pdlab.report import paper, transfer_plot

    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    if results:
        paper.draw(transfer_plot.figure(plan, results), path)
