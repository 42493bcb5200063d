"""What ruff and mypy do not check: one name, one class; docstrings name what exists; nothing newer than Python 3.10;
no sentence that pdlab wrote is read by pdlab; no command line of pdlab is spelled by hand, and flags in texts exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

from pdlab.__main__ import COMMANDS
from pdlab.core.commands import module_of
from pdlab.core.settings import declared, settings_of
from pdlab.core.text import counted

ROOT = Path(__file__).resolve().parents[1]
PDLAB = ROOT / "pdlab"

# Class names that several modules define, and in how many. Rename a class, then correct its row: the list only shrinks.
SHARED_NAMES = {}
# Words in ``...`` that are no names of their module: examples, and names of vLLM, Ray, UCX and files.
WORDS: dict[str, set[str]] = {
    "pdlab/analysis/intervals.py": {"p50", "p95"},
    "pdlab/results/published_names.py": {"p1d3"},
    "pdlab/core/vllm_limits.py": {"all_gatherv"},
    "pdlab/core/workload.py": {"concurrency8"},
    "pdlab/deploy/serving/elastic.py": {"external_scaler_enabled"},
    "pdlab/deploy/serving/sequences.py": {"j"},
    "pdlab/guard/lease_queries.py": {"perf_counter"},
    "pdlab/rehearsal/protocol.py": {"pd_tokenize_once"},
    "pdlab/rehearsal/spec.py": {"kv_lease_duration"},
    "pdlab/results/schema.py": {"p90"},
    "pdlab/roles/prefixes.py": {"prefix_cache_retention_interval"},
    "pdlab/sim/hardware.py": {"common", "level"},
    "pdlab/transfer/rank/messages.py": {"y"},
    "pdlab/transfer/ucx_log.py": {"uct_ib_efa"},
}
# Module -> what Python 3.11 or later added to it.
NEWER: dict[str, set[str]] = {
    "typing": {
        "LiteralString", "Never", "NotRequired", "ReadOnly", "Required", "Self", "TypeAliasType", "TypeIs",
        "TypeVarTuple", "Unpack", "assert_never", "assert_type", "dataclass_transform", "override", "reveal_type",
    },
    "enum": {"EnumCheck", "ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "datetime": {"UTC"},
    "asyncio": {"Barrier", "Runner", "TaskGroup", "timeout", "timeout_at"},
    "contextlib": {"chdir"},
    "itertools": {"batched"},
    "hashlib": {"file_digest"},
    "math": {"cbrt", "exp2", "sumprod", "fma"},
    "operator": {"call"},
    "inspect": {"getmembers_static"},
}  # fmt: skip
NEWER_MODULES = {"tomllib"}


@cache
def trees() -> dict[str, ast.Module]:
    """Path below the checkout -> its syntax tree."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PDLAB.rglob("*.py"))
    }


def class_homes() -> dict[str, list[str]]:
    homes = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(path)  # `_Engine` beside `Engine` means two things as well
    return homes


def test_a_class_name_means_one_thing() -> None:
    shared = {name: homes for name, homes in class_homes().items() if len(homes) > 1}
    new = {name: homes for name, homes in shared.items() if len(homes) > SHARED_NAMES.get(name, 1)}
    assert not new, "give one of them another name"
    assert {name: len(homes) for name, homes in shared.items()} == SHARED_NAMES, "fewer now: shorten the list"


# Names that a reader can only guess. A part of a longer name is fine: ``own_ids``.
RIDDLES = {
    "asked",
    "bring",
    "fates",
    "flow",
    "here",
    "keeper",
    "lean",
    "out",
    "own",
    "playing",
    "said",
    "stage",
    "told",
}
# Module -> names in files of an earlier version, which it recognises.
IN_FILES = {"pdlab/results/timeline.py": {"told"}}


def riddles(path: str, tree: ast.Module) -> Iterator[str]:
    """Functions, classes and the module itself that a single such word names; ``asked`` and ``told`` in any place."""
    yield from {Path(path).stem} & {*RIDDLES, "parts", "shared", "words"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name.lstrip("_").lower()
            if name in RIDDLES:
                yield node.name
    yield from (names_in(tree) & {"asked", "told"}) - IN_FILES.get(path, set())


def test_no_name_is_a_riddle() -> None:
    found = {path: sorted(riddles(path, tree)) for path, tree in trees().items()}
    assert {path: names for path, names in found.items() if names} == {}, "give them names that tell what they are"
    assert list(riddles("pdlab/x.py", ast.parse("def _told(): pass\ndef told_twice(): pass"))) == ["_told"]


def names_in(tree: ast.AST) -> set[str]:
    """Every name, attribute, parameter, keyword and whole string of the code, docstrings left out."""
    names: set[str] = set()
    docs = {id(doc) for doc in (docstring_node(node) for node in ast.walk(tree)) if doc is not None}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.update((node.asname or node.name).split("."))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            names.update(re.findall(r"\w+", node.value))
    return names


def docstring_node(node: ast.AST) -> ast.Constant | None:
    body = getattr(node, "body", None)
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not body:
        return None
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.value
    return None


def unknown_names(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, class or function, and a name in its docstring that its module does not have. A name that the docstring
    of a class defines (``x``: ...) has to be one of the class, or a value, which is a string somewhere."""
    known = names_in(tree)
    values = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            names = set(re.findall(r"``([a-z_][a-z_0-9]*)``", text)) - known
            if isinstance(node, ast.ClassDef):
                names |= set(re.findall(r"``([a-z_][a-z_0-9]*)``:", text)) - names_in(node) - values
            yield from ((node.lineno, node.name, name) for name in sorted(names))


def test_docstrings_name_what_their_module_has() -> None:
    found = {path: list(unknown_names(tree)) for path, tree in trees().items()}
    unknown = {path: [each for each in names if each[2] not in WORDS.get(path, ())] for path, names in found.items()}
    assert {path: names for path, names in unknown.items() if names} == {}
    used = {path: {name for _, _, name in names} for path, names in found.items()}
    assert {path: words - used[path] for path, words in WORDS.items() if words - used[path]} == {}, (
        "no docstring has these words any more: shorten the list"
    )


def newer(tree: ast.Module) -> Iterator[str]:
    typing_only = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inside in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name in NEWER.get(node.module or "", ()))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in NEWER_MODULES)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in NEWER.get(node.value.id, ()):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.TryStar):
            yield "except*"
        elif isinstance(node, ast.ClassDef):
            bases = {name.id for base in node.bases for name in ast.walk(base) if isinstance(name, ast.Name)}
            if bases >= {"NamedTuple", "Generic"}:
                yield "NamedTuple and Generic"


def test_nothing_is_newer_than_the_oldest_python() -> None:
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text(), "then correct NEWER"
    assert {path: found for path, tree in trees().items() if (found := sorted(newer(tree)))} == {}


def test_the_lints_find_what_they_are_for() -> None:
    stale = 'def f(planned):\n    """Those of ``wanted``."""\n    return planned\n'
    assert list(unknown_names(ast.parse(stale))) == [(1, "f", "wanted")]
    assert list(unknown_names(ast.parse(stale.replace("wanted", "planned")))) == []
    field = 'class A:\n    """``roles``: of it."""\n    name: str\n\nroles = 1\n'
    assert list(unknown_names(ast.parse(field))) == [(1, "A", "roles")]
    assert list(unknown_names(ast.parse(field.replace("name:", "roles:")))) == []
    assert list(newer(ast.parse("from typing import Self\nimport tomllib\nasyncio.timeout(1)"))) == [
        "typing.Self", "tomllib", "asyncio.timeout",
    ]  # fmt: skip
    assert list(newer(ast.parse("if TYPE_CHECKING:\n    from typing import Self"))) == []
    assert list(newer(ast.parse("class A(NamedTuple, Generic[S]):\n    a: S"))) == ["NamedTuple and Generic"]
    assert list(newer(ast.parse("class A(NamedTuple):\n    a: int"))) == []


# Texts of others, which nobody here can give a code -> whose they are.
FOREIGN: dict[str, str] = {
    "Ray runtime started.": "`ray start` prints it",
    "^id: ['\\\"]?([0-9a-f]{12})\\b": "a line of YAML in a state file of a node that may be gone",
    "^temp_dir: (/\\S*/pdlab-[^/\\s]+)$": "the same",
    "failed to start": "Ray Serve's status message",
    "Value error, ": "pydantic puts it before a validator's own words",
    "data: ": "server-sent events",
    "Unterminated string": "an error of Python's json",
    "version ": "a pointer file of Git LFS",
    "MLPerf Results Summary": "LoadGen's summary of a run",
    "(Mean|(\\d\\d\\.\\d\\d) percentile) (.*?latency|Time (?:per|to) Output Token) \\(ns\\)": "the same",
    "from multiprocessing.spawn import spawn_main": "the command line of a process that Python spawned",
    "vocab file": "an error of openai_harmony",
    "Could not determine home directory": "an error of Python's pathlib",
    "Kernel Module[^\\n]*?\\s(\\d+\\.\\d+(?:\\.\\d+)?)\\s": "/proc/driver/nvidia/version",
    "^model name\\s*:\\s*(.+)$": "/proc/cpuinfo",
    "(?P<before>)-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
    "(?:(?:[^-]|-(?!----))*-----END [A-Z ]{0,30}PRIVATE KEY-----"
    "|(?:(?:\\s|\\\\+[nr])*[A-Za-z0-9+/=]{30,})*)": "PEM files",
} | {
    text: whose
    for whose, texts in {
        "argparse complains so": (
            "argument ([^:]+): (.*)",
            "unrecognized arguments: (.*)",
            "invalid choice: (.+?) \\(choose from (.*)\\)",
            "invalid (\\w+) value: (.*)",
            "not allowed with argument (.*)",
            "expected (one|at least one) arguments?",
            "ignored explicit argument (.*)",
            "the following arguments are required: (.*)",
        ),
        "HAProxy's configuration and log": (
            "    option abortonclose\n",
            "local function _route_via_ingress_request_router(txn, app, pool, replica_map)\n",
            "bind *:{{ config.stats_port }}",
            "bind :{{ config.metrics_port }}",
            "cannot bind socket .*:(\\d+)\\]",
        ),
        "logs of vLLM and Ray": (
            "root cause|Failed core proc|Engine core initialization failed|Executor failed|EngineDeadError|TaskError|"
            "ActorDied|DeploymentUnavailableError",
            "(?P<line>Worker proc .*died unexpectedly.*|Engine core initialization failed.*Failed core proc.*)",
            "(?:exit code|'): -9\\b",
            "Pre-warm handshake done",
            "returned empty kv_params",
        ),
        "the summary of MLPerf's LoadGen": (
            "(Mean|(\\d\\d\\.\\d\\d) percentile) (.*?latency|Time (?:per|to) Output Token) \\(ns\\)",
            "MLPerf Results Summary",
        ),
        "UCX's log": (
            "env variables",
            "\\b(self|intra-node|inter-node) cfg#\\d+$",
            "^(?:remote memory (?P<rma>read|write) by ucp_(?:get|put)|(?P<message>(?:active|tagged) message) by)",
            "(?:(\\d+)% on )?\\b([a-z][a-z0-9_]*)/([\\w.:-]+)",
            "dlopen\\('(?P<path>[^']*/lib(?P<name>uc[tm]_\\w+)\\.so[^']*)', mode=\\w+\\) failed: (?P<why>.*)",
            "UCX\\s+INFO\\s+Version (\\d+\\.\\d+\\.\\d+)",
            "software emulation",
        ),
    }.items()
    for text in texts
}
# There or not: the step runner that the demo, the experiments and the first hour share ends the first four; the last is
# about keys of metadata in files of others.
LEAVING = {"launch ", " per "}
TEXT_METHODS = {
    "startswith", "endswith", "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition", "find",
    "index", "count", "replace",
}  # fmt: skip
PATTERNS = {"compile", "match", "search", "fullmatch", "findall", "finditer", "sub", "split"}


def written(node: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    """The strings that an expression is made of: literals, tuples of them, and constants of modules."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        yield node.value if isinstance(node.value, str) else node.value.decode("latin-1")
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for element in node.elts:
            yield from written(element, constants)
    elif isinstance(node, ast.Name) and node.id in constants:
        yield from written(constants[node.id], {})


def is_sentence(text: str) -> bool:
    return re.search(r"[A-Za-z][:;,.]? +\S|\S +[A-Za-z]|[A-Za-z][:;,.]? $", text) is not None


def module_constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The names of a module's top that are strings, or tuples of strings, with their values."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    names = [element.id if isinstance(element, ast.Name) else "" for element in target.elts]
                    found.update(zip(names, node.value.elts, strict=True))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def constants_in(tree: ast.Module, modules: dict[str, ast.Module]) -> dict[str, ast.expr]:
    """`module_constants` of a module, and of those modules of pdlab that it imports them from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pdlab."):
            path = f"{(node.module or '').replace('.', '/')}.py"
            others = module_constants(modules[path]) if path in modules else {}
            found.update({a.asname or a.name: others[a.name] for a in node.names if a.name in others})
    return {**found, **module_constants(tree)}


def loops(tree: ast.Module) -> dict[str, ast.expr]:
    """The names that a loop gives one text after another."""
    pairs = [(node.target, node.iter) for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension)]
    return {
        target.id: texts
        for target, texts in pairs
        if isinstance(target, ast.Name) and isinstance(texts, ast.Tuple | ast.List | ast.Set)
    }


def declared_values(modules: dict[str, ast.Module]) -> set[str]:
    """The members of every ``Literal[...]``: values with a space in them, such as a verdict "timed out"."""
    return {
        constant.value
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal"
        for constant in ast.walk(node.slice)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }


def text_comparisons(tree: ast.Module, modules: dict[str, ast.Module], values: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of every comparison with a sentence: with its beginning or end, a part of it, or all of it. A
    value that a ``Literal`` declares (``values``) is no sentence. A whole value may be compared with a constant."""
    constants = {**constants_in(tree, modules), **loops(tree)}
    for node in ast.walk(tree):
        texts: list[str] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            of_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            if node.func.attr in (PATTERNS if of_re else TEXT_METHODS):
                texts = list(written(node.args[0], constants))
        elif isinstance(node, ast.Compare):
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                if isinstance(operator, ast.In | ast.NotIn):
                    whole = isinstance(right, ast.Tuple | ast.List | ast.Set | ast.Dict)
                    texts += written(left, {} if whole else constants)
                    texts += written(right, {}) if whole else []
                elif isinstance(operator, ast.Eq | ast.NotEq):
                    texts += [*written(left, {}), *written(right, {})]
        yield from ((node.lineno, text) for text in texts if is_sentence(text) and text not in values)


def test_nobody_reads_a_sentence_that_pdlab_wrote() -> None:
    """Decisions look at codes and numbers (`pdlab.core.findings`): a reworded sentence changes no behaviour."""
    values = declared_values(trees())
    found = {path: list(text_comparisons(tree, trees(), values)) for path, tree in trees().items()}
    known = {text for lines in found.values() for _, text in lines}
    new = {path: [each for each in lines if each[1] not in {*FOREIGN, *LEAVING}] for path, lines in found.items()}
    assert {path: lines for path, lines in new.items() if lines} == {}, "give it a code, or say whose text it is"
    assert set(FOREIGN) - known == set(), "no code compares these any more: shorten the list"


def test_the_lint_of_sentences_finds_what_it_is_for() -> None:
    def texts(code: str) -> list[str]:
        tree = ast.parse(code)
        modules = {"pdlab/x.py": tree}
        return [text for _, text in text_comparisons(tree, modules, declared_values(modules))]

    assert texts('reason.startswith("load generator")') == ["load generator"]
    assert texts('A, B = "a replica was replaced", "x"\nreason.startswith(A)') == ["a replica was replaced"]
    assert texts('if "name says" in reason: pass') == ["name says"]
    assert texts('if reason == "requests piled up": pass') == ["requests piled up"]
    assert texts('[why.partition(m) for m in ("; launch again", ": the level")]') == ["; launch again", ": the level"]
    assert texts('line.removeprefix("error: ")') == ["error: "]
    assert texts('re.match(r"logs kept in (.*)", line)') == ["logs kept in (.*)"]
    assert texts('V = Literal["timed out", "ok"]\nif verdict == "timed out": pass') == []
    assert texts('if key in ("a key", "b"): pass\nif kind == "key": pass') == ["a key"]
    assert texts('WHERE = "the file\'s name"\nif key == WHERE: pass') == [], "one constant, declared once"


def function_bodies(tree: ast.Module) -> Iterator[str]:
    """Of each function at the top of a module what it does, whatever it and its parameters are called."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.args.args:
            body = node.body[1:] if ast.get_docstring(node) else node.body
            places = {argument.arg: place for place, argument in enumerate(node.args.args)}
            text = "".join(ast.dump(each) for each in body)
            for name, place in places.items():
                text = text.replace(f"Name(id='{name}'", f"Name(place={place}")
            if len(text) > 80:  # more than a constant or one attribute
                yield text


def twins(modules: dict[str, ast.Module]) -> set[frozenset[str]]:
    """The modules that have a function with the same body."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path, tree in modules.items():
        for body in function_bodies(tree):
            found[body].add(path)
    return {frozenset(paths) for paths in found.values() if len(paths) > 1}


def test_no_two_modules_have_the_same_function() -> None:
    """How a value is shown is said once, in `pdlab.core.text`."""
    assert twins(trees()) == set()


def test_the_lint_of_twins_finds_what_it_is_for() -> None:
    parameters = {"a": "x", "b": "y"}
    shown = {f: ast.parse(f"def {f}({v}):\n    return f'{{{v} / 1e9:.1f}} GB'\n") for f, v in parameters.items()}
    assert twins(shown) == {frozenset("ab")}
    assert twins({**shown, "b": ast.parse("def b(x):\n    return f'{x / 1e6:.1f} MB'\n")}) == set()


# Flags of other programs, of declarations, and in messages: (module, flag).
OTHER_FLAGS = {
    ("pdlab/cli/bench.py", "--final"),
    ("pdlab/cli/bench.py", "--hold-s"),
    ("pdlab/cli/launch.py", "--export-env"),
    ("pdlab/cli/plan.py", "--p-hardware"),
    ("pdlab/cli/plan.py", "--d-hardware"),
    ("pdlab/cli/ratio.py", "--prefill"),
    ("pdlab/cli/ratio.py", "--decode"),
    ("pdlab/remote/install.py", "--target"),
    ("pdlab/results/provenance.py", "--format"),
}
COMMAND_LINES = {"typed", "command_line", "child_words", "flag_words", "as_typed", "run_shown", "ChildStep", "_run"}


@cache
def flags_of_pdlab() -> frozenset[str]:
    """The long flags of every command."""
    found: set[str] = set()
    for command in COMMANDS:
        import_module(module_of(command))
        for each in declared(settings_of(command)):
            found |= {*each.flags, *(name for name, _, _ in each.flag.implies)}
            found |= {flag.replace("--", "--no-", 1) for flag in each.flags if each.kind is bool}
    return frozenset(flag for flag in found if flag.startswith("--"))


def called(node: ast.AST) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""


def spelled_flags(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and flag of each flag of pdlab that is a word of a list, an argument of a function for command lines, or
    text behind the call of one. Flags of a field's declaration do not count."""
    declared_here = {id(inside) for node in ast.walk(tree) if called(node) == "setting" for inside in ast.walk(node)}
    for node in ast.walk(tree):
        words: list[ast.expr] = []
        if isinstance(node, ast.List | ast.Tuple) and id(node) not in declared_here:
            words = node.elts
        elif called(node) in COMMAND_LINES and isinstance(node, ast.Call):
            words = node.args
        elif isinstance(node, ast.JoinedStr) and any(called(inside) in COMMAND_LINES for inside in ast.walk(node)):
            texts = [str(each.value) for each in node.values if isinstance(each, ast.Constant)]
            yield from ((node.lineno, flag[1]) for text in texts if (flag := re.match(r" (--[a-z][a-z-]*)", text)))
        for word in words:
            for each in (word.body, word.orelse) if isinstance(word, ast.IfExp) else (word,):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    flag = each.value.partition("=")[0]
                    if flag in flags_of_pdlab():
                        yield each.lineno, flag


def test_no_command_line_of_pdlab_is_spelled_by_hand() -> None:
    found = {(path, flag) for path, tree in trees().items() for _, flag in spelled_flags(tree)}
    assert found - OTHER_FLAGS == set(), "make it by pdlab.core.command_lines"
    assert OTHER_FLAGS - found == set(), "shorten the list"
    templates = [path for path in PDLAB.rglob("*") if path.suffix in (".txt", ".html") and path.is_file()]
    assert len(templates) > 5
    spelled = {path.name: re.findall(r"\}\} --?[a-z][\w-]*", path.read_text(encoding="utf-8")) for path in templates}
    assert {name: flags for name, flags in spelled.items() if flags} == {}


@pytest.mark.parametrize(
    ("code", "flags"),
    [
        ("run_shown('-m', 'pdlab', 'bench', '--smoke')", ["--smoke"]),
        ("command = ('launch', *more, '--port', str(port))", ["--port"]),
        ("words = ['--local' if here else '--cluster', name]", ["--local", "--cluster"]),
        ("text = f\"{typed('launch')} {words} --detach\"", ["--detach"]),
        ("port: int = setting(1, 'port', implies=(('--smoke', 1, 'text'),))", []),
        ("text = f\"{typed('launch')}, then continue with --resume\"", []),
        ("raise UsageError('--smoke is one short level')", []),
        ("command = ['nvidia-smi', '--query-gpu=name']", []),
    ],
)
def test_the_lint_of_command_lines_finds_what_it_is_for(code: str, flags: list[str]) -> None:
    assert [flag for _, flag in spelled_flags(ast.parse(code))] == flags


# Flags of other programs in texts and in their command lines.
OF_OTHER_PROGRAMS = {
    "ray": "address dashboard disable-usage-stats head include-dashboard include-log-monitor labels language "
    "max-worker-port min-worker-port no-monitor node-ip-address num-cpus num-gpus object-store-memory resources "
    "serialized-runtime-env-context temp-dir",
    "pip and uv": "disable-pip-version-check force-reinstall no-deps no-index python quiet reinstall upgrade",
    "containers": "cap-add device ipc shm-size ulimit",
    "kubectl": "for from-literal",
    "git and nvidia-smi": "no-optional-locks porcelain query-gpu",
    "clients": "custom-dataset-type fixed-schedule ignore-eos input-file output-details random-range-ratio "
    "save-detailed",
    "grafana": "homepath",
    "debug/build_nixl_ucx_efa.sh": "wheel",
    "prefixes of slo flags": "itl-p99-ms stall-ms",
}


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text))


def test_texts_name_only_flags_that_exist() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for flag in flags_in(node.value):
                    found[flag].add(path)
    for template in (path for path in PDLAB.rglob("*") if path.suffix in (".txt", ".html")):
        for flag in flags_in(template.read_text(encoding="utf-8")):
            found[flag].add(template.name)
    known = flags_of_pdlab() | {"--help", "--help-all", "--version"}
    # The start of one stands for several (--p-...); a part's flags have their prefix in the command only.
    part = {flag for flag in found if any(each.startswith(f"{flag}-") or each.endswith(flag[1:]) for each in known)}
    others = {f"--{name}" for names in OF_OTHER_PROGRAMS.values() for name in names.split()}
    assert {flag: paths for flag, paths in found.items() if flag not in known | part | others} == {}
    assert others - found.keys() == set(), "shorten the list"


# Begin of a text -> the modules that may have it. One reader of each file of the kernel, and one reader of events;
# the others are programs that run without packages, and facts that have one reader anyway.
HOMES = {
    "/proc/": {
        "pdlab/remote/kernel_files.py",
        "pdlab/remote/node.py",  # meminfo and the driver's version; a program that runs with any Python
        "pdlab/faults/on_node.py",  # a program that runs without packages
        "pdlab/results/provenance.py",  # cpuinfo
        "pdlab/cluster/namespaces.py",
        "pdlab/cluster/two_hosts.py",  # namespaces that are entered
        "pdlab/cluster/priority.py",
        "pdlab/marks/engine_marks.py",  # it may not import pdlab.remote
        "pdlab/transfer/rank/rank.py",  # a name that UCX opens
    },
    "data: ": {"pdlab/deploy/serving/events.py"},
    "[DONE]": {"pdlab/deploy/serving/events.py"},
}


@pytest.mark.parametrize("begin", HOMES)
def test_a_format_has_one_reader(begin: str) -> None:
    homes = {
        path
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.startswith(begin) or (begin == "/proc/" and f'"{begin}' in node.value)
    }
    assert homes == HOMES[begin]


# What pdlab's sentences count. Behind a number that may be 1, `pdlab.core.text.counted` gives the noun its form.
COUNTED = (
    "blocks|cells|checks|columns|configurations|copies|CPUs|curves|deployments|devices|engines|faults|files|"
    "findings|folders|GPUs|groups|layers|levels|loads|looks|minutes|nodes|pairs|prompts|repeats|replicas|requests|rows|runs|sessions|"
    "settings|streams|tokens"
)
BEHIND_A_COUNT = re.compile(rf" (?:more |other |of them )?(?:{COUNTED})\b(?!/s)")
# Programs and packages that may not import pdlab.core.text.
ALONE = (
    "pdlab/deploy/serving/",
    "pdlab/guard/",
    "pdlab/remote/",
    "pdlab/roles/",
    "pdlab/transfer/rank/",
    "pdlab/rehearsal/engine.py",
)


def uncounted(tree: ast.Module) -> Iterator[str]:
    """``{len(rows)} rows``: lengths and sums before a plural, in f-strings."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, after in pairwise(node.values):
            if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                number = value.value
                called = isinstance(number, ast.Call) and isinstance(number.func, ast.Name) and number.func.id
                if called in ("len", "sum") and BEHIND_A_COUNT.match(str(after.value)):
                    yield ast.unparse(number)


def uncounted_in_template(text: str) -> list[str]:
    return re.findall(rf"\{{\{{ [^}}]*\|length \}}\}}{BEHIND_A_COUNT.pattern}", text)


def test_a_number_that_may_be_1_has_the_noun_in_its_form() -> None:
    found = {path: [*uncounted(tree)] for path, tree in trees().items() if not path.startswith(ALONE)}
    for path in PDLAB.rglob("*"):
        if path.suffix in (".txt", ".html"):
            found[str(path)] = uncounted_in_template(path.read_text(encoding="utf-8"))
    # Whether there are several is decided beside these.
    several = {"len(names)", "len(ids)", "{{ curves|length }} configurations"}
    several |= {"{{ block.comparisons|length }} other deployments", "{{ capacity.searches|length }} repeats"}
    texts = {path: set(each) - several for path, each in found.items()}
    assert {path: each for path, each in texts.items() if each} == {}, "use counted()"
    assert several == {text for each in found.values() for text in each}, "shorten the list"


def test_the_lint_of_counts_finds_what_it_is_for() -> None:
    assert [*uncounted(ast.parse('f"{len(rows)} rows"'))] == ["len(rows)"]
    assert [*uncounted(ast.parse('f"{sum(x)} more tokens, {len(y)} requests/s, {len(z)} has"'))] == ["sum(x)"]
    assert uncounted_in_template("{{ a|length }} runs, {{ b|length }} of them") == ["{{ a|length }} runs"]
    assert [counted(1, "run"), counted(2, "run"), counted(0.5, "run")] == ["1 run", "2 runs", "0.5 runs"]
    assert [counted(n, "run is", "runs are", ",") for n in (1, 1000)] == ["1 run is", "1,000 runs are"]
