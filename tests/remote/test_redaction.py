"""What is taken for a secret in texts and command lines."""

from __future__ import annotations

import json
import pprint
import shlex
from collections.abc import Callable

import pytest
import yaml

from pdlab.remote import redaction
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


# Each has the secret somewhere below a name of secrets, and below b what must stay.
NESTED: list[dict[str, object]] = [
    {"credentials": {"user": "x", "value": SECRET}, "b": 1},
    {"credentials": {"of": {"all": [{"which": [[SECRET]]}], "pin": 12345678}}, "b": 1},
    {"api_keys": [[[SECRET, 2]], [[["c", SECRET]]]], "b": 1},
    {"my_secrets": [{"a": {"b": [SECRET]}}, SECRET], "b": 1},
    {"kv_connector_extra_config": {"remote": [{"auth": {"access_token": {"value": SECRET}}}]}, "b": 1},
    {"env": [{"name": "HF_TOKEN", "value": SECRET}, {"name": "UCX_TLS", "value": "rc,cuda_copy"}], "b": 1},
    {"env": [{"name": "HF_TOKEN", "type": "x", "value": SECRET}, {"name": "UCX_TLS", "value": "rc,cuda_copy"}], "b": 1},
    {"env": [{"value": "rc,cuda_copy", "name": "UCX_TLS"}, {"value": SECRET, "name": "HF_TOKEN"}], "b": 1},
    {"x_token": {"expires_s": 3600, "unit": "seconds", "password": {"digits": 12345678}}, "b": 1},
    {"credentials": {"keys": [SECRET, {"token": [12345678]}]}, "b": 1},
    {"password": {"phrase": f"correct {SECRET} battery"}, "b": 1},
]


@pytest.mark.parametrize("value", NESTED)
@pytest.mark.parametrize(
    "write",
    [
        json.dumps, lambda value: json.dumps(value, indent=2), repr, pprint.pformat, yaml.safe_dump,
        lambda value: yaml.safe_dump(value, default_flow_style=True, width=1000),
        lambda value: "at: " + json.dumps(json.dumps(json.dumps(value))),
        lambda value: shlex.join(["launch", "--engine-arg", f"model_loader_extra_config={json.dumps(value)}"]),
        lambda value: repr(["launch", "--kv-connector", json.dumps(value), "--wait"]),
    ],
    ids=["json", "lines of json", "repr", "pprint", "yaml", "flow", "texts", "command", "words"],
)  # fmt: skip
def test_a_secret_is_hidden_at_any_depth(value: dict[str, object], write: Callable[[object], str]) -> None:
    text = f"{write(value)}\nnext: line-that-stays\n"
    shown = redacted(text)
    assert SECRET not in shown and "12345678" not in shown and HIDDEN in shown
    assert "battery" not in shown
    assert shown.endswith("next: line-that-stays\n") and redacted(shown) == shown
    for kept in ("UCX_TLS", "rc,cuda_copy", "3600", "seconds", "kv_connector_extra_config", "expires_s"):
        assert (kept in shown) == (kept in text)
    if write is json.dumps:
        assert json.loads(shown.partition("\n")[0])["b"] == 1


STEPS = "INFO 11-29 17:05:54 [core.py:58] step 7: throughput: 12345.7 tok/s\n" * 50


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        # Cut off: its own are its line and those below that are further right or begin with a quote.
        (f'credentials: {{"value": "{SECRET}\nnext: {SECRET}', f'credentials: {{"value": "{HIDDEN}\nnext: {SECRET}'),
        (f'"credentials": {{\n"value": "{SECRET}",', f'"credentials": {{\n"value": "{HIDDEN}",'),
        (f'"{{\\"api_keys\\": [[\\"{SECRET}\\"" and {SECRET}', f'"{{\\"api_keys\\": [\\"{HIDDEN}\\"" and {SECRET}'),
        (f"--kv-secrets {{a: {SECRET}}} --port 8000", f"--kv-secrets {{a: {HIDDEN}}} --port 8000"),
        (f"keys:\n  password: |-\n    {SECRET}\n\n    {SECRET}\n  b: {SECRET}",
         f"keys:\n  password: |-\n    {HIDDEN}\n\n    {HIDDEN}\n  b: {SECRET}"),
        (f"passwords:\n- - {SECRET}\n- a: '{SECRET}\n\n    x {SECRET}'\nb: {SECRET}",
         f"passwords:\n- - {HIDDEN}\n- a: {HIDDEN}\n\n    {HIDDEN}\nb: {SECRET}"),
        ("secret: {" * 20_000, "secret: {" * 20_000),
        ("secret: {x\n" * 4_000 + f"password: {{a: [\n [{SECRET}]]}}",
         "secret: {x\n" * 4_000 + f"password: {{a: [\n [{HIDDEN}]]}}"),
        (f"credentials: {{'a': {{'b': 1,\n    'c': '{SECRET}',\n\n",
         f"credentials: {{'a': {{'b': 1,\n    'c': '{HIDDEN}',\n\n"),
        (f" api_keys=[\n  {SECRET},\n x: {SECRET}", f" api_keys=[{HIDDEN}\n x: {SECRET}"),
        ("INFO api_keys={\n" + STEPS, "INFO api_keys={\n" + STEPS),
        ("INFO api_keys=[\n\n" + STEPS, "INFO api_keys=[\n\n" + STEPS),
    ],
)  # fmt: skip
def test_a_nested_value_ends_where_it_ends(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"secrets: # all\n  a: {SECRET}\nb: {SECRET}", f"secrets: # all\n  a: {HIDDEN}\nb: {SECRET}"),
        (f"secrets: &x\n  a: {SECRET}", f"secrets: &x\n  a: {HIDDEN}"),
        (f"secrets: !x &y # all: of\n- {SECRET}", f"secrets: !x &y # all: of\n- {HIDDEN}"),
        (f"secrets: !x |- # all\n  {SECRET}", f"secrets: !x |- # all\n  {HIDDEN}"),
        (f"secrets:\n  a: {SECRET} Bearer {SECRET}", f"secrets:\n  a: {HIDDEN}"),
        (f"secrets:\n  a: {HIDDEN}\n  b: [{HIDDEN}]", f"secrets:\n  a: {HIDDEN}\n  b: [{HIDDEN}]"),
        (f"- name: UCX_TLS\n  value: rc,cuda_copy\n- type: x\n  value: {SECRET}\n  name: HF_TOKEN",
         f"- name: UCX_TLS\n  value: rc,cuda_copy\n- type: x\n  value: {HIDDEN}\n  name: HF_TOKEN"),
        (f"name=UCX_TLS value=cuda_copy name=HF_TOKEN type=x value={SECRET}",
         f"name=UCX_TLS value=cuda_copy name=HF_TOKEN type=x value={HIDDEN}"),
        ('{"value": 12345678, "name": "HF_TOKEN"}', f'{{"value": "{HIDDEN}", "name": "HF_TOKEN"}}'),
    ],
)  # fmt: skip
def test_a_secret_is_hidden_beside_or_below_its_name(text: str, shown: str) -> None:
    assert redacted(text) == shown == redacted(shown)


@pytest.mark.parametrize("run", [" ", "\t", "\\", "'"])
def test_a_long_run_of_one_character_is_read(run: str) -> None:
    for before in ("secrets:\n  x", "secrets: {x", "name: my_token", "value"):
        text = f"{before}{run * 100_000}y"
        assert redacted(redacted(text)) == redacted(text)


def test_many_values_without_an_end_are_not_read_to_the_end_each(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def values_within(text: str, start: int, most: int, name: str, quote: int) -> tuple[list[slice], int | None]:
        nonlocal read
        read += most - start
        return within(text, start, most, name, quote)

    within = redaction._values_within
    monkeypatch.setattr(redaction, "_values_within", values_within)
    for line in ("INFO api_key=[abc, {def \n", '"secret": {{x\n', "}secret: {{x\n"):
        text, read = line * 4_000, 0
        redacted(text)
        assert read < 20 * len(text) + 1_000_000


@pytest.mark.parametrize(
    "value",
    [
        {
            "max_tokens": 131072,
            "num_tokens": [100000, 200000],
            "tokenizer": {"name": "gpt2-medium", "mode": "automatic"},
        },
        {"tokens": {"input": 500000, "kind": "synthetic"}, "max_num_batched_tokens": {"prefill": 131072}},
        {"time_per_output_token": {"units": "seconds/token", "mean": 0.0123456, "percentiles": {"p50": 0.0123456}}},
        {"ms_per_token": [{"p50": 12.34567}, {"p50": [123.4567]}]},
        {"key": {"kind": "concurrency", "value": "concurrency8"}, "keys": ["concurrency", {"by": "arrival"}]},
        {"secretKeyRef": {"name": "chat-api-key", "key": "sha256digest"}},
        {"ssh_key_files": {"first": "/home/me/.ssh/id_rsa"}, "credentials": {"file": "/etc/me/credentials.json"}},
        {"name": "max_tokens", "value": 131072},
        {"time_per_output_token": {"of": "percentile"}, "ms_per_token": {"of": ["percentile"]}},
        {"cache_key": {"of": "blockhash"}, "sort_keys": ["arrival-time", {"by": "arrival"}], "block-keys": "blockhash"},
        {"multi_token_prediction": {"method": "deepseek_mtp"}},
        {"monitor": [{"name": "tokenizer", "value": "gpt2-medium"}]},
    ],
)
@pytest.mark.parametrize(
    "write", [json.dumps, lambda value: json.dumps(value, indent=2), yaml.safe_dump, repr], ids=range(4)
)
def test_what_is_no_secret_is_shown_at_any_depth(value: object, write: Callable[[object], str]) -> None:
    assert redacted(write(value)) == write(value)


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
