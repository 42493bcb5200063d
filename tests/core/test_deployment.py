"""Pools as values: equal ones are one key, whatever engine arguments they carry."""

from __future__ import annotations

from pdlab.core.deployment import Pool


def test_a_pool_with_engine_arguments_is_a_key() -> None:
    pool = Pool(tp=2, engine_kwargs={"block_size": 16})
    rates = {pool: 1.0}
    assert rates[Pool(tp=2, engine_kwargs={"block_size": 16})] == 1.0
    assert Pool(tp=2, engine_kwargs={"block_size": 32}) not in rates
    assert Pool(replicas=3, tp=2, engine_kwargs={"block_size": 16}).one_replica in rates
