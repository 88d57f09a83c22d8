"""Special functions, by expansions whose coefficients are found when they are first needed.

On an interval a smooth function is a sum of Chebyshev polynomials with quickly falling coefficients, which
a cosine transform of its exact values (mpmath's) gives; as many count as the dtype can tell from zero.
What isn't smooth (a logarithm, a root) is split off first; `EXPANSIONS` has what remains.
(L. N. Trefethen, Approximation Theory and Approximation Practice, chapters 3 and 4.)
The real compiler calls ATen's C++ functions on CPUs and libdevice's on GPUs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import torch
from mpmath import log
from torch import Tensor, where

from minicompile.aot.decompositions.registry import Rule, formulas, real

aten = torch.ops.aten
INF, NAN, PI = math.inf, math.nan, math.pi
ROOT, ROOT_REST = 1.46163213253021240234375, 1.243814993891892e-08
"""Where digamma is 0, as a float32 and what it lacks."""
NODES = 64
EPS = torch.finfo(torch.float64).eps


# Exact functions ---------------------------------------------------------------------------------


EXPANSIONS: dict[str, tuple[Callable[..., Any], float, float]] = {
    "digamma near": (lambda x: mpmath.digamma(x) / (x - ROOT - mpmath.mpf(ROOT_REST)), 1, 2),
    "digamma far": (lambda t: (log(1 / t) - mpmath.digamma(1 / t)) / t, 0, 0.5),
    "cotangent": (lambda s: mpmath.cot(mpmath.pi * s**0.5) * s**0.5 / (0.25 - s), 0, 0.25),
    "polygamma": (lambda n, t: abs(mpmath.polygamma(n, 1 / t)) / t**n, 0, 1),
}
"""Name -> a smooth function, perhaps of an order too, and the interval it is needed on."""


@functools.cache
def coefficients(name: str, order: tuple[int, ...], eps: float) -> tuple[float, ...]:
    """Of an expansion, without those that are small beside `eps`."""
    exact, low, high = EXPANSIONS[name]
    with mpmath.workdps(30):
        cosines = [mpmath.cos(mpmath.pi * k / (2 * NODES)) for k in range(4 * NODES)]
        middle, half = mpmath.mpf(high + low) / 2, mpmath.mpf(high - low) / 2
        values = [exact(*order, middle + half * cosines[2 * k + 1]) for k in range(NODES)]
        found: list[float] = []
        for j in range(NODES):
            terms = (v * cosines[j * (2 * k + 1) % (4 * NODES)] for k, v in enumerate(values))
            found.append(float(2 * sum(terms) / NODES))
    found[0] /= 2
    least = eps * max(map(abs, found)) / 8
    return tuple(found[: 1 + max(j for j, c in enumerate(found) if abs(c) > least)])


def fitted(x: Tensor, eps: float, name: str, *order: int) -> Tensor:
    """An expansion at x, which lies in its interval, by Clenshaw's recurrence; within about `eps`."""
    first, *others = coefficients(name, order, eps)
    _, low, high = EXPANSIONS[name]
    t = (2 * x - (high + low)) / (high - low)
    after: Any = 0.0
    before: Any = 0.0
    for c in reversed(others):
        after, before = c + 2 * t * after - before, after
    return first + t * after - before


# Derivatives of log gamma ------------------------------------------------------------------------


def polygamma(n: int, x: Tensor) -> Tensor:
    """The n-th derivative of digamma: smooth from 1 on, below by recurrence, below 1/2 by reflection.

    In double precision, with about the terms that x's dtype needs: between poles large numbers cancel.
    """
    dtype, x = x.dtype, x.double()
    eps = max(torch.finfo(dtype).eps ** 1.5, EPS)
    sign = (-1) ** (n + 1)
    positive = where(x < 0.5, 1 - x, x)
    shifted = where(positive < 1, positive + 1, positive)
    t = 1 / shifted
    if n == 0:
        near = shifted.clamp(max=2)
        low = fitted(near, eps, "digamma near") * ((near - ROOT) - ROOT_REST)
        far = torch.log(shifted) - fitted(t.clamp(max=0.5), eps, "digamma far") * t
        found = where(shifted < 2, low, far)
    else:
        found = sign * fitted(t, eps, "polygamma", n) * t**n
    found = where(positive < 1, found + sign * math.factorial(n) / positive ** (n + 1), found)
    fraction = x - torch.round(x)
    square = fraction * fraction
    cotangent = fitted(square, eps, "cotangent") * (0.25 - square) / fraction
    slope = PI ** (n + 1) * cotangent_slope(n, cotangent)
    found = where(x < 0.5, (-1) ** n * found - slope, found)
    at_pole: Any = sign * INF
    if n == 0:
        at_pole = where(x == 0, -1 / x, NAN)
    elif n == 1:  # eager's isn't infinite
        at_pole = (PI / torch.sin(PI * x.to(dtype))) ** 2
    found = where((x == torch.round(x)) & (x <= 0), at_pole, found)
    return (where(x == INF, NAN, found) if n > 1 else found).to(dtype)


def cotangent_slope(n: int, cotangent: Tensor) -> Tensor:
    """The n-th derivative of cot, a polynomial in cot, whose own derivative is -1 - cot^2."""
    polynomial = [0, 1]
    for _ in range(n):
        slopes = [power * c for power, c in enumerate(polynomial)][1:]
        polynomial = [-a - b for a, b in zip([*slopes, 0, 0], [0, 0, *slopes])]
    found: Any = polynomial[-1]
    for c in reversed(polynomial[:-1]):
        found = found * cotangent + c
    return found


# Around logarithms -------------------------------------------------------------------------------


def entropy(x: Tensor) -> Tensor:
    found = where(x > 0, -x * torch.log(x), where(x == 0, 0.0, -INF))
    return where(torch.isnan(x), x, found)


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return torch.log(x / (1 - x))


def logit_backward(grad: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    low = 0.0 if eps is None else eps
    steep = where((x == 0) | (x == 1), grad * INF, grad / (x * (1 - x)))
    return where((x < low) | (x > 1 - low), NAN if eps is None else 0.0, steep)


RULES: dict[str, Rule] = {
    "digamma": lambda x: polygamma(0, x),
    "polygamma": polygamma,
    "special_entr": entropy,
    "sinc": lambda x: where(x == 0, 1.0, torch.sin(PI * x) / (PI * x)),
    "logit": logit,
    "logit_backward": logit_backward,
}
formulas({getattr(aten, name).default: real(rule) for name, rule in RULES.items()}, wide=False)
