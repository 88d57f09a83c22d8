"""The format in which an answer's kernel sends data to the judge: JSON, and never pickle.

Numbers, texts, containers, dtypes and tensors come back as they were. Of any other object only its type and
a short text go over: the judge holds no object that an answer has made.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from minicompile.errors import MinicompileError

PLAIN = (type(None), bool, int, float, str)
CONTAINERS: dict[str, type] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size)
}


class Other:
    """Something that is not data; its text says what it was."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Raised(MinicompileError):
    """The answer raised this error where it should have given data."""


def show(value: object, longest: int = 160) -> str:
    """A value in one short line."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().flatten()[:6].tolist()
        few = ", ".join(f"{x:.6g}" if isinstance(x, float) else str(x) for x in numbers)
        more = ", ..." if value.numel() > len(numbers) else ""
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)} of [{few}{more}]"
    text = " ".join(repr(value).split())
    return text if len(text) <= longest else text[: longest - 4] + " ..."


def freeze(value: Any) -> Any:
    """A value as JSON can hold it. Types must match exactly: a subclass could behave in any way."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in CONTAINERS.values():
        return {kind.__name__: [freeze(item) for item in value]}
    if kind is dict:
        return {"dict": [[freeze(key), freeze(item)] for key, item in value.items()]}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    tensor = kind in (torch.Tensor, torch.nn.Parameter)
    if tensor and value.layout is torch.strided and value.is_cpu and not value.is_quantized:
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return {
            "tensor": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "requires_grad": value.requires_grad,
            "bytes": base64.b64encode(plain.reshape(-1).view(torch.uint8).numpy()).decode(),
        }
    return {"other": show(value)}


def thaw(data: Any) -> Any:
    """The value that `freeze` was given. Raises MinicompileError for anything else."""
    match data:
        case None | bool() | int() | float() | str():
            return data
        case {"dict": items}:
            return {thaw(key): thaw(item) for key, item in items}
        case {"dtype": name}:
            return dtype_called(name)
        case {"tensor": name, "shape": shape, "requires_grad": requires_grad, "bytes": text}:
            raw, dtype = bytearray(base64.b64decode(text)), dtype_called(name)
            flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
            return flat.reshape(shape).requires_grad_(requires_grad)
        case {"other": text}:
            return Other(str(text))
    for kind, items in data.items() if isinstance(data, dict) else ():
        if kind in CONTAINERS:
            return CONTAINERS[kind](thaw(item) for item in items)
    raise MinicompileError(f"an answer sent {show(data)}, which is no kind of data")


def dtype_called(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise MinicompileError(f"an answer sent a dtype {name!r}")
    return dtype
