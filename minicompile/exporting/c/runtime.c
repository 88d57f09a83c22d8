// A model: errors, checks of what is given, its weights (which stay in the file's pages), the memory of a call (which
// serves later ones). Compiled for any processor of the kind.

#define _GNU_SOURCE
#include <pthread.h>
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
    char* map = mc_map(folder, "weights.bin", &bytes);
    if (!map)
        mc_fail("%s/weights.bin can't be read", folder);
    else if (bytes != MC_BYTES || mc_crc32(0, (const unsigned char*)map, MC_BYTES) != MC_CRC32)
        mc_fail("weights.bin is damaged, or another than that of %s", MC_NAME);
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

struct mc_model {
    char* weights;
    char* state[MC_WEIGHTS + 1];
    char* arena;  // of the last call: {bytes, memory}
    pthread_mutex_t lock;
};

EXPORT mc_model* mc_open(const char* folder) {
    mc_model* model = calloc(1, sizeof *model);
    if (!model) return mc_fail("out of memory"), NULL;
    pthread_mutex_init(&model->lock, NULL);
    if (mc_check_processor() || !(model->weights = mc_map_weights(folder))) return mc_close(model), NULL;
    for (int i = 0; i < MC_WEIGHTS; i++) model->state[i] = model->weights + mc_weights[i].offset;
    return model;
}

EXPORT void mc_close(mc_model* model) {
    if (!model) return;
    if (model->weights) munmap(model->weights, MC_BYTES);
    free(model->arena);
    pthread_mutex_destroy(&model->lock);
    free(model);
}

// Memory for one call: that of an earlier one if it is large enough and no other thread has it.
static char* take(mc_model* model, int64_t bytes) {
    char* arena = __atomic_exchange_n(&model->arena, NULL, __ATOMIC_ACQ_REL);
    if (arena && *(int64_t*)arena >= bytes) return arena;
    free(arena);
    arena = aligned_alloc(64, (size_t)bytes + 64);
    if (arena) *(int64_t*)arena = bytes;
    return arena;
}

EXPORT int mc_run(mc_model* model, const mc_tensor* in, int inputs, mc_tensor* out, int outputs) {
    int64_t size[MC_SIZES + 1], at[MC_PIECES + 1];
    if (mc_check_call(model, in, inputs, outputs, size)) return 1;
    char* arena = take(model, mc_plan(size, at));
    if (!arena) return mc_fail("out of memory");
    mc_written written[MC_WRITES + 1] = {0};
    for (int i = 0; i < outputs; i++) out[i].data = NULL;
    if (MC_WRITES) pthread_mutex_lock(&model->lock);  // calls that change the state come one after the other
    int failed = mc_call(model->state, in, out, written, size, arena + 64, at);
    for (int i = 0; i < MC_WRITES; i++) {
        if (!failed) memcpy(written[i].target, written[i].value.data, mc_bytes_of(&written[i].value));
        free(written[i].value.data);
    }
    if (MC_WRITES) pthread_mutex_unlock(&model->lock);
    if (failed) mc_free(out, outputs);
    free(__atomic_exchange_n(&model->arena, arena, __ATOMIC_ACQ_REL));
    return failed;
}

void mc_gather(void* to, const void* from, int bytes, int ndim, const int64_t* shape, const int64_t* strides) {
    int64_t whole = 1;  // elements that lie side by side already
    while (ndim > 0 && (shape[ndim - 1] == 1 || strides[ndim - 1] == whole)) whole *= shape[--ndim];
    int64_t place[MC_MOST_DIMENSIONS] = {0}, count = 1;
    for (int i = 0; i < ndim; i++) count *= shape[i];
    for (; count > 0 && whole > 0; count--) {
        const char* source = from;
        for (int i = 0; i < ndim; i++) source += place[i] * strides[i] * bytes;
        memcpy(to, source, (size_t)(whole * bytes));
        to = (char*)to + whole * bytes;
        for (int i = ndim - 1; i >= 0 && ++place[i] == shape[i]; i--) place[i] = 0;
    }
}

int mc_give(mc_tensor* out, const void* from, int dtype, int bytes, int ndim, const int64_t* shape,
    const int64_t* strides) {
    out->dtype = dtype, out->ndim = ndim;
    for (int i = 0; i < ndim; i++) out->shape[i] = shape[i];
    out->data = malloc(mc_bytes_of(out) + 1);
    if (!out->data) return mc_fail("out of memory");
    mc_gather(out->data, from, bytes, ndim, shape, strides);
    return 0;
}
