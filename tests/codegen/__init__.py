"""What code generation promises, file by file; `test_kernels.py` is its specification.

    test_kernels   every kernel gives eager's values, in C and in Triton: a table of programs
    test_ops       so does every operation, on edge cases
    test_legalize, test_merge, test_plan     bodies and decisions, without running a kernel
    test_cpp_*     what C alone does: threads, scratch rows, helpers, its own functions
    test_triton_*, test_long_rows, test_varying_sizes     what Triton alone does: tiles, versions, assembly
    test_scans, test_in_place, test_races                 whole programs around one subject

`fusing.py` builds programs, `kernels.py` runs their kernels.
"""
