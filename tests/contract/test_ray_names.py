"""Ray has the private modules and attributes that serving uses."""

from __future__ import annotations

import importlib

import pytest

from pdlab.deploy.serving import ray_names
from pdlab.deploy.serving.ray_names import bind_class, bound_deployment

pytestmark = pytest.mark.filterwarnings("ignore")
MODULES = {name: value for name, value in vars(ray_names).items() if name.isupper()}


@pytest.mark.parametrize("module", MODULES.values(), ids=list(MODULES))
def test_ray_has_the_module(module: str) -> None:
    importlib.import_module(module)


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
