// A model on the CPU: its weights stay in the file's pages, the memory of a call serves later ones.

#include <pthread.h>

#include "minicompile_load.h"
#include "model.h"
#include "target.h"

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
    int failed = mc_call(model, model->state, in, out, written, size, arena + 64, at);
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

int mc_give(mc_model* model, mc_tensor* out, const void* from, int dtype, int bytes, int ndim, const int64_t* shape,
    const int64_t* strides) {
    (void)model;
    out->dtype = dtype, out->ndim = ndim;
    for (int i = 0; i < ndim; i++) out->shape[i] = shape[i];
    out->data = malloc(mc_bytes_of(out) + 1);
    if (!out->data) return mc_fail("out of memory");
    mc_gather(out->data, from, bytes, ndim, shape, strides);
    return 0;
}
