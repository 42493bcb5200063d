"""What a prefix cache has of the prompts of a replay: who is in time for whose blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.bench.forecast import foreseen, oracle_for
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool
from pdlab.results.schema import ReplayedRequest, RequestRecord
from pdlab.traffic.oracle import HitOracle
from pdlab.traffic.prompts import TrafficPrompts
from pdlab.traffic.requests import TrafficHead, TrafficRequest, write_requests

BLOCK = 4


def record(name: str, arrival_s: float, finish_s: float | None, parent: str | None = None) -> RequestRecord:
    return RequestRecord(
        arrival_s=arrival_s,
        first_token_s=finish_s,
        finish_s=finish_s,
        input_tokens=1,
        output_tokens=1,
        error=None if finish_s else "x",
        replayed=ReplayedRequest(id=name, session=name, parent=parent),
    )


def plan(folder: Path, *requests: TrafficRequest) -> Path:
    path = folder / "plan.jsonl"
    with path.open("w") as stream:
        write_requests(stream, TrafficHead(), requests)
    return path


def hits(records: tuple[RequestRecord, ...], path: Path) -> dict[str, int | None]:
    oracle, prompts = HitOracle(100, BLOCK, None), TrafficPrompts(BLOCK)
    told = foreseen(records, path, oracle, prompts)
    return {each.replayed.id: each.replayed.foreseen_tokens for each in told if each.replayed}


def test_a_follow_up_hits_prompt_and_answer_and_another_one_what_was_there_when_it_came(tmp_path: Path) -> None:
    shared = ("sys", 8)
    path = plan(
        tmp_path,
        TrafficRequest(id="a0", session="a", at_s=0.0, blocks=(shared, ("a", 4)), out=5),
        TrafficRequest(id="b0", session="b", at_s=1.0, blocks=(shared, ("b", 4)), out=5),
        TrafficRequest(id="a1", session="a", parent="a0", blocks=(("a2", 3),), out=5),
    )
    first, other, later = record("a0", 1.0, 2.0), record("b0", 0.5, 4.0), record("a1", 3.0, 5.0, "a0")
    # b0 came first and finds nothing, whatever the file's order; a1 finds 12 tokens and the 4 first of the answer.
    assert hits((first, other, later), path) == {"a0": 8, "b0": 0, "a1": 16}


def test_a_failed_request_is_not_counted(tmp_path: Path) -> None:
    path = plan(
        tmp_path,
        TrafficRequest(id="a0", session="a", at_s=0.0, blocks=(("s", 8), ("a", 4)), out=5),
        TrafficRequest(id="b0", session="b", at_s=1.0, blocks=(("s", 8), ("b", 4)), out=5),
    )
    assert hits((record("a0", 0.0, None), record("b0", 1.0, 2.0)), path) == {"a0": None, "b0": 0}


def test_only_one_engine_of_its_own_is_foreseen() -> None:
    one = Deployment(model="tiny-gptoss", topology=Collocated(pool=Pool()))
    made = oracle_for(one, 3200.0, local=True)
    assert made is not None and made[0].blocks == 100 - 1 and made[1].block_tokens == 32
    assert made[0].needed == 4, "its window of 128 tokens, in blocks of 32"
    assert oracle_for(one, None, local=True) is None and oracle_for(None, 3200.0, local=True) is None
    assert oracle_for(one, 3200.0, local=False) is None, "nobody says how large a block is on GPUs"
    for other in (
        one.model_copy(update={"topology": Collocated(pool=Pool(replicas=2))}),
        one.model_copy(update={"topology": Disaggregated(prefill=Pool(), decode=Pool(), placement="pack")}),
        one.model_copy(update={"kv_offload_gb": 1.0}),
        one.model_copy(update={"engine_kwargs": {"enable_prefix_caching": False}}),
    ):
        assert oracle_for(other, 3200.0, local=True) is None


@pytest.mark.parametrize(("retention", "expected"), [(None, 0), (512, 512)])
def test_the_engines_retention_interval_is_followed(retention: int | None, expected: int) -> None:
    arguments = {} if retention is None else {"prefix_cache_retention_interval": retention}
    deployment = Deployment(model="tiny-gptoss", topology=Collocated(pool=Pool()), engine_kwargs=arguments)
    made = oracle_for(deployment, 3200.0, local=True)
    assert made is not None and made[0].retention == expected
