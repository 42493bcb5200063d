"""A KV transfer that moves blocks to wrong places, and tells nobody, is found before anything is served."""

from __future__ import annotations

from tests.live.conftest import Stack


def test_spoiled_transfer_fails_the_canary(stack: Stack) -> None:
    nodes = stack.nodes()
    done = stack.launch("--pd-spread", "--d-engine-arg", "worker_extension_cls=tests.live.spoil.Spoil")
    assert done.code == 1
    assert "answers, but wrongly" in done.text
    assert "Traceback" not in done.text
    assert stack.running() is None
    assert not stack.answers()
    assert stack.nodes() == nodes, "nodes of an earlier launch stay, those of this one do not"
