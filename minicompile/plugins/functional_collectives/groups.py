"""Functional collectives are operators of the graph; their process groups are constants of it.

The real compiler: torch/_dynamo/variables/distributed.py.
"""

from __future__ import annotations

from typing import Any

from minicompile import compat
from minicompile.dynamo.calls import Calls, call_rules


def group_name(tracer: Calls, args: Any, kwargs: Any) -> str:
    """The name of a group: for the graph, which is made for this group."""
    group = kwargs.get("group", *args[:1])
    name, owner = compat.group_name(group), tracer.tracker(group)
    if name is None or owner is None:
        what = f"a collective of a group given as a {type(group).__name__}"
        tracer.unsupported("unusual-arguments", what, "give a ProcessGroup")
    tracer.guard("identity", owner.source, group, "the processes of a collective")
    return name


_COLLECTIVES = compat.FUNCTIONAL_COLLECTIVES
call_rules(f"{_COLLECTIVES}._are_we_tracing")(lambda tracer, args, kwargs: True)
call_rules(f"{_COLLECTIVES}._resolve_group", f"{_COLLECTIVES}._resolve_group_name")(group_name)
call_rules("torch.distributed.distributed_c10d._get_group_size_by_name")(
    lambda tracer, args, kwargs: compat.group_size(args[0])
)
