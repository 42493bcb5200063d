"""A soak from its command line, against a server that gets slower with every request."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sweep import Oracle, publish, run_bm

from pdlab.core.deployment import Deployment, parse_label
from pdlab.results.schema import Run

pytestmark = pytest.mark.usefixtures("warm_client")


@pytest.mark.parametrize("load", [("-r", "20"), ("-c", "2")], ids=["open", "closed"])
def test_a_server_that_gets_slower_is_seen_to(
    load: tuple[str, str], oracle: Oracle, tokenizer: Path, tmp_path: Path
) -> None:
    publish(tmp_path, oracle, tokenizer, Deployment(model="tiny-gptoss", topology=parse_label("collocated-1xtp1")))
    oracle.configure({"": {"ttft_s": 0.01, "tpot_s": 0.004, "pool_blocks": 100}})
    kind = "rate20" if load[0] == "-r" else "concurrency2"
    oracle.configure({kind: {"ttft_s": 0.01, "tpot_s": 0.004, "drift": 0.01}})
    done = run_bm(
        *("-u", oracle.url, *load, "--itl", "16", "--otl", "11", "--soak", "0.15", "--out", str(tmp_path / "bm")),
        cache=tmp_path,
    )
    assert done.returncode in (0, 3), done.stderr  # 3: a closed loop that gets slower is in no steady state
    assert "KV pools: not filled first, for a soak shows what changes while they fill" in done.stderr
    found = Run.model_validate_json((tmp_path / "bm" / "collocated-1xtp1" / f"{kind}.json").read_text())
    assert found.soak and found.soak.asked_s == pytest.approx(9) and found.pool_age is not None and found.pool_age < 1
    assert found.num_requests >= 60
    tpot = found.soak.changes["tpot"]
    assert tpot.verdict == "longer" and tpot.low and tpot.low > 1.1
    assert f"{kind} over 1 minutes: TTFT " in done.stdout and "TPOT longer in the last third: +" in done.stdout
