"""Pools and deployments as values: equal ones are one key, and keep the fingerprint that was stored of them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pdlab.core.deployment import Deployment, Disaggregated, Pool, Transport, parse_label, unguarded


def test_a_pool_with_engine_arguments_is_a_key() -> None:
    pool = Pool(tp=2, engine_kwargs={"block_size": 16})
    rates = {pool: 1.0}
    assert rates[Pool(tp=2, engine_kwargs={"block_size": 16})] == 1.0
    assert Pool(tp=2, engine_kwargs={"block_size": 32}) not in rates
    assert Pool(replicas=3, tp=2, engine_kwargs={"block_size": 16}).one_replica in rates


def with_transport(**fields: object) -> Deployment:
    topology = Disaggregated(prefill=Pool(tp=4), decode=Pool(tp=4), placement="spread", transport=Transport(**fields))  # type: ignore[arg-type]
    return Deployment(topology=topology)


def test_fields_that_came_later_change_no_stored_fingerprint() -> None:
    default = Deployment(topology=parse_label("pd-spread-p1xtp4-d1xtp4"))
    assert with_transport(kv_guard=False).fingerprint == "6cb416b81550", "of when there was no KV guard"
    assert default.fingerprint == with_transport(kv_guard=True, kv_deadline_s=10.0).fingerprint != "6cb416b81550"
    assert Deployment(topology=unguarded(default.topology)) == with_transport(kv_guard=False)
    prints = {
        with_transport(**fields).fingerprint
        for fields in ({}, {"kv_guard": False}, {"kv_deadline_s": 5.0}, {"ucx_env": {"UCX_A": "1"}})
    }
    assert len(prints) == 4


def test_the_guards_scheduler_has_no_other_beside_it() -> None:
    topology = parse_label("pd-spread-p1xtp1-d1xtp1")
    kwargs = {"scheduler_cls": "my.Scheduler"}
    with pytest.raises(ValidationError, match=r"'scheduler_cls' .prefill. is the KV guard's: use --no-kv-guard"):
        Deployment(topology=topology, engine_kwargs=kwargs)
    assert isinstance(topology, Disaggregated)
    off = topology.model_copy(update={"transport": Transport(kv_guard=False)})
    assert Deployment(topology=off, engine_kwargs=kwargs).engine_kwargs == kwargs
    assert Deployment(topology=parse_label("collocated-1xtp1"), engine_kwargs=kwargs).engine_kwargs == kwargs


@pytest.mark.parametrize("deadline_s", [0, -1, 3601, float("nan")])
def test_a_deadline_is_a_time(deadline_s: float) -> None:
    with pytest.raises(ValidationError):
        Transport(kv_deadline_s=deadline_s)
