"""KV pools are filled before anything is judged: as far as needed, where it costs little, with prompts of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.sweep import Oracle, ended_well, publish, run_bm

from pdlab.bench.fill import MOST_PARTS, FillCache, fill, planned
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.workload import Workload

WORKLOAD = Workload(input_tokens=901, output_tokens=100)  # prompts of 1,000 tokens


class Pools:
    """Engines of one role with so many tokens missing in each; ``shares`` of the requests go to each."""

    def __init__(self, missing: list[float], pace_rps: float | None = 100.0, local: bool = False) -> None:
        self.missing = missing
        self.pace_rps = pace_rps
        self.local = local
        self.shares = [1 / len(missing)] * len(missing)
        self.sent: list[int] = []
        self.seeds: list[int] = []

    @property
    def to_fill(self) -> float | None:
        return max(0.0, max(self.missing)) * len(self.missing)

    @property
    def engines(self) -> int:
        return len(self.missing)

    def fill(self, requests: int, seed: int, concurrency: int) -> float | None:
        self.sent.append(requests)
        self.seeds.append(seed)
        self.missing = [left - 1000 * requests * share for left, share in zip(self.missing, self.shares, strict=True)]
        return self.pace_rps


class Unknown(Pools):
    @property
    def to_fill(self) -> float | None:
        return None


def test_every_pool_is_filled_with_prompts_of_several_seeds() -> None:
    pools, lines = Pools([1e6, 0.9e6]), []
    assert fill(pools, WORKLOAD, "auto", 0, lines.append).startswith("filled once")
    assert max(pools.missing) <= 0
    assert sum(pools.sent) == pytest.approx(2000, rel=0.06), "no more than needed, and what is spare"
    assert len(set(pools.seeds)) == len(pools.seeds)
    assert lines == ["filling KV pools takes about 21 s, 2084 prompts of 1000 tokens"]
    other = Pools([1e6, 0.9e6])
    fill(other, WORKLOAD, "auto", 1)
    assert not {*other.seeds} & {*pools.seeds}, "another sweep of the same start has other prompts"


@pytest.mark.parametrize(
    ("mode", "pools", "parts", "words"),
    [
        ("no", Pools([1e6]), 0, "not filled (--fill-cache no)"),
        ("auto", Unknown([1e6]), 0, "do not report the size of the pools"),
        ("auto", Pools([-1.0, 0.0]), 0, "filled before"),
        ("auto", Pools([1e6], local=True), 0, "not filled on CPUs of this machine"),
        ("yes", Pools([1e6], local=True), 2, "filled once"),
        ("auto", Pools([1e6], pace_rps=5.0), 1, "that takes about 3 minutes, 1034 prompts of 1000 tokens"),
        ("yes", Pools([1e6], pace_rps=5.0), 2, "filled once"),
        ("auto", Pools([1e6], pace_rps=None), 1, "prompts that fill them failed"),
        ("auto", Pools([1e3]), 1, "filled once"),
    ],
)
def test_what_is_done_and_why(mode: FillCache, pools: Pools, parts: int, words: str) -> None:
    assert words in fill(pools, WORKLOAD, mode, 0)
    assert len(pools.sent) == parts


def test_uneven_routing_is_made_up_for_and_an_engine_without_requests_ends_it() -> None:
    uneven = Pools([1e6, 1e6])
    uneven.shares = [0.7, 0.3]
    assert fill(uneven, WORKLOAD, "yes", 0).startswith("filled once") and max(uneven.missing) <= 0
    starved = Pools([1e6, 1e6])
    starved.shares = [1.0, 0.0]
    assert "not all filled" in fill(starved, WORKLOAD, "yes", 0)
    assert len(starved.sent) == MOST_PARTS


def test_required_and_unknown_is_refused() -> None:
    with pytest.raises(UsageError, match="--fill-cache yes: the engines' metrics do not report"):
        fill(Unknown([1.0]), WORKLOAD, "yes", 0)


def test_a_plan_has_the_same_words() -> None:
    assert planned("auto", WORKLOAD, local=True).startswith("not filled on CPUs")
    assert "at most 3 minutes" in planned("auto", WORKLOAD)
    assert "however long" in planned("yes", WORKLOAD, local=True)
    assert planned("yes", WORKLOAD, smoke=True).startswith("not filled: a smoke test")


@pytest.mark.usefixtures("warm_client")
def test_a_sweep_fills_and_its_levels_record_how_old_the_pools_were(
    oracle: Oracle, tokenizer: Path, tmp_path: Path
) -> None:
    publish(tmp_path, oracle, tokenizer, Deployment(model="tiny-gptoss", topology=parse_label("collocated-1xtp1")))
    oracle.configure({"": {"ttft_s": 0.005, "tpot_s": 0.001, "pool_blocks": 100}})  # 1,600 tokens

    def sweep(name: str, *more: str) -> tuple[str, dict[str, object]]:
        done = run_bm(
            *("-u", oracle.url, "-c", "2", "--itl", "16", "--otl", "4", "--prompts-per-level", "20", "-e", name),
            *("--out", str(tmp_path / "bm"), *more),
            cache=tmp_path,
        )
        assert ended_well(done.returncode, done.stdout), done.stderr + done.stdout
        return done.stdout + done.stderr, json.loads((tmp_path / "bm" / name / "concurrency2.json").read_text())

    text, fresh = sweep("fresh", "--fill-cache", "no")
    assert fresh["pool_age"] == pytest.approx((8 * 20 + 3) / 1600), "of the warm-up, and of a completion before it"
    assert "on fresh KV pools (given fewer tokens than they hold when the level began): all levels" in text
    text, aged = sweep("aged")
    assert "KV pools: filled once" in text and "on fresh KV pools" not in text
    assert 1 <= float(str(aged["pool_age"])) < 1.5
    prompts = [entry["prompt"] for entry in oracle.log()]
    assert len(set(prompts)) == len(prompts), "none can be found in the prefix cache"
    filling = oracle.log_of("fill")
    assert {(len(entry["prompt"].split()), entry["body"]["max_tokens"]) for entry in filling} == {(19, 1)}
    text, _ = sweep("again")
    assert "KV pools: filled before" in text and len(oracle.log_of("fill")) == len(filling)
