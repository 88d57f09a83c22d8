"""The database of operators that torch's own tests use."""

from __future__ import annotations

import functools
import sys
import types
import unittest
import warnings
from typing import Any

import torch


@functools.cache
def operators() -> list[Any]:
    """The OpInfos. Importing them asks for a package of which nothing is used, and forbids to set
    torch's flags, which other tests do.
    """
    stub: Any = types.SimpleNamespace(TestCase=unittest.TestCase)
    sys.modules.setdefault("expecttest", stub)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return op_db
