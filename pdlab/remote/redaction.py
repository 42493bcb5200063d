"""Which names are names of secrets, and texts without the values of such names."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "[removed]"
LEAST_SECRET = 6  # characters; a shorter value is a word or a number
# TOKENIZERS_PARALLELISM, numbers of tokens and what tokens are of (token_source) are not secret.
WORDS = r"token(?!iz|s|_(?:source|kind|type|mode|unit|format)\b)|key|secret|passw|credential"
_WORD = re.compile(f"(?i){WORDS}")
# An ordinary word of logs and files: the key of a mapping, a keyword.
_ORDINARY_KEY = re.compile(r"(?i)-*key")
_OF_A_PATH = re.compile(r"(?i)(file|path|dir|folder)s?$")
# The name of a variable for one token; TOKEN_BUDGET is for a number of them.
_OF_A_TOKEN = re.compile(r"[A-Z0-9_]*TOKEN")
_UNIT = r"(?-i:ns|us|µs|ms|s|min|h|B|[kKMGT]B|[KMGT]iB|bytes|%)"
_NUMBER = (
    rf"(?:[-+]?(?:(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?(?:\ ?{_UNIT})?|inf(?:inity)?)"
    r"|nan|null|none|true|false)"
)
_NUMBERS = re.compile(rf"(?i)[\s\[]*{_NUMBER}(?:[\s,\[\]]+{_NUMBER})*[\s\]]*")

# A list with lists in it, a quoted text to its last quote (an escaped quote is one of a text within a text), or a word.
_VALUE = (
    r"(?:(?P<list>\[(?:[^\[\]]|\[[^\[\]]{0,1000}\])*)"
    r"""|(?P<quote>\\*["'])(?P<quoted>[^\n]*?)(?:(?<!\\)(?P=quote)|$)|(?P<bare>[^\s"',}\]]+))"""
)
_QUOTE = re.compile(r"""\\*["']""")
_NAMED = rf"[\w-]*(?:{WORDS})[\w-]{{0,64}}"  # bounded: a long word with many of the words is read once
# As in an environment, JSON, YAML, a header or Python; then as on a command line or in a list of its words.
_ASSIGNED = re.compile(
    rf"""(?im)(?<![\w-])(?P<name>{_NAMED})(?P<end>\\*["']?)\s*(?:[=:]|[=-]{{1,2}}>)\s*(?P<value>{_VALUE})"""
)
_FLAG = re.compile(
    rf"""(?im)(?<![\w-])(?P<name>--?(?=[a-z]){_NAMED})(?P<end>(?:\\*["'])?),?\s+(?!\\*["']?-)(?P<value>{_VALUE})"""
)
_KNOWN = (
    re.compile(r"(?i)(?P<before>\b(?:bearer|basic)\s+)[\w.~+/=-]{6,}"),
    re.compile(r"(?P<before>\b)(?:hf_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[\w-]{20,})"),
    re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]{0,30}://[^\s/:@]*:)[^\s/@]+(?=@)"),
    # To its end, or as far as it looks like one: never over five dashes, so that each text is read once.
    re.compile(
        r"(?P<before>)-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
        r"(?:(?:[^-]|-(?!----))*-----END [A-Z ]{0,30}PRIVATE KEY-----|(?:(?:\s|\\+[nr])*[A-Za-z0-9+/=]{30,})*)"
    ),
)  # fmt: skip


def is_secret(name: str) -> bool:
    """Whether the value of the variable ``name`` must not be shown or stored."""
    return bool(_WORD.search(name))


def names_a_path(name: str) -> bool:
    """Whether the value of ``name`` is the path of a file or of a folder."""
    return bool(_OF_A_PATH.search(name))


def is_count(name: str, value: str) -> bool:
    """Whether the value is a number, with or without a unit, or a list of them, and the name has only the word token: a
    number of tokens or a time per token."""
    if _OF_A_TOKEN.fullmatch(name):
        return False
    return {word.lower() for word in _WORD.findall(name)} == {"token"} and bool(_NUMBERS.fullmatch(value))


def hidden_in_text(name: str, value: str) -> bool:
    """Whether ``value``, which follows ``name`` in a text, is a secret.

    Unlike a variable, the name may be any word of a log. A path is no secret, and the next name of nested YAML neither.
    """
    words = _ORDINARY_KEY.sub("", name, count=1) if _ORDINARY_KEY.match(name) else name
    if len(value) < LEAST_SECRET or not is_secret(words):
        return False
    return not (names_a_path(name) or value.endswith(":") or is_count(name, value))


def redacted(text: str) -> str:
    """The text without values that are or look like secrets."""
    for known in _KNOWN:
        text = known.sub(lambda match: match["before"] + HIDDEN, text)
    return _FLAG.sub(_without_value, _ASSIGNED.sub(_without_value, text))


def redacted_words(words: Sequence[str]) -> list[str]:
    """The words of a command, each without secrets; the word after a flag with the name of a secret is hidden whole."""
    shown = []
    for before, word in zip(("", *words), words, strict=False):
        named = before.startswith("-") and "=" not in before and " " not in before and not word.startswith("-")
        shown.append(HIDDEN if named and hidden_in_text(before, word) else _redacted_word(word))
    return shown


def _redacted_word(word: str) -> str:
    name, equals, value = word.partition("=")
    if equals and re.fullmatch(r"[\w.-]+", name) and hidden_in_text(name, value):
        return f"{name}={HIDDEN}"
    return redacted(word)


def _without_value(match: re.Match[str]) -> str:
    kind = next(kind for kind in ("list", "quoted", "bare") if match[kind] is not None)
    value = match[kind]
    if value == HIDDEN.removesuffix("]"):
        return match[0]
    if not hidden_in_text(match["name"], value.removeprefix("[") if kind == "list" else value):
        return match[0]
    start, end = (place - match.start() for place in match.span(kind))
    # What has a quoted name is JSON or Python, and stays it.
    quote = match["end"]
    if kind == "list":
        inner = _QUOTE.search(value)
        quote = inner[0] if inner else quote
    elif kind == "quoted":
        quote = ""
    opened = "[" if kind == "list" else ""
    return f"{match[0][:start]}{opened}{quote}{HIDDEN}{quote}{match[0][end:]}"
