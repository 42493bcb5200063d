"""What is taken for a secret in texts and command lines."""

from __future__ import annotations

import json

import pytest

from pdlab.remote.redaction import HIDDEN, redacted, redacted_words

SECRET = "abcdefgh12345678"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"--api-key {SECRET} --port 8000", f"--api-key {HIDDEN} --port 8000"),
        (f"--api-key={SECRET} --port 8000", f"--api-key={HIDDEN} --port 8000"),
        (f"-api_key '{SECRET} x' --port 8000", f"-api_key '{HIDDEN}' --port 8000"),
        (f'"password": "a \\"quoted\\" {SECRET}", "b": 1', f'"password": "{HIDDEN}", "b": 1'),
        (f'password: "never closed {SECRET}\nnext', f'password: "{HIDDEN}\nnext'),
        (f"api_key=['{SECRET}', 'x'], port=1", f"api_key=[{HIDDEN}], port=1"),
        (f"secret -> {SECRET}", f"secret -> {HIDDEN}"),
        ("api_key=None, hf_token=None", "api_key=None, hf_token=None"),
        ("my_password: 12345678", f"my_password: {HIDDEN}"),
        ("--hf-token --port 8000", "--hf-token --port 8000"),
    ],
)
def test_the_value_of_a_secret_is_hidden_in_a_text(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_a_text_within_texts_loses_the_whole_value() -> None:
    text = "password is " + json.dumps(json.dumps(json.dumps({"password": "one two", "port": "8000"})))
    assert "two" not in redacted(text) and "8000" in redacted(text)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["vllm", "--api-key", "two words", "--port", "80"], f"vllm --api-key {HIDDEN} --port 80"),
        (["vllm", "--api-key=two words", "x"], f"vllm --api-key={HIDDEN} x"),
        (["env", "HF_TOKEN=two words", "x"], f"env HF_TOKEN={HIDDEN} x"),
        (["sh", "-c", f"serve --api-key {SECRET} --port 80"], f"sh -c serve --api-key {HIDDEN} --port 80"),
        (["serve", "--api-key-file", "/root/api-key", "--tokenizer", "gpt2-medium"],
         "serve --api-key-file /root/api-key --tokenizer gpt2-medium"),
    ],
)  # fmt: skip
def test_the_words_of_a_command_lose_their_secrets(words: list[str], shown: str) -> None:
    assert " ".join(redacted_words(words)) == shown
