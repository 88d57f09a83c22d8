"""Graph passes: what they are, how they run, and rewriting by patterns.

    takes    graphs of torch functions or ATen operators, and a room's list of passes
    gives    the graphs rewritten, and a record of what each pass took away and added
    decides  the order, which passes are off, where a bisection stops; rooms own what passes do

Read manager.py first, then patterns.py.
"""
