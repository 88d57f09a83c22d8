"""Sizes and index arithmetic: `int | sympy.Expr` everywhere, simplified with what is known about ranges."""
