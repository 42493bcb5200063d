"""pdlab: does prefill/decode disaggregation pay, with which P:D ratio, TP degrees and placement?

In a program or a notebook: ``results = pdlab.load("bm_results/NAME")``, ``results.levels()``,
``report = pdlab.build_report(results)``, ``print(pdlab.render_text(report))``, ``pdlab.draw(report, "plot.png")``,
``pdlab.write_html(report, "report.html")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdlab.core.version import __version__

if TYPE_CHECKING:
    from pdlab.analysis.view import View
    from pdlab.report.build import Report, build_report
    from pdlab.report.html import write_html
    from pdlab.report.load import Results, load
    from pdlab.report.pictures import draw
    from pdlab.report.text import render_text

__all__ = [
    "Report",
    "Results",
    "View",
    "__version__",
    "build_report",
    "draw",
    "load",
    "render_text",
    "write_html",
]

# Imported when it is first used: numpy and matplotlib take longer than most commands.
_HOMES = {
    "Report": "pdlab.report.build",
    "Results": "pdlab.report.load",
    "View": "pdlab.analysis.view",
    "build_report": "pdlab.report.build",
    "draw": "pdlab.report.pictures",
    "load": "pdlab.report.load",
    "render_text": "pdlab.report.text",
    "write_html": "pdlab.report.html",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pdlab' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
