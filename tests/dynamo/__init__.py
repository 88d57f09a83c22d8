"""Tests of capture.

`test_promises.py` reads as the room's specification. Behind it stand tables of programs, each run compiled
and not: `table_*.py` (Python and torch, through `program_table.py`), `guard_*programs.py` (what changes
between calls), `container_table.py` (containers by operations), `plain_*.py` (functions without tensors, for
the machine and for breaks), `architecture_zoo.py` (models). Other files test the part they name.
"""
