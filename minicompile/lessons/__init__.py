"""What the notebooks are made of: the lesson model, its text, training, check cells and grading.

    takes    lesson notebooks, and the answers in them
    gives    checks that pass or say input, expected and got; grades; pictures that only lessons need
    decides  how an answer plugs into the compiler: through built-in rules' registries, for a while

Read exercise.py first, then model.py.
"""
