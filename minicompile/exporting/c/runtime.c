// What models on a CPU and on a GPU have in common: errors, checks of what is given. Compiled for any processor of
// the kind.

#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "minicompile_load.h"
#include "model.h"
#include "target.h"

static __thread char error[1024];

EXPORT const char* mc_error(void) { return error; }

int mc_fail(const char* form, ...) {
    va_list values;
    va_start(values, form);
    vsnprintf(error, sizeof error, form, values);
    va_end(values);
    return 1;
}

int mc_check_processor(void) {
#define NEED(feature) \
    if (!__builtin_cpu_supports(feature)) return mc_fail("%s was compiled for processors with " feature, MC_NAME);
    MC_FEATURES(NEED)
    return 0;
}

char* mc_map_weights(const char* folder) {
    int64_t bytes;
    char* map = mc_map(folder, "model.safetensors", &bytes);
    const unsigned char* at = (const unsigned char*)map;
    if (!map)
        mc_fail("%s/model.safetensors can't be read", folder);
    else if (bytes != MC_BYTES)
        mc_fail("model.safetensors has %ld bytes, not %ld", (long)bytes, (long)MC_BYTES);
    else if (mc_crc32(0, at, MC_HEADER) != MC_HEADER_CRC32)
        mc_fail("the header of model.safetensors is not that of %s: weights are missing or differ", MC_NAME);
    else if (mc_crc32(0, at + MC_HEADER, MC_BYTES - MC_HEADER) != MC_DATA_CRC32)
        mc_fail("the data of model.safetensors is damaged");
    else
        return map;
    if (map) munmap(map, (size_t)bytes);
    return NULL;
}

int mc_expect(const mc_tensor* given, const char* name, int dtype, int ndim) {
    static const char* names[] = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
        "float64"};
    if (given->dtype < 0 || given->dtype > MC_FLOAT64) return mc_fail("%s has no known dtype", name);
    if (given->dtype != dtype) return mc_fail("%s has dtype %s, not %s", name, names[given->dtype], names[dtype]);
    if (given->ndim != ndim) return mc_fail("%s has %d dimensions, not %d", name, given->ndim, ndim);
    int64_t elements = 1;
    for (int i = 0; i < ndim; i++) {
        if (given->shape[i] < 0 || __builtin_mul_overflow(elements, given->shape[i], &elements))
            return mc_fail("%s: dimension %d has size %ld", name, i, (long)given->shape[i]);
    }
    if (!given->data && elements) return mc_fail("%s has no data", name);
    return 0;
}

int mc_expect_size(const mc_tensor* given, const char* name, int axis, int64_t size) {
    if (given->shape[axis] == size) return 0;
    return mc_fail("%s: dimension %d has size %ld, not %ld", name, axis, (long)given->shape[axis], (long)size);
}

size_t mc_bytes_of(const mc_tensor* tensor) {
    static const int bytes[] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8};
    int64_t elements = 1;
    for (int i = 0; i < tensor->ndim; i++) elements *= tensor->shape[i];
    return (size_t)(elements * bytes[tensor->dtype]);
}

int mc_check_call(const mc_model* model, const mc_tensor* in, int inputs, int outputs, int64_t* size) {
    if (!model) return mc_fail("no model");
    if (inputs != MC_INPUTS) return mc_fail("%s takes %d inputs, not %d", MC_NAME, MC_INPUTS, inputs);
    if (outputs != MC_OUTPUTS) return mc_fail("%s gives %d results, not %d", MC_NAME, MC_OUTPUTS, outputs);
    return mc_check(in, size);
}

EXPORT void mc_free(mc_tensor* out, int outputs) {
    for (int i = 0; i < outputs; i++) free(out[i].data), out[i].data = NULL;
}
