"""Checks of lesson 15."""

from __future__ import annotations

from minicompile.lessons.exercise import Lesson

lesson = Lesson("15")
