"""pdlab's copy of vLLM's head split and descriptor order, against vLLM's own code."""

from __future__ import annotations

import importlib
import inspect
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Disaggregated, Pool
from pdlab.core.model_size import kv_bytes
from pdlab.sim.hardware import load_hardware
from pdlab.sim.kv_transfer import transfer_costs
from pdlab.transfer.rank.layout import descriptor_ids, descriptors, pairs, plain_kv_shape
from pdlab.transfer.rank.layout import refusal as tp_refusal
from pdlab.transfer.rank.rank import NUM_THREADS

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


def quietly(module: str) -> ModuleType:
    """vLLM warns while it is imported, and warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


@pytest.fixture(scope="module")
def mapping() -> ModuleType:
    return quietly(f"{NIXL}.tp_mapping")


DEGREES = (1, 2, 4, 8, 16)
ALLOWED = [(p, d, heads) for p in DEGREES for d in DEGREES for heads in (1, 2, 8) if not tp_refusal(p, d, heads)]


@pytest.mark.parametrize("prefill_tp, decode_tp, kv_heads", ALLOWED)
def test_heads_go_where_vllm_sends_them(mapping: ModuleType, prefill_tp: int, decode_tp: int, kv_heads: int) -> None:
    utils = quietly("vllm.distributed.kv_transfer.kv_connector.utils")
    spec = quietly("vllm.v1.kv_cache_interface").FullAttentionSpec
    shape = plain_kv_shape(1, kv_heads * 64, kv_heads, 16)
    for rank in range(decode_tp):
        topology = utils.TransferTopology(
            tp_rank=rank, tp_size=decode_tp, block_size=16, engine_id="decode", is_mla=False, is_mamba=False,
            total_num_kv_heads=kv_heads, attn_backends=[],
        )  # fmt: skip
        info = utils.EngineTransferInfo(
            remote_tp_size=prefill_tp, remote_block_size=16, remote_block_len=shape.page_bytes(prefill_tp),
            remote_physical_blocks_per_logical=1,
        )  # fmt: skip
        topology.register_remote_engine("prefill", info)
        plan = mapping.compute_tp_mapping(topology, prefill_tp, (spec,))
        mine = [pair for pair in pairs(shape, prefill_tp, decode_tp) if pair.decode == rank]
        assert tuple(pair.prefill for pair in mine) == plan.all_source_ranks
        page = shape.page_bytes(decode_tp)
        reads = len(plan.source_ranks_per_group[0])
        for pair in mine:
            assert pair.length == page // reads
            assert pair.prefill_offset == plan.rank_offset_factor * page
            assert pair.decode_offset == plan.rank_to_attention_slot[pair.prefill] * (page // reads)


@pytest.mark.parametrize("latent", [True, False])
@pytest.mark.parametrize("prefill_tp, decode_tp, kv_heads", ALLOWED)
def test_ranks_move_the_bytes_that_vllm_reads(
    mapping: ModuleType, prefill_tp: int, decode_tp: int, kv_heads: int, latent: bool
) -> None:
    spec = quietly("vllm.v1.kv_cache_interface").FullAttentionSpec
    hardware = load_hardware("h100-vllm-0.11")
    shape = require_shape("deepseek-v3" if latent else "gpt-oss-120b").model_copy(update={"kv_heads": kv_heads})
    # A latent vector is whole on every rank, of KV heads each rank keeps its own or one.
    kept = kv_bytes(shape, 1, hybrid=False) * (1 if latent else max(1, kv_heads // decode_tp) / kv_heads)
    sends = dict.fromkeys(range(prefill_tp), 0.0)
    for rank in range(decode_tp):
        topology = SimpleNamespace(is_mla=latent, tp_rank=rank, tp_size=decode_tp, total_num_kv_heads=kv_heads)
        topology.dcp_consumer_count = lambda *_: 1
        (sources,) = mapping.compute_tp_mapping(topology, prefill_tp, (spec,)).source_ranks_per_group
        for source in sources:
            sends[source] += kept / len(sources)
    topology = Disaggregated(prefill=Pool(tp=prefill_tp), decode=Pool(tp=decode_tp), placement="spread")
    costs = transfer_costs(hardware, shape, topology, "srd")
    rank_s = 1 / (hardware.value("srd_gb_per_s") * 1e9)
    assert costs.bytes_per_token == pytest.approx(sum(sends.values()))
    assert costs.bytes_per_token / costs.prefill_bytes_per_s == pytest.approx(max(sends.values()) * rank_s)
    assert costs.bytes_per_token / costs.decode_bytes_per_s == pytest.approx(kept * rank_s)


def test_descriptors_are_in_vllms_order() -> None:
    worker = quietly(f"{NIXL}.base_worker").NixlBaseConnectorWorker
    blocks = np.array([5, 1, 7])
    ours = descriptor_ids(blocks, 3, 10)
    theirs = worker._compute_desc_ids(
        SimpleNamespace(_has_mamba=False, num_regions=3), [[5, 1, 7]], 10, None, 1
    )  # fmt: skip
    assert ours.tolist() == theirs.tolist()
    local = worker._build_fa_local(
        SimpleNamespace(
            transfer_topo=object(), num_blocks=10, device_id=0, block_len_per_layer=[64] * 3,
            block_stride_per_layer=[64] * 3, _stack_descs=worker._stack_descs,
        ),
        [1000, 9000, 5000], 1,
    )  # fmt: skip
    assert np.array_equal(descriptors([1000, 9000, 5000], 10, 64, 0, 64, 0), local)


def test_the_defaults_are_vllms() -> None:
    source = inspect.getsource(quietly(f"{NIXL}.base_worker").NixlBaseConnectorWorker.__init__)
    assert f'"num_threads", {NUM_THREADS}\n' in source
    assert "nixl_agent_config(num_threads=num_threads, capture_telemetry=True)" in source
