"""Attention of decoded tokens on a GPU, on the CPU: the choices are those of a GPU, the ops run on their references."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from ptq.fast import whole_model
from ptq.fast.attention import decoded_attention, decoding
from ptq.kv.attention import CACHE, attach
from ptq.kv.kv_cache import CacheQuantization
from ptq.kv.packed_cache import PackedCache
from ptq.kv.static_cache import StaticPackedCache
from ptq.ops import hadamard, kv_step, matmul, steps

SETTINGS = CacheQuantization(4, 3, hadamard="sylvester:5")
LENGTH = 24


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def model_of(settings: CacheQuantization | None, dtype: torch.dtype = torch.bfloat16, head_dim: int = 32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=head_dim, vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    if settings is not None:
        attach(model, settings)
    whole_model.install(model)
    return model


def cache_of(kind: str, model: Any) -> Any:
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=LENGTH)
    if kind == "growing":
        return DynamicCache()
    made = StaticPackedCache if kind == "static packed" else PackedCache
    return made(model.config, SETTINGS, LENGTH) if kind == "static packed" else made(model.config, SETTINGS)


def run(model: Any, cache: Any, padded: bool) -> list[Tensor]:
    """Logits of a prompt of two rows, of a token and of three tokens."""
    ids = torch.arange(2 * 12).view(2, 12) % 50
    there = torch.ones(2, LENGTH, dtype=torch.bool)
    there[1, :3] = not padded
    found, at = [], 0
    for count in (8, 1, 3):
        positions = torch.arange(at, at + count)
        length = LENGTH if type(cache) in (StaticCache, StaticPackedCache) else at + count
        mask = (torch.arange(length) <= positions[:, None])[None, None] & there[:, None, None, :length]
        given = {"position_ids": positions[None], "attention_mask": mask, CACHE: cache}
        found.append(model(ids[:, at : at + count], **given).logits[:, -1])
        at += count
    return found


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["static", "growing", "static packed", "packed"])
def test_decoded_tokens_are_one_op(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(SETTINGS if "packed" in kind else None)
    wanted = run(model, cache_of(kind, model), padded)
    served: list[Any] = []
    own = decoding.layer_on_gpu
    monkeypatch.setattr(
        decoding, "layer_on_gpu", lambda *given: served.append(own(*given)[0]) or (served[-1], own(*given)[1])
    )
    monkeypatch.setattr(matmul, "lies_on_gpu", lambda x: True)
    monkeypatch.setattr(decoded_attention, "cpu_ops_serve", lambda *tensors: False)
    cache = cache_of(kind, model)
    found = run(model, cache, padded)
    assert len(served) == 3 * 2 and not any(served[:2]) and all(served[2:])  # not the prompt
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * float(b.float().abs().max()))
    held = [layer.get_seq_length() for layer in cache.layers]
    assert [int(length) for length in held] == [12, 12]


def test_what_the_kernels_do_not_serve_is_left_to_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "lies_on_gpu", lambda x: True)
    monkeypatch.setattr(decoded_attention, "cpu_ops_serve", lambda *tensors: False)
    own = decoding.layer_on_gpu
    served: list[Any] = []
    monkeypatch.setattr(
        decoding, "layer_on_gpu", lambda *given: served.append(own(*given)[0]) or (served[-1], own(*given)[1])
    )
    dense = CacheQuantization(4, 4, hadamard=hadamard.construction(12))
    for model, kind in (
        (model_of(None, torch.float32), "static"), (model_of(None, head_dim=36), "growing"),
        (model_of(None, head_dim=512), "static"), (model_of(dense, head_dim=12), "packed"),
    ):  # fmt: skip
        cache = PackedCache(model.config, dense) if kind == "packed" else cache_of(kind, model)
        served.clear()
        run(model, cache, False)
        assert served == [None] * 6, kind


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_ops_behind_a_number_in_a_tensor() -> None:
    """They are the ops behind a number, where the mask hides what that does not see."""
    b, h, groups, t, d, start, room = 2, 2, 3, 2, 32, 5, 20
    q, k, v = (draw(b, t, n * d, seed=n + i) for i, n in enumerate((h * groups, h, h)))
    cos, sin = draw(1, t, d, seed=8), draw(1, t, d, seed=9)
    mask = (torch.arange(room) <= start + torch.arange(t)[:, None])[None, None]
    at, short = torch.tensor(start), mask[..., : start + t]
    mine, theirs = ([draw(b, h, room, d, seed=seed) for seed in (4, 5)] for _ in range(2))
    found = torch.ops.ptq.decode_attention_at(q, k, v, cos, sin, *mine, at, 0.2, mask)
    assert int(at) == start + t
    wanted = steps.decode_attention(q, k, v, cos, sin, *theirs, start, 0.2, short)
    torch.testing.assert_close(found, wanted)
    assert all(map(torch.equal, mine, theirs))
    at = torch.tensor(start)
    given = (q, k, v, cos, sin, *mine, at, 0.2, mask)
    torch.library.opcheck(torch.ops.ptq.decode_attention_at.default, given, test_utils=CHECKS)
    settings = CacheQuantization(4, 3, hadamard="sylvester:5")
    caches = []
    for _ in range(2):
        model = model_of(settings)
        cache = PackedCache(model.config, settings)
        layer: Any = cache.layers[0]
        layer.update(draw(b, h, start, d, seed=6), draw(b, h, start, d, seed=7))
        caches.append(layer)
    bits, *numbers = caches[0].numbers()
    sides = [[*layer.key.tensors, *layer.value.tensors] for layer in caches]
    more = (mask, torch.zeros(1, 1, t, 256 - room, dtype=torch.bool))
    wide = torch.cat(more, -1)
    at.fill_(start)
    given = (q, k, v, cos, sin, *sides[0], at, *bits, *numbers, 0.2, wide)
    found = torch.ops.ptq.kv_decode_attention_at(*given)
    assert int(at) == start + t
    rest = (start, *bits, *numbers, 0.2, None, None, None, short)
    wanted = kv_step.decode_attention(q, k, v, cos, sin, *sides[1], *rest)
    torch.testing.assert_close(found, wanted)
    assert all(map(torch.equal, *sides))
    torch.library.opcheck(torch.ops.ptq.kv_decode_attention_at.default, given, test_utils=CHECKS)


CHECKS = ("test_schema", "test_faketensor")


@pytest.mark.parametrize("kind", ["packed", "static packed"])
def test_sinks_are_kept_anew_behind_a_reset(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short prompt looks like decoded tokens."""
    settings = CacheQuantization(2, 2, sinks=2, hadamard="sylvester:5")
    model = model_of(settings)
    made = (
        (lambda: PackedCache(model.config, settings))
        if kind == "packed"
        else (lambda: StaticPackedCache(model.config, settings, LENGTH))
    )
    monkeypatch.setattr(matmul, "lies_on_gpu", lambda x: True)
    monkeypatch.setattr(decoded_attention, "cpu_ops_serve", lambda *tensors: False)
    wanted, cache = run(model, made(), False), made()
    model(torch.arange(2 * 7).view(2, 7) + 20, position_ids=torch.arange(7)[None], **{CACHE: cache})
    cache.reset()
    for a, b in zip(run(model, cache, False), wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("wanted_of", ["product", "cache"])
def test_gradients_of_what_others_bring(wanted_of: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the module wants a gradient, but a tensor that a hook adds, or the tokens before."""
    model = model_of(None).requires_grad_(False)
    cache = DynamicCache()
    model(torch.arange(4)[None], **{CACHE: cache})
    if on_gpu:
        monkeypatch.setattr(matmul, "lies_on_gpu", lambda x: True)
        monkeypatch.setattr(decoded_attention, "cpu_ops_serve", lambda *tensors: False)
    layer, learned = cache.layers[0], torch.zeros(1, requires_grad=True, dtype=torch.bfloat16)
    if wanted_of == "product":
        projection = model.model.layers[0].self_attn.k_proj
        projection.register_forward_hook(lambda module, given, y: y + learned)
    else:
        layer.keys = layer.keys + learned.detach()
        learned = layer.keys.requires_grad_()
    with torch.enable_grad():
        model(torch.tensor([[7]]), **{CACHE: cache}).logits.float().sum().backward()
    assert learned.grad is not None and learned.grad.abs().sum() > 0
