"""Errors of inline float32 functions over all 2^32 inputs: `python -m tests.codegen.every_float [name ...]`.

A minute or so for each. The figures in `minicompile/codegen/cpp_ops.py` and the bounds in `test_cpp_math.py`
come from here. The reference is the C library's function of doubles.
"""

from __future__ import annotations

import ctypes
import sys

from minicompile.codegen.helpers import c_prelude
from minicompile.ops.build import start_build
from minicompile.options import Options
from tests.codegen.test_cpp_math import FUNCTIONS

REFERENCES = {"sigmoid": "1 / (1 + exp(-x))"}

CHECK = """
// the largest error in ulp (infinite where one is NaN or infinite and the other isn't), and the input with it
double check_NAME(float* where) {
    double worst = 0;
    #pragma omp parallel for schedule(dynamic)
    for (int64_t start = -(1LL << 31); start < 1LL << 31; start += 4096) {
        float in[4096], out[4096];
        double exact[4096];
        for (int i = 0; i < 4096; i++) in[i] = mc_float(start + i);
        #pragma omp simd
        for (int i = 0; i < 4096; i++) out[i] = mc_NAME(in[i]);
        #pragma omp simd
        for (int i = 0; i < 4096; i++) {
            double x = in[i];
            exact[i] = REFERENCE;
        }
        for (int i = 0; i < 4096; i++) {
            float rounded = exact[i];
            if (rounded == out[i] || (rounded != rounded && out[i] != out[i])) continue;
            double step = (double)mc_float((mc_bits(rounded) & INT32_MAX) + 1) - fabs(rounded);
            double error = isfinite(rounded) && isfinite(out[i]) ? fabs(out[i] - exact[i]) / step : INFINITY;
            if (error <= worst) continue;
            #pragma omp critical
            if (error > worst) {
                worst = error;
                *where = in[i];
            }
        }
    }
    return worst;
}
"""


def main(names: list[str]) -> None:
    """Print, for each function, the largest error and where it is."""
    text = "".join(
        CHECK.replace("NAME", name).replace("REFERENCE", REFERENCES.get(name, f"{name}(x)"))
        for name in names
    )
    library = start_build(c_prelude(text) + text, Options()).result()
    for name in names:
        check, where = getattr(library, f"check_{name}"), ctypes.c_float()
        check.restype, check.argtypes = ctypes.c_double, [ctypes.c_void_p]
        error = check(ctypes.addressof(where))
        print(f"{name:8} {error:.3f} ulp at {where.value!r}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(FUNCTIONS))
