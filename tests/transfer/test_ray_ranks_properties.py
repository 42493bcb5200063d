"""Where the ranks of a KV-transfer check go: strictly, and the same whatever order Ray lists its nodes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.core.errors import TransferError
from pdlab.core.nodes import ClusterNode, ClusterView
from pdlab.transfer.plan import RequestSize, TransferPlan
from pdlab.transfer.rank.layout import plain_kv_shape
from pdlab.transfer.ray_ranks import choose_nodes

pytestmark = pytest.mark.property


def plan(strategy: str, prefill: int, decode: int) -> TransferPlan:
    shape = plain_kv_shape(1, 16 * 8, 8, 16)
    return TransferPlan(
        strategy=strategy, shape=shape, sizes=(RequestSize(1),), num_blocks=4, prefill_tp=prefill, decode_tp=decode
    )


nodes = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 8), st.sampled_from(["a", "b", "c"])), min_size=1, max_size=5
)


@given(nodes, st.booleans(), st.sampled_from(["pack", "spread"]), st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_strict_and_independent_of_order(made, gpus, strategy, prefill, decode, rng) -> None:  # type: ignore[no-untyped-def]
    cluster = [
        ClusterNode(id=f"n{i}", gpus=total, free_gpus=tuple(range(min(free, total))), host=host)
        if gpus
        else ClusterNode(id=f"n{i}", cpus=total, free_cpus=min(free, total), host=host)
        for i, (free, total, host) in enumerate(made)
    ]
    free = {node.id: len(node.slots) for node in ClusterView(nodes=tuple(cluster)).engine_nodes}
    if strategy == "pack":
        possible = any(count >= prefill + decode for count in free.values())
    else:
        possible = any(a != b and free[a] >= prefill and free[b] >= decode for a in free for b in free)
    answers = []
    for _ in range(2):
        view = ClusterView(nodes=tuple(cluster))
        if not possible:
            with pytest.raises(TransferError, match="the cluster has") as failure:
                choose_nodes(view, plan(strategy, prefill, decode))
            assert failure.value.exit_code == 5 and f"--strategy {strategy} needs" in str(failure.value)
            answers.append(str(failure.value))
        else:
            places = choose_nodes(view, plan(strategy, prefill, decode))
            assert (places.prefill == places.decode) == (strategy == "pack")
            if strategy == "pack":
                assert free[places.prefill] >= prefill + decode
            else:
                assert free[places.prefill] >= prefill and free[places.decode] >= decode
                hosts = {node.id: node.machine for node in cluster}
                apart = any(
                    hosts[a] != hosts[b] and free[a] >= prefill and free[b] >= decode for a in free for b in free
                )
                assert (hosts[places.prefill] != hosts[places.decode]) == apart, "two machines where there are two"
            answers.append(f"{places}")
        rng.shuffle(cluster)
    assert answers[0] == answers[1]
