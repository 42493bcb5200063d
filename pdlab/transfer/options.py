"""Flags of the KV-transfer check, and the plan that they describe."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdlab.core.arguments import (
    MAX_TOKENS,
    OneLineParser,
    backends,
    numbers,
    positive,
    seconds,
    seed,
    ucx_transports,
    whole,
)
from pdlab.core.catalog import ModelShape, known_models, load_model
from pdlab.core.errors import UsageError
from pdlab.core.text import choices
from pdlab.transfer.check import Size, TransferPlan, cache_blocks
from pdlab.transfer.rank.codes import CodeBook
from pdlab.transfer.rank.faults import FAULTS
from pdlab.transfer.rank.faults import refusal as fault_refusal
from pdlab.transfer.rank.layout import DTYPE_BYTES, KvShape, model_kv_shape, plain_kv_shape
from pdlab.transfer.rank.layout import refusal as tp_refusal

BLOCK_TOKENS = 16
TOKENS = (1000, 5000, 20000)
MAX_TRANSFERS = 100_000  # minutes to hours; more is a typing error
MODEL = "gpt-oss-120b"
LOCAL_NODES, MAX_LOCAL_NODES = 2, 64

_EPILOG = f"""exit codes: 0 right wire and fast, 3 slow or wrong wire, 4 corrupt, 5 cannot run, 2 wrong flags

examples:
  python debug/test_nixl_connector_ray.py --local
      pack on Ray nodes of this machine that are started for it, no GPU
  python debug/test_nixl_connector_ray.py --strategy spread --prefill-tp 4 --decode-tp 4 --json out.json --plot out.png
      on the Ray cluster that this machine belongs to
  python debug/test_nixl_connector_ray.py --local --plant-fault swap-blocks
      shows that corruption is detected and named

models of configs/models/: {", ".join(known_models())}
"""


def build_parser(prog: str) -> argparse.ArgumentParser:
    """All flags; complaints are UsageErrors."""
    parser = OneLineParser(
        prog=prog,
        description="Move KV cache between prefill and decode ranks as vLLM's NixlConnector does, and report whether "
        "every word arrived intact, how fast, and over which wire.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    placement = parser.add_argument_group("where")
    placement.add_argument(
        "--strategy", choices=("pack", "spread"), default="pack",
        help="all ranks on one node, or prefill and decode on two; strictly (default %(default)s)",
    )  # fmt: skip
    placement.add_argument(
        "--local", nargs="?", type=whole(1, MAX_LOCAL_NODES, "a number of nodes"), const=LOCAL_NODES, metavar="N",
        help=f"on N Ray nodes of this machine, started for it (default {LOCAL_NODES}); without it: the running Ray",
    )  # fmt: skip
    placement.add_argument("--prefill-tp", type=positive, default=1, metavar="N", help="default %(default)s")
    placement.add_argument("--decode-tp", type=positive, default=1, metavar="N", help="default %(default)s")
    payload = parser.add_argument_group("what moves")
    payload.add_argument("--model", metavar="NAME", help=f"shape of its KV cache, by its name (default {MODEL})")
    payload.add_argument("--num-layers", type=positive, metavar="N", help="in place of --model, with --block-len-bytes")
    payload.add_argument(
        "--block-len-bytes", type=positive, metavar="BYTES", help="one block of one layer, all ranks together"
    )
    payload.add_argument(
        "--num-blocks", type=positive, metavar="N", help="blocks of the cache (default: what is needed)"
    )
    payload.add_argument(
        "--tokens", type=numbers, metavar="N,N,...",
        help=f"prompt sizes to sweep (default {','.join(map(str, TOKENS))})",
    )  # fmt: skip
    payload.add_argument(
        "--blocks", type=numbers, metavar="N,N,...", help="request sizes in blocks, in place of --tokens"
    )
    payload.add_argument(
        "--random-blocks", action="store_true", help="scattered blocks, as after hours of serving; else one run"
    )
    payload.add_argument(
        "--compare-blocks", action="store_true",
        help="every size in scattered blocks and as one run, in turns; the --json of it is for plan.py --blocks",
    )  # fmt: skip
    payload.add_argument("--seed", type=seed, default=0, help="of the block tables (default %(default)s)")
    transfer = parser.add_argument_group("how")
    transfer.add_argument(
        "--backends", type=backends, default=("UCX",), metavar="A,B", help="NIXL backends (default UCX)"
    )
    transfer.add_argument(
        "--direction", choices=("read", "write"), default="read",
        help="decode pulls, as vLLM does, or prefill pushes (default %(default)s)",
    )  # fmt: skip
    transfer.add_argument(
        "--concurrent-requests", type=positive, default=1, metavar="N", help="in flight together (default %(default)s)"
    )
    transfer.add_argument(
        "--repeats", type=whole(1, MAX_TRANSFERS), default=5, help="warm transfers per size, at least 5 (default 5)"
    )
    transfer.add_argument(
        "--ucx-tls", type=ucx_transports, metavar="LIST", help="UCX_TLS of the ranks, to force a transport"
    )
    transfer.add_argument("--timeout-s", type=seconds, default=60.0, help="of every step (default %(default)g)")
    transfer.add_argument("--plant-fault", choices=sorted(FAULTS), metavar="FAULT", help=f"one of {', '.join(FAULTS)}")
    output = parser.add_argument_group("output")
    output.add_argument("--verbose", action="store_true", help="every repeat, UCX's own table, libraries in use")
    output.add_argument("--json", type=Path, metavar="OUT", help="everything, as JSON")
    output.add_argument(
        "--plot", type=Path, metavar="OUT", help="bandwidth against KV size, with the ceilings (png, svg, pdf)"
    )
    return parser


def plan_from(args: argparse.Namespace) -> TransferPlan:
    """The plan of parsed flags. Raises UsageError naming the flag, the rule and the fix."""
    shape = _shape(args)
    if reason := tp_refusal(args.prefill_tp, args.decode_tp, shape.kv_heads):
        raise UsageError(f"{reason}; change --prefill-tp or --decode-tp")
    if args.repeats < 5:
        raise UsageError(f"--repeats {args.repeats}: fewer than 5 give no spread; give 5 or more")
    if args.tokens and args.tokens[-1] > MAX_TOKENS:
        raise UsageError(f"--tokens {args.tokens[-1]}: at most {MAX_TOKENS}, more than any model takes")
    if args.tokens and args.blocks:
        raise UsageError("--tokens and --blocks exclude each other: both give the sizes of a request; give one")
    if args.blocks:
        sizes = tuple(Size(blocks) for blocks in args.blocks)
    else:
        sizes = tuple(Size(shape.blocks_of(tokens), tokens) for tokens in args.tokens or TOKENS)
    needed_blocks = max(size.blocks for size in sizes) * args.concurrent_requests
    num_blocks = args.num_blocks or cache_blocks(sizes, args.concurrent_requests)
    if num_blocks < needed_blocks:
        raise UsageError(
            f"--num-blocks {num_blocks}: the largest size, {args.concurrent_requests} at a time, needs {needed_blocks}"
            f"; give at least that, better {cache_blocks(sizes, args.concurrent_requests)}"
        )
    if args.plant_fault:
        smallest = min(size.blocks for size in sizes)
        if reason := fault_refusal(args.plant_fault, smallest, shape.kv_heads):
            raise UsageError(f"--plant-fault {args.plant_fault}: {reason}")
    if args.ucx_tls and "UCX" not in args.backends:
        raise UsageError(f"--ucx-tls is for the backend UCX, --backends is {','.join(args.backends)}: leave one out")
    plan = TransferPlan(
        strategy=args.strategy, shape=shape, sizes=sizes, num_blocks=num_blocks, prefill_tp=args.prefill_tp,
        decode_tp=args.decode_tp, backends=args.backends, direction=args.direction,
        concurrent=args.concurrent_requests, repeats=args.repeats, scattered=args.random_blocks or args.compare_blocks,
        compare=args.compare_blocks, seed=args.seed,
        ucx_tls=args.ucx_tls, timeout_s=args.timeout_s, fault=args.plant_fault,
    )  # fmt: skip
    try:
        CodeBook(shape, num_blocks, max(plan.prefill_tp, plan.decode_tp), plan.requests)
    except ValueError as error:
        raise UsageError(f"--num-blocks {num_blocks}: {error}") from error
    return plan


def kv_shape(model: ModelShape) -> KvShape:
    """KV cache of a catalogue model. Raises UsageError for a dtype or shape that has no codes."""
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


def _shape(args: argparse.Namespace) -> KvShape:
    plain = (args.num_layers, args.block_len_bytes)
    if any(plain):
        if args.model:
            raise UsageError(
                "--model and --num-layers with --block-len-bytes exclude each other: both give a shape; give one"
            )
        if not all(plain):
            raise UsageError("--num-layers and --block-len-bytes go together: give both, or --model")
        heads = max(args.prefill_tp, args.decode_tp)
        try:
            return plain_kv_shape(args.num_layers, args.block_len_bytes, heads, BLOCK_TOKENS)
        except ValueError as error:
            raise UsageError(
                f"--block-len-bytes {args.block_len_bytes}: {error}; give a multiple of {16 * heads}"
            ) from error
    name = args.model or MODEL
    model = load_model(name)
    if model is None:
        raise UsageError(f"--model {name}: not in configs/models/; {choices(name, known_models())}")
    return kv_shape(model)
