"""What every room shares: origins, registries, dtypes, operator tables, the printed form, C compilers.

    takes    nothing of any room: they all stand on this one
    gives    Origin, Registry, Graph, events, and `Ops`, the protocol in which loop bodies are written
    decides  the words of loop bodies; that an extension point is a registry with one decorator

Read registry.py first, then handler.py.
"""
