"""Settings of the KV-transfer check, and its plan."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from pdlab.core import defaults
from pdlab.core.arguments import MAX_TOKENS, MODEL_HELP, ucx_transports
from pdlab.core.catalog import ModelShape, known_models, require_shape
from pdlab.core.commands import PLAN, RUN_CHECK_TRANSFER
from pdlab.core.errors import UsageError
from pdlab.core.model_size import CHECK_BLOCK_TOKENS, latent_check
from pdlab.core.settings import Backends, LocalNodes, Numbers, OneOf, Positive, Seconds, Seed, Settings, Text, setting
from pdlab.transfer.plan import RequestSize, TransferPlan, cache_blocks
from pdlab.transfer.rank.faults import FAULTS
from pdlab.transfer.rank.faults import refusal as fault_refusal
from pdlab.transfer.rank.layout import DTYPE_BYTES, KvShape, model_kv_shape, plain_kv_shape
from pdlab.transfer.rank.layout import refusal as tp_refusal

TOKENS = (1000, 5000, 20000)
MAX_TRANSFERS = 100_000  # takes minutes to hours; more is a typing error

_EPILOG = f"""exit codes: 0 right wire and fast, 3 slow or wrong wire, 4 corrupt, 5 cannot run, 2 bad flags

examples:
  {RUN_CHECK_TRANSFER} --local
      pack, on Ray nodes that the check starts on this machine; no GPU
  {RUN_CHECK_TRANSFER} --strategy spread --prefill-tp 4 --decode-tp 4 --json out.json --plot out.png
      on the Ray cluster that this machine belongs to
  {RUN_CHECK_TRANSFER} --local --plant-fault swap-blocks
      corrupt the cache on purpose, to show that the check finds and names it

models of configs/models/: {", ".join(known_models())}
"""


WHERE, WHAT, HOW, OUTPUT = "where", "what moves", "how", "output"


class CheckTransferSettings(Settings):
    """Settings of ``debug/test_nixl_connector_ray.py``."""

    COMMAND = "check-transfer"
    ABOUT = (
        "Move KV cache between prefill and decode ranks as vLLM's NixlConnector does, and report whether every word "
        "arrived intact, how fast, and over which wire."
    )
    EXAMPLES = _EPILOG
    EXCLUSIONS = (("tokens", "blocks", "{} and {} exclude each other: both give the sizes of a request; give one"),)

    strategy: Literal["pack", "spread"] = setting(
        "pack", "pack: all ranks on one node; spread: prefill and decode on two nodes", WHERE
    )
    local: LocalNodes | None = setting(
        None,
        f"start N Ray nodes on this machine ({defaults.LOCAL_NODES} without a number), and check there",
        WHERE,
        bare=defaults.LOCAL_NODES,
        otherwise="the running Ray cluster",
    )
    prefill_tp: Positive = setting(TransferPlan.prefill_tp, "tensor parallel ranks of prefill", WHERE)
    decode_tp: Positive = setting(TransferPlan.decode_tp, "tensor parallel ranks of decode", WHERE)
    model: str | None = setting(
        None, f"model whose KV cache is moved: {MODEL_HELP}", WHAT, value="NAME|PATH", otherwise=defaults.MODEL
    )
    num_layers: Positive | None = setting(None, "number of layers, in place of --model", WHAT)
    block_len_bytes: Positive | None = setting(
        None, "with --num-layers: bytes of one block of one layer, over all ranks", WHAT, value="BYTES"
    )
    num_blocks: Positive | None = setting(None, "blocks of the cache", WHAT, otherwise="as many as the check needs")
    tokens: Numbers = setting((), "prompt sizes to sweep", WHAT, value="N,N,...", otherwise=",".join(map(str, TOKENS)))
    blocks: Numbers = setting((), "request sizes in blocks, in place of --tokens", WHAT, value="N,N,...")
    random_blocks: bool = setting(
        False, "use scattered blocks, as after hours of serving (default: contiguous blocks)", WHAT
    )
    compare: bool = setting(
        TransferPlan.compare,
        f"move every size in scattered and in contiguous blocks, in turn; the --json file is for {PLAN} --blocks",
        WHAT,
        "--compare-blocks",
    )
    seed: Seed = setting(TransferPlan.seed, "seed of the block tables", WHAT)
    backends: Backends = setting(TransferPlan.backends, "NIXL backends", HOW, value="A,B")
    direction: Literal["read", "write"] = setting(
        TransferPlan.direction, "read: decode pulls, as vLLM does; write: prefill pushes", HOW
    )
    concurrent: Positive = setting(TransferPlan.concurrent, "requests in flight together", HOW, "--concurrent-requests")
    repeats: Annotated[int, Ge(5), Le(MAX_TRANSFERS)] = setting(
        TransferPlan.repeats, "warm transfers per size, at least 5", HOW
    )
    ucx_tls: Annotated[str, Text(ucx_transports)] | None = setting(
        None, "UCX_TLS of the ranks, to force a transport, such as tcp", HOW, value="LIST"
    )
    timeout_s: Seconds = setting(TransferPlan.timeout_s, "time limit of every step", HOW, value="S")
    fault: Annotated[str, OneOf(tuple(sorted(FAULTS)))] | None = setting(
        TransferPlan.fault,
        f"plant a fault, to show that the check finds it: {', '.join(FAULTS)}",
        HOW,
        "--plant-fault",
        value="FAULT",
    )
    verbose: bool = setting(False, "print every repeat, UCX's own table and the loaded libraries", OUTPUT)
    json_file: Path | None = setting(None, "write all results as JSON", OUTPUT, "--json", value="OUT")
    plot: Path | None = setting(
        None, "plot bandwidth against KV size, with the upper limits (png, svg, pdf)", OUTPUT, value="OUT"
    )


def plan_from(settings: CheckTransferSettings) -> TransferPlan:
    """The plan of the settings. Raises UsageError with the flag, the rule and the fix."""
    shape = _shape(settings)
    if reason := tp_refusal(settings.prefill_tp, settings.decode_tp, shape.kv_heads):
        raise UsageError(f"{reason}; change --prefill-tp or --decode-tp")
    if settings.tokens and settings.tokens[-1] > MAX_TOKENS:
        raise UsageError(f"--tokens {settings.tokens[-1]}: at most {MAX_TOKENS}, more than any model takes")
    if settings.blocks:
        sizes = tuple(RequestSize(blocks) for blocks in settings.blocks)
    else:
        sizes = tuple(RequestSize(shape.blocks_of(tokens), tokens) for tokens in settings.tokens or TOKENS)
    needed_blocks = max(size.blocks for size in sizes) * settings.concurrent
    num_blocks = settings.num_blocks or cache_blocks(sizes, settings.concurrent)
    if num_blocks < needed_blocks:
        raise UsageError(
            f"--num-blocks {num_blocks}: the largest size, {settings.concurrent} at a time, needs "
            f"{needed_blocks}; give at least that, better {cache_blocks(sizes, settings.concurrent)}"
        )
    if settings.fault:
        smallest = min(size.blocks for size in sizes)
        if reason := fault_refusal(settings.fault, smallest, shape.kv_heads):
            raise UsageError(f"--plant-fault {settings.fault}: {reason}")
    if settings.ucx_tls and "UCX" not in settings.backends:
        raise UsageError(
            f"--ucx-tls is for the backend UCX, --backends is {','.join(settings.backends)}: leave one out"
        )
    same = {each.name for each in fields(TransferPlan)} & set(CheckTransferSettings.model_fields)
    found = {"shape": shape, "sizes": sizes, "num_blocks": num_blocks}
    scattered = settings.random_blocks or settings.compare
    plan = TransferPlan(**{name: getattr(settings, name) for name in same} | found, scattered=scattered)
    from pdlab.transfer.rank.codes import CodeBook  # only a check needs it

    try:
        CodeBook(shape, num_blocks, max(plan.prefill_tp, plan.decode_tp), plan.requests)
    except ValueError as error:
        raise UsageError(f"--num-blocks {num_blocks}: {error}") from error
    return plan


def kv_shape(model: ModelShape) -> KvShape:
    """KV cache of a catalogue model. Raises UsageError for a dtype or shape without codes."""
    if model.kv_latent:
        raise UsageError(
            f"model {model.name}: latent attention has no KV heads to check one by one; check one rank of each side, "
            f"which has the whole latent: {latent_check(model)} in place of --model"
        )
    if model.kv_dtype not in DTYPE_BYTES:
        raise UsageError(f"model {model.name}: KV dtype {model.kv_dtype} is not known; use one of {list(DTYPE_BYTES)}")
    try:
        return model_kv_shape(
            model.name, layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim,
            dtype_bytes=DTYPE_BYTES[model.kv_dtype], block_tokens=model.kv_block_tokens,
            sliding_window=model.sliding_window, full_attention_layers=model.full_attention_layers, k_per_token=True,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(f"model {model.name}: {error}") from error


def _shape(settings: CheckTransferSettings) -> KvShape:
    layers, block_bytes = settings.num_layers, settings.block_len_bytes
    if layers or block_bytes:
        if settings.model:
            raise UsageError(
                "--model and --num-layers with --block-len-bytes exclude each other: both give a shape; give one"
            )
        if layers is None or block_bytes is None:
            raise UsageError("--num-layers and --block-len-bytes go together: give both, or --model")
        heads = max(settings.prefill_tp, settings.decode_tp)
        try:
            return plain_kv_shape(layers, block_bytes, heads, CHECK_BLOCK_TOKENS)
        except ValueError as error:
            raise UsageError(f"--block-len-bytes {block_bytes}: {error}; give a multiple of {16 * heads}") from error
    return kv_shape(require_shape(settings.model or defaults.MODEL))
