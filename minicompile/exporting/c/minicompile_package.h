// A model compiled ahead of time by minicompile: its C interface, and a loader that checks before it loads.
// Tensors are row-major without gaps. Any number of threads may run one model.

#ifndef MINICOMPILE_PACKAGE_H
#define MINICOMPILE_PACKAGE_H

#include <stdint.h>

#define MC_VERSION 4
#define MC_MOST_DIMENSIONS 16
#ifdef __cplusplus
extern "C" {
#endif

enum mc_dtype { MC_BOOL, MC_UINT8, MC_INT8, MC_INT16, MC_INT32, MC_INT64, MC_FLOAT16, MC_BFLOAT16, MC_FLOAT32, MC_FLOAT64 };

typedef struct {
    void* data;
    int32_t dtype, ndim;
    int64_t shape[MC_MOST_DIMENSIONS];
} mc_tensor;

typedef struct mc_model mc_model;

// The model in a folder; NULL if its weights or this processor don't fit what was compiled.
mc_model* mc_open(const char* folder);

// Fills `out`, whose memory mc_free gives back. 0, or 1: then nothing is there to free. An input that the model
// changes is changed in place.
int mc_run(mc_model* model, const mc_tensor* in, int inputs, mc_tensor* out, int outputs);

// What went wrong in the last call of this thread that failed.
const char* mc_error(void);

void mc_free(mc_tensor* out, int outputs);
void mc_close(mc_model* model);

#ifdef __cplusplus
}
#endif
#endif
