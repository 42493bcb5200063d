"""Which names are names of secrets, and texts without the values of such names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

HIDDEN = "[removed]"
LEAST_SECRET = 6  # characters; a shorter value is a word or a number
# TOKENIZERS_PARALLELISM, numbers of tokens and what tokens are of (token_source) are not secret.
WORDS = r"token(?!iz|s|_(?:source|kind|type|mode|unit|format)\b)|key|secret|passw|credential"
_WORD = re.compile(f"(?i){WORDS}")
# Ordinary words of logs and files: the key of a mapping or of a cache, a keyword, a time per token. Variables have
# capitals: CACHE_KEY may be a secret.
_ORDINARY = re.compile(
    r"^-*(?i:key)|(?<![^_-])(?:(?:cache|sort|group|block|prefix)[_-]keys?|per[_-](?:(?:in|out)put[_-])?token)$"
    r"|(?<![^_-])multi[_-]token[_-]prediction(?![^_-])"
)
_OF_A_PATH = re.compile(r"(?i)(file|path|dir|folder)s?$")
# The name of a variable for one token; TOKEN_BUDGET is for a number of them.
_OF_A_TOKEN = re.compile(r"[A-Z0-9_]*TOKEN")
_UNIT = r"(?-i:ns|us|µs|ms|s|min|h|B|[kKMGT]B|[KMGT]iB|bytes|%)"
_NUMBER = (
    rf"(?:[-+]?(?:(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?(?:\ ?{_UNIT})?|inf(?:inity)?)"
    r"|nan|null|none|true|false)"
)
_NUMBERS = re.compile(rf"(?i)[\s\[]*{_NUMBER}(?:[\s,\[\]]+{_NUMBER})*[\s\]]*")

# A quoted text to its last quote (an escaped quote is one of a text within a text), or a word.
_VALUE = r"""(?:(?P<quote>\\*["'])(?P<quoted>[^\n]*?)(?:(?<!\\)(?P=quote)|$)|(?P<bare>[^\s"',\[{}\]][^\s"',}\]]*))"""
_QUOTE = re.compile(r"""\\{0,64}["']""")  # bounded, as spaces are below: a long run of one character is read once
_NAMED = rf"[\w-]*(?:{WORDS})[\w-]{{0,64}}"  # bounded: a long word with many of the words is read once
# As in an environment, JSON, YAML, a header or Python; then as on a command line or in a list of its words.
_ASSIGNED = re.compile(
    rf"""(?im)(?<![\w-])(?P<name>{_NAMED})(?P<end>\\*["']?)\s*(?:[=:]|[=-]{{1,2}}>)\s*(?P<value>{_VALUE})"""
)
_FLAG = re.compile(
    rf"""(?im)(?<![\w-])(?P<name>--?(?=[a-z]){_NAMED})(?P<end>(?:\\*["'])?),?\s+(?!\\*["']?-)(?P<value>{_VALUE})"""
)
# The same two, before the bracket of a list or of a mapping.
_OPENED = re.compile(
    rf"""(?im)(?<![\w-])(?P<name>(?P<flag>--?(?=[a-z]))?{_NAMED})(?P<end>\\*["']?)"""
    rf"""(?:\s*(?:[=:]|[=-]{{1,2}}>)\s*|(?(flag),?\s+|(?!)))(?!{re.escape(HIDDEN)})(?=[\[{{])"""
)
_PIECE = re.compile(
    rf"""(?m)(?P<shown>{re.escape(HIDDEN)})|(?P<open>[\[{{])|(?P<close>[\]}}])"""
    r"""|(?P<quote>\\{0,64}["'])(?P<quoted>[^\n]*?)(?:(?<!\\)(?P=quote)|$)|(?P<bare>[^\s"',:\[\]{}\\](?:[^\n"',:\[\]{}\\]|:(?!\s))*)"""
)
_AFTER_KEY = re.compile(r"\s*:")
# Lists and mappings without an end that are searched to the end of the text. Of others it is LONGEST_CUT characters at
# most, and MOST_BELOW after the first lines of all of them: a text with many of them is else read as often.
MOST_UNCLOSED, LONGEST_CUT, MOST_BELOW = 10, 1_000, 1_000_000
_LINE_BELOW = re.compile(r"""\n(?P<indent>[ \t]*)(?P<first>[^\s])""")
# Of a mapping that has the name of a secret: what its other values are of, and the name of a secret that is elsewhere.
_OF_A_DESCRIPTION = re.compile(r"(?i)(?:^|_|-)(?:units?|kind|type|mode|format|source|description)$")
_REFERENCE = re.compile(r"(?:Ref|_ref|-ref)$")
# As in a list of variables: the name of a secret is a value itself, and its value is beside it, in the same item.
_NAME_KEY = r"""(?<![\w-])(?:name|key)(?P<quoted_key>\\{0,64}["']?)\s{0,200}[:=]"""
_BETWEEN = (
    r"""(?:(?!(?<![\w-])(?:name|key|value)\\{0,64}["']?\s{0,200}[:=])(?!\n\s{0,200}-\s)"""
    rf"""(?:[^{{}}\[\]]|{re.escape(HIDDEN)})){{0,200}}?"""
)
_THE_NAME = rf"""\s{{0,200}}(?:\\{{0,64}}["'])?(?P<name>{_NAMED})(?![\w-])(?P<end>\\{{0,64}}["']?)"""
_BESIDE = re.compile(
    rf"""(?im){_NAME_KEY}{_THE_NAME}{_BETWEEN}(?<![\w-])value(?P=quoted_key)\s{{0,200}}[:=]\s{{0,200}}(?P<value>{_VALUE})"""
)
# The value is in a look-ahead: it is read once, whatever follows.
_BEFORE_NAME = re.compile(
    rf"""(?im)(?<![\w-])value(?P<quoted_key>\\{{0,64}}["']?)\s{{0,200}}[:=]\s{{0,200}}(?=(?P<value>{_VALUE}))(?P=value)"""
    rf"""{_BETWEEN}(?<![\w-])(?:name|key)(?P=quoted_key)\s{{0,200}}[:=]{_THE_NAME}"""
)
_NAMED_BEFORE = re.compile(rf"(?i){_NAME_KEY}")
_ITEM = re.compile(r"[{}]|(?:^|\n)[ ]*-[ ]")
# Of YAML in lines: a name whose value is in the lines below, which are further to the right or items of a list. It may
# have an anchor, a tag and a comment.
_HEADING = re.compile(
    r"""(?P<before>[ ]*(?:-[ ]+)*)["']?(?P<name>[\w.-]+)["']?:[ ]{0,200}(?:[&!]\S*\s{1,200}){0,2}"""
    r"""(?:[|>][-+\d]*)?\s{0,200}(?:(?<=\s)#.*)?\s{0,200}"""
)
_LINE = re.compile(
    r"""[ ]*(?:-[ ]+)*(?:["']?(?P<key>[\w.-]+)["']?:[ ]+)?(?P<quote>["']?)(?P<value>.*?)(?P=quote)\s{0,200}"""
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


def _is_secret_in_text(name: str) -> bool:
    return is_secret(_ORDINARY.sub("", name))


def hidden_in_text(name: str, value: str) -> bool:
    """Whether ``value``, which follows ``name`` in a text, is a secret.

    Unlike a variable, the name may be any word of a log. A path is no secret, and the next name of nested YAML neither.
    """
    if len(value) < LEAST_SECRET or not _is_secret_in_text(name):
        return False
    return not (names_a_path(name) or value.endswith(":") or is_count(name, value))


def _hidden_below(names: Iterable[str], key: str, value: str) -> bool:
    """As `hidden_in_text`, for a value at any depth below these names, which has its own ``key`` (empty: an item)."""
    if names_a_path(key) or _OF_A_DESCRIPTION.search(key):
        return False
    return any(hidden_in_text(name, value) for name in names)


def redacted(text: str) -> str:
    """The text without values that are or look like secrets."""
    for known in _KNOWN:
        text = known.sub(lambda match: match["before"] + HIDDEN, text)
    text = _BESIDE.sub(_without_value, "".join(_without_blocks("".join(_without_nested(text)))))
    text = _BEFORE_NAME.sub(_without_value_before_name, text)
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


def _without_nested(text: str) -> Iterator[str]:
    """The text in pieces, without the values at any depth of lists and mappings that have the name of a secret."""
    done = past = unclosed = below = 0
    for opened in _OPENED.finditer(text):
        if opened.start() < past or _REFERENCE.search(opened["name"]) or not _is_secret_in_text(opened["name"]):
            continue
        start, end = opened.end(), opened["end"]
        line = _end_of_line(text, start)
        cut = _end_of_cut(text, start) if below < MOST_BELOW else line
        most = len(text) if unclosed < MOST_UNCLOSED else cut
        values, closed = _values_within(text, start, most, opened["name"], len(end))
        past = cut if closed is None else closed
        if closed is None:
            unclosed += 1
            below += max(cut - line, 0)
            values = [each for each in values if each.start < cut]
        inner = text[start + 1 : past]
        if text[start] == "[" and "{" not in inner:
            hidden = [slice(start + 1, past)] if hidden_in_text(opened["name"], inner) else []
            end = quoted[0] if (quoted := _QUOTE.search(inner)) else end
        else:
            hidden = values
        for each in hidden:
            # What has a quoted name is JSON or Python, and stays it.
            quote = "" if _QUOTE.search(text, max(each.start - 1, 0), each.start) else end
            yield f"{text[done : each.start]}{quote}{HIDDEN}{quote}"
            done = each.stop
    yield text[done:]


def _values_within(text: str, start: int, most: int, name: str, quote: int) -> tuple[list[slice], int | None]:
    """Where the values are that are to be hidden between the bracket at ``start``, which has the ``name``, and its end;
    and where that end is: at the closing bracket, or where a quote is shorter than ``quote``, which ends the text
    around. None: it has neither before ``most``."""
    found: list[slice] = []
    names: list[tuple[str, ...]]
    names, key = [(name,)], ""  # of each bracket that is open, and around
    for piece in _PIECE.finditer(text, start, most):
        kind, at = "quoted" if piece["quote"] else "bare", piece.start()
        if piece["open"]:
            names.append((*names[-1], key) if _is_secret_in_text(key) and key not in names[-1] else names[-1])
        elif piece["close"]:
            names.pop()
            key = ""
            if len(names) == 1:
                return found, at
        elif piece["quote"] and len(piece["quote"]) < quote:
            return found, at
        elif not piece["shown"] and _AFTER_KEY.match(text, piece.end()):
            key = piece[kind]
        elif not piece["shown"] and _hidden_below(names[-1], key, piece[kind]):
            found.append(slice(*piece.span(kind)))
    return found, None


def _end_of_line(text: str, start: int) -> int:
    line = text.find("\n", start)
    return len(text) if line < 0 else line


def _end_of_cut(text: str, start: int) -> int:
    """Where the value that opens at ``start`` ends if it has no closing bracket: before the first later line that is
    not further right than its own, unless that begins with a closing bracket or a quote."""
    own = text.rfind("\n", 0, start) + 1
    most = min(start + LONGEST_CUT, len(text))
    indent = len(text[own:start]) - len(text[own:start].lstrip(" \t"))
    for below in _LINE_BELOW.finditer(text, start, most):
        if len(below["indent"]) <= indent and below["first"] not in "]}\"'\\":
            return below.start()
    return most


def _without_blocks(text: str) -> Iterator[str]:
    """The text in lines, without the values at any depth of YAML's lists and mappings that have the name of a
    secret."""
    above: list[tuple[int, str]] = []  # column and name of each secret that the line is below
    for line in text.splitlines(keepends=True):
        at = len(line) - len(line.lstrip(" "))
        while above and line.strip() and not (at > above[-1][0] or (at == above[-1][0] and line[at : at + 2] == "- ")):
            above.pop()
        if heading := _HEADING.fullmatch(line):
            if _is_secret_in_text(heading["name"]) and not _REFERENCE.search(heading["name"]):
                above.append((len(heading["before"]), heading["name"]))
        elif above and (parts := _LINE.fullmatch(line)):
            names, key, value = [name for _, name in above], parts["key"] or "", parts["value"]
            if value.replace(HIDDEN, "").strip("[]{}\"', ") and _hidden_below(names, key, value):
                start, stop = parts.span("value")
                line = line[:start] + HIDDEN + line[stop:]
        yield line


def _without_value_before_name(match: re.Match[str]) -> str:
    """As `_without_value`, unless the value is that of an earlier name in the same item."""
    before = match.string[max(match.start() - 200, 0) : match.start()]
    own = before[max((item.end() for item in _ITEM.finditer(before)), default=0) :]
    return match[0] if _NAMED_BEFORE.search(own) else _without_value(match)


def _without_value(match: re.Match[str]) -> str:
    kind = "bare" if match["quoted"] is None else "quoted"
    if not hidden_in_text(match["name"], match[kind]):
        return match[0]
    start, end = (place - match.start() for place in match.span(kind))
    # What has a quoted name is JSON or Python, and stays it.
    quote = match["end"] if kind == "bare" else ""
    return f"{match[0][:start]}{quote}{HIDDEN}{quote}{match[0][end:]}"
