"""Hadamard matrices against H H^T = n I, and the op, on every CPU level, against a float64 product with the matrix."""

import hashlib
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptq.errors import InputError
from ptq.ops import hadamard, native

LEVELS = native.CPU_LEVELS if native.load() else ()
# no power of two beyond Sylvester's, each dense kind, a prime power, dense times dense, and a transform beyond a line
ORDERS = (1, 2, 4, 8, 12, 20, 28, 36, 44, 48, 72, 76, 144, 256, 344, 448)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 4e-2, torch.float16: 4e-3}


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_signs(n: int) -> torch.Tensor:
    return torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(n)) * 2.0 - 1


def dense(order: int, size: int) -> torch.Tensor:
    """The oracle: the orthonormal block-diagonal matrix, float64 [size, size]."""
    return torch.block_diag(*[hadamard.matrix(order) * order**-0.5] * (size // order))


# --- matrices ---


@pytest.mark.parametrize("order", [n for n in range(1, 201) if hadamard.exists(n)] + [244, 344, 488, 500, 924])
def test_matrix_is_hadamard(order: int):
    h = hadamard.matrix(order)
    assert h.shape == (order, order) and h.abs().eq(1).all()
    assert torch.equal(h @ h.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("prime_power", [9, 25, 27, 49, 81, 121, 125, 169, 243, 343])
def test_prime_power_fields(prime_power: int):
    name = f"paley{1 if prime_power % 4 == 3 else 2}:{prime_power}"
    h = hadamard.matrix_from(name)
    assert torch.equal(h @ h.T, len(h) * torch.eye(len(h), dtype=torch.float64))


def test_which_orders_exist_below_200():
    missing = [n for n in range(1, 201) if not hadamard.exists(n) and n % 4 == 0]
    assert missing == [92, 116, 156, 172, 184, 188]
    assert [n for n in range(1, 201) if hadamard.exists(n) and n % 4] == [1, 2]


# Widths of real layers that a table of matrices has failed on, and how they are built (never to change).
@pytest.mark.parametrize(
    "order, expected",
    [
        (4864, "paley2:37,sylvester:6"),
        (5632, "paley1:43,sylvester:7"),
        (17408, "paley1:67,sylvester:8"),
        (18944, "paley2:73,sylvester:7"),
        (25600, "paley1:19,paley1:19,sylvester:6"),
        (21504, "paley1:11,paley1:27,sylvester:6"),
        (2880, "paley1:11,paley1:11,paley1:19"),
        (29568, "paley1:11,paley1:27,paley1:43,sylvester:1"),
        (4544, "paley1:283,sylvester:4"),
        (11008, "paley1:343,sylvester:5"),
        (13824, "paley1:11,paley1:11,paley1:11,sylvester:3"),
        (14336, "paley1:27,sylvester:9"),
        (5120, "paley1:19,sylvester:8"),
        (72, "paley2:17,sylvester:1"),
        (152, "paley2:37,sylvester:1"),
        (344, "paley1:343"),
        (1, "sylvester:0"),
    ],
)
def test_construction(order: int, expected: str):
    assert hadamard.construction(order) == expected
    assert hadamard.order_of(expected) == order


def test_a_size_that_cannot_be_built_says_what_can():
    assert not hadamard.exists(13696) and hadamard.largest_block(13696) == 128
    with pytest.raises(InputError, match="order 13696.*divides it is 128"):
        hadamard.matrix(13696)
    with pytest.raises(InputError, match="order 0"):
        hadamard.construction(0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "paley1:44", "paley1:13", "paley2:11", "sylvester:25", "paley3:7", "paley1:-1", "paley1:11 "),
        *("sylvester:1,paley1:11", "sylvester:20,sylvester:20"),
        *(",".join(["paley1:99991"] * 9), "paley1:11," * 8 + "sylvester:9"),
    ],
)
def test_a_bad_construction_is_refused(text: str):
    with pytest.raises(InputError, match="Hadamard construction"):
        hadamard.parse(text)


@pytest.mark.parametrize(
    "construction, digest",
    [
        ("paley1:11", "c9c5f02d2e199f81"),
        ("paley1:27", "3dd65c1b22c1e0f6"),
        ("paley1:343", "c1ba3da5ab0c0168"),
        ("paley2:17", "a606a811e5572a95"),
        ("paley2:49", "66819d920ca6dcb4"),
        ("sylvester:5", "ac7ff06ddd696236"),
        ("paley1:11,paley1:19,sylvester:2", "64b13619b769d59e"),
    ],
)
def test_golden_matrices(construction: str, digest: str):
    """A checkpoint names a construction; its matrix may never change."""
    signs = (hadamard.matrix_from(construction) < 0).to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(signs).hexdigest()[:16] == digest


def test_golden_row():
    assert hadamard.matrix(12)[1].tolist() == [-1, 1, -1, 1, -1, -1, -1, 1, 1, 1, -1, 1]


# --- the op ---


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_against_the_matrix(order: int, dtype: torch.dtype, set_level):
    """Rows and columns, both directions, with and without signs, in place and not; all levels give the same bits."""
    size, batch = 3 * order, 5
    x, signs, h = random(batch, size, dtype=dtype), random_signs(size), dense(order, size)
    for s, transpose in ((None, False), (None, True), (signs, False), (signs, True)):
        r = h if s is None else h * s
        wanted = x.double() @ (r if transpose else r.T)
        results = []
        for name in LEVELS or (None,):
            if name is not None:
                set_level(name)
            results.append(
                [
                    hadamard.apply(x, s, order, transpose),
                    hadamard.apply(x.clone(), s, order, transpose, inplace=True),
                    hadamard.apply_columns(x.T, s, order, transpose).T,
                    hadamard.apply_columns(x.T.contiguous(), s, order, transpose, inplace=True).T,
                ]
            )
        for y in results[0]:
            assert y.dtype == dtype
            torch.testing.assert_close(y.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("order", [2, 36, 64, 344])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_reference_and_kernel_agree_on_any_axis_and_stride(order: int, dim: int):
    shape = [2, 3, 5]
    shape[dim] = order
    base = (
        random(*(2 * n for n in shape), dtype=torch.float32)[::2, ::2, ::2].transpose(0, 1).contiguous().transpose(0, 1)
    )
    signs = random_signs(order)
    factors, _ = hadamard._factors(order, base.device)
    for x in (base, base.contiguous(), base.transpose(0, 1).contiguous().transpose(0, 1)):
        for transpose in (False, True):
            wanted = hadamard.reference(x, signs, factors, order, dim, transpose)
            got = torch.ops.ptq.hadamard(x, signs, factors, order, dim, transpose)
            assert got.is_contiguous() and wanted.is_contiguous()
            torch.testing.assert_close(got, wanted, rtol=0, atol=4e-6)
            changed = x.clone()
            torch.ops.ptq.hadamard_(changed, signs, factors, order, dim, transpose)
            torch.testing.assert_close(changed, wanted, rtol=0, atol=4e-6)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(ORDERS), st.integers(1, 3), st.integers(0, 70), st.booleans())
def test_columns_are_rows_of_the_transpose(order: int, blocks: int, k: int, transpose: bool):
    w, signs = random(order * blocks, k), random_signs(order * blocks)
    columns = hadamard.apply_columns(w, signs, order, transpose)
    rows = hadamard.apply(w.T.contiguous(), signs, order, transpose)
    torch.testing.assert_close(columns, rows.T, rtol=0, atol=1e-13)


@pytest.mark.parametrize("order", [12, 28, 344, 512])
def test_inverse_is_the_transpose(order: int):
    x, signs = random(4, order), random_signs(order)
    y = hadamard.apply(x, signs, order)
    torch.testing.assert_close(hadamard.apply(y, signs, order, transpose=True), x, rtol=0, atol=1e-13)


def test_the_matrix_is_not_its_own_inverse():
    """Orders 20 and 12 are not symmetric: forward twice is not the identity."""
    for order in (12, 20):
        x = random(1, order)
        assert not torch.allclose(hadamard.apply(hadamard.apply(x, None, order), None, order), x)


@pytest.mark.parametrize("shape", [(0, 12), (3, 0, 24), (12,), (2, 0)])
def test_empty_and_single(shape: tuple[int, ...]):
    x = random(*shape)
    y = hadamard.apply(x, None, 12)
    assert y.shape == x.shape
    torch.testing.assert_close(y, x @ dense(12, shape[-1]).T if shape[-1] else x)


def test_infinity_and_nan_stay_in_their_vector():
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 7] = torch.inf, torch.nan
    y = hadamard.apply(x.bfloat16(), None, 64)
    assert y[0].eq(0).all() and not y[1].isfinite().any() and y[2].isnan().all()


def test_stored_construction_in_place_of_an_order():
    x = random(2, 1936)
    plain, other = hadamard.construction(1936), "paley1:43,paley1:43"
    assert plain == other
    assert torch.equal(hadamard.apply(x, None, 1936), hadamard.apply(x, None, other))
    paley8 = hadamard.apply(random(1, 8), None, "paley1:7")  # never what the search picks
    torch.testing.assert_close(paley8, random(1, 8) @ hadamard.matrix_from("paley1:7").T * 8**-0.5)


def test_gradients():
    x, signs = random(2, 24).requires_grad_(), random_signs(24)
    for transpose in (False, True):
        assert torch.autograd.gradcheck(lambda v, t=transpose: hadamard.apply(v, signs, 12, t), x)
        assert torch.autograd.gradgradcheck(lambda v, t=transpose: hadamard.apply(v, signs, 12, t), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order, dim", [(12, -1), (16, 0), (144, 1)])
def test_opcheck(order: int, dim: int, dtype: torch.dtype):
    x = random(2 * order, 2 * order, dtype=dtype).requires_grad_()
    factors, _ = hadamard._factors(order, x.device)
    for signs in (None, random_signs(2 * order)):
        torch.library.opcheck(torch.ops.ptq.hadamard.default, (x, signs, factors, order, dim, True))
        torch.library.opcheck(torch.ops.ptq.hadamard_.default, (x.detach(), signs, factors, order, dim, False))


def test_compiles_without_a_graph_break():
    """In a process of its own: the compiler cannot trace the run-time shape checks that the tests switch on."""
    program = """
import torch
from ptq.ops import hadamard
signs = torch.ones(24); signs[::3] = -1
x = torch.randn(3, 24)
compiled = torch.compile(lambda v: hadamard.apply(v * 2, signs, 12) + 1, backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(x), hadamard.apply(x * 2, signs, 12) + 1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", [28, 344, 4096])
def test_threads_do_not_change_the_result(order: int):
    x = random(200, order, dtype=torch.float32)
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append((hadamard.apply(x, None, order), hadamard.apply_columns(x.T.contiguous(), None, order)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r, strict=True))


def test_what_does_not_fit_is_refused():
    with pytest.raises((InputError, RuntimeError), match="size 20, not a multiple of the order 12"):
        hadamard.apply(random(2, 20), None, 12)
    factors, _ = hadamard._factors(12, torch.device("cpu"))
    with pytest.raises((InputError, RuntimeError), match="signs"):
        torch.ops.ptq.hadamard(random(2, 12), torch.ones(6, dtype=torch.float64), factors, 12, -1, False)
    with pytest.raises(InputError, match="172"):
        hadamard.apply(random(2, 172), None, 172)


@pytest.mark.skipif(not LEVELS, reason="native kernels are not built")
def test_factors_that_are_no_codes_are_refused():
    """Kernels take codes for addresses."""
    factors, _ = hadamard._factors(12, torch.device("cpu"))
    for byte in (1, 128, 255):
        spoilt = factors[0].clone()
        spoilt[1, 2, 3] = byte
        with pytest.raises(RuntimeError, match="not 8 times 0..15"):
            torch.ops.ptq.hadamard(random(2, 12), None, [spoilt], 12, -1, False)


def test_autograd_sees_a_transform_in_place():
    w = random(4, 12).requires_grad_()
    with pytest.raises(InputError, match="no gradient"):
        hadamard.apply(w, None, 12, inplace=True)
    x = w * 2
    loss = (x * x).sum()  # has saved x
    hadamard.apply(x.detach(), None, 12, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_dense_factors_are_bounded():
    """For 9344 = 73 x 128 there is a Paley matrix of order 4672: it would take seconds and gigabytes to build."""
    assert hadamard.largest_block(9344) == 128
    assert hadamard.exists(924)
    with pytest.raises(InputError, match="expected paley1:Q"):
        hadamard.parse("paley1:4671")
