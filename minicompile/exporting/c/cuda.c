// A model on an NVIDIA GPU, by the CUDA driver, which is loaded when the first model is opened: nothing is linked to
// CUDA, and none of its headers is needed to build this. Calls of a model come one after the other.
// MINICOMPILE_CUDA_DRIVER names another file than libcuda.so.1, as a compatibility package of CUDA's has one.

#include <pthread.h>

#include "minicompile_load.h"
#include "model.h"
#include "target.h"

typedef uint64_t address;  // CUdeviceptr

// What is used of the driver: the name in its library, as cuda.h #defines it, and parameters.
#define FUNCTIONS(X) \
    X(cuGetErrorString, "cuGetErrorString", (int, const char**)) \
    X(cuInit, "cuInit", (unsigned)) \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int*)) \
    X(cuDeviceGet, "cuDeviceGet", (int*, int)) \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, int)) \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (void**, int)) \
    X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (int)) \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", (void**)) \
    X(cuCtxGetDevice, "cuCtxGetDevice", (int*)) \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (void*)) \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (void**)) \
    X(cuStreamCreate, "cuStreamCreate", (void**, unsigned)) \
    X(cuStreamSynchronize, "cuStreamSynchronize", (void*)) \
    X(cuStreamDestroy, "cuStreamDestroy_v2", (void*)) \
    X(cuMemAlloc, "cuMemAlloc_v2", (address*, size_t)) \
    X(cuMemFree, "cuMemFree_v2", (address)) \
    X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", (address, const void*, size_t)) \
    X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (address, const void*, size_t, void*)) \
    X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void*, address, size_t, void*)) \
    X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (address, address, size_t, void*)) \
    X(cuPointerGetAttribute, "cuPointerGetAttribute", (void*, int, address)) \
    X(cuModuleLoadData, "cuModuleLoadData", (void**, const void*)) \
    X(cuModuleGetFunction, "cuModuleGetFunction", (void**, void*, const char*)) \
    X(cuModuleUnload, "cuModuleUnload", (void*)) \
    X(cuFuncSetAttribute, "cuFuncSetAttribute", (void*, int, int)) \
    X(cuLaunchKernel, "cuLaunchKernel", (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
        void*, void**, void**))

static struct {
#define MEMBER(name, symbol, parameters) int (*name) parameters;
    FUNCTIONS(MEMBER)
} driver;

// Constants of cuda.h.
enum { INVALID_VALUE = 1, MAJOR = 75, MINOR = 76, MEMORY_TYPE = 2, DEVICE_ORDINAL = 9, ON_DEVICE = 2 };
enum { MAX_DYNAMIC_SHARED_BYTES = 8, USUAL_SHARED = 49152, ALIGNMENT = 256, NULL_POINTERS = 2, MOST_ARGUMENTS = 1024 };

struct mc_model {
    int device, pushed;
    void *context, *own, *stream;  // its own stream; that of the call
    char* state[MC_WEIGHTS + 1];
    address weights, arena;
    int64_t arena_bytes;
    void *modules[MC_KERNELS + 1], *functions[MC_KERNELS + 1];
    pthread_mutex_t lock;
};

static int told(int code, const char* call) {
    const char* text = NULL;
    if (code == 0) return 0;
    driver.cuGetErrorString(code, &text);
    return mc_fail("%s failed: CUDA error %d: %s", call, code, text ? text : "unknown");
}

#define CU(name, ...) told(driver.name(__VA_ARGS__), #name)

static int load_driver(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static void* library;
    const char *chosen = getenv("MINICOMPILE_CUDA_DRIVER"), *missing = NULL;
    pthread_mutex_lock(&lock);
    void* found = library ? library : dlopen(chosen && *chosen ? chosen : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int failed = found ? 0 : mc_fail("%s needs NVIDIA's driver, which can't be loaded: %s", MC_NAME, dlerror());
    if (found && !library) {
        void* at;
#define FIND(name, symbol, parameters) \
    if ((at = dlsym(found, symbol))) memcpy(&driver.name, &at, sizeof at); else missing = symbol;
        FUNCTIONS(FIND)
        if (missing) failed = mc_fail("%s needs a newer driver: this one has no %s", MC_NAME, missing);
        if (missing) dlclose(found); else library = found;
    }
    pthread_mutex_unlock(&lock);
    return failed;
}

static int choose_device(mc_model* model) {
    int count = 0, major, minor;
    void* current = NULL;
    if (CU(cuInit, 0) || CU(cuDeviceGetCount, &count)) return 1;
    if (count == 0) return mc_fail("%s needs an NVIDIA GPU: the driver sees none", MC_NAME);
    if (CU(cuCtxGetCurrent, &current)) return 1;
    if (current ? CU(cuCtxGetDevice, &model->device) : CU(cuDeviceGet, &model->device, 0)) return 1;
    if (CU(cuDeviceGetAttribute, &major, MAJOR, model->device)) return 1;
    if (CU(cuDeviceGetAttribute, &minor, MINOR, model->device)) return 1;
    if (major == MC_MAJOR && minor == MC_MINOR) return 0;
    return mc_fail("%s was compiled for GPUs of compute capability %d.%d, this one has %d.%d", MC_NAME, MC_MAJOR, MC_MINOR,
        major, minor);
}

static int enter(mc_model* model) {
    if (CU(cuCtxPushCurrent, model->context)) return 1;
    return model->pushed = 1, 0;
}

static void leave(mc_model* model) {
    void* context;
    if (model->pushed) driver.cuCtxPopCurrent(&context);
    model->pushed = 0;
}

static int64_t rounded(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// Each weight at a place of its own: kernels take addresses that 16 divides, a file has them side by side.
static int upload_weights(mc_model* model, const char* folder) {
    int64_t at[MC_WEIGHTS + 1], end = 0;
    char* map = mc_map_weights(folder);
    if (!map) return 1;
    for (int i = 0; i < MC_WEIGHTS; i++) {
        int first = 0;
        while (mc_weights[first].offset != mc_weights[i].offset || mc_weights[first].bytes != mc_weights[i].bytes) first++;
        at[i] = first < i ? at[first] : end;
        if (first == i) end += rounded(mc_weights[i].bytes);
    }
    int failed = CU(cuMemAlloc, &model->weights, (size_t)end + 1);
    for (int i = 0; i < MC_WEIGHTS && !failed; i++) {
        model->state[i] = (char*)(model->weights + (address)at[i]);
        if (mc_weights[i].bytes)
            failed = CU(cuMemcpyHtoD, (address)model->state[i], map + mc_weights[i].offset, (size_t)mc_weights[i].bytes);
    }
    munmap(map, MC_BYTES);
    return failed;
}

static int load_kernels(mc_model* model, const char* folder) {
    for (int i = 0; i < MC_KERNELS; i++) {
        const mc_kernel* kernel = &mc_kernels[i];
        int64_t bytes = 0;
        char* code = mc_map(folder, kernel->file, &bytes);
        int whole = code && bytes == kernel->bytes && kernel->crc32 == mc_crc32(0, (unsigned char*)code, bytes);
        int failed = whole ? CU(cuModuleLoadData, &model->modules[i], code) : mc_fail("%s/%s is missing or damaged", folder, kernel->file);
        if (code) munmap(code, (size_t)bytes);
        if (failed || CU(cuModuleGetFunction, &model->functions[i], model->modules[i], kernel->function)) return 1;
        if (kernel->shared > USUAL_SHARED
            && CU(cuFuncSetAttribute, model->functions[i], MAX_DYNAMIC_SHARED_BYTES, (int)kernel->shared)) return 1;
    }
    return 0;
}

EXPORT mc_model* mc_open(const char* folder) {
    mc_model* model = calloc(1, sizeof *model);
    if (!model) return mc_fail("out of memory"), NULL;
    pthread_mutex_init(&model->lock, NULL);
    int failed = mc_check_processor() || load_driver() || choose_device(model)
        || CU(cuDevicePrimaryCtxRetain, &model->context, model->device) || enter(model)
        || CU(cuStreamCreate, &model->own, 0) || upload_weights(model, folder) || load_kernels(model, folder);
    leave(model);
    if (failed) return mc_close(model), NULL;
    return model;
}

EXPORT void mc_close(mc_model* model) {
    if (!model) return;
    if (model->context && driver.cuCtxPushCurrent(model->context) == 0) {
        model->pushed = 1;
        for (int i = 0; i < MC_KERNELS; i++)
            if (model->modules[i]) driver.cuModuleUnload(model->modules[i]);
        if (model->weights) driver.cuMemFree(model->weights);
        if (model->arena) driver.cuMemFree(model->arena);
        if (model->own) driver.cuStreamDestroy(model->own);
        leave(model);
    }
    if (model->context) driver.cuDevicePrimaryCtxRelease(model->device);
    pthread_mutex_destroy(&model->lock);
    free(model);
}

int mc_launch(mc_model* model, int kernel, int64_t programs, const int64_t* arguments, int count) {
    static const int64_t null = 0;
    void* at[MOST_ARGUMENTS + NULL_POINTERS];  // Triton's kernels end in pointers to scratch memory: ours need none
    char call[300];
    if (programs == 0) return 0;
    if (programs > INT32_MAX || count > MOST_ARGUMENTS) return mc_fail("%s: too many programs", mc_kernels[kernel].file);
    for (int i = 0; i < count + NULL_POINTERS; i++) at[i] = (void*)(i < count ? &arguments[i] : &null);
    snprintf(call, sizeof call, "cuLaunchKernel of %s", mc_kernels[kernel].file);
    return told(driver.cuLaunchKernel(model->functions[kernel], (unsigned)programs, 1, 1, mc_kernels[kernel].threads, 1, 1,
        mc_kernels[kernel].shared, model->stream, at, NULL), call);
}

int mc_give(mc_model* model, mc_tensor* out, const void* from, int dtype, int bytes, int ndim, const int64_t* shape,
    const int64_t* strides) {
    (void)model, (void)bytes, (void)strides;
    out->dtype = dtype, out->ndim = ndim, out->data = (void*)from;
    for (int i = 0; i < ndim; i++) out->shape[i] = shape[i];
    return 0;
}

// Whether memory is the GPU's; another GPU's is an error, -1.
static int on_gpu(const mc_model* model, const void* data, int input) {
    int type = 0, device = 0;
    int code = driver.cuPointerGetAttribute(&type, MEMORY_TYPE, (address)data);
    if (code == INVALID_VALUE) return 0;  // memory of which the driver knows nothing
    if (told(code, "cuPointerGetAttribute")) return -1;
    if (type != ON_DEVICE) return 0;
    if (CU(cuPointerGetAttribute, &device, DEVICE_ORDINAL, (address)data)) return -1;
    if (device == model->device) return 1;
    return mc_fail("input %d lies on GPU %d, the model on GPU %d", input, device, model->device), -1;
}

static int make_room(mc_model* model, int64_t bytes) {
    if (bytes <= model->arena_bytes) return 0;
    address old = model->arena;
    model->arena = 0, model->arena_bytes = 0;
    if ((old && CU(cuMemFree, old)) || CU(cuMemAlloc, &model->arena, (size_t)bytes)) return 1;
    return model->arena_bytes = bytes, 0;
}

// One copy, to wherever: `to` and `from` say what is the GPU's.
static int copy(mc_model* model, int to_gpu, void* to, int from_gpu, const void* from, size_t bytes) {
    if (bytes == 0) return 0;
    if (to_gpu && from_gpu) return CU(cuMemcpyDtoDAsync, (address)to, (address)from, bytes, model->stream);
    if (to_gpu) return CU(cuMemcpyHtoDAsync, (address)to, from, bytes, model->stream);
    return CU(cuMemcpyDtoHAsync, to, (address)from, bytes, model->stream);
}

// A result as the caller gets it, in memory of its own.
static int hand_over(mc_model* model, mc_tensor* out, const void* from, int to_gpu) {
    size_t bytes = mc_bytes_of(out);
    address made = 0;
    if (to_gpu) {
        if (CU(cuMemAlloc, &made, bytes + 1)) return 1;
        out->data = (void*)made;
    } else if (!(out->data = malloc(bytes + 1))) {
        return mc_fail("out of memory");
    }
    return copy(model, to_gpu, out->data, 1, from, bytes);
}

static void give_back(mc_tensor* out, int outputs, int from_gpu) {
    if (!from_gpu) return mc_free(out, outputs);
    for (int i = 0; i < outputs; i++) {
        if (out[i].data) driver.cuMemFree((address)out[i].data);
        out[i].data = NULL;
    }
}

static int run(mc_model* model, const mc_tensor* in, mc_tensor* out, const int64_t* size, int keep) {
    int64_t at[MC_PIECES + 1], place[MC_INPUTS + 1], end = rounded(mc_plan(size, at));
    int there[MC_INPUTS + 1], failed = 0;
    mc_tensor moved[MC_INPUTS + 1], made[MC_OUTPUTS + 1];
    mc_written written[MC_WRITES + 1] = {0};
    for (int i = 0; i < MC_INPUTS; i++) {
        if ((there[i] = on_gpu(model, in[i].data, i)) < 0) return 1;
        place[i] = there[i] && (address)in[i].data % 16 == 0 ? -1 : end;
        end += place[i] < 0 ? 0 : rounded((int64_t)mc_bytes_of(&in[i]) + 1);
    }
    if (make_room(model, end)) return 1;
    char* arena = (char*)model->arena;
    for (int i = 0; i < MC_INPUTS && !failed; i++) {
        moved[i] = in[i];
        if (place[i] < 0) continue;
        moved[i].data = arena + place[i];
        failed = copy(model, 1, moved[i].data, there[i], in[i].data, mc_bytes_of(&in[i]));
    }
    failed = failed || mc_call(model, model->state, moved, made, written, size, arena, at);
    for (int i = 0; i < MC_OUTPUTS && !failed; i++) {
        out[i] = made[i], out[i].data = NULL;
        failed = hand_over(model, &out[i], made[i].data, keep);
    }
    for (int i = 0; i < MC_WRITES && !failed; i++) {
        size_t bytes = mc_bytes_of(&written[i].value);
        failed = copy(model, 1, written[i].target, 1, written[i].value.data, bytes);
        for (int j = 0; j < MC_INPUTS && !failed; j++)
            if (place[j] >= 0 && moved[j].data == written[i].target) failed = copy(model, there[j], in[j].data, 1, written[i].target, bytes);
    }
    int late = driver.cuStreamSynchronize(model->stream);  // also after an error: copies may be under way
    return failed ? 1 : told(late, "cuStreamSynchronize");
}

static int run_on(mc_model* model, const mc_tensor* in, int inputs, mc_tensor* out, int outputs, void* stream, int keep) {
    int64_t size[MC_SIZES + 1];
    if (mc_check_call(model, in, inputs, outputs, size)) return 1;
    for (int i = 0; i < outputs; i++) out[i].data = NULL;
    pthread_mutex_lock(&model->lock);
    model->stream = stream;
    int failed = enter(model) || run(model, in, out, size, keep);
    if (failed) give_back(out, outputs, keep);
    leave(model);
    pthread_mutex_unlock(&model->lock);
    return failed;
}

EXPORT int mc_run(mc_model* model, const mc_tensor* in, int inputs, mc_tensor* out, int outputs) {
    return run_on(model, in, inputs, out, outputs, model ? model->own : NULL, 0);
}

EXPORT int mc_run_on_gpu(mc_model* model, const mc_tensor* in, int inputs, mc_tensor* out, int outputs, void* stream) {
    return run_on(model, in, inputs, out, outputs, stream, 1);
}

EXPORT void mc_free_on_gpu(mc_model* model, mc_tensor* out, int outputs) {
    if (!model) return;
    pthread_mutex_lock(&model->lock);
    if (enter(model) == 0) give_back(out, outputs, 1);
    leave(model);
    pthread_mutex_unlock(&model->lock);
}
