"""What a server that answers wrongly is said to do, and what cannot be a tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pdlab.bench.target import require_answering, resolve_target
from pdlab.core.errors import BenchError, UsageError
from pdlab.core.workload import Workload


class Broken(BaseHTTPRequestHandler):
    """HTTP 500 to everything."""

    def do_GET(self) -> None:
        self.send_error(500)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def broken() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Broken) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_that_answers_500_is_told_as_that(broken: str) -> None:
    with pytest.raises(BenchError, match=r"no longer answers: the running level is not kept \(.*answers HTTP 500"):
        require_answering(broken)
    with pytest.raises(UsageError, match=r"/v1/models answers HTTP 500; is the deployment ready"):
        resolve_target(broken, workload=Workload(), name="x")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere/at/all", "no such folder"),
        ("./nowhere", "no such folder"),
        ("~/nowhere", "no such folder"),
        ("an id with spaces", "no such folder"),
        ("", "a folder without a tokenizer"),
        ("a" * 5000, "cannot be read"),
    ],
)
def test_what_cannot_be_a_tokenizer_is_told_before_anything_is_asked(
    name: str, told: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"--tokenizer .*{told}"):
        resolve_target(broken, workload=Workload(), name="x", tokenizer=name)


def test_a_folder_with_a_tokenizer_and_an_id_are_left_to_the_loader(broken: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in (str(tmp_path), "gpt2", "org/name"):
        with pytest.raises(UsageError, match="answers HTTP 500"):
            resolve_target(broken, workload=Workload(), name="x", tokenizer=name)
