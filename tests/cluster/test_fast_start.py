"""What the processes of the local nodes leave out, or import when they use it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pdlab.cluster import fast_start

PROGRAM = """
import importlib.util, sys
from pdlab.cluster import fast_start
fast_start.install()
try:
    import pandas
except ImportError:
    print("left out", importlib.util.find_spec("pandas"))
"""


def test_pandas_is_as_if_it_were_not_installed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout == "left out None\n", done.stderr


def test_a_module_is_imported_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    helpers = SimpleNamespace(try_import=lambda name, error=False: names.append(name))
    monkeypatch.setattr(fast_start, "LAZY_MODULE", "this_is_imported_later")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    fast_start._import_later(helpers)
    later = helpers.try_import("this_is_imported_later")
    helpers.try_import("transformers")
    assert names == ["transformers"] and later is not None
    monkeypatch.setitem(sys.modules, "this_is_imported_later", SimpleNamespace(hub="there"))
    assert later.hub == "there"
    helpers.try_import("this_is_imported_later", True)
    assert names[-1] == "this_is_imported_later", "loaded already: as Ray does"


def test_what_is_not_installed_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    helpers = SimpleNamespace(try_import=lambda name, error=False: names.append(name))
    monkeypatch.setattr(fast_start, "LAZY_MODULE", "no_such_module_anywhere")
    fast_start._import_later(helpers)
    assert helpers.try_import("no_such_module_anywhere") is None and names == ["no_such_module_anywhere"]
