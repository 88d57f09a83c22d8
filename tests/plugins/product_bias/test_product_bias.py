"""A bias is added by the library's product where no kernel follows; numbers are eager's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.aot.fired_passes import FIRST, checked, fired, leaf, rand, run


def test_a_bias_goes_back_into_the_product_where_no_kernel_could_add_it():
    inputs = [leaf(5, 3), leaf(4, 3), leaf(4)]
    checked(
        "addmm",
        (F.linear, inputs),
        (lambda x, w, b: F.linear(x, w, b).relu(), inputs),
        FIRST,
    )
    twice = lambda x, w, b: F.linear(x.mm(w.t()), torch.ones(4, 4), b)  # noqa: E731
    assert "addmm" in fired(run(twice, [rand(5, 3), rand(4, 3), rand(4)]))
    shared = lambda x, w, b: (x @ w.t() + b, (x @ w.t()).sin())  # noqa: E731
    assert "addmm" not in fired(run(shared, inputs))
    half = [x.detach().bfloat16() for x in inputs]
    assert "addmm" not in fired(run(lambda x, w, b: x @ w.t() + b, half))
