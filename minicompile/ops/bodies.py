"""Operators that run graphs of their own, their bodies. The node that calls such an operator holds it.

    trace(tracer, *args)      records the operator, and how it is differentiated, while a graph is traced
    graphs                    the bodies, to look at
    bodies(options)           the bodies as ATen graphs, by name: each is compiled on its own
    lines(prefix, arguments)  statements of the wrapper that call the compiled bodies, `prefix` before their
                              names, and leave the operator's tensors in `results`
    (*args)                   runs the operator with eager's bodies

The real compiler: torch/_ops.py (HigherOrderOperator).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from minicompile.ops.display import Shown


class BodyOperator(Shown):
    """What rooms ask of an operator, answered as for one that only computes."""

    name: str
    namespace = ""
    _schema: Any = SimpleNamespace(name="", is_mutable=False, returns=(), arguments=())
    tags: Any = (torch.Tag.data_dependent_output,)
    overloadpacket: Any = property(type)

    def trace(self, tracer: Any, *args: Any) -> Any:
        raise NotImplementedError

    def bodies(self, options: Any) -> dict[str, Any]:
        raise NotImplementedError

    def lines(self, prefix: str, arguments: list[str]) -> list[str]:
        raise NotImplementedError

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.name
