"""What prefix caches have of the prompts of a replay: whose cache, and who is in time for whose blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdlab.bench.client.protocol import ComputedTokens
from pdlab.bench.forecast import CacheRules, cache_rules, foreseen, placed
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Fluid, Pool
from pdlab.core.engine_cache import EngineCache
from pdlab.core.rehearsal import Rehearsal
from pdlab.deploy.engine_metrics import KvPool
from pdlab.results.schema import ReplayedRequest, RequestRecord
from pdlab.results.timeline import RequestTimeline
from pdlab.traffic.requests import TrafficHead, TrafficRequest, read_requests, write_requests

BLOCK = 4
ONE = Deployment(model="tiny-gptoss", topology=Collocated(pool=Pool()))


def rules(*replicas: str, answers: bool = True) -> CacheRules:
    return CacheRules(dict.fromkeys(replicas, cache()), answers)


def cache(blocks: int = 100) -> EngineCache:
    """All layers of one kind, so that hits are whole blocks of a common beginning."""
    return EngineCache(blocks=blocks, block_tokens=BLOCK)


def blocks_of(made: CacheRules | None) -> dict[str, int]:
    assert made is not None
    return {replica: each.blocks for replica, each in made.caches.items()}


def record(name: str, arrival_s: float, finish_s: float | None, parent: str | None = None, **own: Any) -> RequestRecord:
    return RequestRecord(
        arrival_s=arrival_s,
        first_token_s=finish_s,
        finish_s=finish_s,
        input_tokens=1,
        output_tokens=1,
        error=None if finish_s else "x",
        replayed=ReplayedRequest(id=name, session=name[0], parent=parent, **own),
    )


def plan(folder: Path) -> Path:
    """Two sessions with a common beginning of two blocks; the first has a follow-up."""
    path = folder / "plan.jsonl"
    shared = ("sys", 8)
    requests = (
        TrafficRequest(id="a0", session="a", at_s=0.0, blocks=(shared, ("a", 4)), out=5),
        TrafficRequest(id="b0", session="b", at_s=1.0, blocks=(shared, ("b", 4)), out=5),
        TrafficRequest(id="a1", session="a", parent="a0", blocks=(("a2", 3),), out=5),
    )
    with path.open("w") as stream:
        write_requests(stream, TrafficHead(), requests)
    return path


def hits(records: tuple[RequestRecord, ...], path: Path, by: CacheRules) -> dict[str, int | None]:
    records = foreseen(records, path, by, ())
    return {each.replayed.id: each.replayed.foreseen_tokens for each in records if each.replayed}


def bounds(records: tuple[RequestRecord, ...], path: Path, by: CacheRules) -> dict[str, tuple[int, int] | None]:
    records = foreseen(records, path, by, ())
    return {each.replayed.id: each.replayed.foreseen_bounds for each in records if each.replayed}


def test_a_follow_up_hits_prompt_and_answer_and_another_one_what_was_there_when_it_came(tmp_path: Path) -> None:
    # b0 came first and finds nothing, whatever the file's order; a1 finds 12 tokens and the 4 first of the answer.
    records = (record("a0", 1.0, 2.0), record("b0", 0.5, 4.0), record("a1", 3.0, 5.0, "a0"))
    assert hits(records, plan(tmp_path), rules("r0")) == {"a0": 8, "b0": 0, "a1": 16}


def test_each_engine_has_a_cache_of_its_own(tmp_path: Path) -> None:
    path = plan(tmp_path)

    def replayed(*replicas: str, where: str = "replica") -> tuple[RequestRecord, ...]:
        times = (("a0", 0.0, None), ("b0", 1.0, None), ("a1", 3.0, "a0"))
        return tuple(
            record(name, moment, moment + 1, parent, **{where: replica})
            for (name, moment, parent), replica in zip(times, replicas, strict=True)
        )

    both = rules("r0", "r1")
    assert hits(replayed("r0", "r0", "r0"), path, both) == {"a0": 0, "b0": 8, "a1": 16}
    assert hits(replayed("r0", "r1", "r0"), path, both) == {"a0": 0, "b0": 0, "a1": 16}
    assert hits(replayed("r0", "r1", "r1"), path, both) == {"a0": 0, "b0": 0, "a1": 8}
    unknown = replayed("r0", "r1", "gone")
    assert set(hits(unknown, path, both).values()) == {None}, "of an engine that is not known bounds are foreseen"
    prefill = rules("r0", "r1", answers=False)
    # Prefill generates no answers, so that the follow-up finds the prompt alone.
    found = hits(replayed("r0", "r1", "r0", where="prefill_replica"), path, prefill)
    assert found == {"a0": 0, "b0": 0, "a1": 12}


def test_prompts_that_the_file_does_not_determine_are_those_that_were_reported(tmp_path: Path) -> None:
    path = plan(tmp_path)
    records = (record("a0", 0.0, 0.5), record("b0", 1.0, 1.5), record("a1", 2.0, 2.5, "a0"))
    reported = (
        ComputedTokens(id="a0", tokens=9, computed=13, keys=(1, 2, 3)),
        ComputedTokens(id="b0", tokens=9, computed=13, keys=(1, 8, 9)),
        ComputedTokens(id="a1", tokens=17, computed=21, keys=(1, 2, 3, 4, 5)),
    )

    def by(rules: CacheRules, reported: Sequence[ComputedTokens]) -> list[int | None]:
        return [each.replayed.foreseen_tokens for each in foreseen(records, path, rules, reported) if each.replayed]

    assert by(rules("r0"), reported) == [0, 4, 12]
    assert by(rules("r0", answers=False), reported) == [0, 4, 8], "prefill does not compute answers"
    assert by(rules("r0"), reported[:2]) == [None] * 3, "a prompt was not reported"
    two = foreseen(records, path, rules("r0", "r1"), reported)
    assert two == records, "text may be in a cache before a replay begins: there are no bounds"
    requests = list(read_requests(path))
    with path.open("w") as stream:
        write_requests(stream, TrafficHead(endpoint="chat"), requests)
    assert by(rules("r0"), ()) == [None] * 3, "the file does not have what a template makes of it"


def test_a_failed_request_is_not_counted(tmp_path: Path) -> None:
    records = (record("a0", 0.0, None), record("b0", 1.0, 2.0))
    assert hits(records, plan(tmp_path), rules("r0")) == {"a0": None, "b0": 0}


def test_memory_of_the_host_gives_back_what_the_engine_forgot(tmp_path: Path) -> None:
    records = (record("a0", 0.0, 1.0), record("b0", 1.0, 2.0), record("a1", 3.0, 5.0, "a0"))
    path, small = plan(tmp_path), rules("r0", answers=False)._replace(caches={"r0": cache(4)})
    assert hits(records, path, small) == {"a0": 0, "b0": 8, "a1": 8}, "three blocks, and b0 has one of its own"
    assert hits(records, path, small._replace(host_blocks=6)) == {"a0": 0, "b0": 8, "a1": 12}
    full = hits(records, path, small._replace(host_blocks=5))
    assert set(full.values()) == {None}, "what goes first where not all fits is not known"


def test_replicas_come_from_timelines() -> None:
    reported = RequestTimeline(id="replay1-00ff-a0", path="pd", role_p="p1", role_d="d2", t={})
    first, other = placed((record("a0", 0.0, 1.0), record("b0", 0.0, 1.0)), [reported], "replay1-00ff-")
    assert first.replayed and (first.replayed.replica, first.replayed.prefill_replica) == ("d2", "p1")
    assert other.replayed and other.replayed.replica is None


def pool(role: str, tokens: float = 3200.0) -> KvPool:
    return KvPool(role=role, tokens=tokens, served=0.0)


def test_rules_are_those_of_the_engines_that_compute_prompts() -> None:
    made = cache_rules(ONE, {"r0": pool("collocated")}, local=True)
    assert made is not None and blocks_of(made) == {"r0": 100} and made.block_tokens == 32 and made.answers
    assert made.oracle("r0").needed == 4, "a window of 128 tokens, in blocks of 32"
    assert made.host_blocks is None
    offload = ONE.model_copy(update={"kv_offload_gb": 1.0})
    behind = cache_rules(offload, {"r0": pool("collocated")}, local=True)
    assert behind is not None and 1000 < (behind.host_blocks or 0) < 1_000_000
    pd = Disaggregated(prefill=Pool(replicas=2), decode=Pool(), placement="pack")
    pools = {"p0": pool("prefill"), "p1": pool("prefill", 6400.0), "d0": pool("decode")}
    made = cache_rules(ONE.model_copy(update={"topology": pd}), pools, local=True)
    assert made is not None and blocks_of(made) == {"p0": 100, "p1": 200} and not made.answers


def test_engines_of_a_fluid_pool_are_followed_while_they_prefill_alone(tmp_path: Path) -> None:
    """What an engine pulled to decode it is in its cache too, by rules that nobody has compared with vLLM."""
    fluid = ONE.model_copy(update={"topology": Fluid(pool=Pool(replicas=3))})
    made = cache_rules(fluid, {name: pool("fluid") for name in ("e0", "e1", "e2")}, local=True)
    assert made is not None and blocks_of(made) == {"e0": 100, "e1": 100, "e2": 100} and not made.answers
    path, by = plan(tmp_path), rules("e0", "e1", "e2", answers=False)

    def replayed(*pairs: tuple[str | None, str]) -> tuple[RequestRecord, ...]:
        times = (("a0", 0.0, None), ("b0", 1.0, None), ("a1", 3.0, "a0"))
        return tuple(
            record(name, moment, moment + 1, parent, prefill_replica=prefill, replica=decode)
            for (name, moment, parent), (prefill, decode) in zip(times, pairs, strict=True)
        )

    stay = replayed(("e0", "e2"), ("e1", "e2"), ("e0", "e2"))
    assert hits(stay, path, by) == {"a0": 0, "b0": 0, "a1": 12}
    to_decode = replayed(("e0", "e2"), ("e0", "e2"), ("e1", "e0"))
    assert hits(to_decode, path, by) == {"a0": 0, "b0": 8, "a1": 0}, "e0 prefills no more"
    for unknown in (
        replayed(("e0", "e2"), ("e1", "e0"), ("e0", "e2")),
        replayed(("e0", "e2"), ("e2", "e1"), ("e0", "e1")),
        replayed(("e0", "e2"), (None, "e2"), ("e0", "e2")),
    ):
        assert set(hits(unknown, path, by).values()) == {None}
        assert bounds(unknown, path, by) == {"a0": (0, 8), "b0": (0, 8), "a1": (0, 16)}
    assert set(bounds(stay, path, by).values()) == {None}, "what is known needs none"


def test_a_prompt_of_a_fluid_pool_hits_at_least_what_its_engine_computed_or_decoded(tmp_path: Path) -> None:
    """If all layers have full attention, until others may have taken the blocks. Records come in any order."""
    times = (("b0", 1.0, None), ("a0", 0.0, None), ("a1", 3.0, "a0"))
    records = tuple(
        record(name, moment, moment + 1, parent, prefill_replica=prefill, replica=decode)
        for (name, moment, parent), (prefill, decode) in zip(
            times, (("e0", "e1"), ("e0", "e1"), ("e1", "e0")), strict=True
        )
    )
    path, by = plan(tmp_path), rules("e0", "e1", answers=False)._replace(grows=True)
    assert bounds(records, path, by) == {"a0": (0, 8), "b0": (8, 8), "a1": (16, 16)}, "e1 decoded the parent"
    for blocks, least in ((24, (0, 8, 8)), (20, (0, 8, 0)), (18, (0, 0, 0))):
        small = by._replace(caches={"e0": cache(), "e1": cache(blocks)})
        found = bounds(records, path, small)
        assert tuple(pair[0] for name in ("a0", "b0", "a1") if (pair := found[name])) == least, "of the smallest pool"
    failed = (records[0], record("a0", 0.0, None), records[2])
    assert bounds(failed, path, by) == {"a0": None, "b0": (0, 8), "a1": (8, 16)}, "it may have been computed"


def test_simulated_engines_have_the_caches_that_their_launch_published(tmp_path: Path) -> None:
    reported = {"prefill": cache(50), "decode": cache(70)}
    pd = ONE.model_copy(
        update={
            "topology": Disaggregated(prefill=Pool(), decode=Pool(), placement="pack"),
            "engine_kwargs": {"enable_prefix_caching": False},  # of vLLM's, which are not there
        }
    )
    pools = {"p0": pool("prefill"), "d0": pool("decode")}
    made = cache_rules(pd, pools, local=False, rehearsal=Rehearsal(caches=reported))
    assert made == CacheRules({"p0": cache(50)}, answers=False, grows=True)
    records = (record("a0", 0.0, 1.0), record("b0", 1.0, 2.0), record("a1", 3.0, 5.0, "a0"))
    assert hits(records, plan(tmp_path), made) == {"a0": 0, "b0": 8, "a1": 12}
    one = cache_rules(ONE, {"r0": pool("collocated")}, local=False, rehearsal=Rehearsal(caches={"collocated": cache()}))
    assert one == rules("r0")._replace(grows=True)
    assert hits(records, plan(tmp_path), one) == {"a0": 0, "b0": 8, "a1": 16}, "it generated the answer too"
    assert cache_rules(ONE, {"r0": pool("collocated")}, local=False, rehearsal=Rehearsal()) is None, "an older launch"
    assert cache_rules(pd, {"d0": pool("decode")}, local=False, rehearsal=Rehearsal(caches=reported)) is None


def test_behind_a_router_the_simulated_engine_of_a_prompt_is_unknown(tmp_path: Path) -> None:
    """A rehearsal has no timelines."""
    records = (record("a0", 0.0, 1.0), record("b0", 1.0, 2.0), record("a1", 3.0, 5.0, "a0"))
    two = cache_rules(
        ONE.model_copy(update={"topology": Collocated(pool=Pool(replicas=2))}),
        {"r0": pool("collocated"), "r1": pool("collocated")},
        local=False,
        rehearsal=Rehearsal(caches={"collocated": cache()}),
    )
    assert two is not None
    path = plan(tmp_path)
    assert set(hits(records, path, two).values()) == {None}
    # Another engine may have it all, or none of it.
    assert bounds(records, path, two) == {"a0": (0, 8), "b0": (0, 8), "a1": (0, 16)}


@pytest.mark.parametrize(
    "change",
    [
        {"topology": Collocated(pool=Pool(dp=2))},
        {"kv_connectors": ({"kv_connector": "Another"},)},
        {"engine_kwargs": {"enable_prefix_caching": False}},
    ],
    ids=["data parallel", "another store", "no cache"],
)
def test_other_engines_have_other_rules(change: dict[str, Any]) -> None:
    assert cache_rules(ONE.model_copy(update=change), {"r0": pool("collocated")}, local=True) is None


@pytest.mark.parametrize(
    ("model", "arguments", "grows"),
    [("tiny-llama", {}, True), ("tiny-gptoss", {}, False), ("tiny-llama", {"speculative_config": {}}, False)],
)
def test_hits_grow_with_a_cache_of_full_attention(model: str, arguments: dict[str, Any], grows: bool) -> None:
    deployment = ONE.model_copy(update={"model": model, "engine_kwargs": arguments})
    made = cache_rules(deployment, {"r0": pool("collocated")}, local=True)
    assert made is not None and made.grows is grows


def test_what_is_not_known_is_not_foreseen() -> None:
    assert cache_rules(None, {"r0": pool("collocated")}, local=True) is None
    assert cache_rules(ONE, {}, local=True) is None
    assert cache_rules(ONE, {"r0": pool("collocated")}, local=False) is None, "the size of a block on GPUs is not given"
    named = ONE.model_copy(update={"engine_kwargs": {"block_size": 16, "prefix_cache_retention_interval": 512}})
    made = cache_rules(named, {"r0": pool("collocated")}, local=False)
    assert made is not None and made.block_tokens == 16 and made.caches["r0"].retention == 512
