"""Special functions, by expansions whose coefficients are found when they are first needed.

On an interval a smooth function is a sum of Chebyshev polynomials with quickly falling coefficients, which
a cosine transform of its exact values (mpmath's) gives; as many count as the dtype can tell from zero.
What isn't smooth (a logarithm, a root, an oscillation) is split off first; `EXPANSIONS` has what remains.
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
from mpmath import besseli, besselj, besselk, bessely, exp, log, sqrt
from torch import Tensor, where

from minicompile.aot.decompositions.registry import Rule, decompose, formulas, real

aten = torch.ops.aten
INF, NAN, PI, SQRT_HALF = math.inf, math.nan, math.pi, math.sqrt(0.5)
ROOT, ROOT_REST = 1.46163213253021240234375, 1.243814993891892e-08
"""Where digamma is 0, as a float32 and what it lacks."""
ZEROS = (2.404825557695773, 5.520078110286311), (3.8317059702075125, 7.015586669815619)
"""Where J0 and J1 are 0, up to 8."""
NODES = 64
EDGE = 8.0
"""Bessel functions: from here on the expansions are in 8 / x."""


# Exact functions ---------------------------------------------------------------------------------


def j_near(n: int, square: Any) -> Any:
    """Of x^2: J_n without its zeros."""
    zeros = math.prod(square - mpmath.mpf(zero) ** 2 for zero in ZEROS[n])
    return besselj(n, sqrt(square)) / sqrt(square) ** n / zeros


def y_near(n: int, square: Any) -> Any:
    """Of x^2: what remains of Y_n without its logarithm and its pole."""
    x = sqrt(square)
    return (bessely(n, x) - 2 / mpmath.pi * (log(x) * besselj(n, x) - n / x)) / x**n


def k_near(n: int, square: Any) -> Any:
    """The same of K_n."""
    x = sqrt(square)
    return (besselk(n, x) + (-1) ** n * log(x / 2) * besseli(n, x)) * x**n


def wave(odd: bool, n: int, square: Any) -> Any:
    """Of (8 / x)^2: the cosine's amplitude in J_n, or the sine's."""
    x = EDGE / sqrt(square)
    first, second, angle = besselj(n, x), bessely(n, x), x - (2 * n + 1) * mpmath.pi / 4
    cosine, sine, scale = mpmath.cos(angle), mpmath.sin(angle), sqrt(mpmath.pi * x / 2)
    if odd:
        return scale * (second * cosine - first * sine) * x / EDGE
    return scale * (first * cosine + second * sine)


def erfinv_far(root: Any) -> Any:
    with mpmath.workdps(60):
        return mpmath.erfinv(sqrt(1 - exp(-root * root)))


def normal_tail(z: Any) -> Any:
    """x with P(X > x) = exp(-z^2 / 2)."""
    start = sqrt(max(z * z - 2 * log(z * sqrt(2 * mpmath.pi)), mpmath.mpf(0.1)))
    return mpmath.findroot(lambda x: log(mpmath.erfc(x / sqrt(2)) / 2) + z * z / 2, start)


Exact = Callable[..., Any]

EXPANSIONS: dict[Any, tuple[Exact, float, float]] = {
    "erfcx": (lambda t: exp((4 / t - 4) ** 2) * mpmath.erfc(4 / t - 4) / t, 0, 1),
    "erfinv near": (lambda square: mpmath.erfinv(sqrt(square)) / sqrt(square), 0, 0.5625),
    "erfinv far": (erfinv_far, 0.9, 6.2),
    "ndtri near": (normal_tail, 1.5, 9),
    "ndtri far": (lambda t: normal_tail(9 / t) * t / 9, 0.2, 1),
    "digamma near": (lambda x: mpmath.digamma(x) / (x - ROOT - mpmath.mpf(ROOT_REST)), 1, 2),
    "digamma far": (lambda t: (log(1 / t) - mpmath.digamma(1 / t)) / t, 0, 0.5),
    "polygamma": (lambda n, t: abs(mpmath.polygamma(n, 1 / t)) / t**n, 0, 1),
    "i near": (lambda n, x: exp(-x) * besseli(n, x) / x**n, 0, EDGE),
    "i far": (lambda n, t: exp(-EDGE / t) * besseli(n, EDGE / t) * sqrt(EDGE / t), 0, 1),
    "k near": (k_near, 0, 4),
    "k far": (lambda n, t: exp(2 / t) * besselk(n, 2 / t) * sqrt(2 / t), 0, 1),
    "j near": (j_near, 0, EDGE**2),
    "y near": (y_near, 0, EDGE**2),
    "cosine": (functools.partial(wave, False), 0, 1),
    "sine": (functools.partial(wave, True), 0, 1),
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


def fitted(x: Tensor, name: str, *order: int) -> Tensor:
    """An expansion at x, which lies in its interval, by Clenshaw's recurrence."""
    first, *others = coefficients(name, order, torch.finfo(x.dtype).eps)
    _, low, high = EXPANSIONS[name]
    t = (2 * x - (high + low)) / (high - low)
    after: Any = 0.0
    before: Any = 0.0
    for c in reversed(others):
        after, before = c + 2 * t * after - before, after
    return first + t * after - before


# Bessel functions --------------------------------------------------------------------------------


def joined(x: Tensor, edge: float, near: Rule, far: Rule) -> Tensor:
    """For x >= 0: near(x) up to `edge`; beyond, far(x, t) with t = edge / x from 1 down to 0."""
    return where(x <= edge, near(x.clamp(max=edge)), far(x, edge / x.clamp(min=edge)))


def bessel_i(n: int, scaled: bool) -> Rule:
    """I_n(x), or exp(-|x|) I_n(x)."""

    def rule(x: Tensor) -> Tensor:
        a = x.abs()
        found = joined(
            a,
            EDGE,
            lambda a: fitted(a, "i near", n) * a**n,
            lambda a, t: fitted(t, "i far", n) / torch.sqrt(a),
        )
        found = where(x < 0, -found, found) if n else found
        return found if scaled else torch.exp(a) * found

    return rule


def bessel_k(n: int, scaled: bool) -> Rule:
    """K_n(x), or exp(x) K_n(x): near 0 it holds a logarithm, K_1 also a pole."""

    def near(x: Tensor) -> Tensor:
        product = torch.log(x / 2) * bessel_i(n, False)(x)
        smooth = fitted(x * x, "k near", n)
        found = product + smooth / x if n else smooth - product
        return found * torch.exp(x) if scaled else found

    def far(x: Tensor, t: Tensor) -> Tensor:
        found = fitted(t, "k far", n) / torch.sqrt(x)
        return found if scaled else found * torch.exp(-x)

    return lambda x: where(x > 0, joined(x, 2.0, near, far), where(x == 0, INF, NAN))


def oscillating(n: int, x: Tensor, second: bool) -> Tensor:
    """J_n(x), or Y_n(x), for x >= 0: far out a wave whose amplitude and phase are smooth."""

    def near(x: Tensor) -> Tensor:
        found = fitted(x * x, "y near" if second else "j near", n) * x**n
        if second:
            product = torch.log(x) * oscillating(n, x, False)
            return found + (2 / PI) * (product - 1 / x if n else product)
        for zero in ZEROS[n]:
            found = found * (x - zero) * (x + zero)
        return found

    def far(x: Tensor, t: Tensor) -> Tensor:
        angle = x - (2 * n + 1) * PI / 4
        cosine, sine = torch.cos(angle), torch.sin(angle)
        p, q = fitted(t * t, "cosine", n), fitted(t * t, "sine", n) * t
        wave = p * sine + q * cosine if second else p * cosine - q * sine
        return wave * torch.sqrt(2 / PI / x)

    return joined(x, EDGE, near, far)


def single(rule: Rule) -> Rule:
    """Eager's own waves err by 1e-7 in double precision, by which float64 would differ: it stays."""
    return lambda x: NotImplemented if x.dtype is torch.float64 else rule(x)


def bessel_j1(x: Tensor) -> Tensor:
    return oscillating(1, x.abs(), False) * torch.copysign(torch.ones_like(x), x)


def bessel_y(n: int) -> Rule:
    return lambda x: where(x > 0, oscillating(n, x, True), where(x == 0, -INF, NAN))


def spherical_j0(x: Tensor) -> Tensor:
    return where(x.abs() == INF, 0.0, where(x == 0, 1.0, torch.sin(x) / x))


# The error function and its kin ------------------------------------------------------------------


def erfcx(x: Tensor) -> Tensor:
    """exp(x^2) erfc(x)."""
    t = 4 / (4 + x.abs())
    found = t * fitted(t, "erfcx")
    return where(x < 0, 2 * torch.exp(x * x) - found, found)


def erfinv(x: Tensor) -> Tensor:
    """Towards 1 it grows like the root of a logarithm, on which it depends smoothly."""
    a = x.abs()
    near = fitted(a.clamp(max=0.75) ** 2, "erfinv near") * a
    root = torch.sqrt(-torch.log((1 - a) * (1 + a))).clamp(0.9, 6.2)
    found = where(a <= 0.75, near, fitted(root, "erfinv far"))
    return torch.copysign(where(a < 1, found, where(a == 1, INF, NAN)), x)


def ndtri(p: Tensor) -> Tensor:
    """Where the normal distribution reaches p."""
    tail = torch.minimum(p, 1 - p)
    middle = math.sqrt(2) * erfinv((2 * p - 1).clamp(-0.75, 0.75))
    z = torch.sqrt(-2 * torch.log(tail))
    far = fitted(9 / z.clamp(9, 40), "ndtri far") * z
    found = where(z < 9, fitted(z.clamp(1.5, 9), "ndtri near"), far)
    found = where(tail < 0.125, where(p < 0.5, -found, found), middle)
    return where((p > 0) & (p < 1), found, where(p == 0, -INF, where(p == 1, INF, NAN)))


def log_ndtr(x: Tensor) -> Tensor:
    scaled = x * SQRT_HALF
    far = torch.log(erfcx(-scaled.clamp(max=0)) / 2) - scaled * scaled
    return where(x < -1, far, torch.log1p(-torch.special.erfc(scaled.clamp(min=-1)) / 2))


# Derivatives of log gamma ------------------------------------------------------------------------


def polygamma(n: int, x: Tensor) -> Tensor:
    """The n-th derivative of digamma: smooth from 1 on, below by recurrence, below 1/2 by reflection."""
    sign = (-1) ** (n + 1)
    positive = where(x < 0.5, 1 - x, x)
    shifted = where(positive < 1, positive + 1, positive)
    t = 1 / shifted
    if n == 0:
        near = shifted.clamp(max=2)
        low = fitted(near, "digamma near") * ((near - ROOT) - ROOT_REST)
        far = torch.log(shifted) - fitted(t.clamp(max=0.5), "digamma far") * t
        found = where(shifted < 2, low, far)
    else:
        found = sign * fitted(t, "polygamma", n) * t**n
    found = where(positive < 1, found + sign * math.factorial(n) / positive ** (n + 1), found)
    if n == 1:  # at whole numbers eager's isn't infinite
        return where(x < 0.5, (PI / torch.sin(PI * x)) ** 2 - found, found)
    fraction = x - torch.round(x)
    cotangent = torch.sin(PI * (0.5 - fraction.abs())) / torch.sin(PI * fraction)
    slope = PI ** (n + 1) * cotangent_slope(n, cotangent)
    found = where(x < 0.5, (-1) ** n * found - slope, found)
    at_pole = where(x == 0, -1 / x, NAN) if n == 0 else sign * INF
    found = where((x == torch.round(x)) & (x <= 0), at_pole, found)
    return where(x == INF, NAN, found) if n else found


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


def times_log(log: Rule) -> Rule:
    """x log(y), where 0 times an infinity is 0; one of them may be a number."""

    def rule(x: Any, y: Any) -> Tensor:
        y = y if isinstance(y, Tensor) else torch.full_like(x, y)
        x = x if isinstance(x, Tensor) else torch.full_like(y, x)
        return where(torch.isnan(y), NAN, where(x == 0, 0.0, x * log(y)))

    return rule


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return torch.log(x / (1 - x))


def logit_backward(grad: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    low = 0.0 if eps is None else eps
    steep = where((x == 0) | (x == 1), grad * INF, grad / (x * (1 - x)))
    return where((x < low) | (x > 1 - low), NAN if eps is None else 0.0, steep)


RULES: dict[str, Rule] = {
    "i0": bessel_i(0, False),
    "special_i0e": bessel_i(0, True),
    "special_i1": bessel_i(1, False),
    "special_i1e": bessel_i(1, True),
    "special_bessel_j0": single(lambda x: oscillating(0, x.abs(), False)),
    "special_bessel_j1": single(bessel_j1),
    "special_spherical_bessel_j0": spherical_j0,
    "special_erfcx": erfcx,
    "erfinv": erfinv,
    "special_ndtri": ndtri,
    "special_log_ndtr": log_ndtr,
    "digamma": lambda x: polygamma(0, x),
    "polygamma": polygamma,
    "special_entr": entropy,
    "mvlgamma": lambda x, p: (
        p * (p - 1) * math.log(PI) / 4 + sum(torch.lgamma(x - j / 2) for j in range(p))
    ),
    "sinc": lambda x: where(x == 0, 1.0, torch.sin(PI * x) / (PI * x)),
    "logit": logit,
    "logit_backward": logit_backward,
}
for _n in (0, 1):
    RULES |= {
        f"special_modified_bessel_i{_n}": bessel_i(_n, False),
        f"special_modified_bessel_k{_n}": bessel_k(_n, False),
        f"special_scaled_modified_bessel_k{_n}": bessel_k(_n, True),
        f"special_bessel_y{_n}": single(bessel_y(_n)),
    }
formulas({getattr(aten, name).default: real(rule) for name, rule in RULES.items()}, wide=False)
decompose(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other, to="core")(
    real(times_log(torch.log))
)
_XLOG1PY = aten.special_xlog1py
decompose(_XLOG1PY.default, _XLOG1PY.self_scalar, _XLOG1PY.other_scalar, to="core")(
    real(times_log(torch.log1p))
)
