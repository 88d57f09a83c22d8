"""Functional forms of a user's operators that write to their arguments.

    mylib::scale_(Tensor(a!) x, float by) -> ()    becomes, when first asked for,
    minicompile::functional_mylib_scale_(Tensor x, float by) -> Tensor    which scales and returns a copy of x

A graph holds the functional form; generated code calls the user's operator, on copies only where they are
needed (codegen/wrapper.py).

The real compiler: torch/_higher_order_ops/auto_functionalize.py.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch._ops import OpOverload

from minicompile.errors import Unsupported
from minicompile.ops.writes import written_arguments

WRITING: dict[OpOverload, OpOverload] = {}
"""For each functional form, the user's operator that writes."""
_library = torch.library.Library("minicompile", "FRAGMENT")
ALIAS = re.compile(r"\([\w*|]+!?(?: -> [\w*|]+)?\)(?=[?\s])")
"""In a schema: `(a!)` of what is written to."""


@functools.cache
def functional_form(op: OpOverload) -> OpOverload:
    """An operator with the same arguments that gives what `op` newly makes, then what `op` would write.

    Raises Unsupported where `op` writes to lists, or returns views, or what it writes among others.
    """
    schema = op._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    plain = all(str(a.type) in ("Tensor", "Optional[Tensor]") for a in written)
    aliases = [x.alias_info for x in schema.returns if x.alias_info is not None]
    several = len(schema.returns) > 1
    if not plain or not all(alias.is_write for alias in aliases) or (aliases and several):
        raise Unsupported(
            f"{op} writes into lists of tensors, or returns views or what it writes: no functional form"
        )
    names = {a.name for a in written}
    places = {i for i, a in enumerate(schema.arguments) if a.name in names}
    fresh = [i for i, result in enumerate(schema.returns) if result.alias_info is None]
    results = [str(schema.returns[i].type) for i in fresh] + ["Tensor"] * len(written)

    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(x.clone() if i in places and x is not None else x for i, x in enumerate(args))
        kwargs = {k: x.clone() if k in names and x is not None else x for k, x in kwargs.items()}
        found = op(*args, **kwargs)
        made = list(found) if isinstance(found, tuple | list) else [found]
        contents = written_arguments(op, args, kwargs)
        new = [torch.empty(0) if x is None else x for x in contents]
        given = [*(made[i] for i in fresh), *new]
        return given[0] if len(given) == 1 else tuple(given)

    name = f"functional_{schema.name.replace('::', '_')}_{op._overloadname}"
    takes = ALIAS.sub("", str(schema)).partition("(")[2].rpartition(" -> ")[0]
    _library.define(f"{name}({takes} -> ({', '.join(results)})")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"minicompile::{name}", run, lib=_library)
    form: OpOverload = getattr(torch.ops.minicompile, name).default
    WRITING[form] = op
    return form
