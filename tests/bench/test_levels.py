"""Levels: what the flags mean, how many requests, and seeds that never meet."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pdlab.bench import levels, options
from pdlab.bench.client import protocol
from pdlab.bench.client.protocol import ClientLevel
from pdlab.cli import bench
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.lengths import parse_lengths, read_pairs
from pdlab.core.workload import Closed, Load, Open, RunKey, Workload

WORKLOAD = Workload(input_tokens=512, output_tokens=64)


def test_all_is_the_published_list() -> None:
    assert options.parse_concurrencies("all") == (4, 8, 16, 32, 48, 64)
    assert options.parse_rates("all") == (1, 2, 4, 8, 12, 16)


def test_lists_keep_their_order() -> None:
    assert options.parse_concurrencies("64, 4,8") == (64, 4, 8)
    assert options.parse_rates("2.5,1") == (2.5, 1.0)


@pytest.mark.parametrize("text", ["", ",", "4,,8", "a", "1e3", "4;8", "٣", "-1", "0", "100001", "4,4"])
def test_bad_concurrencies(text: str) -> None:
    with pytest.raises(UsageError, match="--concurrency"):
        options.parse_concurrencies(text)


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "inf", "nan", "1,1.0", "1,,2"])
def test_bad_rates(text: str) -> None:
    with pytest.raises(UsageError, match="--request-rate"):
        options.parse_rates(text)


@pytest.mark.parametrize(
    ("load", "smoke", "expected"),
    [
        (Closed(concurrency=1), False, 20),
        (Closed(concurrency=4), False, 40),
        (Closed(concurrency=64), False, 640),
        (Open(rate_rps=0.1), False, 20),
        (Open(rate_rps=2.5), False, 150),
        (Closed(concurrency=2), True, 8),
        (Closed(concurrency=16), True, 32),
        (Open(rate_rps=4), True, 40),
    ],
)
def test_number_of_requests(load: Load, smoke: bool, expected: int) -> None:
    assert levels.num_requests(load, Workload(), smoke=smoke) == expected


def test_a_rate_is_held_for_a_time_and_ten_times_e2el() -> None:
    assert levels.num_requests(Open(rate_rps=2), Workload(), hold_s=600) == 1200
    assert levels.num_requests(Open(rate_rps=2), Workload(), e2el_s=5.9) == 120
    assert levels.num_requests(Open(rate_rps=2), Workload(), e2el_s=20) == 400
    assert levels.num_requests(Closed(concurrency=4), Workload(), hold_s=600, e2el_s=20) == 40
    (level,) = levels.sweep_levels(WORKLOAD, [Open(rate_rps=10)], hold_s=5)
    assert level.num_requests == 50


def test_repeats_go_around() -> None:
    sweep = levels.sweep_levels(WORKLOAD, [Closed(concurrency=4), Closed(concurrency=8)], repeats=2)
    assert [level.key.stem for level in sweep] == [
        "concurrency4", "concurrency8", "concurrency4-r1", "concurrency8-r1",
    ]  # fmt: skip


def test_smoke_is_one_short_level() -> None:
    (level,) = levels.sweep_levels(WORKLOAD, [Closed(concurrency=4), Closed(concurrency=8)], repeats=3, smoke=True)
    assert level.key.stem == "concurrency4" and level.num_requests == 8


def test_prompts_per_level_wins() -> None:
    (level,) = levels.sweep_levels(WORKLOAD, [Closed(concurrency=4)], prompts_per_level=7)
    assert level.num_requests == 7


def test_no_level_is_refused() -> None:
    with pytest.raises(UsageError, match="no load level given"):
        levels.sweep_levels(WORKLOAD, [])


def test_seeds_never_meet() -> None:
    seeds = []
    workloads = [
        Workload(input_tokens=isl, output_tokens=osl, mode=mode, seed=seed)
        for isl, osl, seed in product((512, 5000), (64, 250), range(3))
        for mode in ("mixed", "prefill-only", "decode-only")
    ] + [Workload(lengths=parse_lengths(text)) for text in ("uniform:0.8-1.0", "uniform:0.5-1.0", "lognormal:0.5")]
    for workload, attempt, smoke in product(workloads, range(3), (False, True)):
        seeds.append(levels.warmup_seed(workload, smoke=smoke, attempt=attempt))
        for value, repeat in product((4, 8, 64), range(3)):
            key = RunKey(kind="concurrency", value=value, repeat=repeat)
            seeds.append(levels.level_seed(workload, key, smoke=smoke, attempt=attempt))
        seeds.append(levels.level_seed(workload, RunKey(kind="rate", value=4), smoke=smoke, attempt=attempt))
    assert len(seeds) == 39 * 3 * 2 * 11
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_seeds_stay_the_same() -> None:
    # A change here makes the results of a release unrepeatable.
    key = RunKey(kind="concurrency", value=8)
    assert levels.level_seed(Workload(input_tokens=64, output_tokens=16), key) == 581019295


def test_a_file_of_lengths_is_known_by_its_pairs(tmp_path: Path) -> None:
    """Where it is, or in which form, changes no prompt."""
    (tmp_path / "a.csv").write_text("input_tokens,output_tokens\n5,2\n9,3\n")
    (tmp_path / "b.jsonl").write_text(
        '{"input_tokens": 5, "output_tokens": 2}\n{"input_tokens": 9, "output_tokens": 3}'
    )
    (tmp_path / "c.csv").write_text("input_tokens,output_tokens\n5,2\n9,4\n")
    a, b, c = (Workload(lengths=read_pairs(tmp_path / name)) for name in ("a.csv", "b.jsonl", "c.csv"))
    assert levels.derive_seed(a) == levels.derive_seed(b) != levels.derive_seed(c)
    kept = Workload.model_validate_json(a.model_dump_json())
    assert levels.derive_seed(kept) == levels.derive_seed(a)


def pd(prefill: Pool, decode: Pool) -> Deployment:
    return Deployment(model="m", topology=Disaggregated(prefill=prefill, decode=decode, placement="pack"))


@pytest.mark.parametrize(
    ("deployment", "expected"),
    [
        (None, 8),
        (Deployment(model="m", topology=Collocated(pool=Pool())), 8),
        (Deployment(model="m", topology=Collocated(pool=Pool(replicas=8))), 16),
        (pd(Pool(), Pool()), 8),
        (pd(Pool(replicas=3), Pool(replicas=4)), 24),
        (pd(Pool(replicas=2, dp=2), Pool(dp=3)), 24),
    ],
)
def test_warm_up_reaches_every_pair_twice(deployment: Deployment | None, expected: int) -> None:
    assert levels.warmup_requests(deployment) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"load": {}},
        {"load": {"concurrency": 1, "rate_rps": 2.0}},
        {"base_url": None},
        {"backend": "pd-bare"},
        {"seed": 2**32},
        {"backend": "chat"},
        {"typo": 1},
    ],
)
def test_incomplete_client_levels(wrong: dict[str, Any]) -> None:
    right = {
        "name": "x", "base_url": "http://h", "model": "m", "tokenizer": "t", "input_tokens": 1, "output_tokens": 1,
        "num_requests": 1, "seed": 0, "load": {"concurrency": 1},
    }  # fmt: skip
    assert ClientLevel.model_validate(right).load == Closed(concurrency=1)
    with pytest.raises(ValidationError):
        ClientLevel.model_validate({**right, **wrong})


def test_client_level_sends_what_the_mode_sends() -> None:
    workload = Workload(input_tokens=512, output_tokens=64, mode="decode-approx")
    (level,) = levels.sweep_levels(workload, [Open(rate_rps=2, burstiness=0.5)])
    sent = protocol.client_level(level, workload, base_url="http://h", model="m", tokenizer="t", request_timeout_s=9)
    assert (sent.input_tokens, sent.output_tokens) == (1, 64)
    assert (sent.load, sent.concurrency, sent.request_timeout_s) == (level.load, None, 9)
    assert sent.seed == level.seed and sent.name == "rate2"


def test_client_level_has_the_lengths_that_the_workload_draws() -> None:
    workload = Workload(input_tokens=512, output_tokens=64, lengths=parse_lengths("uniform:0.5-1.5"))
    client_levels = []
    for attempt in (0, 1):
        (level,) = levels.sweep_levels(workload, [Closed(concurrency=4)], attempt=attempt)
        client_levels.append(
            protocol.client_level(level, workload, base_url="http://h", model="m", tokenizer="t", request_timeout_s=9)
        )
        assert client_levels[-1].lengths == workload.draw(level) and len(set(client_levels[-1].lengths or ())) > 10
    assert client_levels[0].seed != client_levels[1].seed and client_levels[0].lengths == client_levels[1].lengths
    with pytest.raises(ValidationError, match="2 lengths for 40 requests"):
        ClientLevel.model_validate({**client_levels[0].model_dump(), "lengths": [(1, 1), (2, 2)]})


def test_a_mix_that_moves_is_sent_with_its_times_for_two_rounds_at_least() -> None:
    workload = Workload(lengths=parse_lengths("mixes:512:64@2,64:512,every=50"))
    (level,) = levels.sweep_levels(workload, [Open(rate_rps=2)])
    assert level.num_requests == 200 * 2 * 1.5
    sent = protocol.client_level(level, workload, base_url="http://h", model="m", tokenizer="t", request_timeout_s=9)
    arrivals = workload.arrivals(level)
    assert arrivals is not None and sent.due_s == tuple(arrival.due_s for arrival in arrivals)
    assert sent.lengths == workload.draw(level) == tuple(arrival[1:] for arrival in arrivals)
    assert sent.schedule_s() == list(sent.due_s)
    slow = protocol.slowed(sent, 4.0)
    assert slow.schedule_s() == [4 * moment_s for moment_s in sent.due_s] and slow.lengths == sent.lengths
    with pytest.raises(ValidationError, match="2 times at which requests are due"):
        ClientLevel.model_validate({**sent.model_dump(), "due_s": [0.0, 1.0]})
    with pytest.raises(UsageError, match="give --request-rate"):
        levels.sweep_levels(workload, [Closed(concurrency=4)])


@pytest.mark.parametrize("factor", [0.5, 4, 10])
def test_a_level_with_a_crowd_goes_on_after_it(factor: float) -> None:
    for lengths in ("mixes:1000:100", "mixes:1000:100,5000:250,every=60"):
        workload = Workload(lengths=parse_lengths(f"{lengths},crowd=rate*{factor}@60+30"))
        (level,) = levels.sweep_levels(workload, [Open(rate_rps=40)])
        arrivals = workload.arrivals(level)
        assert arrivals is not None and arrivals[-1].due_s == pytest.approx(240, rel=0.05)


def test_mixes_have_a_short_form() -> None:
    short = bench.options(["--mixes", "5000:250@1.5,1000:1000", "--mix-every", "30", "-r", "4"]).workload
    long = bench.options(["--lengths", "mixes:5000:250@1.5,1000:1000,every=30", "-r", "4"]).workload
    assert short == long and short.lengths.flag_value == "mixes:5000:250@1.5,1000:1000,every=30"


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("collocated-2xtp1", 8),
        ("collocated-32xtp1", 32),
        ("pd-spread-p2xtp1-d4xtp1", 8),
        ("pd-spread-p1xdp32ep-d1xdp72ep", 72),
    ],
)
def test_a_warm_up_of_many_engines_does_not_wait_for_one_after_the_other(label: str, expected: int) -> None:
    assert levels.warmup_concurrency(Deployment(topology=parse_label(label))) == expected
    assert levels.warmup_concurrency(None) == 8
