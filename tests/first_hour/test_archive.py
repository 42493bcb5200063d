"""Planted secrets never leave, and what helps does."""

from __future__ import annotations

import json
import random
import tarfile
from pathlib import Path

import pytest

from pdlab.core import api_key
from pdlab.core.errors import WriteError
from pdlab.first_hour import archive

TOKEN, KEY, PASSWORD = "3f9a1c77e2b04d5f9a", "pdlab-4Q8x_Zr2-key-of-clients", "hunter2hunter2"
FLAG, PHRASE = "abcdefgh12345678", "correct horse battery"
HUB = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
LEAKS = {
    "logs/01-doctor.log": f"RAY_AUTH_TOKEN={TOKEN}\nRAY_AUTH_MODE=token\n",
    "logs/05-launch.log": f"Authorization: Bearer {KEY}\nfetching https://me:{PASSWORD}@hub.example/x\n",
    "logs/06-sweep.log": f"retry with api_key='{KEY}' password: {PASSWORD}\ntoken {TOKEN} refused\n",
    "doctor.json": json.dumps({"environment": {"HF_TOKEN": HUB, "UCX_TLS": "srd"}, "auth": {"token": "0123456789ab"}}),
    "results/x/manifest.json": json.dumps({"commands": [f"launch --password {PASSWORD}"], "total_tokens": 5000}),
    "failed-replicas/launch-pack/worker-1.out": f"aws_secret_access_key = {PASSWORD}\nAKIAABCDEFGHIJKLMNOP\n",
    "logs/07-engine.log": f"vllm serve m --api-key {FLAG} \nAZURE_STORAGE_KEY={FLAG}\nSSH_PRIVATE_KEY={FLAG}",
    "logs/08-engine.log": f"non-default args: {{'api_key': ['{FLAG}', '{FLAG}x'], 'max_num_batched_tokens': 8192}}\n",
    "config.json": json.dumps({"password": PHRASE, "words": ["--hf-token", FLAG]}),
    "deployment.yaml": "kv_connectors:\n- kv_connector: LMCacheConnectorV1\n  kv_connector_extra_config:\n"
    f"    credentials:\n      remote: {FLAG}\n      keys:\n      - - {FLAG}\n",
    "results/y/manifest.json": json.dumps(
        {
            "deployment": {"engine_kwargs": {"model_loader_extra_config": {"secrets": {"s3": [[[FLAG]]]}}}},
            "commands": [
                f"""launch --kv-connector '{json.dumps({"kv_connector": "x", "secrets": [[[FLAG]]]})}' --local"""
            ],
        }
    ),
    "nested.json": json.dumps({"text": json.dumps({"passwd": PHRASE})}),
    "key.txt": "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----\n",
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for name, text in LEAKS.items():
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "out" / "report.png").write_bytes(b"\x89PNG")
    (tmp_path / "out" / "results/x/concurrency4.records.json.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "out" / "results/x/.lock").write_text("held")
    return tmp_path / "out"


def unpacked(path: Path) -> dict[str, str]:
    with tarfile.open(path) as made:
        contents = {}
        for member in made.getmembers():
            file = made.extractfile(member)
            assert file is not None
            contents[member.name.split("/", 1)[1]] = file.read().decode()
        return contents


def planted(tmp_path: Path) -> set[str]:
    """As the command collects them: the environment, Ray's token file, the cache's key file."""
    home, cache = tmp_path / "home", tmp_path / "cache"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text(f"{TOKEN}\n")
    cache.mkdir()
    (cache / "api-key").write_text(KEY)
    environment = {"DATABASE_PASSWORD": PASSWORD, "HOME": str(home), "RAY_AUTH_MODE": "token", "SSH_KEY": str(home)}
    return archive.known_secrets(environment, archive.secret_files(home, cache))


def test_the_key_that_a_launch_took_from_a_variable_is_known(tmp_path: Path) -> None:
    api_key.chosen(None, {api_key.KEY: KEY}, needed=True, folder=tmp_path)
    assert archive.known_secrets({}, archive.secret_files(tmp_path / "home", tmp_path)) == {KEY}


def test_secrets_in_files_that_variables_name_are_known(tmp_path: Path) -> None:
    for name in ("ray", "hub/token"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}-{KEY}\n")
    environment = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "ray"), "HF_HOME": str(tmp_path / "hub")}
    environment |= {"DB_PASSWORD": PHRASE, "MY_TOKEN_BUDGET": "5000000"}
    known = archive.known_secrets(environment, archive.secret_files(None, None, environment))
    assert known == {f"ray-{KEY}", f"hub/token-{KEY}", PHRASE}


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "HF_TOKEN", "hf_token", "TOKEN"])
def test_a_token_of_digits_is_a_secret(name: str, out: Path) -> None:
    known = archive.known_secrets({name: "1234567890", "VLLM_MAX_TOKEN_BUDGET": "1310720"}, ())
    assert known == {"1234567890"}
    assert "1234567890" not in archive.redact("refused 1234567890\n", known)


def test_a_secret_may_begin_like_a_path(tmp_path: Path) -> None:
    long = "/" + "x" * 5000
    named = {"DB_PASSWORD": "/hunter2hunter2", "API_SECRET": long}
    paths = {"SSH_KEY": str(tmp_path), "TOKEN_FILE": "/not/there", "AWS_SECRET_DIR": "/nor/there"}
    assert archive.known_secrets(named | paths, ()) == {"/hunter2hunter2", long}


def test_known_secrets(tmp_path: Path) -> None:
    assert planted(tmp_path) == {TOKEN, KEY, PASSWORD}


def test_no_planted_secret_leaves(out: Path, tmp_path: Path) -> None:
    contents = unpacked(archive.write(out, planted(tmp_path)))
    everything = "\n".join(contents.values())
    for secret in (TOKEN, KEY, PASSWORD, HUB, "AKIAABCDEFGHIJKLMNOP", "MIIabc", "0123456789ab", FLAG, "battery"):
        assert secret not in everything, secret
    assert archive.HIDDEN in everything


def test_what_looks_like_a_secret_is_removed_though_it_is_unknown(out: Path) -> None:
    everything = "\n".join(unpacked(archive.write(out, set())).values())
    for secret in (HUB, "AKIAABCDEFGHIJKLMNOP", "MIIabc", f"Bearer {KEY}", f"me:{PASSWORD}@", f"password: {PASSWORD}"):
        assert secret not in everything, secret
    assert FLAG not in everything and "battery" not in everything
    assert f"RAY_AUTH_TOKEN={TOKEN}" not in everything and f"api_key='{KEY}" not in everything


def test_what_helps_is_kept(out: Path, tmp_path: Path) -> None:
    contents = unpacked(archive.write(out, planted(tmp_path)))
    assert set(contents) == set(LEAKS), "no pictures, no requests, no locks"
    assert "RAY_AUTH_MODE=token" in contents["logs/01-doctor.log"]
    assert json.loads(contents["doctor.json"])["environment"]["UCX_TLS"] == "srd"
    assert json.loads(contents["results/x/manifest.json"])["total_tokens"] == 5000
    manifest = json.loads(contents["results/y/manifest.json"])
    assert manifest["deployment"]["engine_kwargs"]["model_loader_extra_config"] == {
        "secrets": {"s3": [[[archive.HIDDEN]]]}
    }
    assert manifest["commands"][0].endswith("' --local")
    assert "kv_connector: LMCacheConnectorV1\n" in contents["deployment.yaml"]


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 250", "token_id:1234", '"input_tokens": 5000', "tokens=4000,8000", "key: concurrency8",
        "TTFT p50 120 ms, TPOT 8.1 ms", "3 of 3 prompts give the same tokens", "http://127.0.0.1:8000/v1",
        '"tokenizer": "/models/gpt-oss"', "keyed on max_concurrency",
        "mean_time_per_output_token: 0.0123456", '"token_ids": [128000, 791, 4062]', "per_token_latency_ms=12.34567",
        "--api-key-file /keys/api-key", "RAY_AUTH_TOKEN_PATH=/tmp/ray/auth_token", "keyword: throughput",
        "time_per_token:\n  units: ms",
        "'max_num_batched_tokens': 8192, 'port': 8000",
        '{"ms_per_token": [12.34, null]}', '{"ms_per_token": [[12.34, NaN], [-Infinity, true]]}',
        "time_per_output_token=12.345ms", "bytes_per_token=98304B", "kv_per_token: 1234.5 KiB",
        '"token_source": "tokenizer"',
        "ms_per_token: [12.345, 1e-3, nan, inf, None]",
    ],
)  # fmt: skip
def test_measurements_are_not_mistaken_for_secrets(text: str) -> None:
    assert archive.redact(text, set()) == text


def test_a_long_log_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_BYTES", 100)
    (tmp_path / "a.log").write_text("x" * 500 + "the end")
    (text,) = unpacked(archive.write(tmp_path, set())).values()
    assert text.startswith("[the first 407 bytes are left out]") and text.endswith("the end")


def test_on_a_full_disk_no_archive_is_cut_short(small_disk: Path) -> None:
    (small_disk / "long.log").write_text(random.Random(0).randbytes(20_000).hex())
    (small_disk / "fill").write_bytes(bytes(16 * 1024))
    with pytest.raises(WriteError, match="No space left"):
        archive.write(small_disk, ())
    assert sorted(each.name for each in small_disk.iterdir()) == ["fill", "long.log"]
