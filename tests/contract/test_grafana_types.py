"""The dashboard as Grafana's own types read it: grafana-foundation-sdk, which `make test-extras` installs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pdlab.deploy import dashboard

encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
models = {
    name: pytest.importorskip(f"grafana_foundation_sdk.models.{name}") for name in ("dashboard", "common", "prometheus")
}
# The fields whose values are one of a list, and the types that have the list.
CHOICES = {
    "drawStyle": "GraphDrawStyle",
    "showPoints": "VisibilityMode",
    "displayMode": "LegendDisplayMode",
    "placement": "LegendPlacement",
}


@pytest.fixture(autouse=True, scope="module")
def known_panels() -> None:
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()


def unknown(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """What Grafana's types have no place for, or keep as something else."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from unknown(value, theirs.get(key, "nothing"), f"{where}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from unknown(one, other, f"{where}[{number}]")
    elif ours != theirs:
        yield f"{where}: {ours!r}, {theirs!r}"


def read(ours: dict[str, Any]) -> Any:
    return models["dashboard"].Dashboard.from_json(json.loads(json.dumps(ours)))


def written(typed: Any) -> Any:
    return json.loads(encoder.JSONEncoder().encode(typed))


def test_every_field_is_one_of_grafanas() -> None:
    ours = dashboard.dashboard()
    typed = read(ours)
    assert list(unknown(ours, written(typed))) == []
    panels = [panel for panel in typed.panels if panel.type_val == "timeseries"]
    assert len(panels) == sum(len(row.panels) for row in dashboard.ROWS)
    for target in (target for panel in panels for target in panel.targets):
        assert isinstance(target, models["prometheus"].Dataquery) and target.expr


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    ours = dashboard.dashboard()
    ours["panels"][1]["fieldConfig"]["defaults"]["custom"]["fill"] = 60
    assert list(unknown(ours, written(read(ours)))) == [".panels[1].fieldConfig.defaults.custom.fill: 60, 'nothing'"]


def chosen(value: Any) -> Iterator[tuple[str, Any]]:
    for key, each in value.items() if isinstance(value, dict) else ():
        yield from [(key, each)] if key in CHOICES else chosen(each)
    for each in value if isinstance(value, list) else ():
        yield from chosen(each)


def test_every_choice_is_one_of_grafanas() -> None:
    found = set(chosen(dashboard.dashboard()))
    assert {key for key, _ in found} == set(CHOICES)
    for key, value in found:
        assert value in {each.value for each in getattr(models["common"], CHOICES[key])}, (key, value)
