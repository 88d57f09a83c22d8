// A CUDA driver for tests without a GPU: memory is the host's, calls are written to the file FAKE_CUDA_LOG, kernels
// are a function's that the test sets (none: they do nothing). FAKE_CUDA_FAIL="cuMemAlloc_v2 2" makes that call
// fail the second time; FAKE_CUDA_CAPABILITY=80 and FAKE_CUDA_DEVICES=0 are another machine.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t address;
enum { MOST = 4096 };

static struct { char* at; size_t bytes; } blocks[MOST];
static struct function { char name[200]; unsigned shared; } functions[MOST];
static int contexts, modules, made, calls;
static void (*launcher)(int, unsigned, unsigned, unsigned, void**);

void fake_set_launcher(void (*f)(int, unsigned, unsigned, unsigned, void**)) { launcher = f, calls = 0; }
// How many functions have been made: the next one's number.
int fake_functions(void) { return made; }

static int number(const char* variable, int otherwise) {
    const char* text = getenv(variable);
    return text ? atoi(text) : otherwise;
}

// Notes a call; the error that it is to give.
static int note(const char* name, const char* about) {
    const char *path = getenv("FAKE_CUDA_LOG"), *fail = getenv("FAKE_CUDA_FAIL");
    FILE* file = path ? fopen(path, "a") : NULL;
    if (file) fprintf(file, "%s %s\n", name, about), fclose(file);
    char wanted[100];
    int when;
    if (!fail || sscanf(fail, "%99s %d", wanted, &when) != 2 || strcmp(wanted, name)) return 0;
    return ++calls == when ? 2 : 0;
}

#define NOTE(...) \
    do { \
        char about[300]; \
        snprintf(about, sizeof about, __VA_ARGS__); \
        int code = note(__func__, about); \
        if (code) return code; \
    } while (0)

// The block in which an address lies: its number, else -1.
static int block_of(address at) {
    for (int i = 0; i < MOST; i++)
        if (blocks[i].at && at >= (address)blocks[i].at && at < (address)blocks[i].at + blocks[i].bytes) return i;
    return -1;
}

static int inside(address at, size_t bytes) {
    int i = block_of(at);
    return i >= 0 && at + bytes <= (address)blocks[i].at + blocks[i].bytes;
}

int64_t fake_bytes_from(address at) {
    int i = block_of(at);
    return i < 0 ? -1 : (int64_t)((address)blocks[i].at + blocks[i].bytes - at);
}

int cuGetErrorString(int code, const char** text) { return *text = code == 2 ? "out of memory" : "invalid", 0; }
int cuInit(unsigned flags) { NOTE("%u", flags); return 0; }
int cuDeviceGetCount(int* count) { NOTE("-"); return *count = number("FAKE_CUDA_DEVICES", 1), 0; }
int cuDeviceGet(int* device, int i) { NOTE("%d", i); return *device = i, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    NOTE("%d %d", attribute, device);
    int capability = number("FAKE_CUDA_CAPABILITY", 90);
    if (attribute != 75 && attribute != 76) return 1;
    return *value = attribute == 75 ? capability / 10 : capability % 10, 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { NOTE("%d", device); return *context = &contexts, 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { NOTE("%d", device); return 0; }
int cuCtxGetCurrent(void** context) { NOTE("-"); return *context = contexts ? &contexts : NULL, 0; }
int cuCtxGetDevice(int* device) { NOTE("-"); return *device = 0, 0; }
int cuCtxPushCurrent_v2(void* context) { NOTE("%d", ++contexts); return context == &contexts ? 0 : 201; }
int cuCtxPopCurrent_v2(void** context) { NOTE("%d", contexts--); return *context = &contexts, 0; }
int cuStreamCreate(void** stream, unsigned flags) { NOTE("%u", flags); return *stream = &modules, 0; }
int cuStreamSynchronize(void* stream) { NOTE("%d", stream == &modules); return 0; }
int cuStreamDestroy_v2(void* stream) { NOTE("%d", stream == &modules); return 0; }

int cuMemAlloc_v2(address* at, size_t bytes) {
    NOTE("%zu", bytes);
    int i = 0;
    while (blocks[i].at) i++;
    if (bytes == 0 || !(blocks[i].at = aligned_alloc(256, (bytes + 255) / 256 * 256))) return 1;
    memset(blocks[i].at, 0xff, bytes);  // NaN: nothing may be read that wasn't written
    return blocks[i].bytes = bytes, *at = (address)blocks[i].at, 0;
}
int cuMemFree_v2(address at) {
    int i = block_of(at);
    if (i < 0 || (address)blocks[i].at != at) return 1;
    NOTE("%zu", blocks[i].bytes);
    free(blocks[i].at);
    return blocks[i].at = NULL, 0;
}
static int copied(void* to, const void* from, size_t bytes) { return memcpy(to, from, bytes), 0; }
int cuMemcpyHtoD_v2(address to, const void* from, size_t bytes) {
    NOTE("%zu", bytes);
    return inside(to, bytes) ? copied((void*)to, from, bytes) : 1;
}
int cuMemcpyHtoDAsync_v2(address to, const void* from, size_t bytes, void* stream) {
    NOTE("%zu %d", bytes, stream == &modules);
    return inside(to, bytes) && !inside((address)from, 1) ? copied((void*)to, from, bytes) : 1;
}
int cuMemcpyDtoHAsync_v2(void* to, address from, size_t bytes, void* stream) {
    NOTE("%zu %d", bytes, stream == &modules);
    return inside(from, bytes) && !inside((address)to, 1) ? copied(to, (void*)from, bytes) : 1;
}
int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void* stream) {
    NOTE("%zu %d", bytes, stream == &modules);
    return inside(from, bytes) && inside(to, bytes) ? copied((void*)to, (void*)from, bytes) : 1;
}
int cuPointerGetAttribute(void* value, int attribute, address at) {
    if (block_of(at) < 0) return 1;
    return *(int*)value = attribute == 2 ? 2 : number("FAKE_CUDA_ORDINAL", 0), 0;
}
int cuModuleLoadData(void** module, const void* code) {
    NOTE("%d", memcmp(code, "\177ELF", 4) == 0);
    return modules++, *module = (void*)code, 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    NOTE("%s", name);
    snprintf(functions[made].name, sizeof functions[made].name, "%s", name);
    return module ? (*function = &functions[made++], 0) : 1;
}
int cuModuleUnload(void* module) { NOTE("%d", module != NULL); return modules--, 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) {
    NOTE("%d %d", attribute, value);
    return ((struct function*)function)->shared = (unsigned)value, 0;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
    unsigned shared, void* stream, void** arguments, void** extra) {
    struct function* f = function;
    NOTE("%s %u %u %u %d", f->name, x, threads, shared, stream == &modules);
    if (x == 0 || y != 1 || z != 1 || ty != 1 || tz != 1 || extra || (shared > 49152 && f->shared < shared)) return 1;
    if (launcher) launcher((int)(f - functions), x, threads, shared, arguments);
    return 0;
}
