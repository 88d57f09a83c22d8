"""Looking into compilations: logs, dump folder, progress, comparisons, and what is to blame.

    takes    functions and their arguments, scripts, traces, the events of ops/events.py
    gives    logs and files; differences, accuracies, bisections, minified programs, measured what-ifs
    decides  what counts as wrong: float64 is the judge, eager's own errors are the measure

Read logs.py first, then accuracy.py. No room imports this one: importing it registers what observes
compilations, a backend, methods of traces; tables of the compiler do so when they are first read.
"""

from __future__ import annotations

from . import diff, dump, limit, logs, progress, torch_bridge  # noqa: F401
