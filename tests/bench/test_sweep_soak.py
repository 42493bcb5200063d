"""A soak from its command line, against a server that gets slower with every request."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sweep import BUSY_MACHINE, Oracle, publish, run_bm

from pdlab.bench.client.processes import LoadClient
from pdlab.bench.sweep import SweepOptions, run_sweep
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.workload import Closed, Load, Open, Workload
from pdlab.results.schema import Run

pytestmark = pytest.mark.usefixtures("warm_client")


@pytest.mark.parametrize(
    "load", [("-r", "20"), pytest.param(("-c", "2"), marks=pytest.mark.long)], ids=["open", "closed"]
)
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
    assert "KV pools: not filled first, because a soak shows the changes while they fill" in done.stderr
    run = Run.model_validate_json((tmp_path / "bm" / "collocated-1xtp1" / f"{kind}.json").read_text())
    assert run.soak and run.soak.requested_s == pytest.approx(9) and run.pool_age is not None and run.pool_age < 1
    assert run.num_requests >= 60
    tpot = run.soak.changes["tpot"]
    assert tpot.verdict == "longer" and tpot.low and tpot.low > 1.1
    assert f"{kind} over 1 minute: TTFT " in done.stdout and "TPOT longer in the last third: +" in done.stdout


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    "load", [Closed(concurrency=5), pytest.param(Open(rate_rps=25), marks=pytest.mark.long)], ids=["closed", "open"]
)
def test_several_load_generators_fill_and_soak_as_one_does(
    load: Load, oracle: Oracle, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path))
    publish(tmp_path, oracle, tokenizer, Deployment(model="tiny-gptoss", topology=parse_label("collocated-1xtp1")))
    oracle.configure({"": {"ttft_s": 0.02, "tpot_s": 0.01, "pool_blocks": 100}})  # 1,600 tokens
    done = run_sweep(
        SweepOptions(
            loads=(load,), workload=Workload(input_tokens=16, output_tokens=8), base_url=oracle.url, hold_s=8.0,
            soak_s=8.0, fill_cache="yes", out=tmp_path / "bm",
        ),
        client=LoadClient(processes=2),
    )  # fmt: skip
    (run,) = done.runs
    assert set(run.validity.failed_gates) <= BUSY_MACHINE, run.validity.reasons
    assert run.client and run.client.processes == 2 and run.pool_age is not None and run.pool_age >= 1
    assert run.soak and sum(window.requests for window in run.soak.windows) == run.completed == run.num_requests
    assert set(run.soak.changes) == {"ttft", "tpot"}
    served = [entry for entry in oracle.log() if not entry["id"].startswith("warm-up")]
    prompts = [entry["prompt"] for entry in served]
    assert len(set(prompts)) == len(prompts), "none can be found in the prefix cache, whoever sent it"
    assert sum(entry["id"].startswith("fill") for entry in served) >= (1600 - 8 * 24) / 23, "the warm-up had the rest"
    moments = sorted((t, step) for e in served for t, step in ((e["arrived"], 1), (e["sent"][-1], -1)))
    most = 0
    for _, step in moments:
        most += step
        assert isinstance(load, Open) or most <= 8, "places are shared out, not doubled"
