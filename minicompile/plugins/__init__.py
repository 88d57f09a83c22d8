"""Optimizations with a price: delete any folder here, and every answer stays right.

    takes    the extension points that extension.py lists
    gives    rules that make compiled programs faster, or that cover rare operators
    decides  nothing about what a program means

`minicompile plugins` prints what each costs in tokens, and what it buys. ops/plugins.py finds, selects and
loads them.
"""
