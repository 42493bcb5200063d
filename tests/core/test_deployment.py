"""Pools and deployments as values: equal ones are one key, and keep the fingerprint that was stored of them."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import ValidationError

from pdlab.core.deployment import (
    Deployment,
    Disaggregated,
    Fluid,
    Pool,
    Serving,
    Transport,
    launch_words,
    parse_label,
    unguarded,
)
from pdlab.core.errors import UsageError
from pdlab.core.notation import parse
from pdlab.core.schema import Frozen, Incidental, InLabel, incidental, label_words
from pdlab.roles.spec import counts_of


def test_a_pool_with_engine_arguments_is_a_key() -> None:
    pool = Pool(tp=2, engine_kwargs={"block_size": 16})
    rates = {pool: 1.0}
    assert rates[Pool(tp=2, engine_kwargs={"block_size": 16})] == 1.0
    assert Pool(tp=2, engine_kwargs={"block_size": 32}) not in rates
    assert Pool(replicas=3, tp=2, engine_kwargs={"block_size": 16}).one_replica in rates


def with_transport(**fields: object) -> Deployment:
    topology = Disaggregated(prefill=Pool(tp=4), decode=Pool(tp=4), placement="spread", transport=Transport(**fields))  # type: ignore[arg-type]
    return Deployment(topology=topology)


def test_a_fingerprint_is_of_the_whole_transport() -> None:
    default = Deployment(topology=parse_label("pd-spread-p1xtp4-d1xtp4"))
    assert default.fingerprint == with_transport(kv_guard=True, kv_deadline_s=10.0).fingerprint
    assert Deployment(topology=unguarded(default.topology)) == with_transport(kv_guard=False)
    prints = {with_transport(**fields).fingerprint for fields in ({}, {"kv_guard": False}, {"kv_deadline_s": 5.0})}
    assert len(prints) == 3


def test_the_guards_scheduler_has_no_other_beside_it() -> None:
    topology = parse_label("pd-spread-p1xtp1-d1xtp1")
    kwargs = {"scheduler_cls": "my.Scheduler"}
    with pytest.raises(ValidationError, match=r"'scheduler_cls' .prefill. is set by the KV guard: use --no-kv-guard"):
        Deployment(topology=topology, engine_kwargs=kwargs)
    assert isinstance(topology, Disaggregated)
    off = topology.model_copy(update={"transport": Transport(kv_guard=False)})
    assert Deployment(topology=off, engine_kwargs=kwargs).engine_kwargs == kwargs
    assert Deployment(topology=parse_label("collocated-1xtp1"), engine_kwargs=kwargs).engine_kwargs == kwargs


@pytest.mark.parametrize("deadline_s", [0, -1, 3601, float("nan")])
def test_a_deadline_is_a_time(deadline_s: float) -> None:
    with pytest.raises(ValidationError):
        Transport(kv_deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("topology", "label", "flags"),
    [
        (Fluid(pool=Pool(replicas=8, tp=2)), "pd-fluid-8xtp2", "--pd-fluid --num 8 --tp 2"),
        (
            Fluid(pool=Pool(replicas=8, tp=2), roles="3:5"),
            "pd-fluid-8xtp2-p3d5",
            "--pd-fluid --num 8 --tp 2 --roles 3:5",
        ),
        (
            Fluid(pool=Pool(replicas=12), roles="11:1"),
            "pd-fluid-12xtp1-p11d1",
            "--pd-fluid --num 12 --tp 1 --roles 11:1",
        ),
        (
            Fluid(pool=Pool(replicas=4, tp=2), min_replicas=2, max_replicas=8),
            "pd-fluid-4xtp2-n2to8",
            "--pd-fluid --num 4 --tp 2 --min 2 --max 8",
        ),
    ],
)
def test_a_fluid_deployment_has_a_label_of_its_own(topology: Fluid, label: str, flags: str) -> None:
    deployment = Deployment(topology=topology)
    assert deployment.label == label
    assert parse_label(label) == parse(label) == topology
    assert Deployment.model_validate(deployment.model_dump(mode="json")) == deployment
    assert (deployment.mode, deployment.pools, deployment.gpus) == (
        "pd-fluid",
        {"fluid": topology.pool},
        topology.pool.gpus,
    )
    assert launch_words(deployment) == tuple(flags.split())
    assert deployment.transport == Transport()


def test_fluid_roles_tell_deployments_apart() -> None:
    pool = Pool(replicas=4)
    fluids = [
        Fluid(pool=pool),
        Fluid(pool=pool, roles="1:3"),
        Fluid(pool=pool, p_min=2),
        Fluid(pool=pool, slo_ttft_s=1),
    ]
    fluids += [Fluid(pool=pool, max_replicas=8), Fluid(pool=pool, max_replicas=8, down_after_s=60)]
    unlike = [*fluids, unguarded(fluids[0]), Fluid(pool=pool, prefill_locally_below="auto")]
    unlike += [Fluid(pool=pool, prefix_affinity=True), Fluid(pool=pool, prefix_affinity=True, max_replicas=8)]
    assert len({Deployment(topology=each).fingerprint for each in unlike}) == len(unlike)


def test_affinity_needs_a_prefix_cache() -> None:
    affine = Fluid(pool=Pool(replicas=4), prefix_affinity=True)
    off = {"enable_prefix_caching": False}
    with pytest.raises(ValidationError, match="enable_prefix_caching=false has nothing cached"):
        Deployment(topology=affine, engine_kwargs=off)
    assert Deployment(topology=affine, engine_kwargs={"enable_prefix_caching": True})
    assert Deployment(topology=Fluid(pool=Pool(replicas=4)), engine_kwargs=off)


def test_room_is_planned_for_as_many_engines_as_there_may_be() -> None:
    deployment = Deployment(topology=parse_label("pd-fluid-4xtp2-n2to8"))
    assert (deployment.gpus, deployment.most_pools["fluid"].gpus) == (8, 16)
    fixed = Deployment(topology=parse_label("pd-fluid-4xtp2"))
    assert fixed.most_pools == fixed.pools


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"replicas": 1}, "1 to prefill and 1 to decode at least are more than 1 replica"),
        ({"replicas": 4, "d_min": 4}, "1 to prefill and 4 to decode at least are more than 4 replicas"),
        ({"replicas": 4, "roles": "1:4"}, "roles 1:4 are 5 engines, there are 4 replicas"),
        ({"replicas": 4, "roles": "1:3", "p_min": 2}, "roles 1:3 are fewer than p_min 2"),
        ({"replicas": 4, "roles": "0:4"}, "'0:4' is not a split: give PREFILL:DECODE"),
        ({"replicas": 4, "roles": "fast"}, "'fast' is not a split: give PREFILL:DECODE"),
        ({"replicas": 4, "dp": 2}, "roles need dp 1"),
        ({"replicas": 4, "prefill_locally_below": 0}, "a number of tokens from 1, or auto"),
        ({"replicas": 4, "slo_tpot_s": 0.0}, "greater than 0"),
        ({"replicas": 4, "max_replicas": 3}, "4 replicas|--min 4 is more than --max 3"),
        ({"replicas": 4, "min_replicas": 5, "max_replicas": 6}, "4 replicas are not between --min 5 and --max 6"),
        ({"replicas": 4, "min_replicas": 2, "p_min": 2}, "2 to prefill and 1 to decode at least are more than --min 2"),
        ({"replicas": 4, "max_replicas": 5, "roles": "1:3"}, "roles 1:3 are a split of one number of engines"),
        ({"replicas": 4, "down_after_s": 9}, "--down-after-s is of a number that moves"),
    ],
)
def test_roles_are_a_split_of_the_replicas(fields: dict[str, object], complaint: str) -> None:
    pool = {name: fields.pop(name) for name in ("replicas", "dp") if name in fields}
    with pytest.raises(ValidationError, match=complaint):
        Fluid.model_validate({"pool": pool, **fields})


@pytest.mark.parametrize("label", ["pd-fluid-8xtp2-p3d4", "pd-fluid-1xtp2", "pd-fluid-8xtp2-p3", "pd-fluid-8xtp2-p0d8"])
def test_a_label_of_no_split_is_refused(label: str) -> None:
    with pytest.raises(UsageError, match="label"):
        parse_label(label)


@pytest.mark.parametrize("text", ["", "3", "3:", ":5", "3:5:1", "-1:2", "03:5", "3 : 5"])
def test_a_split_is_two_counts(text: str) -> None:
    with pytest.raises(ValueError, match="is not a split: give PREFILL:DECODE"):
        counts_of(text)
    assert counts_of("3:5") == (3, 5)


def changed(deployment: Deployment) -> dict[str, Deployment]:
    """Field of a deployment, its pool or its transport -> the deployment with another value there."""
    assert isinstance(deployment.topology, Disaggregated)
    others = {
        Pool: {
            **{"replicas": 2, "tp": 2, "pp": 2, "dp": 2, "expert_parallel": True, "gpu_type": "H200"},
            **{"engine_kwargs": {"block_size": 16}, "env": {"A": "1"}, "routing": "session"},
        },
        Transport: {
            **{"backends": ("LIBFABRIC",), "ucx_tls": "tcp", "verbose": True, "kv_guard": False},
            **{"kv_deadline_s": 5.0, "kv_poll_s": 0.05, "reuse_first_token": True},
        },
        Deployment: {
            **{"name": "mine", "model": "m", "model_id": "i", "ingress_replicas": 2, "max_model_len": 4096},
            **{"serving": Serving(tokenize_once=True), "engine_kwargs": {"block_size": 16}, "env": {"A": "1"}},
            **{"kv_offload_gb": 1.0, "kv_connectors": ({"kv_connector": "LMCacheConnectorV1"},), "decode_bench": True},
        },
    }
    free = {"connector", "topology"}  # has one value; is changed by its parts
    for kind, values in others.items():
        assert set(values) == set(kind.model_fields) - free, f"give every field of {kind.__name__} another value here"
    topology = deployment.topology
    result = {name: deployment.model_copy(update={name: value}) for name, value in others[Deployment].items()}
    for name, value in others[Pool].items():
        result[f"decode.{name}"] = deployment.with_topology(decode=topology.decode.model_copy(update={name: value}))
    for name, value in others[Transport].items():
        part = topology.transport.model_copy(update={name: value})
        result[f"transport.{name}"] = deployment.with_topology(transport=part)
    return result


def test_the_name_alone_is_not_in_the_fingerprint_and_the_shape_of_pools_alone_in_the_label() -> None:
    base = Deployment(topology=parse_label("pd-spread-p1xtp1-d1xtp1"))
    others = changed(base)
    assert {name for name, each in others.items() if each.fingerprint == base.fingerprint} == {"name"}
    in_label = {name for name, each in others.items() if each.label != base.label}
    assert in_label == {f"decode.{name}" for name in ("replicas", "tp", "pp", "dp", "expert_parallel")}
    for name in in_label:
        assert parse_label(others[name].label) == others[name].topology


def test_a_field_is_in_a_label_because_it_is_marked() -> None:
    class Shape(Frozen):
        wide: Annotated[int, InLabel("w")] = 1
        note: Annotated[str, Incidental] = ""

    assert label_words(Shape) == {"wide": "w"}
    assert incidental(Shape) == {"note"}
