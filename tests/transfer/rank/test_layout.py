"""Who reads which heads from whom."""

from __future__ import annotations

import pytest

from pdlab.core.catalog import load_model
from pdlab.core.deployment import Deployment, Disaggregated, Pool
from pdlab.core.errors import UsageError
from pdlab.core.vllm_limits import check_divisibility
from pdlab.transfer.rank.layout import refusal


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_the_check_pairs_the_tp_degrees_that_the_launcher_accepts(kv_heads: int) -> None:
    """The rank's rule travels to nodes without pdlab; the launcher's has it with what else vLLM asks for."""
    model = load_model("gpt-oss-120b")
    assert model is not None
    shape = model.model_copy(update={"kv_heads": kv_heads, "heads": 5040})
    for prefill in range(1, 17):
        for decode in range(1, 17):
            topology = Disaggregated(prefill=Pool(tp=prefill), decode=Pool(tp=decode), placement="spread")
            try:
                check_divisibility(Deployment(topology=topology), shape)
                accepted = True
            except UsageError:
                accepted = False
            refused = refusal(prefill, decode, kv_heads)
            # 5040 attention heads divide by every TP degree here but these two.
            assert accepted == (refused is None and not {11, 13} & {prefill, decode}), (prefill, decode, refused)
