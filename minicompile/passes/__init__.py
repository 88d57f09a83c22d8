"""Graph passes: what they are, how they run, and what a rewrite puts into a graph.

    takes    graphs of torch functions or ATen operators, and a room's list of passes
    gives    the graphs rewritten, and a record of what each pass took away and added
    decides  the order, which passes are off, where a bisection stops; rooms own what passes do

Read manager.py first, then replacements.py.
"""
