"""Products of bfloat16, through which calibration rows go where the model is stored so."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantize
from tiny_models import TINY, save_model

from ptq.layers.linear import QuantLinear
from ptq.ops import matmul, native
from ptq.statistics import hessian
from ptq.statistics.chunks import Chunks
from ptq.weights import formats
from ptq.weights.rounding import nearest

SHAPE = (300, 64)  # n, k


def draw(n: int, k: int, t: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n * k)
    return [torch.randn(size, generator=generator) for size in ((1, t, k), (n, k), (n,))]


def test_factors_are_those_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, bias = draw(*SHAPE, 2 * matmul.FEW_ROWS)
    plain = matmul.linear(x, w, bias)
    exact = x.bfloat16().double() @ w.bfloat16().double().t() + bias.double()
    for piece in (matmul.PIECE_BYTES, 1 << 13):  # the second: some rows at a time
        monkeypatch.setattr(matmul, "PIECE_BYTES", piece)
        with matmul.in_bfloat16():
            y = matmul.linear(x, w, bias)
        assert y.dtype == torch.float32 and not torch.equal(y, plain)
        torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=2**-8 * float(bias.abs().max()))
        torch.testing.assert_close(matmul.linear(x, w, bias), plain, rtol=0, atol=1e-5)  # and it is over


def test_it_is_of_one_thread_and_of_its_block() -> None:
    with matmul.in_bfloat16():
        with pytest.raises(ZeroDivisionError), matmul.in_bfloat16():
            _ = 1 / 0
        assert matmul.PRODUCTS.bfloat16
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(lambda: matmul.PRODUCTS.bfloat16).result()
    assert not matmul.PRODUCTS.bfloat16


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize(
    "name, options",
    [
        ("dense", {}),
        ("quarot/integer", {"bits": 4, "group_size": 32}),
        ("fp6/minifloat", {"element": "e3m2", "group_size": 0}),
        ("quip_sharp/e8p", {"bits": 2}),
    ],
)
@torch.no_grad()
def test_packed_linears_take_bfloat16(name: str, options: dict[str, Any], tokens: int) -> None:
    format = formats.get(name, **options)
    x, w, bias = draw(*SHAPE, tokens)
    layer = QuantLinear(SHAPE[1], SHAPE[0], True, format)
    codebook = format.codebook
    parts = {"dense": w} if codebook is None else format.pack(nearest(w, codebook))
    layer.load_state_dict({"bias": bias, **{f"weight_{part}": tensor for part, tensor in parts.items()}}, strict=False)
    layer.prepack()
    plain = layer(x)
    with matmul.in_bfloat16():
        y = layer(x)
    assert y.dtype == torch.float32 and not torch.equal(y, plain)
    alone = layer.to(torch.bfloat16)(x.bfloat16())
    torch.testing.assert_close(y, alone.float(), rtol=2**-7, atol=0.02)


def precisions(patch: pytest.MonkeyPatch) -> list[bool]:
    """Whether products are of bfloat16 when Hessians are summed, and when rows go through a block: filled by a run."""
    found: list[bool] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **named: Any) -> Any:
            found.append(matmul.PRODUCTS.bfloat16)
            return function(*args, **named)

        return watch

    patch.setattr(hessian, "observe", watched(hessian.observe))
    patch.setattr(Chunks, "through", watched(Chunks.through))
    return found


@pytest.mark.parametrize(
    "dtype, options, wanted",
    [
        (torch.bfloat16, [], True),
        (torch.float32, [], False),
        (torch.float16, [], False),
        (torch.bfloat16, ["--gptaq-alpha", "0.25"], True),
    ],
)
def test_models_in_bfloat16_are_calibrated_so(
    dtype: torch.dtype, options: list[Any], wanted: bool, tmp_path: Path, calibration_text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(matmul, "has_bfloat16", lambda: True)
    found = precisions(monkeypatch)
    model = save_model(tmp_path / "model", dtype=dtype, **TINY)
    options = ["--calibration", calibration_text, "--samples", 8, "--sequence-length", 16, *options]
    made = quantize("quarot", model, tmp_path / "out", *options)
    assert made.exit_code == 0, made.stderr
    assert len(found) >= 3 and set(found) == {wanted}  # of two blocks; rows go through the first one
    assert not matmul.PRODUCTS.bfloat16


def test_only_where_the_cpu_has_them(set_level: Callable[[str | None], str]) -> None:
    if not native.load():
        assert not matmul.has_bfloat16()
        return
    best = set_level(None)
    assert native.cpu_level() == best
    assert matmul.has_bfloat16() == (best == "amx" or (best == "avx512bf16" and not native.has_slow_pairs()))
    set_level("avx2")
    assert not matmul.has_bfloat16()


def test_not_where_they_are_slow(level: str) -> None:
    assert matmul.has_bfloat16() == (level in ("avx512bf16", "amx"))
