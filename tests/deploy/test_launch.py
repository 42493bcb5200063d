"""What a launch publishes of what it started."""

from __future__ import annotations

import pytest

from pdlab.core.deployment import Collocated, Deployment, Pool
from pdlab.deploy.launch import tokenizer_of


@pytest.mark.parametrize(
    ("everywhere", "own", "expected"),
    [({}, {}, "org/m"), ({"tokenizer": "/t"}, {}, "/t"), ({"tokenizer": "/t"}, {"tokenizer": "/own"}, "/own")],
)
def test_the_tokenizer_that_an_engine_argument_names_is_published(
    everywhere: dict[str, str], own: dict[str, str], expected: str
) -> None:
    topology = Collocated(pool=Pool(engine_kwargs=own))
    deployment = Deployment(model="org/m", topology=topology, engine_kwargs=everywhere)
    assert tokenizer_of(deployment, "org/m") == expected
