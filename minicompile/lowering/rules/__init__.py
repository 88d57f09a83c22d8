"""The built-in rules by family. Importing this package registers them."""

from minicompile.lowering.rules import (  # noqa: F401
    creation,
    externs,
    indexing,
    pointwise,
    reductions,
    scans,
    view,
)
