"""Rules that users write as plain functions: rewrites of graphs, gradients of operators.

    takes    a search function and its replacement (`mc.register_pattern`), a gradient (`mc.register_vjp`)
    gives    a graph pass that rewrites every occurrence, a gradient in place of torch's formula
    decides  what in a graph is an occurrence; which tensors a gradient is for

Read patterns.py first, then vjps.py. The compiler doesn't need this folder: it registers passes and contexts
through the same decorators as anybody's.
"""
