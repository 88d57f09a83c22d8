"""Lets children of tests mark lines: Python imports this file at its start, if PYTHONPATH has its folder."""

import os

from tests.coverage.marks import VARIABLE, put_marks

if VARIABLE in os.environ:
    put_marks(os.environ[VARIABLE])
