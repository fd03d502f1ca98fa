"""Paley's Hadamard matrices, over any finite field of odd order (R. Paley, "On orthogonal matrices", 1933).

For a prime power q, let chi be the quadratic character of GF(q) and Q[a, b] = chi(a - b), the Jacobsthal matrix.
Paley I  (q = 3 mod 4): order q + 1.    Paley II (q = 1 mod 4): order 2 (q + 1).
"""

import functools
import itertools

import numpy as np


@functools.cache
def prime_power(q: int) -> tuple[int, int] | None:
    """(p, m) with q = p^m and p prime, or None."""
    if q < 2:
        return None
    p = next((d for d in range(2, int(q**0.5) + 2) if q % d == 0 and d < q), q)
    m = 0
    while q % p == 0:
        q, m = q // p, m + 1
    return (p, m) if q == 1 else None


def paley(order: int) -> tuple[str, int] | None:
    """("paley1" or "paley2", q) of the Paley matrix of this order, the first kind where both exist, or None."""
    q = order - 1
    if q % 4 == 3 and prime_power(q):
        return "paley1", q
    q = order // 2 - 1
    if order % 2 == 0 and q % 4 == 1 and prime_power(q):
        return "paley2", q
    return None


def _remainder(a: tuple[int, ...], b: tuple[int, ...], p: int) -> tuple[int, ...]:
    """a mod b for polynomials over GF(p), lowest coefficient first, b monic."""
    rest, degree = list(a), len(b) - 1
    while len(rest) > degree:
        lead = rest.pop()
        for i in range(degree):
            rest[len(rest) - degree + i] = (rest[len(rest) - degree + i] - lead * b[i]) % p
    return tuple(rest)


def _irreducible(p: int, m: int) -> tuple[int, ...]:
    """The first monic irreducible polynomial of degree m over GF(p), lowest coefficient first.

    "First" counts c_0 + c_1 p + c_2 p^2 + ...; it is part of the meaning of a construction and must never change.
    """
    divisors = [(*low, 1) for d in range(1, m // 2 + 1) for low in itertools.product(range(p), repeat=d)]
    for high_first in itertools.product(range(p), repeat=m):
        candidate = (*reversed(high_first), 1)
        if all(any(_remainder(candidate, divisor, p)) for divisor in divisors):
            return candidate
    raise AssertionError(f"no irreducible polynomial of degree {m} over GF({p})")


def _jacobsthal(q: int) -> np.ndarray:
    """Q[a, b] = chi(a - b), int8 [q, q]. Element number i of GF(p^m) has the base-p digits of i as its coefficients."""
    found = prime_power(q)
    assert found is not None, q
    p, m = found
    place = p ** np.arange(m)
    digits = np.arange(q)[:, None] // place % p
    product = np.zeros((q, 2 * m - 1), dtype=np.int64)  # every element squared, as polynomials
    for i, j in itertools.product(range(m), repeat=2):
        product[:, i + j] += digits[:, i] * digits[:, j]
    modulus = np.array(_irreducible(p, m)[:m]) if m > 1 else np.zeros(1, dtype=np.int64)
    for top in range(2 * m - 2, m - 1, -1):  # x^m = -(modulus without its leading term)
        product[:, top - m : top] -= product[:, top : top + 1] * modulus
        product %= p
    squares = (product[:, :m] % p) @ place
    chi = np.full(q, -1, dtype=np.int8)
    chi[squares] = 1
    chi[0] = 0
    difference = np.zeros((q, q), dtype=np.int64)
    for i in range(m):
        difference += (digits[:, None, i] - digits[None, :, i]) % p * place[i]
    return chi[difference]


def paley1(q: int) -> np.ndarray:
    """I + S, with S = [[0, 1], [-1, Q]] skew: int8 +-1 [q + 1, q + 1]."""
    h = np.ones((q + 1, q + 1), dtype=np.int8)
    h[1:, 0] = -1
    h[1:, 1:] = _jacobsthal(q) + np.eye(q, dtype=np.int8)
    return h


def paley2(q: int) -> np.ndarray:
    """C x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]], with C = [[0, 1], [1, Q]]: int8 +-1 [2 (q + 1), 2 (q + 1)]."""
    c = np.ones((q + 1, q + 1), dtype=np.int8)
    c[0, 0] = 0
    c[1:, 1:] = _jacobsthal(q)
    eye = np.eye(q + 1, dtype=np.int8)
    return np.kron(c, np.array([[1, 1], [1, -1]], np.int8)) + np.kron(eye, np.array([[1, -1], [-1, -1]], np.int8))
