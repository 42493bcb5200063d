"""NIXL without torch is the NIXL that vLLM's processes load with it."""

from __future__ import annotations

import pytest
from contract.conftest import ROOT, printed

pytest.importorskip("nixl")

PROGRAM = """
import sys
{first}
from pdlab.transfer.rank.nixl_import import nixl_api
api = nixl_api({tensors})
descriptors = api.nixl_agent("a", api.nixl_agent_config(backends=[])).get_xfer_descs([(4096, 8, 0)], "DRAM")
print(api.__file__, descriptors.descCount(), "torch" in sys.modules)
import torch
print(torch.zeros(2).sum().item())
"""


def printed_words(first: str, tensors: bool) -> list[str]:
    return " ".join(printed(PROGRAM.format(first=first, tensors=tensors), cwd=ROOT)).split()[-4:]


def test_the_same_file_with_torch_and_without() -> None:
    without, wanted, after = printed_words("", False), printed_words("", True), printed_words("import torch", False)
    assert without[:2] == wanted[:2] == after[:2]
    assert [without[2], wanted[2], after[2]] == ["False", "True", "True"]
    assert {without[3], wanted[3], after[3]} == {"0.0"}, "torch can be imported afterwards"
