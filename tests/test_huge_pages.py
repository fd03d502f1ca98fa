"""Weights that are read for every token lie in memory of their own, on huge pages where there are any."""

import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ptq.ops import free_memory, huge_pages

LARGE = huge_pages.LARGE_BYTES // 4

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is mapped")


def lies_in_a_file(x: Tensor) -> bool:
    return any(begin <= x.data_ptr() < end for begin, end in huge_pages._mapped_files())


@pytest.fixture
def mapped(tmp_path: Path) -> Callable[[int], Tensor]:
    """A tensor of so many numbers that lies in a file."""

    def make(size: int) -> Tensor:
        path = tmp_path / str(size)
        path.write_bytes(torch.randn(size).numpy().tobytes())
        with path.open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.float32)

    return make


def test_only_what_is_large_and_in_a_file_is_taken_out(mapped: Callable[[int], Tensor]) -> None:
    of_file, small, own = mapped(LARGE), mapped(LARGE - 1), torch.randn(LARGE)
    layers = [nn.Linear(1, 1) for _ in range(3)]
    for layer, x in zip(layers, (of_file, small, own), strict=True):
        layer.weight = nn.Parameter(x.view(-1, 1))
    tied = nn.Linear(1, 1)
    tied.weight = layers[0].weight
    assert lies_in_a_file(layers[0].weight) and lies_in_a_file(layers[1].weight)
    huge_pages.take_out_of_files([*layers, tied])
    assert not lies_in_a_file(layers[0].weight) and torch.equal(layers[0].weight.flatten(), of_file)
    assert lies_in_a_file(layers[1].weight) and tied.weight is layers[0].weight
    assert layers[2].weight.data_ptr() == own.data_ptr()


def test_what_is_free_is_left(mapped: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(1, 1)
    layer.weight = nn.Parameter(mapped(LARGE).view(-1, 1))
    free = {"available": 2 * layer.weight.nbytes - 1}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(**free))
    huge_pages.take_out_of_files([layer])
    assert lies_in_a_file(layer.weight)
    free["available"] += 1
    with monkeypatch.context() as container:
        container.setattr(free_memory, "_left", lambda *places: iter([free["available"] - 1]))
        huge_pages.take_out_of_files([layer])
    assert lies_in_a_file(layer.weight)
    huge_pages.take_out_of_files([layer])
    assert not lies_in_a_file(layer.weight)


def test_neighbours_are_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_it = torch.zeros(4 * LARGE)
    begin = all_of_it.data_ptr()
    parts = [all_of_it[2 * LARGE :], all_of_it[: LARGE - 64], torch.empty(LARGE, device="meta")]
    monkeypatch.setattr(huge_pages, "LARGE_BYTES", 1024)
    large = [x for x in parts if huge_pages._is_large(x)]
    end = begin + all_of_it.nbytes
    assert len(large) == 2
    assert list(huge_pages._pieces(large, gap=4 * LARGE + 257)) == [(begin, end)]
    apart = [(begin, begin + 4 * LARGE - 256), (begin + 8 * LARGE, end)]
    assert list(huge_pages._pieces(large, gap=4 * LARGE + 256)) == apart
    assert list(huge_pages._pieces([], gap=1)) == []


def test_numbers_stay_and_whole_pages_are_asked_for(
    mapped: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = huge_pages._size()
    if not size:
        pytest.skip("no huge pages here")
    asked: list[tuple[int, int, int]] = []
    advise = huge_pages._advise()

    def seen(first: int, nbytes: int, kind: int) -> int:
        asked.append((first, nbytes, kind))
        return int(advise(first, nbytes, kind))

    monkeypatch.setattr(huge_pages, "_advise", lambda: seen)
    x, small = torch.randn(3 * size // 4), torch.randn(16)
    before, place = x.clone(), x.data_ptr()
    huge_pages.use([x, small, mapped(3 * size // 4)])
    assert torch.equal(x, before) and x.data_ptr() == place
    assert [kind for *_, kind in asked] == [huge_pages.MADV_HUGEPAGE, huge_pages.MADV_COLLAPSE]
    for first, nbytes, _ in asked:
        assert first % size == 0 and nbytes % size == 0 and place <= first < first + nbytes <= place + x.nbytes


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    huge_pages._size.cache_clear()
    monkeypatch.setattr(huge_pages, "_advise", lambda: pytest.fail("asked for huge pages"))
    huge_pages.use([torch.zeros(1 << 20)])
    huge_pages._size.cache_clear()


def test_weights_of_a_loaded_model_lie_in_no_file(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "LARGE_BYTES", 1)
    model = AutoModelForCausalLM.from_pretrained(packed)
    assert isinstance(model.lm_head, nn.Linear)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) or hasattr(m, "parts")]
    assert len(linears) > 7
    for module in linears:
        assert not any(lies_in_a_file(parameter) for parameter in module.parameters(recurse=False))
