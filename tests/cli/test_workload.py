"""``pdlab workload``: figures, requests, exports, and that nothing is lost."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdlab.cli.workload import main

DATA = Path(__file__).resolve().parents[1] / "data" / "traffic"


def test_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DATA / "mooncake.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "8; 2 of them wait for others" in out
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


def test_speed_scale_and_window_of_a_trace_are_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the same keys in a workload file, in place of those; requests that are written keep theirs."""
    spec, by_file, by_flags = tmp_path / "keys.yaml", tmp_path / "file.jsonl", tmp_path / "flags.jsonl"
    trace = DATA / "mooncake.jsonl"
    spec.write_text(f"replay: {trace}\nwindow: 0-4\nspeed: 2\nscale: 16\n", encoding="utf-8")
    flags = ["--window", "0-4", "--speed", "2", "--scale", "16"]
    assert main([str(spec), "-o", str(by_file)]) == 0
    assert main([str(trace), *flags, "-o", str(by_flags)]) == 0
    heads, requests = zip(*(path.read_text().split("\n", 1) for path in (by_file, by_flags)), strict=True)
    assert requests[0] == requests[1] and len(requests[0].splitlines()) > 1
    head = json.loads(heads[1])
    assert (head["scale"], head["speed"], head["window_s"]) == (16.0, 2.0, [0.0, 4.0])
    assert main([str(spec), "--speed", "4", "-o", str(tmp_path / "faster.jsonl")]) == 0
    assert json.loads((tmp_path / "faster.jsonl").read_text().split("\n", 1)[0])["speed"] == 4
    capsys.readouterr()
    assert main([str(by_file), "--speed", "4"]) == 2
    assert "file.jsonl: has requests that were written before" in capsys.readouterr().err
    for wrong, rule in (("5", "from one second to another"), ("9-3", "from an earlier second"), ("a-b", "window")):
        assert main([str(trace), "--window", wrong]) == 2
        assert rule in capsys.readouterr().err


def test_a_full_disk_is_one_line(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small_disk / "fill").write_bytes(bytes(60 * 1024))
    assert main([str(DATA / "chat.yaml"), "-o", str(small_disk / "requests.jsonl")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: -o ") and "No space left" in err and err.count("\n") == 1
    assert [each.name for each in small_disk.iterdir()] == ["fill"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    real, link, pipe, plain = (tmp_path / name for name in ("real", "link", "pipe", "plain"))
    real.write_text("old", encoding="utf-8")
    link.symlink_to(real)
    os.mkfifo(pipe)
    assert main([str(DATA / "chat.yaml"), "-o", str(plain)]) == 0
    assert main([str(DATA / "chat.yaml"), "-o", str(link), "--force"]) == 0
    assert link.is_symlink() and real.read_bytes() == plain.read_bytes()
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        assert main([str(DATA / "chat.yaml"), "-o", str(pipe), "--force"]) == 0
        assert reader.communicate(timeout=60)[0] == plain.read_bytes()
    assert pipe.is_fifo()


def test_two_at_once_write_one_whole_file(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pdlab", "workload", str(DATA / "chat.yaml"), "--force", "-o"]
    alone, both = tmp_path / "alone", tmp_path / "both"
    assert main([str(DATA / "chat.yaml"), "-o", str(alone)]) == 0
    running = [subprocess.Popen([*words, str(both)], stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [each.wait(timeout=60) for each in running] == [0, 0, 0]
    assert both.read_bytes() == alone.read_bytes() and len(list(tmp_path.iterdir())) == 2
