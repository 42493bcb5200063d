"""``python -m pdlab models``: parameters, weights and KV cache of models, from their config.json."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pdlab.core.arguments import MODEL_HELP
from pdlab.core.catalog import (
    ModelShape,
    encoder_not_counted,
    format_only_in_name,
    known_models,
    resolve_model,
    why_no_shape,
)
from pdlab.core.commands import PDLAB
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command
from pdlab.core.model_size import dense_bytes, expert_bytes, full_layers, kv_bytes_per_token_layer, parameters
from pdlab.core.settings import Settings, setting
from pdlab.core.text import table

UNKNOWN = 3
HEAD = (
    *("model", "parameters", "weights, GB", "KV bytes per token", "beyond windows", "context"),
    *("weights are", "not representable"),
)

EPILOG = f"""\
examples:
  {PDLAB} models                                     the models of configs/models/
  {PDLAB} models --model meta-llama/Llama-3.1-8B     a model of the Hugging Face cache, or of the hub
  {PDLAB} models --model /models/* --markdown        folders with a config.json, as a table of Markdown

exit code: 0 all models are known, 3 the shape of a model is not known, 2 bad command line
models of configs/models/: {", ".join(known_models())}
"""


class ModelsSettings(Settings):
    """Which models to show, and how."""

    COMMAND = "models"
    ABOUT = "Parameters, weights and KV cache of models, from their config.json."
    EXAMPLES = EPILOG

    model: tuple[str, ...] = setting(
        (), f"each {MODEL_HELP}", "models", several="words",
        value="NAME|PATH", otherwise="all of configs/models/",
    )  # fmt: skip
    markdown: bool = setting(False, "as a table of Markdown", "output")


@command(ModelsSettings)
def main(settings: ModelsSettings) -> int:
    """Print the table."""
    rows, unknown, doubtful = [], [], []
    for model in settings.model or known_models():
        shape = resolve_model(model).shape
        if shape is None:
            unknown.append(f"{model}: {why_no_shape(model)}")
        else:
            rows.append(row(shape))
            doubtful += [text for text in (format_only_in_name(shape), encoder_not_counted(shape)) if text]
    if rows:
        print(markdown(rows) if settings.markdown else table(HEAD, rows, left=(0, 6, 7)))
    for line in doubtful:
        print(f"note: {line}", file=sys.stderr)
    for line in unknown:
        print(f"error: {line}", file=sys.stderr)
    return UNKNOWN if unknown else 0


def row(shape: ModelShape) -> tuple[str, ...]:
    """The cells of `HEAD` for one model; ``-`` for an unknown value."""
    try:
        counted = _billions(parameters(shape))
        weights_gb = (expert_bytes(shape) + dense_bytes(shape, with_embedding=True)) / 1e9
        weights = f"{weights_gb:,.1f}" if weights_gb >= 0.1 else f"{weights_gb:.2g}"
    except UsageError:
        counted = weights = "-"
    try:
        one = kv_bytes_per_token_layer(shape)
        kv, beyond = f"{one * shape.layers:,.0f}", f"{one * full_layers(shape):,.0f}"
    except UsageError:
        kv = beyond = "-"
    return (
        *(shape.name, counted, weights, kv, beyond, f"{shape.max_context:,}"),
        *(shape.weight_dtype, ", ".join(shape.unknown) or ""),
    )


def _billions(count: float) -> str:
    """``1,571 B``, ``8.03 B``, ``4.3 M``."""
    if count >= 1e11:
        return f"{count / 1e9:,.0f} B"
    return f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count / 1e6:.3g} M"


def markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """The table in Markdown, as in docs/models.md."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---" + "|---:" * 5 + "|---" * 2 + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])
