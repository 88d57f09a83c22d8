"""Which graph passes fire on a program, whose numbers are compared with eager's."""

from __future__ import annotations

import torch

from minicompile.options import Options
from tests.aot.helpers import assert_aot_as_eager, compile_aot

rand = torch.randn


def leaf(*size):
    return rand(*size, requires_grad=True)


def fired(result):
    return {record.name.partition(".")[2] for record in result.passes if record.changed}


def run(fn, inputs, dynamic=None, atol=1e-5, **options):
    """The AotResult of a function; what it computes is eager's."""
    call, result = compile_aot(fn, inputs, options=Options(**options), dynamic=dynamic)
    assert_aot_as_eager(call, fn, *inputs, rtol=1e-4, atol=atol)
    return result


def checked(name, fires, stays, dynamic=None, **options):
    """The pass fires on one program and not on another; where it is off it does nothing."""
    for given in (dynamic, None) if dynamic else (None,):
        assert name in fired(run(*fires, given, **options)), given
        assert name not in fired(run(*fires, given, **options, disable_passes=(name,)))
    assert name not in fired(run(*stays, **options))
    if options:
        assert name not in fired(run(*fires))


FIRST = {(0, 0): "s0"}
