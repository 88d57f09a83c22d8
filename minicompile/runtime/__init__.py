"""Building, loading and running kernels, and keeping them on disk.

    takes    modules of kernel text and a WrapperSource (codegen/plan.py)
    gives    what a call runs: loaded kernels in a wrapper; measured tiles, CUDA graphs, kept files
    decides  how kernels are launched, which tiles were fastest, when a kept graph may be used

Read load.py first, then cpp.py; triton.py does the same for GPUs.
"""
