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
    torch's flags, which other tests do. Their samples search the whole stack, and its source, for a
    `unittest.TestCase` that they belong to, which takes long; there is none.
    """
    stub: Any = types.SimpleNamespace(TestCase=unittest.TestCase)
    sys.modules.setdefault("expecttest", stub)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return op_db
