"""Looking into compilations: logs, dump folder, comparisons, and what is to blame.

    takes    functions and their arguments, scripts, traces, the events of ops/events.py
    gives    logs and files; differences, accuracies, bisections, minified programs, measured what-ifs
    decides  what counts as wrong: float64 is the judge, eager's own errors are the measure

Read logs.py first, then variant.py. No room imports this one: register.py brings what observes compilations.
"""
