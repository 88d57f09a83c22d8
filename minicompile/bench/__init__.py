"""Side-by-side timing of eager PyTorch, torch.compile and minicompile.

    takes    names of patterns and models, or the lesson model's training
    gives    tables and JSON: first calls, later calls, memory, the machine they were measured on
    decides  sizes, turns and repetitions, and how far results may be from float64

Read cases.py first, then timing.py.
"""
