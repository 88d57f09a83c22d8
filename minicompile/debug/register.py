"""Register the tools of this folder with the compiler: observers, a gate, a backend, methods of traces.

Tables of the compiler import this page when they are first read (`FILLED_BY` in minicompile/__init__.py). The
package itself imports nothing, so that `minicompile doctor` runs without torch.
"""

from minicompile.debug import diff, dump, limit, logs, progress, roofline, torch_bridge, why  # noqa: F401
