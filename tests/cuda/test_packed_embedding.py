"""A packed embedding on a GPU: rows, and the product of a head that is tied to it, in every layout and dtype."""

import pytest
import torch
from test_ops import GPU, HALVES
from torch import nn

from ptq.layers.embedding import PackedEmbedding, TiedHead
from quarot.integer import IntegerFormat


def packed(bits: int, dtype: torch.dtype, tied: bool) -> tuple[nn.Module, torch.Tensor]:
    """An embedding of 75 rows of 128 numbers, on the GPU, and its weight in float32."""
    generator, format = torch.Generator().manual_seed(bits), IntegerFormat(bits, 32)
    stored = {
        "codes": torch.randint(0, 256, (75, 16 * bits), generator=generator, dtype=torch.uint8),
        "scale": (0.01 + torch.rand(75, 4, generator=generator)).bfloat16().view(torch.int16),
    }
    module = PackedEmbedding(75, 128, format, dtype, 1.7)
    module.load_state_dict(
        {"weight": torch.zeros(1, dtype=torch.uint8)} | {f"weight_{k}": v for k, v in stored.items()}
    )
    module.multiplies = tied
    module.to(GPU).prepack()
    assert ("fragments" in module.parts()) == tied
    return module, format.dequantize(stored, 75, 128)


@HALVES
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [4, 6, 8])
@torch.no_grad()
def test_rows_and_the_product_of_a_tied_head(bits: int, tied: bool, dtype: torch.dtype) -> None:
    module, weight = packed(bits, dtype, tied)
    ids = torch.tensor([[3, 74, 0], [3, 16, 73]])
    assert torch.equal(module(ids.to(GPU)).cpu(), weight[ids].to(dtype) * torch.tensor(1.7, dtype=dtype))
    if tied:
        assert isinstance(module, PackedEmbedding)
        x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
        found, wanted = TiedHead(module, None)(x.to(GPU)).cpu().double(), x.double() @ weight.double().T
        assert found.shape == (2, 3, 75) and ((found - wanted).norm() / wanted.norm()) < 1e-2
