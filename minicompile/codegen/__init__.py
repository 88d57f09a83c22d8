"""Kernel plans and code generation: C++ for CPUs, Triton for GPUs, Python for the wrapper.

    takes    a Schedule (scheduling/nodes.py) and the device
    gives    a KernelPlan for each fused node, the modules of kernel text, one WrapperSource
    decides  dtypes that eager leaves unsaid, phases, tiles, vectors, threads, index widths

Read generate.py first, then plan.py.
"""
