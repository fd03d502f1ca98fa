"""RMSNorm and rotary embedding as one op: numbers at every level, and models of every family that use them."""

import copy
import pickle

import pytest
import torch
from conftest import tiny_config
from test_fast_decode import level
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from ptq import fast_steps, steps
from ptq.families import FAMILIES

__all__ = ["level"]
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 15, 16, 63, 64, 200, 2048])
def test_norm_against_float64(k: int, dtype: torch.dtype, level: None) -> None:
    x, gain = draw(3, 2, k, dtype=dtype), draw(k, dtype=dtype, seed=1)
    for eps, offset, first in ((1e-6, 0.0, True), (0.5, 0.0, False), (1e-5, 1.0, False)):
        found = torch.ops.ptq.rms_norm(x, gain, eps, offset, first)
        y = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        wanted = y * (gain.double() + offset)
        place = 2**-7 if dtype == torch.bfloat16 else 2**-21
        assert found.dtype == dtype and ((found.double() - wanted).abs() <= place * wanted.abs() + 1e-30).all()
        same = (found == steps.rms_norm(x, gain, eps, offset, first)).double().mean()
        assert same > (0.99 if dtype == torch.bfloat16 else 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [2, 16, 24, 64, 130])
def test_rotary_is_that_of_transformers_to_the_bit(d: int, dtype: torch.dtype, level: None) -> None:
    q, k = draw(2, 3, 5, d, dtype=dtype).transpose(1, 2), draw(2, 3, 1, d, dtype=dtype, seed=1).transpose(1, 2)
    for rows in (1, 2):
        cos, sin = draw(rows, 3, d, dtype=dtype, seed=2), draw(rows, 3, d, dtype=dtype, seed=3)
        found = torch.ops.ptq.rotary(q, k, cos, sin)
        for a, b in zip(found, apply_rotary_pos_emb(q, k, cos, sin), strict=True):
            assert torch.equal(a, b) and a.is_contiguous()
    wide = draw(2, 5, 3, 2 * d, dtype=dtype)[..., ::2]
    assert torch.equal(torch.ops.ptq.rotary(wide, k, cos, sin)[0], apply_rotary_pos_emb(wide, k, cos, sin)[0])


def test_ops_and_refusals(level: None) -> None:
    x, gain = draw(1, 2, 8, dtype=torch.float32), draw(8, dtype=torch.float32)
    torch.library.opcheck(torch.ops.ptq.rms_norm.default, (x, gain, 1e-5, 0.0, True))
    q, cos = draw(1, 2, 3, 8, dtype=torch.float32), draw(1, 3, 8, dtype=torch.float32)
    torch.library.opcheck(torch.ops.ptq.rotary.default, (q, q.clone(), cos, cos.clone()))
    assert torch.ops.ptq.rms_norm(x[:, :0], gain, 1e-5, 0.0, True).shape == (1, 0, 8)
    for bad in (lambda: torch.ops.ptq.rms_norm(x, gain[:5], 1e-5, 0.0, True),
                lambda: torch.ops.ptq.rotary(q, q, cos[..., :4], cos[..., :4])):  # fmt: skip
        with pytest.raises(RuntimeError):
            bad()


@pytest.mark.parametrize("cls, kind", [
    (LlamaRMSNorm, (0.0, True)), (Olmo2RMSNorm, (0.0, False)), (GemmaRMSNorm, (1.0, False)),
])  # fmt: skip
def test_norms_are_told_apart_by_their_numbers(cls: type[nn.Module], kind: tuple[float, bool]) -> None:
    assert fast_steps._norm_kind(cls(40, eps=1e-4)) == (1e-4, *kind)


def test_what_only_looks_like_a_norm_is_left_alone() -> None:
    class Other(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 1.001

    class Wide(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states.abs())

    for cls in (Other, Wide):
        assert fast_steps._norm_kind(cls(40)) is None
    assert fast_steps._norm_kind(nn.LayerNorm(8)) is None and fast_steps._norm_kind(nn.Linear(3, 3)) is None


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_of_every_family(family: str) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    fast = copy.deepcopy(plain)
    fast_steps.install(fast)
    norms = [m for m in fast.modules() if type(m).__name__.endswith("RMSNorm")]
    attention = [m for m in fast.modules() if type(m).__name__.endswith("Attention")]
    assert norms and attention and all("forward" in vars(m) for m in (*norms, *attention))
    ids = torch.arange(3, 12).reshape(1, -1)
    assert torch.equal(fast(ids).logits, plain(ids).logits)  # many tokens: the model's own code
    torch.testing.assert_close(fast(ids[:, :3]).logits, plain(ids[:, :3]).logits, rtol=1e-4, atol=1e-5)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(again(ids[:, :2]).logits, fast(ids[:, :2]).logits)
        assert again.get_decoder().norm.forward.args[0] is again.get_decoder().norm
    with torch.enable_grad():
        assert fast(ids[:, :2]).logits.requires_grad
