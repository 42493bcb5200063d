"""What a launch publishes of what it started."""

from __future__ import annotations

import pytest

from pdlab.core.deployment import Collocated, Deployment, Pool
from pdlab.deploy.application import AppState, ReplicaState
from pdlab.deploy.launch import _stages, tokenizer_of


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


def test_progress_counts_replicas_by_stage() -> None:
    def replicas(deployment: str, stages: list[str]) -> list[ReplicaState]:
        return [ReplicaState(deployment=deployment, replica=f"{deployment}{i}", state=s) for i, s in enumerate(stages)]

    state = AppState(
        status="DEPLOYING",
        replicas=(*replicas("Prefill:m", ["STARTING"] * 31 + ["RUNNING"]), *replicas("Decode:m", ["RUNNING"])),
        deployments={"Prefill:m": "UPDATING", "Decode:m": "HEALTHY", "LLMRouter": "UPDATING"},
    )
    assert _stages(state) == "Decode:m: 1 running; LLMRouter: no replica placed yet; Prefill:m: 1 running, 31 starting"
    assert _stages(AppState(status="NOT_STARTED")) == "submitted"
