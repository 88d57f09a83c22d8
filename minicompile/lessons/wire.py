"""The format in which an answer's kernel sends data to the judge: JSON, and never pickle.

Numbers, texts, containers, dtypes and tensors come back as they were. Of any other object only its type and
a short text go over: the judge holds no object that an answer has made.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

from minicompile.errors import MinicompileError

MOST_BYTES = 256 * 2**20
"""Most bytes that one exercise may send."""

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
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        return frozen_tensor(value.detach(), value.requires_grad)
    return {"other": show(value)}


def frozen_tensor(value: torch.Tensor, requires_grad: bool) -> dict[str, Any]:
    if value.device.type != "cpu" or value.is_quantized:
        return {"other": f"a tensor on {value.device}"}
    raw = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return {
        "tensor": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "requires_grad": requires_grad,
        "bytes": base64.b64encode(raw.numpy().tobytes()).decode(),
    }


def thaw(data: Any) -> Any:
    """The value that `freeze` was given. Raises MinicompileError for anything else."""
    if type(data) in PLAIN:
        return data
    if not isinstance(data, dict) or not data:
        raise MinicompileError("not in the format that answers are sent in")
    kind, items = next(iter(data.items()))
    if kind in CONTAINERS:
        return CONTAINERS[kind](thaw(item) for item in items)
    if kind == "dict":
        return {thaw(key): thaw(item) for key, item in items}
    if kind == "dtype":
        return dtype_called(items)
    if kind == "tensor":
        return thawed_tensor(data)
    if kind == "other":
        return Other(str(items))
    raise MinicompileError(f"an answer sent {kind!r}, which is no kind of data")


def dtype_called(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise MinicompileError(f"an answer sent a dtype {name!r}")
    return found


def thawed_tensor(data: dict[str, Any]) -> torch.Tensor:
    raw, dtype = base64.b64decode(data["bytes"]), dtype_called(data["tensor"])
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(data["shape"])
    return tensor.requires_grad_() if data["requires_grad"] else tensor


def to_text(items: list[Any]) -> str:
    """Frozen items as the text that is sent."""
    return json.dumps(items)


def from_text(text: str) -> list[Any]:
    """What was sent, still frozen. Raises MinicompileError for a text that `to_text` did not make."""
    try:
        items = json.loads(text)
    except ValueError as error:
        raise MinicompileError(f"what the answer sent is no JSON: {error}") from None
    if not isinstance(items, list):
        raise MinicompileError("what the answer sent is no list")
    return items
