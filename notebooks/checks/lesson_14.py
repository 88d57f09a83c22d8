"""Checks of lesson 14."""

from __future__ import annotations

from minicompile.lessons.exercise import Lesson

lesson = Lesson("14")
