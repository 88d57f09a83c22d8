"""Lowering: from ATen graphs to loops that define buffers."""
