"""The codec of small floats: against exact arithmetic over all codes, and against CUDA's own conversion."""

import json
import re
import shutil
import struct
import subprocess
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import ops_at

import fp6.minifloat_ops  # noqa: F401 (declares the ops)
from fp6 import element
from fp6.element import ELEMENTS, Element, element_of
from ptq.errors import InputError
from ptq.ops import native

ROOT = Path(__file__).resolve().parents[1]
EVERY = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)


@pytest.fixture(params=("reference", *native.CPU_LEVELS))
def implementation(request):
    yield from ops_at(request.param)


def value(code: int, element: Element) -> Fraction:
    """What a code stands for, bit by bit and exact: written without `Element`'s arithmetic."""
    text = f"{code:0{1 + element.exponent + element.mantissa}b}"
    field, fraction = text[1 : 1 + element.exponent], text[1 + element.exponent :]
    bias = int("0" + "1" * (element.exponent - 1), 2)
    power = (int(field, 2) or 1) - bias
    one = "1" if "1" in field else "0"
    number = Fraction(int(one + fraction, 2), 2 ** len(fraction)) * Fraction(2) ** power
    return -number if text[0] == "1" else number


@cache
def numbers_of(element: Element) -> list[Fraction]:
    """What the codes without a sign stand for."""
    return [value(code, element) for code in range(1 << (element.bits - 1))]


def nearest_code(x: float, element: Element) -> int:
    """The nearest code by exact comparison with all; ties to the even one, the sign of zero kept, saturated."""
    negative = struct.pack(">f", x)[0] >> 7
    distance = [abs(number - abs(Fraction(x))) for number in numbers_of(element)]
    least = min(distance)
    code = min((code for code, found in enumerate(distance) if found == least), key=lambda code: code & 1)
    return code + len(distance) * negative


@cache
def expected_codes(element: Element) -> list[int]:
    return [nearest_code(number, element) for number in neighbourhoods(element).tolist()]


def neighbourhoods(element: Element) -> torch.Tensor:
    """Every number, every boundary between two, what saturates, and four float32 numbers on each side of them."""
    numbers = sorted(value(code, element) for code in range(1 << (element.bits - 1)))
    middles = [(a + b) / 2 for a, b in zip(numbers, numbers[1:], strict=False)]
    beyond = [2 * numbers[-1] - numbers[-2], Fraction(2) ** 20, Fraction(2) ** -126, Fraction(2) ** -149]
    centres = torch.tensor([float(x) for x in (*numbers, *middles, *beyond)])
    bits = centres.view(torch.int32)[:, None] + torch.arange(-4, 5, dtype=torch.int32)
    found = torch.cat([bits[bits >= 0].view(torch.float32), torch.tensor([3.0e38])])
    return torch.cat([found, -found])


@EVERY
def test_every_code_has_its_number(element: Element) -> None:
    codes = torch.arange(2**element.bits)
    numbers = [float(value(code, element)) for code in codes.tolist()]
    assert element.values().tolist() == numbers
    assert torch.equal(element.values().signbit(), codes >= 2 ** (element.bits - 1)), "minus zero is a code"
    assert max(numbers) == element.largest and min(x for x in numbers if x > 0) == element.smallest


@EVERY
def test_decode_and_encode_are_inverse(element: Element, implementation) -> None:
    codes, scale = torch.arange(2**element.bits, dtype=torch.uint8)[None], torch.ones(1, 1)
    options = element.exponent, element.mantissa, 0
    numbers = implementation["minifloat_decode"](codes, scale, *options)
    assert torch.equal(numbers[0].double(), element.values())
    assert torch.equal(numbers.signbit()[0], element.values().signbit())
    assert torch.equal(implementation["minifloat_encode"](numbers, scale, *options), codes)


@EVERY
def test_every_boundary_is_exact(element: Element, implementation) -> None:
    x = neighbourhoods(element)
    codes = implementation["minifloat_encode"](x[None], torch.ones(1, 1), element.exponent, element.mantissa, 0)
    assert codes[0].tolist() == expected_codes(element)


OCP = {
    "e3m2": (28.0, 0.25, 0.1875, 0.0625),
    "e2m3": (7.5, 1.0, 0.875, 0.125),
    "e2m1": (6.0, 1.0, 0.5, 0.5),
}
"""OCP Microscaling Formats 1.0, tables 4 and 5: largest normal, smallest normal, largest and smallest subnormal."""


@pytest.mark.parametrize("name", OCP)
def test_numbers_of_the_ocp_specification(name: str) -> None:
    found = element_of(name)
    subnormal = found.values()[1 : 2**found.mantissa]
    assert OCP[name] == (found.largest, found.smallest_normal, float(subnormal.max()), float(subnormal.min()))
    if name == "e2m1":
        assert found.values()[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


CUDA = Path("/usr/local/cuda/include"), *sorted(Path("/usr/local").glob("cuda-*/include"))
CUDA_KINDS = {"e3m2": ("fp6", "__NV_E3M2"), "e2m3": ("fp6", "__NV_E2M3"), "e2m1": ("fp4", "__NV_E2M1")}
PROGRAM = """
#include <cstdio>
#include <cuda_fp4.h>
#include <cuda_fp6.h>
int main() {
    float x;
    while (std::fread(&x, 4, 1, stdin) == 1) std::putchar(__nv_cvt_float_to_%s(x, %s, cudaRoundNearest));
}
"""


@pytest.mark.parametrize("name", CUDA_KINDS)
def test_cuda_converts_alike(name: str, tmp_path: Path) -> None:
    """NVIDIA's header, compiled for the host."""
    folder = next((folder for folder in CUDA if (folder / "cuda_fp6.h").is_file()), None)
    if folder is None or not (folder / "cuda_fp4.h").is_file() or shutil.which("g++") is None:
        pytest.skip("no g++, or no cuda_fp6.h and cuda_fp4.h: they come with CUDA 12.8 and later")
    (tmp_path / "convert.cpp").write_text(PROGRAM % CUDA_KINDS[name])
    command = ["g++", "-w", "-I", str(folder), str(tmp_path / "convert.cpp"), "-o", str(tmp_path / "convert")]
    subprocess.run(command, check=True)
    found = element_of(name)
    drawn = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * found.largest / 3
    x = torch.cat([neighbourhoods(found), drawn])
    theirs = subprocess.run([tmp_path / "convert"], input=x.numpy().tobytes(), stdout=subprocess.PIPE, check=True)
    assert list(theirs.stdout) == element.encode(x, found).tolist()


@EVERY
def test_int8_holds_what_it_says(element: Element) -> None:
    scaled = element.values() / element.smallest
    assert torch.equal(scaled, scaled.round())
    assert (element.int8_shift is not None) == bool(scaled.abs().max() <= 127)
    if element.int8_shift is not None:
        assert element.values().mul(2**element.int8_shift).equal(scaled)


def test_unknown_elements_are_refused_with_the_known_ones() -> None:
    for name in ("e5m2", "E3M2", "", 6, None):
        with pytest.raises(InputError, match="known elements: e3m2, e2m3, e2m2, e3m1, e2m1, e4m2, e3m3"):
            element_of(name)


def test_the_table_of_the_documentation_is_made_from_the_elements() -> None:
    text = (ROOT / "docs" / "math.md").read_text()
    for found in ELEMENTS.values():
        assert found.row() in text, found.row()


def test_golden_codes() -> None:
    golden = json.loads((ROOT / "tests" / "golden" / "minifloat.json").read_text())
    for name, case in golden["elements"].items():
        found = element_of(name)
        assert element.encode(torch.tensor(golden["numbers"]), found).tolist() == case["codes"]


def test_golden_bytes_of_the_page() -> None:
    """A reader made from docs/format.md alone: the stream as an integer, the number of each code bit by bit."""
    golden = json.loads((ROOT / "tests" / "golden" / "minifloat.json").read_text())
    text = (ROOT / "docs" / "format.md").read_text()
    rows = re.findall(r"^\| (e\dm\d) \| ([\d ]+) \| ([0-9a-f]+) \|$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(ELEMENTS)
    for name, codes, packed in rows:
        found, numbers = element_of(name), [int(code) for code in codes.split()]
        stream = int.from_bytes(bytes.fromhex(packed), "little")
        assert [stream >> (i * found.bits) & (2**found.bits - 1) for i in range(len(numbers))] == numbers
        assert golden["elements"][name]["codes"][: len(numbers)] == numbers
        for code, number in zip(numbers, golden["numbers"], strict=False):
            assert abs(value(code, found) - Fraction(number)) == min(
                abs(x - abs(Fraction(number))) for x in numbers_of(found)
            )
