"""--retry-invalid: an invalid level is measured once more, the second result counts, the first is not lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.sweep import Oracle, ended_well, publish, run_bm

from pdlab.cli import viz
from pdlab.core.deployment import Collocated, Deployment, Pool
from pdlab.results.store import Store

pytestmark = pytest.mark.usefixtures("warm_client")

DEPLOYMENT = Deployment(model="tiny-gptoss", topology=Collocated(pool=Pool()))
PROMPTS = 24


def sweep(oracle: Oracle, cache: Path, *more: str) -> tuple[int, str]:
    command = ["-u", oracle.url, "-c", "2,3,4", "--itl", "32", "--otl", "16", "--prompts-per-level", str(PROMPTS)]
    done = run_bm(*command, "--out", str(cache / "bm"), *more, cache=cache)
    print(done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def test_an_invalid_level_is_measured_once_more(
    oracle: Oracle, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path, oracle, tokenizer, DEPLOYMENT)
    # The counters of one engine begin anew during the first measurement; every seventh answer is short in both.
    oracle.configure({"concurrency2-": {"restart_at": 20}, "concurrency3-": {"short_every": 7}})
    code, output = sweep(oracle, tmp_path, "--retry-invalid")
    assert code == 3
    folder = tmp_path / "bm" / DEPLOYMENT.label
    mended, broken, untouched = Store(folder).runs()

    assert mended.validity.valid and mended.replaces
    assert "its counters decreased" in mended.replaces.reasons[0]
    assert not broken.validity.valid and broken.replaces
    assert "wrong output token count" in broken.replaces.reasons[0]
    assert untouched.validity.valid and untouched.replaces is None
    assert output.count("measured twice: ") == 2 and "INVALID concurrency3: " in output

    firsts = Store(folder / "replaced")
    assert [run.key for run in firsts.runs()] == [mended.key, broken.key]
    assert all(not run.validity.valid and run.replaces is None for run in firsts.runs())
    for first, second in zip(firsts.runs(), (mended, broken), strict=True):
        assert folder / second.replaces.file == firsts.path(first.key)  # type: ignore[union-attr]
        assert first.seed != second.seed
        assert len(firsts.read_records(first.key)) == len(Store(folder).read_records(second.key)) == PROMPTS
    prompts = Counter(entry["prompt"] for entry in oracle.log())
    assert max(prompts.values()) == 1, "the second measurement finds its prompts in the prefix cache"

    served = len(oracle.log())
    code, _ = sweep(oracle, tmp_path, "--resume", "--retry-invalid")
    assert code == 3
    assert len(oracle.log()) == served, "a level was measured a third time"

    capsys.readouterr()
    assert viz.main(["--exps", str(folder), "--no-plot"]) == 0
    output = capsys.readouterr().out
    assert "1xTP1 collocated at concurrency 2: measured twice, the first result was not valid: an engine" in output
    assert "x 1xTP1 collocated at concurrency 3: not valid, measured twice: 3 of 24 answers" in output
    assert "(first: 3 of 24 answers" in output


def test_resume_retries_levels_that_are_finished(oracle: Oracle, tokenizer: Path, tmp_path: Path) -> None:
    publish(tmp_path, oracle, tokenizer, DEPLOYMENT)
    oracle.configure({"concurrency2-": {"restart_at": 20}})
    assert sweep(oracle, tmp_path)[0] == 3
    store = Store(tmp_path / "bm" / DEPLOYMENT.label)
    before = {path.name: path.read_bytes() for path in store.folder.glob("concurrency*")}
    assert sweep(oracle, tmp_path, "--resume")[0] == 3
    assert {path.name: path.read_bytes() for path in store.folder.glob("concurrency*")} == before
    code, output = sweep(oracle, tmp_path, "--resume", "--retry-invalid")
    assert ended_well(code, output)
    assert "2 of 3 levels were already measured and skipped" in output
    for name in ("concurrency2.json", "concurrency2.records.json.gz"):
        assert (store.folder / "replaced" / name).read_bytes() == before.pop(name)
    assert {name: (store.folder / name).read_bytes() for name in before} == before
