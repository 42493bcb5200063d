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
        (f"api_key=['{SECRET}', 'x'], port=1", f"api_key=['{HIDDEN}'], port=1"),
        ("api_keys: [abcdefgh, x]", f"api_keys: [{HIDDEN}]"),
        ("HF_TOKEN=12345678", f"HF_TOKEN={HIDDEN}"),
        ("export RAY_AUTH_TOKEN=12345678.5", f"export RAY_AUTH_TOKEN={HIDDEN}"),
        ('"TOKEN": "12345678"', f'"TOKEN": "{HIDDEN}"'),
        ("access_token: 12345678x", f"access_token: {HIDDEN}"),
        ("token_source_secret: tokenizer", f"token_source_secret: {HIDDEN}"),
        (f"secret -> {SECRET}", f"secret -> {HIDDEN}"),
        ("api_key=None, hf_token=None", "api_key=None, hf_token=None"),
        ("my_password: 12345678", f"my_password: {HIDDEN}"),
        ("--hf-token --port 8000", "--hf-token --port 8000"),
    ],
)
def test_the_value_of_a_secret_is_hidden_in_a_text(text: str, shown: str) -> None:
    assert redacted(text) == shown == redacted(shown)


BEGIN, END = ("-----" + word + " RSA PRIVATE KEY-----" for word in ("BEGIN", "END"))


@pytest.mark.parametrize(
    "value",
    [
        {"api_keys": [SECRET, "b"], "b": 1},
        {"my_passwords": [[SECRET, "c"], [SECRET]], "b": 1},
        {"my_secrets": [{"name": SECRET, "of": [SECRET, 2]}], "b": 1},
        {"my_password": 12345678, "b": 1},
        {"text": json.dumps({"passwords": [SECRET, "b"], "password": 12345678}), "b": 1},
        {"access_tokens": [12.345, "c"], "api_key": [12345678, None], "b": 1},
    ],
)
def test_json_stays_json(value: dict[str, object]) -> None:
    shown = redacted(json.dumps(value))
    assert json.loads(shown)["b"] == 1 and HIDDEN in shown
    assert SECRET not in shown and "12345678" not in shown
    if "text" in value:
        assert list(json.loads(json.loads(shown)["text"])) == ["passwords", "password"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a\n{BEGIN}\nMIIabc+/=\nx: y-z\n{END}\nb", f"a\n{HIDDEN}\nb"),
        (json.dumps(f"{BEGIN}\nMIIabc\n{END}\n"), json.dumps(f"{HIDDEN}\n")),
        # Cut, or only named: a match never leaps over the next marker.
        (f"{BEGIN}\n{'A9+/' * 16}\n{'b' * 64}", HIDDEN),
        (f"{BEGIN} is not found\nb\n{BEGIN}\nMIIabc\n{END}\nc", f"{HIDDEN} is not found\nb\n{HIDDEN}\nc"),
        (f"{BEGIN}\n" * 20_000, f"{HIDDEN}\n" * 20_000),
    ],
    ids=["whole", "in json", "cut", "named", "many"],
)
def test_private_keys_are_hidden(text: str, shown: str) -> None:
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
        (["serve", "--api-key-file", "/keys/api-key", "--tokenizer", "gpt2-medium"],
         "serve --api-key-file /keys/api-key --tokenizer gpt2-medium"),
    ],
)  # fmt: skip
def test_the_words_of_a_command_lose_their_secrets(words: list[str], shown: str) -> None:
    assert " ".join(redacted_words(words)) == shown
