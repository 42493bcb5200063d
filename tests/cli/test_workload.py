"""``pdlab workload``: figures, requests, exports, and that nothing is lost."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from pdlab.cli.workload import main

DATA = Path(__file__).resolve().parents[1] / "data" / "traffic"


def test_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DATA / "mooncake.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "8, of which 2 wait for others" in out
    assert "ideal hit share" in out


def test_requests_are_written_with_their_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "requests.jsonl"
    assert main([str(DATA / "chat.yaml"), "-o", str(out), "--describe"]) == 0
    said = capsys.readouterr().out
    assert hashlib.sha256(out.read_bytes()).hexdigest() in said
    assert "sessions" in said
    lines = out.read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["kind"] == "conversations"
    assert len(lines) == 1 + 143


def test_a_file_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "requests.jsonl"
    out.write_text("mine", encoding="utf-8")
    assert main([str(DATA / "chat.yaml"), "-o", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "mine"
    assert main([str(DATA / "chat.yaml"), "-o", str(out), "--force"]) == 0


def test_a_bad_line_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,5,1\nx,1,1\n", encoding="utf-8")
    out = tmp_path / "requests.jsonl"
    assert main([str(trace), "-o", str(out)]) == 2
    assert "line 3: 'x' is not a time" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [trace]


def test_a_window_without_a_request_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "workload.yaml"
    spec.write_text(f"replay: {DATA / 'mooncake.jsonl'}\nwindow: 1000-2000\n", encoding="utf-8")
    for argv in ([str(spec)], [str(spec), "-o", str(tmp_path / "requests.jsonl")]):
        assert main(argv) == 2
        assert "workload.yaml: holds no request in its window of 1000-2000 s" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [spec]
    empty = tmp_path / "compiled.jsonl"
    empty.write_text('{"traffic":1}\n', encoding="utf-8")
    assert main([str(empty)]) == 2
    assert "compiled.jsonl: holds no request;" in capsys.readouterr().err


def test_export_for_aiperf(tmp_path: Path) -> None:
    out = tmp_path / "aiperf.jsonl"
    assert main([str(DATA / "chat.yaml"), "--export", "aiperf", "-o", str(out)]) == 0
    first = json.loads(out.read_text(encoding="utf-8").splitlines()[0])
    assert {*first} == {"session_id", "timestamp", "text_input", "output_length"}
