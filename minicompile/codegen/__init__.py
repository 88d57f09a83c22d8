"""Kernel plans and code generation: C++ for CPUs, Triton for GPUs, Python for the wrapper."""
