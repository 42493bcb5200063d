"""The report of stored results against a stored report, without the parts that change with the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import golden

import pdlab
from pdlab.report import html
from pdlab.report.build import build_report
from pdlab.report.load import load

pytestmark = pytest.mark.golden


ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "tests" / "data" / "published"
GOLDEN = Path(__file__).parent / "golden" / "three.html"
FOLDERS = [
    "demo_itl1000_otl100_mixed_baseline_2xtp2",
    "demo_itl1000_otl100_mixed_1xtp2-1xtp2",
    "demo_itl1000_otl100_mixed_1xtp4-1xtp4-spread-ucx120",
]


def test_report() -> None:
    report = build_report(load(*(PUBLISHED / name for name in FOLDERS)))
    command = "python viz.py --exps ... --report out/report.html"
    text = normalised(html.render(report, command))
    golden.compare(text, GOLDEN)


def normalised(text: str) -> str:
    """Without style and script, which the browser tests are about, and the version."""
    assert f"Made by pdlab {pdlab.__version__}." in text
    text = text.replace(f"Made by pdlab {pdlab.__version__}.", "Made by pdlab VERSION.")
    text = re.sub(r"<style>.*?</style>", "<style>STYLE</style>", text, flags=re.DOTALL)
    text = re.sub(r"<script>.*?</script>", "<script>SCRIPT</script>", text, flags=re.DOTALL)
    text, count = re.subn(r"'sha256-[^']+'", "'sha256-SCRIPT'", text)
    assert count == 1
    # One curve, level, axis and column a line: a difference is seen where it is.
    return re.sub(r',({"(?:label|series|main)"|"[a-z_0-9]+\.[a-z0-9]+":)', r",\n\1", text)
