"""Templates: numbers and tables as Python prints them, whatever is in the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.core import rendering, text


def made(folder: Path, template: str, name: str = "t.txt", **facts: object) -> str:
    (folder / name).write_text(template, encoding="utf-8")
    return rendering.rendered(folder / name, **facts)


def test_a_table_of_a_template_is_that_of_the_code_and_no_name_moves_its_columns(tmp_path: Path) -> None:
    rows = [("a ¦ b", 0.5), ("c", 12.25)]
    template = "{% filter table %}\n<name¦share\n{% for n, s in rows %}\n{{ n }}¦{{ s|fmt('.1f') }}\n{% endfor %}\n"
    printed = made(tmp_path, template + "{% endfilter %}\n", rows=rows)
    assert printed == text.table(["name", "share"], [["a | b", "0.5"], ["c", "12.2"]], left=(0,))


def test_unknown_columns_are_left_out() -> None:
    lines = "<name¦known¦unknown\na¦1¦-\nb¦-¦-"
    assert rendering.table(lines, drop_unknown=True) == text.table(["name", "known"], [["a", "1"], ["b", "-"]], {0})


@pytest.mark.parametrize(
    ("template", "printed"),
    [
        ("{{ 0.0125|ms('.3g') }} {{ 0.5|fmt('.0%') }} {{ none_known|number }}", "12.5 50% -"),
        ("{{ ['a', 'b', 'c', 'd', 'e']|listed }}; {{ ['a']|listed }}{{ []|listed }}", "a, b, c and 2 others; a"),
        ("{{ 'pays'|capital }} {{ 2|counted('run') }}", "Pays 2 runs"),
    ],
)
def test_filters(template: str, printed: str, tmp_path: Path) -> None:
    assert made(tmp_path, template, none_known=None) == printed


def test_a_fact_that_is_missing_is_an_error_and_a_page_escapes(tmp_path: Path) -> None:
    import jinja2

    with pytest.raises(jinja2.UndefinedError, match="missing"):
        made(tmp_path, "{{ missing }}")
    assert made(tmp_path, "{{ x }}", "p.html", x="<b>") == "&lt;b&gt;" and made(tmp_path, "{{ x }}", x="<b>") == "<b>"


def test_a_page_takes_the_words_of_a_text_for_text(tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("{% macro greet(x) %}{{ x }} <= 5{% endmacro %}", encoding="utf-8")
    say = rendering.Macros(tmp_path / "w.txt")
    assert made(tmp_path, "{{ say.greet('<b>') }}", "p.html", say=say) == "&lt;b&gt; &lt;= 5"
    pages = [*Path(rendering.__file__).parents[1].rglob("*.html")]
    assert pages and not [page for page in pages if "{% import" in page.read_text(encoding="utf-8")]
