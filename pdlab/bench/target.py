"""The target of a sweep: the server at a base URL, with the launcher's published record of it."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdlab.core import api_key
from pdlab.core.commands import LAUNCH
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import DeploymentDied, UsageError, reason_of
from pdlab.core.findings import Finding, found
from pdlab.core.served_model import served_model
from pdlab.core.text import counted
from pdlab.core.workload import Workload
from pdlab.deploy import http_client
from pdlab.deploy.endpoint import Running, key_of, load_running
from pdlab.deploy.http_client import NoAnswer, NotStreamed
from pdlab.results.schema import Manifest

TIMEOUT_S = 10.0
# Of several scripts, code and digits, which no two vocabularies cut alike; twice, so that they differ by more than the
# special tokens that a server or a tokenizer may put around a text.
PROBE = 2 * (
    "Disaggregated prefill, naïve Straße: λ=0.25/s; def f(x):\n    return x**2  # 1234567890\n"
    '日本語のテキスト и ещё немного слов, مرحبا بالعالم, 🙂 {"key": [1.5e-9, null]}\n'
)
SHORT = "x"  # a prompt that fills no block of a prefix cache
MOST_EVENTS = 64  # of a short completion, from a server that does not stop
SPECIAL_TOKENS = 2
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,127}")


class Target(Running):
    """A server to measure. ``manifest`` has the launcher's published record, or the facts from the server and the
    flags, and the workload. ``name`` is the experiment's folder; ``figure_notes`` are stored with every level.
    """

    name: str
    figure_notes: tuple[Finding, ...] = ()


def resolve_target(
    base_url: str,
    *,
    workload: Workload,
    name: str | None = None,
    model: str | None = None,
    tokenizer: str | None = None,
    gpus: int | None = None,
    smoke: bool = False,
) -> Target:
    """Read from the server what it serves, and compare it with the launcher's record and the flags.

    Raises UsageError when the server does not answer, does not serve ``model``, cannot hold the
    workload, or when ``name`` or ``gpus`` contradicts what runs.
    """
    url = normal_url(base_url)
    check_name(name)
    if tokenizer is not None:
        _require_tokenizer(tokenizer)
    running = load_running(url)
    cards = _served_models(url)
    model_id = _model(url, model, running, list(cards))
    longest = cards[model_id].get("max_model_len")
    longest_tokens = sum(workload.longest)
    if isinstance(longest, int) and longest_tokens > longest:
        subject = f"the longest request of {workload.label}" if workload.varied else "--itl + --otl"
        raise UsageError(
            f"{subject} is {counted(longest_tokens, 'token')}, but {model_id} is served with at most {longest}; use "
            "shorter requests, or launch with a larger max_model_len"
        )
    if running is None or tokenizer not in (None, running.tokenizer):
        _require_same_tokens(url, model_id, tokenizer or model_id, running.tokenizer if running else None)
    manifest = _manifest(name, running, gpus, workload)
    _same_phase(url, manifest.deployment, workload)
    if name is None:
        name = manifest.label if workload.mode == "mixed" else f"{manifest.label}-{workload.mode}"
    if manifest.deployment is None:
        manifest = manifest.model_copy(update={"model": model_id, "tokenizer": tokenizer or model_id})
    published: dict[str, Any] = dict(running) if running else {"tokenizer": model_id}
    measured = {"base_url": url, "model_id": model_id, "manifest": manifest} | (
        {"tokenizer": tokenizer} if tokenizer else {}
    )
    return Target(
        **published | measured,
        name=f"{name}-smoke" if smoke else name,
        figure_notes=_limits(manifest.deployment, workload),
    )


def _require_tokenizer(name: str) -> None:
    """Raises UsageError for what is neither a folder with a tokenizer nor written like a Hugging Face id; whether
    the hub has such an id shows when it is loaded."""
    folder = Path(name).expanduser()
    try:
        is_folder = folder.is_dir()
        files = {path.name for path in folder.iterdir()} if is_folder else set()
    except (OSError, ValueError) as error:
        raise UsageError(f"--tokenizer {name}: cannot be read ({reason_of(error)}); give a folder") from error
    if is_folder and not files & TOKENIZER_FILES:
        raise UsageError(
            f"--tokenizer {name}: a folder without a tokenizer ({' or '.join(sorted(TOKENIZER_FILES))}); give the "
            "model's folder"
        )
    if not is_folder and (name.startswith((".", "~", "/")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII)):
        raise UsageError(f"--tokenizer {name!r}: no such folder; give one, or a Hugging Face id such as org/name")


def _require_same_tokens(url: str, model: str, tokenizer: str, served: str | None) -> None:
    """Raises UsageError where ``tokenizer`` is another model's, before the load generator starts.

    Its vocabulary is held against that of ``served``, the one that the launcher published; where that is not on this
    machine, its count of a text against the server's, which one short completion returns. Where neither can be
    compared, the warm-up finds it.
    """
    ours = _loaded(tokenizer)
    if ours is None:
        return
    theirs = None if served is None else _loaded(served)
    if theirs is not None:
        # Without added tokens, of which a newer copy of the same tokenizer may have more.
        own, published = ours.get_vocab(False), theirs.get_vocab(False)
        if own != published:
            raise UsageError(
                f"--tokenizer {tokenizer}: belongs to another model: its vocabulary ({counted(len(own), 'token')}) is "
                f"not that of {served} ({counted(len(published), 'token')}), with which {model} at {url} is served; "
                "leave --tokenizer out"
            )
        return
    count, theirs_count = len(ours.encode(PROBE).ids), _counted(url, model)
    if theirs_count is not None and abs(count - theirs_count) > SPECIAL_TOKENS:
        raise UsageError(
            f"--tokenizer {tokenizer}: belongs to another model: it makes {counted(count, 'token')} of a text for "
            f"which {model} at {url} counts {theirs_count}; give the folder or the Hugging Face id of the served model"
        )


def _loaded(tokenizer: str) -> Any:
    """As the library tokenizers reads it; None for what is not on this machine, or has no tokenizer.json. Raises
    UsageError for a damaged one."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from tokenizers import Tokenizer

    folder = Path(tokenizer).expanduser()
    file: object = folder / "tokenizer.json"
    if not folder.is_dir():
        try:
            file = try_to_load_from_cache(tokenizer, "tokenizer.json")
        except HFValidationError:
            return None
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # it raises nothing narrower
        raise UsageError(f"--tokenizer {tokenizer}: {file} cannot be read ({error}); download it again") from error


def _counted(url: str, model: str) -> int | None:
    """Tokens of `PROBE`, as the server counts them; None where it does not report them."""
    try:
        request = {"model": model, "prompt": PROBE, "max_tokens": 1}
        count = http_client.complete(url, request, key_of(url), TIMEOUT_S)["usage"]["prompt_tokens"]
    except (NoAnswer, KeyError, TypeError):
        return None
    return count if isinstance(count, int) else None


def _same_phase(url: str, deployment: Deployment | None, workload: Workload) -> None:
    """decode-only is measured on engines that fill KV cache, and there nothing else means anything."""
    filled = deployment is not None and deployment.decode_bench
    if workload.mode == "decode-only" and not filled:
        subject = deployment.label if deployment else "what runs there, as far as is known,"
        raise UsageError(
            f"--mode decode-only: {subject} at {url} computes prompts, so the results would mix prefill and decode; "
            f"launch with {LAUNCH} --collocated --decode-bench, or take --mode decode-approx (one input "
            "token: decode of an empty context)"
        )
    if filled and workload.mode != "decode-only":
        raise UsageError(
            f"--mode {workload.mode}: {url} was launched with --decode-bench and fills KV cache instead of computing "
            "prompts; use --mode decode-only, or launch without --decode-bench"
        )


def _limits(deployment: Deployment | None, workload: Workload) -> tuple[Finding, ...]:
    """What decode-only does not measure (read in vLLM 0.29's decode_bench_connector.py)."""
    if workload.mode == "decode-approx":
        return (found("decode_approximated"),)
    if workload.mode != "decode-only":
        return ()
    shape = served_model(deployment).shape if deployment else None
    filled = found("decode_only_filled")
    return (filled, found("decode_only_first_group")) if shape is None or shape.sliding_window else (filled,)


def normal_url(text: str) -> str:
    """``http://HOST[:PORT]`` without a trailing slash or /v1. Raises UsageError."""
    url = text.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        named = re.fullmatch(r"[\w.:%-]+", parts.hostname or "")  # urlsplit takes spaces too
        whole = not re.search(r"[\s?#@]", url)
        valid = parts.scheme in ("http", "https") and named and whole and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"--base-url {text!r}: expected http://HOST:PORT")
    return url


def answers(url: str) -> bool:
    """Whether the server at ``url`` lists its models."""
    try:
        _served_models(url)
    except UsageError:
        return False
    return True


def _served_models(url: str) -> dict[str, dict[str, Any]]:
    """Model id -> model card."""
    key, reason = key_of(url), "its list of models cannot be read"
    try:
        cards = http_client.get_json(f"{url}/v1/models", TIMEOUT_S, key)
        return {str(card["id"]): card for card in cards["data"]}
    except NoAnswer as error:
        if error.code == 401:
            raise UsageError(
                f"{url} requires its API key, and {'another one' if key else 'none'} is known here: "
                f"set {api_key.KEY} to the key it was launched with"
            ) from error
        if error.code is not None:
            raise UsageError(f"{url}/v1/models answers HTTP {error.code}; is the deployment ready?") from error
        reason = error.detail
    except (KeyError, TypeError):
        pass
    raise UsageError(f"no OpenAI server answers at {url} ({reason}); start one with {LAUNCH} or give its --base-url")


def _model(url: str, model: str | None, running: Running | None, served: list[str]) -> str:
    if model is None and running is not None:
        if running.model_id not in served:
            raise UsageError(
                f"{url} serves {', '.join(served) or 'nothing'}, but the launcher last started {running.model_id} "
                f"there; clear that record with {LAUNCH} --shutdown"
            )
        return running.model_id
    if model is None:
        if len(served) == 1:
            return served[0]
        raise UsageError(f"{url} serves {', '.join(served) or 'no model'}; choose one with --served-model-name")
    if model not in served:
        raise UsageError(f"--served-model-name {model!r}: {url} serves {', '.join(served) or 'no model'}")
    return model


def _manifest(name: str | None, running: Running | None, gpus: int | None, workload: Workload) -> Manifest:
    try:
        named = parse_label(name) if name else None
    except UsageError:
        named = None
    if running is not None:
        known = running.manifest
        deployment = known.deployment
        if named and deployment and named.label != deployment.label:
            raise UsageError(f"--exp-name {name}: what runs is {deployment.label}; use that label or a free name")
        known_gpus = known.gpus or (deployment.gpus if deployment else None)
        label = known.label
    else:
        if name is None:
            raise UsageError("--exp-name is needed: the launcher on this machine has not published what runs here")
        known = Manifest(origin="measured", label=name)
        known_gpus = Deployment(topology=named).gpus if named else None
        label = name
    if gpus and known_gpus and gpus != known_gpus:
        raise UsageError(f"--gpus {gpus}: {label} uses {known_gpus}; leave the flag out")
    origin = "measured" if known.rehearsal is None else "simulated"
    return known.model_copy(update={"origin": origin, "label": label, "gpus": known_gpus or gpus, "workload": workload})


def check_name(name: str | None) -> None:
    """Raises UsageError if ``--exp-name`` is given and is no name for a folder."""
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(
            f"--exp-name {name!r}: letters, digits and . _ + = - only, at most 128, because it names a folder"
        )


def completion_error(url: str, model: str) -> str | None:
    """The server's answer to one short streamed completion, if it is not a stream of tokens; None: it is one, or there
    is no answer within TIMEOUT_S.
    """
    request = {"model": model, "prompt": SHORT, "max_tokens": 2, "stream": True}
    try:
        with http_client.streamed(url, request, key_of(url), TIMEOUT_S) as events:
            # To its end: a decode engine whose client is gone may leave KV blocks of the prefill engine waiting.
            for _ in islice(events, MOST_EVENTS):
                pass
            return None
    except NotStreamed as error:
        return (
            f"the server does not stream: a streamed completion is answered as {error.content_type}, "
            f"not as {http_client.EVENT_STREAM}"
        )
    except NoAnswer as error:
        if error.code is None:
            return None
        return f"a completion of {model} is answered with HTTP {error.code}: {error.detail}"


def require_answering(url: str) -> None:
    """Raises DeploymentDied when the server has gone away in the middle of a sweep."""
    try:
        _served_models(url)
    except UsageError as error:
        raise DeploymentDied(
            f"{url} no longer answers",
            f": the running level is not kept ({error}); start the deployment again and use --resume",
        ) from error
