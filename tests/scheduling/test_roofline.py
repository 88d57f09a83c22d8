"""The roofline: where each kernel stands, in numbers, as text and as a picture."""

from __future__ import annotations

import re

import pytest
import torch

import minicompile
from minicompile.debug.roofline import DeviceSpec
from minicompile.ops.display import to_html
from minicompile.pipeline_result import Trace
from minicompile.show.roofline_picture import up

TOY = DeviceSpec("toy", bytes_per_second=1e9, flops_per_second=8e9)


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A product that arithmetic limits, and a sum that memory does."""
    a, b = torch.randn(64, 128), torch.randn(128, 64)
    return minicompile.trace(lambda a, b: (a @ b).relu().sum(1), a, b)


def test_numbers_of_each_kernel(trace: Trace):
    roof = trace.roofline(TOY)
    product, total = roof.points
    flops, moved = 2 * 64 * 128 * 64, 4 * (2 * 64 * 128 + 64 * 64)
    assert product.name == "aten.mm.default"
    assert (product.cost.flops, product.cost.bytes) == (flops, moved)
    assert product.seconds == flops / 8e9, "12.8 operations a byte are above the ridge of 8"
    assert total.name == trace.kernels[0].name
    assert total.seconds == 4 * (64 * 64 + 64) / 1e9
    assert [roof.row(point)[-1] for point in roof.points] == ["arithmetic", "memory"]


def test_the_picture_has_the_roof_and_a_dot_for_each_kernel(trace: Trace):
    html = to_html(trace.roofline(TOY))
    assert html.count("<circle") == 2 and html.count("<polyline") == 1
    dots = re.findall(
        r'<circle cx="([\d.]+)" cy="([\d.]+)".*?<title>(.*?)</title>', html, re.DOTALL
    )
    assert sorted(told.split("\n")[0] for _, _, told in dots) == sorted(
        f"kernel or call: {point.name}" for point in trace.roofline(TOY).points
    )
    heights = {told.split("\n")[0].rpartition(" ")[2]: float(y) for _, y, told in dots}
    assert heights["aten.mm.default"] == up(0), "at the peak"
    assert "http" not in html and "<script" not in html
