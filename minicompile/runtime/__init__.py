"""Building, loading and running kernels, and keeping them on disk.

    takes    modules of kernel text and a WrapperSource (codegen/plan.py)
    gives    what a call runs: loaded kernels in a wrapper
    decides  how kernels are compiled, kept on disk and launched

Read load.py first, then cpp.py; triton.py does the same for GPUs.
"""
