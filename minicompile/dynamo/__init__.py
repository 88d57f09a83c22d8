"""Capture: from a Python frame to a torch-level FX graph, guards, side effects and breaks."""
