"""Rewriting of graphs by patterns: plain functions that say what to look for, and what to put there.

    takes    a search function, a replacement function, examples of their arguments
    gives    a graph pass that rewrites every occurrence; `mc.register_pattern` is the decorator
    decides  what in a graph is an occurrence; the passes' room puts the replacement there

Read matching.py first, then register.py. The compiler doesn't need this folder: it registers passes through
the same decorator as anybody's.
"""
