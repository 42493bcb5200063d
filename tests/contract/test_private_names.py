"""Ray and vLLM have every private module, class and function that pdlab names, and the attributes that serving uses."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
from contract.conftest import quietly

from pdlab.bench.client import vllm_names as of_bench
from pdlab.cluster import ray_names as rays_of_cluster
from pdlab.cluster import vllm_names as of_cluster
from pdlab.deploy.serving import ray_names, vllm_names
from pdlab.deploy.serving.ray_names import bind_class, bound_deployment
from pdlab.guard import vllm_names as of_guard
from pdlab.sim import vllm_names as of_sim

MODULES = {
    value
    for module in (ray_names, vllm_names, rays_of_cluster, of_cluster, of_bench)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str) and name != "NAMESPACE"
}
TABLES = (of_bench, of_guard, of_sim)


def private() -> Iterator[tuple[str, str | None]]:
    """(module, name in it), or the module alone."""
    yield from ((module, None) for module in sorted(MODULES))
    yield from ((module, name) for table in TABLES for name, module in table.NAMES.items())
    yield from ((module, None) for module in rays_of_cluster.COMMANDS)
    yield from (("ray._private.state", name) for name in ("available_resources_per_node", "actors", "jobs"))
    yield from (("ray.experimental.internal_kv", f"_internal_kv_{verb}") for verb in ("get", "put"))
    yield "ray.llm._internal.common.callbacks.base", "CallbackBase"
    yield "ray.serve._private.request_router.pow_2_router", "PowerOfTwoChoicesRequestRouter"
    yield "vllm.platforms", "current_platform"
    yield "vllm.v1.engine.utils", "get_mp_context"
    yield from (("vllm.v1.kv_offload.base", name) for name in ("OffloadingWorker", "TransferResult"))
    yield "vllm.v1.kv_offload.cpu.spec", "CPUOffloadingSpec"


@pytest.mark.parametrize(("module", "name"), list(private()))
def test_the_library_has_it(module: str, name: str | None) -> None:
    found = quietly(module)
    assert name is None or hasattr(found, name)


def test_a_table_gives_the_thing_itself_and_refuses_others() -> None:
    for table in TABLES:
        name, module = next(iter(table.NAMES.items()))
        assert getattr(table, name) is getattr(quietly(module), name)
        with pytest.raises(AttributeError):
            _ = table.no_such_name


def test_rehearsals_find_theirs() -> None:
    theirs = quietly("pdlab.rehearsal.ray_names")
    assert all(getattr(theirs, name) for name in theirs.__all__)


@pytest.mark.filterwarnings("ignore")
def test_an_application_has_its_deployment_at_the_top() -> None:
    serve = importlib.import_module("ray.serve")

    class First:
        pass

    class Second:
        pass

    application = serve.deployment(First).bind()
    assert bound_deployment(application).func_or_class is First
    bind_class(application, Second)
    assert bound_deployment(application).func_or_class is Second
