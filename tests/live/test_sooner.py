"""First tokens that wait for less, on the real stack: the same requests with and without ``--kv-poll-ms``,
``--reuse-first-token`` and ``--early-token``, and faults with them. The tests build on one another."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support import timed

from pdlab.results import chaos
from tests.live.conftest import Stack
from tests.live.test_chaos import CHAOS, SMALL
from tests.live.test_requests import request_shapes

pytestmark = pytest.mark.long

FLAGS = ("--kv-poll-ms", "0.5", "--reuse-first-token", "--early-token")
SHAPES: list[Any] = []
WITHOUT: dict[str, Any] = {}


def counted(stack: Stack, name: str) -> float:
    from pdlab.deploy.metrics_page import read_pages, samples

    pages = read_pages(stack.running().metrics_urls)
    return sum(sample.value for page in pages for sample in samples(page, lambda known: name in known))


def test_without_the_flags(stack: Stack) -> None:
    assert stack.launch("--pd-spread", *SMALL).code == 0
    for shape in request_shapes.shapes(request_shapes.decisive(stack.url)):
        SHAPES.append(shape)
        if "return_token_ids" in shape.body:  # no early token is sent with them
            body = {key: value for key, value in shape.body.items() if key != "return_token_ids"}
            SHAPES.append(shape._replace(name=f"{shape.name}, as text", body=body))
    WITHOUT.update({shape.name: request_shapes.ask(stack.url, shape) for shape in SHAPES})
    assert sum(reply.status == 200 for reply in WITHOUT.values()) > 60, "shapes that are refused prove nothing"
    assert counted(stack, "guard_reused") == 0


def test_every_shape_is_answered_as_without_them(stack: Stack) -> None:
    assert WITHOUT, "the launch without the flags did not answer"
    assert stack.launch("--pd-spread", *SMALL, *FLAGS).code == 0
    mine = {shape.name: request_shapes.ask(stack.url, shape) for shape in SHAPES}
    different = {name: request_shapes.differs(reply, WITHOUT[name]) for name, reply in mine.items()}
    assert not {name: how for name, how in different.items() if how}
    assert counted(stack, "guard_reused") > 10 and counted(stack, "prefill_early") >= 2, "decode took its own"


@pytest.mark.parametrize("stream", [True, False])
def test_the_parts_are_the_clients_ttft(stack: Stack, stream: bool) -> None:
    timelines = [timed.ask(stack.url, stream=stream) for _ in range(10)]
    timed.check(timelines, "pd")
    early = sum(each.early for each in timelines)
    assert early >= 3 if stream else early == 0, "a token that is a part of a character is not sent"
    # Where the client does not get the token early, decode's first is prefill's.
    late = [timed.ask(stack.url, stream=stream, return_token_ids=True) for _ in range(10)]
    timed.check(late, "pd")
    for each in late:
        assert not each.early
        assert each.t["usable"] <= each.t["scheduled"] <= each.t["first"]


def test_faults_make_no_wrong_answer(stack: Stack) -> None:
    out = stack.folder / "sooner"
    done = stack.run(*CHAOS, "short", "--base-url", stack.url, "--out", str(out), "--seed", "5")
    kept = chaos.load(next(out.iterdir()))
    outcomes = Counter(request.outcome for request in kept.requests)
    assert outcomes["right"] > 50 and outcomes["wrong"] == 0, done.text
    assert kept.run.leftovers is not None and kept.run.leftovers.nothing, done.text
    # On a busy machine the only decode engine's replacement takes longer than a request's limit.
    (killed,) = [fault for fault in kept.faults if fault.kind == "kill_decode_engine"]
    hanging = [request for request in kept.requests if request.outcome == "hang"]
    assert all(request.end_s > killed.began_s and not request.tokens for request in hanging), done.text
    assert kept.run.counters["guard_reused"] > 10, "hardly a first token was handed over meanwhile"
