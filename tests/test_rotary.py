"""Rotary embeddings as one op: to the bit those of transformers, at every level, and which function is which."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5Attention
from transformers.models.glm4.modeling_glm4 import Glm4Attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as turned_in_part

from ptq.fast.steps import rotary_embedding
from ptq.fast.trials import innermost
from ptq.ops import steps

DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [2, 16, 24, 64, 130])
@pytest.mark.parametrize("t", [0, 3, 8, 19])
def test_rotary_is_that_of_transformers_to_the_bit(t: int, d: int, dtype: torch.dtype, level: str) -> None:
    q, k = draw(2, t, 5, d, dtype=dtype).transpose(1, 2), draw(2, t, 1, d, dtype=dtype, seed=1).transpose(1, 2)
    for rows in (1, 2):
        cos, sin = draw(rows, t, d, dtype=dtype, seed=2), draw(rows, t, d, dtype=dtype, seed=3)
        found = torch.ops.ptq.rotary(q, k, cos, sin)
        for a, b in zip(found, apply_rotary_pos_emb(q, k, cos, sin), strict=True):
            assert torch.equal(a, b) and a.is_contiguous()
    wide = draw(2, 5, t, 2 * d, dtype=dtype)[..., ::2]
    assert torch.equal(torch.ops.ptq.rotary(wide, k, cos, sin)[0], apply_rotary_pos_emb(wide, k, cos, sin)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d, r", [(4, 2), (128, 96), (20, 6), (130, 34), (7, 4)])
def test_heads_that_are_turned_in_part(d: int, r: int, dtype: torch.dtype, level: str) -> None:
    q, k = draw(2, 3, 5, d, dtype=dtype).transpose(1, 2), draw(2, 3, 1, d, dtype=dtype, seed=1).transpose(1, 2)
    for rows in (1, 2):
        cos, sin = draw(rows, 3, r, dtype=dtype, seed=2), draw(rows, 3, r, dtype=dtype, seed=3)
        found = torch.ops.ptq.rotary(q, k, cos, sin), steps.rotary(q, k, cos, sin)
        for ours in found:
            for a, b in zip(ours, turned_in_part(q, k, cos, sin), strict=True):
                assert torch.equal(a, b) and a.is_contiguous()


def own_rotary(forward: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function of transformers that a forward turns queries and keys with."""
    inner = innermost(forward)
    assert inner is not None
    return inner.__globals__[rotary_embedding.ROTARY]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d, r", [(2, 2), (16, 16), (24, 24), (128, 128), (130, 130), (128, 64), (20, 6), (7, 4)])
def test_neighbours_are_turned_as_in_transformers_to_the_bit(d: int, r: int, dtype: torch.dtype, level: str) -> None:
    q, k = draw(2, 3, 5, d, dtype=dtype).transpose(1, 2), draw(2, 3, 1, d, dtype=dtype, seed=1).transpose(1, 2)
    wide = draw(2, 5, 3, 2 * d, dtype=dtype)[..., ::2]
    for rows in (1, 2):
        cos, sin = draw(rows, 3, r, dtype=dtype, seed=2), draw(rows, 3, r, dtype=dtype, seed=3)
        both = [x[..., : r // 2].repeat_interleave(2, -1) for x in (cos, sin)]
        cases = [(own_rotary(Glm4Attention.forward)(q, k, cos, sin), both)]
        if d == r:
            cases.append((own_rotary(CohereAttention.forward)(q, k, cos, sin), [cos.float(), sin.float()]))
        for wanted, tables in cases:
            for found in (torch.ops.ptq.rotary_pairs(q, k, *tables), steps.rotary_pairs(q, k, *tables)):
                for a, b in zip(found, wanted, strict=True):
                    assert torch.equal(a, b) and a.dtype == dtype and a.is_contiguous()
    assert torch.equal(torch.ops.ptq.rotary_pairs(wide, k, *both)[0], steps.rotary_pairs(wide, k, *both)[0])


@pytest.mark.parametrize("module, served", [(Glm4Attention, 2), (CohereAttention, 3), (Ernie4_5Attention, 3)])
def test_functions_that_turn_neighbours(module: type[nn.Module], served: int, monkeypatch: pytest.MonkeyPatch) -> None:
    through, op = [], torch.ops.ptq.rotary_pairs.default
    monkeypatch.setattr(torch.ops.ptq.rotary_pairs, "default", lambda *given: through.append(given) or op(*given))
    monkeypatch.setattr(rotary_embedding, "with_globals", lambda forward, others: others[rotary_embedding.ROTARY])
    own, turn = own_rotary(module.forward), inspect.unwrap(rotary_embedding.with_fast_rotary)(module.forward)
    assert turn is not None
    for dtype, table in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)):
        q, k = draw(2, 4, 3, 16, dtype=dtype), draw(2, 2, 3, 16, dtype=dtype, seed=1)
        cos, sin = (draw(1, 3, 16, dtype=table, seed=seed) for seed in (2, 3))
        for heads in (q, q.transpose(2, 3).contiguous().transpose(2, 3)):
            wanted = own(heads, k, cos, sin)
            assert all(torch.equal(a, b) for a, b in zip(turn(heads, k, cos, sin), wanted, strict=True))
    assert len(through) == 2 * served
    if module is not Glm4Attention:  # whose own function joins parts, which are not broadcast
        for heads, table in ((q[:1], cos.expand(2, 3, 16)), (q[:, :, :1], cos)):
            found, wanted = (rotary(heads, k[:1, :, :1], table, table) for rotary in (turn, own))
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert turn(q.requires_grad_(), k, cos, sin)[0].requires_grad and len(through) == 2 * served
