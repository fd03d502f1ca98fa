"""docs/format.md is true: a reader made from that page alone agrees with the code.

The first half imports nothing of the package for its decoding: it is what a stranger would write from the page.
"""

import hashlib
import itertools
import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_models import save_model
from transformers import AutoModelForCausalLM

import ptq
from ptq.files.header import read_header
from ptq.ops import bitstream, hadamard
from ptq.pipeline.rewrite import draw_signs
from ptq.weights import formats
from ptq.weights.rounding import nearest
from quarot.plan import QuarotRecipe

ROOT = Path(__file__).resolve().parent.parent
FORMAT = (ROOT / "docs" / "format.md").read_text()


# --- a reader, from the page alone ------------------------------------------------------------------------------------


def read_codes(row: bytes, bits: int, k: int) -> list[int]:
    """Section 3: code i is bits [i b, (i + 1) b) of the stream, lowest first."""
    stream = [byte >> j & 1 for byte in row for j in range(8)]
    assert len(row) == (k * bits + 7) // 8 and not any(stream[k * bits :])
    return [sum(stream[i * bits + j] << j for j in range(bits)) for i in range(k)]


def read_scales(scale: bytes, integer: bool) -> list[float]:
    """Section 3: the scales of a row."""
    if integer:
        return [2.0 ** (scale[0] - 127) * multiple for multiple in struct.unpack(f"{len(scale) - 1}b", scale[1:])]
    return [struct.unpack("<f", b"\0\0" + scale[i : i + 2])[0] for i in range(0, len(scale), 2)]


def read_weight(
    codes: bytes, scale: bytes, zero: bytes | None, bits: int, group_size: int, k: int, integer: bool = False
) -> list[float]:
    """Section 3: one row of W."""
    size, scales = group_size or k, read_scales(scale, integer)
    zeros = list(zero) if zero is not None else [1 << (bits - 1)] * len(scales)
    return [(code - zeros[i // size]) * scales[i // size] for i, code in enumerate(read_codes(codes, bits, k))]


class Field:
    """Section 5: GF(p^m) with its elements numbered."""

    def __init__(self, q: int) -> None:
        self.q, self.p = q, next(d for d in range(2, q + 1) if q % d == 0)
        self.m = next(m for m in itertools.count(1) if self.p**m == q)
        self.modulus = self.polynomial()

    def digits(self, a: int, count: int) -> list[int]:
        return [a // self.p**i % self.p for i in range(count)]

    def polynomial(self) -> list[int]:
        """The smallest irreducible polynomial: no product of two monic polynomials of lower degree is it."""
        products = set()
        for d in range(1, self.m // 2 + 1):
            for a, b in itertools.product(range(self.p**d), range(self.p ** (self.m - d))):
                products.add(tuple(self.times([*self.digits(a, d), 1], [*self.digits(b, self.m - d), 1])))
        candidates = ([*self.digits(number, self.m), 1] for number in range(self.q))
        return next(c for c in candidates if tuple(c) not in products)

    def times(self, a: list[int], b: list[int]) -> list[int]:
        product = [0] * (len(a) + len(b) - 1)
        for i, j in itertools.product(range(len(a)), range(len(b))):
            product[i + j] = (product[i + j] + a[i] * b[j]) % self.p
        return product

    def square(self, a: int) -> int:
        product = self.times(self.digits(a, self.m), self.digits(a, self.m))
        while len(product) > self.m:
            top = product.pop()
            for i in range(self.m):
                at = len(product) - self.m + i
                product[at] = (product[at] - top * self.modulus[i]) % self.p
        return sum(c * self.p**i for i, c in enumerate(product))

    def jacobsthal(self) -> list[list[int]]:
        squares = {self.square(a) for a in range(1, self.q)}
        chi = [0] + [1 if a in squares else -1 for a in range(1, self.q)]
        digits = [self.digits(a, self.m) for a in range(self.q)]

        def difference(a: int, b: int) -> int:
            return sum((x - y) % self.p * self.p**i for i, (x, y) in enumerate(zip(digits[a], digits[b], strict=True)))

        return [[chi[difference(a, b)] for b in range(self.q)] for a in range(self.q)]


def kron(a: list[list[int]], b: list[list[int]]) -> list[list[int]]:
    return [[x * y for x in row for y in other] for row in a for other in b]


def part_matrix(kind: str, number: int) -> list[list[int]]:
    if kind == "sylvester":
        return [[(-1) ** (i & j).bit_count() for j in range(1 << number)] for i in range(1 << number)]
    j = Field(number).jacobsthal()
    if kind == "paley1":
        body = [[-1] + [x + (a == b) for b, x in enumerate(row)] for a, row in enumerate(j)]
        return [[1] * (number + 1), *body]
    c = [[0] + [1] * number, *[[1, *row] for row in j]]
    eye = [[int(a == b) for b in range(number + 1)] for a in range(number + 1)]
    first, second = kron(c, [[1, 1], [1, -1]]), kron(eye, [[1, -1], [-1, -1]])
    return [[x + y for x, y in zip(*pair, strict=True)] for pair in zip(first, second, strict=True)]


def read_hadamard(construction: str) -> list[list[int]]:
    h = [[1]]
    for part in construction.split(","):
        kind, number = part.split(":")
        h = kron(h, part_matrix(kind, int(number)))
    return h


# --- the page against the reader, and the code against both -----------------------------------------------------------

GOLDEN = [
    (int(bits), [int(code) for code in codes.split()], packed)
    for bits, codes, packed in re.findall(r"^\| (\d) \| ([\d ]+) \| ([0-9a-f]+) \|$", FORMAT, re.MULTILINE)
]


def test_golden_bytes_cover_every_width_and_are_those_of_the_tests():
    assert [bits for bits, _, _ in GOLDEN] == list(range(2, 9))
    stored = json.loads((ROOT / "tests" / "golden" / "integer.json").read_text())["codes"]
    assert GOLDEN == [(case["bits"], case["codes"][0], case["packed"][0]) for case in stored]


@pytest.mark.parametrize("bits, codes, packed", GOLDEN)
def test_golden_bytes(bits: int, codes: list[int], packed: str):
    assert read_codes(bytes.fromhex(packed), bits, len(codes)) == codes
    code = torch.tensor([codes], dtype=torch.uint8)
    assert bytes(bitstream.pack(code, bits)[0].tolist()).hex() == packed


def test_the_whole_weight_of_the_page():
    found = re.findall(r"^\| \d \| ([0-9a-f]{6}) \| ([0-9a-f ]+) \| ([\d ]+) \| ([-\d. ]+) \|$", FORMAT, re.MULTILINE)
    assert len(found) == 2
    codes, scales = ([bytes.fromhex(row[i]) for row in found] for i in (0, 1))
    zeros = [bytes(int(zero) for zero in row[2].split()) for row in found]
    values = [[float(value) for value in row[3].split()] for row in found]
    assert [read_weight(*row, 3, 4, 8) for row in zip(codes, scales, zeros, strict=True)] == values
    parts = {
        "codes": torch.tensor([list(row) for row in codes], dtype=torch.uint8),
        "scale": torch.tensor([struct.unpack("<2h", row) for row in scales], dtype=torch.int16),
        "zero": torch.tensor([list(row) for row in zeros], dtype=torch.uint8),
    }
    format = formats.get("quarot/integer", bits=3, group_size=4, symmetric=False)
    assert format.dequantize(parts, 2, 8).tolist() == values


def test_the_row_with_integer_scales_of_the_page():
    [(codes, scale, values)] = re.findall(
        r"`codes` ([0-9a-f]+) and `scale` ([0-9a-f]+),.*\n?.*weight ([-\d. ]+)\.\n", FORMAT
    )
    wanted = [float(value) for value in values.split()]
    assert read_weight(bytes.fromhex(codes), bytes.fromhex(scale), None, 3, 4, 8, integer=True) == wanted
    parts = {
        part: torch.tensor([list(bytes.fromhex(row))], dtype=torch.uint8)
        for part, row in (("codes", codes), ("scale", scale))
    }
    format = formats.get("quarot/integer", bits=3, group_size=4, scale="integer")
    assert format.dequantize(parts, 1, 8).tolist() == [wanted]


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_the_reader_decodes_integer_scales(bits: int):
    w = torch.randn(5, 27, generator=torch.Generator().manual_seed(bits)) * torch.logspace(-2, 0, 27)
    format = formats.get("quarot/integer", bits=bits, group_size=9, scale="integer")
    assert format.codebook is not None
    parts = format.pack(nearest(w, format.codebook))
    rows = zip(*([bytes(row.tolist()) for row in parts[part]] for part in ("codes", "scale")), strict=True)
    got = [read_weight(codes, scale, None, bits, 9, 27, integer=True) for codes, scale in rows]
    assert got == format.dequantize(parts, 5, 27).tolist()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [0, 9])
@pytest.mark.parametrize("bits", range(2, 9))
def test_the_reader_decodes_what_the_package_packs(bits: int, group_size: int, symmetric: bool):
    n, k = 3, 27
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(bits))
    format = formats.get("quarot/integer", bits=bits, group_size=group_size, symmetric=symmetric)
    assert format.codebook is not None
    parts = format.pack(nearest(w, format.codebook))
    stored = {part: [bytes(row.numpy().tobytes()) for row in tensor] for part, tensor in parts.items()}
    zeros = stored.get("zero", [None] * n)
    got = [read_weight(*row, bits, group_size, k) for row in zip(stored["codes"], stored["scale"], zeros, strict=True)]
    assert got == format.dequantize(parts, n, k).tolist()
    assert abs(torch.tensor(got) - w).max() < abs(w).max() / (2**bits - 2) + 0.3 * abs(w).max()


def test_matrices_of_the_page():
    found = re.findall(r"^`([\w:,]+)`[^\n]*\n\n((?:    [+-]+\n)+)", FORMAT, re.MULTILINE)
    assert [construction for construction, _ in found] == ["paley1:3", "paley1:3,sylvester:1", "paley2:5", "paley1:27"]
    for construction, text in found:
        lines = text.split()
        h = read_hadamard(construction)
        assert ["".join("+" if x > 0 else "-" for x in row) for row in h[: len(lines)]] == lines
        assert all(len(line) == len(h) for line in lines)


@pytest.mark.parametrize(
    "construction",
    [
        *("sylvester:0", "sylvester:5", "paley1:3", "paley1:43", "paley2:5", "paley2:37"),
        *("paley2:9", "paley2:25", "paley1:27", "paley2:49", "paley2:81", "paley2:121", "paley2:125", "paley1:343"),
        *("paley1:11,paley1:3", "paley2:5,sylvester:2", "paley1:7,paley2:9,sylvester:1", "paley1:43,sylvester:4"),
    ],
)
def test_the_reader_builds_the_same_matrices(construction: str):
    mine = torch.tensor(read_hadamard(construction), dtype=torch.float64)
    assert torch.equal(mine, hadamard.matrix_from(construction))
    assert torch.equal(mine @ mine.T, len(mine) * torch.eye(len(mine), dtype=torch.float64))


def test_the_field_polynomials_of_the_page():
    found = dict(re.findall(r"\| (\d+) \| (x\^[^|]*?) (?=\|)", FORMAT))
    assert len(found) == 10
    for q, text in found.items():
        field, terms = Field(int(q)), {}
        for term in text.split(" + "):
            [(coefficient, x, power)] = re.findall(r"^(\d*)(x?)(?:\^(\d))?$", term)
            terms[int(power or 1) if x else 0] = int(coefficient or 1)
        assert [terms.get(i, 0) for i in range(field.m + 1)] == field.modulus, q


def test_the_op_is_the_matrix_of_the_page_block_by_block():
    construction, blocks = "paley1:3,sylvester:1", 3
    h = torch.tensor(read_hadamard(construction), dtype=torch.float64)
    x = torch.randn(8 * blocks, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = torch.cat([h @ run / 8**0.5 for run in x.split(8)])
    torch.testing.assert_close(hadamard.apply(x, None, construction), wanted)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small packed checkpoint, with an online rotation and a layer left out."""
    folder = tmp_path_factory.mktemp("docs")
    recipe = QuarotRecipe(rounding="nearest", weight_bits=3, group_size=4, skip=("*.1.mlp.down_proj",))
    ptq.quantize(save_model(folder / "model"), folder / "out", recipe, ptq.RunOptions(progress=False))
    return folder / "out"


def test_a_checkpoint_is_what_the_page_says(checkpoint: Path):
    """Names, dtypes, guards and keys; and a packed layer runs in the page's reader as it does in the package."""
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert set(config) == {"quant_method", "version", "schemes", "linears", "residual_rotation"}
    tensors, _ = read_header(checkpoint / "model.safetensors")
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    data = (checkpoint / "model.safetensors").read_bytes()
    content = {name: data[info.offset : info.offset + info.nbytes] for name, info in tensors.items()}
    for name, scheme in config["linears"].items():
        parts = {"quarot/integer": {"codes", "scale"}, "dense": {"dense"}}[config["schemes"][scheme]["format"]]
        found = {tensor for tensor in tensors if tensor.startswith(f"{name}.weight_")}
        assert found == {f"{name}.weight_{part}" for part in parts}
        assert content[f"{name}.weight"] == b"\0"
    name = "model.layers.0.mlp.down_proj"
    scheme = config["schemes"][config["linears"][name]]
    (n, width), bits, size = tensors[f"{name}.weight_codes"].shape, scheme["bits"], scheme["group_size"]
    groups = tensors[f"{name}.weight_scale"].shape[1]
    k = groups * size
    codes, scale = content[f"{name}.weight_codes"], content[f"{name}.weight_scale"]
    w = []
    for i in range(n):
        row = codes[i * width : (i + 1) * width], scale[2 * i * groups : 2 * (i + 1) * groups]
        w.append(read_weight(*row, None, bits, size, k))
    h = torch.tensor(read_hadamard(scheme["hadamard"])) / len(read_hadamard(scheme["hadamard"])) ** 0.5
    assert len(h) == k
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    layer = model.get_submodule(name)
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(0))
    bias = torch.frombuffer(bytearray(content[f"{name}.bias"]), dtype=torch.float32)
    torch.testing.assert_close(layer(x), x @ h.T @ torch.tensor(w).T + bias, rtol=1e-4, atol=1e-4)
    h = torch.tensor(read_hadamard(config["residual_rotation"]["hadamard"])).float()
    signs = [content[f"model.{end}.residual_signs"] for end in ("embed_tokens", "norm")]
    s, ids = torch.frombuffer(bytearray(signs[0]), dtype=torch.float16).float(), torch.tensor([4, 1, 9])
    rows = torch.frombuffer(bytearray(content["model.embed_tokens.weight"]), dtype=torch.float32).view(-1, len(s))[ids]
    turned = (s * rows) @ h.T / len(h) ** 0.5
    torch.testing.assert_close(model.get_input_embeddings()(ids), turned, rtol=1e-4, atol=1e-4)
    assert signs[1] == signs[0]


def test_the_record_is_what_the_page_says(checkpoint: Path):
    record = json.loads((checkpoint / "ptq.json").read_text())
    section = FORMAT.partition("## 6")[2].partition("## 7")[0]
    assert set(record) == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert set(record["result"]) == {
        *("bits_per_weight", "nbytes", "rotation_error", "kl", "top1", "kl_standard_error", "text"),
        *("perplexity", "original_perplexity"),
    }
    content = {key: record[key] for key in ("recipe", "source", "calibration", "version", "signs")}
    assert hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest() == record["fingerprint"]
    bits = [byte >> j & 1 for byte in bytes.fromhex(record["signs"]["R4.1"]) for j in range(8)]
    assert [1 - 2 * bit for bit in bits][:152] == draw_signs("R4.1", 152, 0).tolist()
    for name, digest in record["files"].items():
        assert hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == digest
