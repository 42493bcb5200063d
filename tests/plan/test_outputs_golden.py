"""Every output of plan.py, word for word, against a stored one.

PDLAB_UPDATE_GOLDEN=1 rewrites it; read the difference before keeping it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support import golden

from pdlab.cli import plan

pytestmark = pytest.mark.golden

STORED = Path(__file__).parent / "golden" / "outputs.txt"
PUBLISHED = "tests/data/published/demo_itl1000_otl100_mixed_1xtp2-1xtp2"
SLO = "--slo-ttft-ms 2000 --slo-tpot-ms 12"
COMMANDS = (
    f"--gpus 4 {SLO}",
    "--gpus 2 --slo-tpot-ms 12 --concurrency 4,8 --hardware h100-start --count-gpus used",
    f"--gpus 4 {SLO} --rate 2 --placement pack --assume-merged",
    "--gpus 2 --slo-tpot-ms 1 --prefix-hit-rate 0.5",
    "--explain pd-pack-p1xtp2-d1xtp2 --concurrency 8,32",
    f"--gpus 2 --fluid {SLO}",
    f"--compare {PUBLISHED} --model gpt-oss-120b",
)


def test_outputs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    texts = []
    for words in COMMANDS:
        assert plan.main(shlex.split(words)) == 0
        texts.append(f"$ python plan.py {words}\n{capsys.readouterr().out}")
    text = "\n".join(texts)
    golden.compare(text, STORED)
