"""Tensors in a file: https://github.com/huggingface/safetensors#format.

8 bytes, the length of the header; the header, JSON: name -> dtype, shape, where its data begins and ends;
the data of all tensors, row-major, without gaps
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64",
}  # fmt: skip


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Write CPU tensors; gives where in the file each begins, and its bytes. The widest dtypes come first, so
    that each is aligned to its own width, the data itself to a cache line."""
    order = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    entries: dict[str, object] = {}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, tensor in order:
        start, end = end, end + tensor.nbytes
        shape, kind = list(tensor.shape), NAMES[tensor.dtype]
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        places[name] = start, tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % 64)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in order:
            rows = tensor.detach().contiguous()
            file.write(bytes_of(rows))
    return {name: (8 + len(text) + at, size) for name, (at, size) in places.items()}


def bytes_of(tensor: Tensor) -> Any:
    """A contiguous CPU tensor's memory as a buffer, which lives as long as the tensor."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
