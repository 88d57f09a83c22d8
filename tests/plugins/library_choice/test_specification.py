"""Large products by another library or in padded rows, where that is faster: numbers and strides of eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.aot.fired_passes import FIRST, checked, fired, leaf, rand, run


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel"])
def test_large_products_are_onednn_s_on_amd_s_processors(vendor, monkeypatch):
    monkeypatch.setattr(
        "minicompile.plugins.library_choice.products.processor_vendor", lambda: vendor
    )
    large = [leaf(512, 256), leaf(600, 256), leaf(600)]
    products = lambda x, w, b: (F.linear(x, w, b), x @ w.t(), x.t() @ x[:, ::2])  # noqa: E731
    chosen = fired(run(products, large, atol=1e-3))
    if vendor == "GenuineIntel":
        assert "onednn" not in chosen
        return
    assert "onednn" in chosen
    small = [x.detach()[:255] for x in large]
    for other in (small, [x.detach().double() for x in large], [x.detach().half() for x in large]):
        assert "onednn" not in fired(run(lambda x, w: x @ w.t(), other[:2], atol=2e-1))
    with torch.backends.mkldnn.flags(enabled=False):
        assert "onednn" not in fired(run(products, large, atol=1e-3))


def test_large_products_for_tensor_cores_have_rows_of_whole_vectors(monkeypatch):
    monkeypatch.setattr(
        "minicompile.plugins.library_choice.products.runs_on_tensor_cores", lambda value: True
    )
    monkeypatch.setattr("minicompile.plugins.library_choice.products.WORTH_PADDING", 2)
    inputs = [leaf(20, 13), leaf(11, 13), leaf(11)]
    products = lambda x, w, b: (F.linear(x, w, b), x @ w.t(), w @ x.t(), F.linear(x, w, b[:1]))  # noqa: E731
    aligned = [leaf(16, 24), leaf(8, 24), leaf(8)]
    checked("pad_products", (products, inputs), (products, aligned), FIRST)
    columns = lambda x, w: x.t() @ w  # noqa: E731
    checked("pad_products", (columns, [rand(24, 13), rand(24, 16)]), (columns, [rand(24, 16)] * 2))
    special = [x.detach().clone() for x in inputs]
    special[0][0, 0], special[1][3, 4] = float("inf"), float("nan")
    assert "pad_products" in fired(run(lambda x, w: x @ w.t(), special[:2]))
