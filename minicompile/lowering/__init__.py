"""Lowering: from ATen graphs to loops that define buffers.

    takes    a functional ATen graph (aot/result.py)
    gives    LoopGraph: buffers defined by Pointwise, Reduction, Scan, Scatter, Extern, Template
    decides  each operator's loops, by a rule each; what is written to memory, what computed again

Read ir.py first, which has the grammar, then lower.py; rules/pointwise.py has the plainest rules.
"""
