"""Sizes and index arithmetic: `int | sympy.Expr` everywhere, simplified by known ranges.

    takes    sizes, strides and indices, and what is known of their ranges
    gives    symbols inside torch.SymInt, simplified expressions, the guards that they rely on
    decides  which rewriting of an index is true for all values, and which question costs a guard

Read expr.py first, then strided.py and env.py.
"""
