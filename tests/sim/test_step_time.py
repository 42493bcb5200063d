"""Step, memory and transfer model against arithmetic done by hand, and against what each term must do."""

from __future__ import annotations

import itertools
import math

import pytest

from pdlab.core.catalog import ModelShape, require_shape
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool, Transport
from pdlab.core.errors import UsageError
from pdlab.core.model_size import dense_bytes, expert_bytes, kv_bytes
from pdlab.sim.hardware import load_hardware
from pdlab.sim.kv_transfer import link_of, transfer_costs
from pdlab.sim.step_time import active_parameters, kv_capacity_tokens, step_costs

HARDWARE = load_hardware("h100-vllm-0.11")


def shape_of(name: str) -> ModelShape:
    shape = require_shape(name)
    return shape


GPT_OSS = shape_of("gpt-oss-120b")
DEEPSEEK = shape_of("deepseek-v3")


def disaggregated(prefill: Pool, decode: Pool, placement: str = "pack", tls: str | None = None) -> Deployment:
    return Deployment(
        topology=Disaggregated.model_validate(
            {"prefill": prefill, "decode": decode, "placement": placement, "transport": Transport(ucx_tls=tls)}
        )
    )


def test_sizes_of_known_models() -> None:
    # 36 layers x 128 experts x 3 x 2880 x 2880 at 4.25 bits.
    assert expert_bytes(GPT_OSS) == pytest.approx(60.92e9, rel=1e-3)
    total = expert_bytes(GPT_OSS) + dense_bytes(GPT_OSS, with_embedding=True)
    assert total == pytest.approx(65.2e9, rel=0.01)  # the published checkpoint: 60.8 GiB
    # Published: 5.1 B active, with both embeddings; 671 B in all, 37 B active.
    assert active_parameters(GPT_OSS) == pytest.approx(5.1e9 - 2 * 201088 * 2880 + 0.6e9, rel=0.1)
    assert expert_bytes(DEEPSEEK) + dense_bytes(DEEPSEEK, with_embedding=True) == pytest.approx(671e9, rel=0.02)
    assert active_parameters(DEEPSEEK) == pytest.approx(37e9, rel=0.05)


def test_kv_bytes_with_and_without_windows() -> None:
    assert kv_bytes(GPT_OSS, 5000, hybrid=False) == 5000 * 36 * 2 * 8 * 64 * 2
    assert kv_bytes(GPT_OSS, 5000, hybrid=True) == (5000 * 18 + 128 * 18) * 2 * 8 * 64 * 2
    assert kv_bytes(GPT_OSS, 100, hybrid=True) == kv_bytes(GPT_OSS, 100, hybrid=False), "the window is not full yet"
    assert kv_bytes(DEEPSEEK, 1, hybrid=False) == 61 * 576 * 2, "the latent vector alone"


def test_a_hybrid_kv_cache_holds_twice_the_tokens() -> None:
    """Half of the layers keep a window of 128 tokens."""
    hybrid = HARDWARE.model_copy(update={"hybrid_kv": True})
    whole, halved = (kv_capacity_tokens(each, GPT_OSS, Pool(tp=2)) for each in (HARDWARE, hybrid))
    assert halved == pytest.approx(2 * whole, rel=1e-3)


def test_kv_capacity_grows_faster_than_tp() -> None:
    """The weights are shared out among the GPUs, so that each doubling of TP more than doubles the room."""
    room = [kv_capacity_tokens(HARDWARE, GPT_OSS, Pool(tp=tp)) for tp in (1, 2, 4, 8)]
    assert room[0] > 5250
    assert all(more > 2 * less for less, more in itertools.pairwise(room))


@pytest.mark.parametrize("expert_parallel", [True, False])
def test_ranks_of_one_replica_share_its_experts(expert_parallel: bool) -> None:
    """vLLM divides them over TP x DP: as whole ones, or as parts of each (FusedMoEParallelConfig.make)."""
    # 58 layers x 256 experts x 3 x 7168 x 2048 bytes; the rest of 18.9 GB is on every rank.
    room = 85.5e9 * 0.9 - 7.2e9 - 58 * 256 * 3 * 7168 * 2048 / 16 - 18.9e9
    found = kv_capacity_tokens(HARDWARE, DEEPSEEK, Pool(dp=16, expert_parallel=expert_parallel))
    assert found == pytest.approx(room / (61 * 576 * 2), rel=0.01)


def test_a_model_that_does_not_fit_has_no_room() -> None:
    assert kv_capacity_tokens(HARDWARE, DEEPSEEK, Pool(tp=4)) == 0


def test_experts_touched_follow_the_independent_choice() -> None:
    costs = step_costs(HARDWARE, GPT_OSS, Pool(tp=4))
    fixed = costs.step_s(0, 0, 0)
    one, many = (costs.step_s(batch, 0, 0) - fixed - batch * costs.sequence_s for batch in (1, 100))
    assert one == pytest.approx(costs.experts_s * 4 / costs.experts), "4 of the experts in use"
    assert one == pytest.approx(costs.experts_s * -math.expm1(costs.log_untouched))
    assert many == pytest.approx(costs.experts_s, rel=1e-3), "reading them all counts, computing overlaps"


def test_more_work_never_takes_less_time() -> None:
    for pool in (Pool(tp=1), Pool(tp=8), Pool(tp=8, expert_parallel=True)):
        costs = step_costs(HARDWARE, GPT_OSS, pool)
        for batch in (0, 1, 7, 64):
            for prefill in (0, 1, 500, 5000, 8192):
                here = costs.step_s(batch, prefill, 5000)
                assert costs.step_s(batch + 1, prefill, 5000) > here
                assert costs.step_s(batch, prefill + 1, 5000) > here


def test_a_step_is_shorter_at_a_larger_tp() -> None:
    for batch, prefill in ((1, 0), (32, 0), (16, 5000), (0, 8192)):
        times = [step_costs(HARDWARE, GPT_OSS, Pool(tp=tp)).step_s(batch, prefill, 5000) for tp in (1, 2, 4)]
        assert times == sorted(times, reverse=True)


def test_experts_on_ranks_wait_for_the_busiest() -> None:
    """The same bytes per GPU on the mean, but one rank has more of the touched experts than the others."""
    split, whole = (
        step_costs(HARDWARE, GPT_OSS, Pool(tp=8, expert_parallel=expert_parallel)).step_s(8, 0, 5000)
        for expert_parallel in (False, True)
    )
    assert whole > split


def test_ranks_of_one_tp_group_see_the_same_tokens() -> None:
    """Expert parallel within TP touches the experts that the batch touches, not a multiple of them."""
    split, whole = (
        step_costs(HARDWARE, GPT_OSS, Pool(tp=8, expert_parallel=expert_parallel)) for expert_parallel in (False, True)
    )
    assert split.experts_s == whole.experts_s
    assert whole.step_s(1, 0, 5000) < split.step_s(1, 0, 5000) + 8 * split.experts_s * 4 / split.experts
    assert whole.dp == 1


def test_a_short_prompt_costs_more_per_token_than_a_full_step() -> None:
    costs = step_costs(HARDWARE, GPT_OSS, Pool(tp=4))

    def per_token(tokens: int) -> float:
        return (costs.step_s(0, tokens, 0) - costs.fixed_s) / tokens

    assert per_token(5000) > per_token(8192) > per_token(50_000)
    assert per_token(500_000) == pytest.approx(costs.prefill_s + costs.unsharded_s, rel=0.01)


def test_the_link_follows_placement_and_transport() -> None:
    four = Pool(tp=4)
    assert link_of(disaggregated(four, four)) == "nvlink"
    assert link_of(disaggregated(four, four, "spread")) == "srd"
    assert link_of(disaggregated(four, four, "spread", "tcp")) == "tcp"
    assert link_of(disaggregated(four, four, "spread", "tcp,srd")) == "srd"
    assert link_of(Deployment(topology=Collocated(pool=four))) == "nvlink"


def test_transfer_costs_by_link() -> None:
    topology = disaggregated(Pool(tp=2), Pool(tp=4)).topology
    assert isinstance(topology, Disaggregated)
    nvlink, srd, tcp = (transfer_costs(HARDWARE, GPT_OSS, topology, link) for link in ("nvlink", "srd", "tcp"))
    assert nvlink.bytes_per_token == srd.bytes_per_token == 36 * 2 * 8 * 64 * 2
    assert nvlink.always_fragmented, "heads that are split differently never merge"
    assert nvlink.stall_s_per_token > nvlink.post_s_per_token, "every block is a copy of its own"
    assert srd.stall_s_per_token == srd.post_s_per_token, "the NIC gathers blocks wherever they are"
    assert tcp.shared and not srd.shared
    assert srd.decode_bytes_per_s == 2 * srd.prefill_bytes_per_s
    assert tcp.decode_bytes_per_s < srd.prefill_bytes_per_s / 10


@pytest.mark.parametrize(
    ("latent", "kv_heads", "prefill_tp", "decode_tp", "busiest_sender", "each_receiver"),
    # Bytes of the busiest rank at each end, as multiples of one copy of the token's KV: worked out rank by rank from
    # vLLM's nixl/tp_mapping.py. Decode rank d reads a latent vector from prefill rank d * P // D, and of KV heads its
    # own ones from the first prefill rank that has each.
    [
        (True, 1, 8, 8, 1, 1),
        (True, 1, 1, 8, 8, 1),
        (True, 1, 8, 1, 1, 1),
        (True, 1, 8, 2, 1, 1),  # two of eight ranks send
        (True, 1, 2, 8, 4, 1),
        (False, 4, 8, 8, 1 / 4, 1 / 4),
        (False, 4, 4, 8, 2 / 4, 1 / 4),
        (False, 4, 1, 8, 2, 1 / 4),
        (False, 4, 4, 2, 1 / 4, 1 / 2),
        (False, 4, 4, 4, 1 / 4, 1 / 4),
        (False, 8, 2, 8, 1 / 2, 1 / 8),
    ],
)
def test_copies_of_kv_are_transferred_too(
    latent: bool, kv_heads: int, prefill_tp: int, decode_tp: int, busiest_sender: float, each_receiver: float
) -> None:
    shape = DEEPSEEK if latent else GPT_OSS.model_copy(update={"kv_heads": kv_heads})
    topology = disaggregated(Pool(tp=prefill_tp), Pool(tp=decode_tp), "spread").topology
    assert isinstance(topology, Disaggregated)
    costs = transfer_costs(HARDWARE, shape, topology, "srd")
    one = kv_bytes(shape, 1, hybrid=False)
    rank_bytes_per_s = HARDWARE.value("srd_gb_per_s") * 1e9
    assert costs.bytes_per_token / costs.prefill_bytes_per_s == pytest.approx(busiest_sender * one / rank_bytes_per_s)
    assert costs.bytes_per_token / costs.decode_bytes_per_s == pytest.approx(each_receiver * one / rank_bytes_per_s)
    assert costs.bytes_per_token == pytest.approx(each_receiver * decode_tp * one), "what crosses the wire"
    tcp = transfer_costs(HARDWARE, shape, topology, "tcp")
    assert tcp.bytes_per_token == costs.bytes_per_token and tcp.prefill_bytes_per_s == tcp.decode_bytes_per_s


def test_unknown_hardware_names_what_there_is() -> None:
    with pytest.raises(UsageError, match="h100-vllm"):
        load_hardware("h999")
    with pytest.raises(UsageError, match="constant 'warp_drive' is missing"):
        HARDWARE.value("warp_drive")


def test_a_joining_request_is_admitted_in_blocks_of_the_hardware() -> None:
    larger = HARDWARE.model_copy(update={"block_tokens": 2 * HARDWARE.block_tokens})
    one, other = (step_costs(hardware, GPT_OSS, Pool(tp=4)) for hardware in (HARDWARE, larger))
    assert one.admit_s * HARDWARE.block_tokens == pytest.approx(HARDWARE.value("admit_us") * 1e-6)
    assert other.admit_s == pytest.approx(one.admit_s / 2)
