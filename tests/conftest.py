"""No test is judged by its time: hypothesis counts examples, not milliseconds.

The examples are the same in every run, so that a change and not chance turns a test red; PDLAB_EXPLORE=1 draws new
ones, to search for what nobody thought of. Quick tests run first, live ones last.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("pdlab", deadline=None, derandomize="PDLAB_EXPLORE" not in os.environ)
settings.load_profile("pdlab")
SLOW_FOLDERS = ("bench", "contract", "transfer")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = {item: item.path.relative_to(Path(__file__).parent).parts[0] for item in items}
    items.sort(key=lambda item: (item.get_closest_marker("live") is not None, folder[item] in SLOW_FOLDERS))


def pytest_configure() -> None:
    # A shell without job control has what runs in its background ignore an interrupt, and every child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _interrupts_as_before() -> Iterator[None]:
    """A test that leaves another handler behind fails itself, not one that comes after it."""
    yield
    left = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert left is signal.default_int_handler
