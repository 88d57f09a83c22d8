// What clang calls for `omp parallel` and `omp for`, on the threads of GNU's library: those that torch has here.
// (LLVM: openmp/runtime/src/kmp_csupport.cpp; GNU: libgomp/parallel.c.) A file that needs more doesn't load.
#include <stdarg.h>
#include <stdint.h>
#define MC_INTERNAL __attribute__((visibility("hidden"), used))
#define MC_MOST 64
#define MC_FOUR_OF(a, i) a[i], a[i + 1], a[i + 2], a[i + 3]
#define MC_ALL_OF(a, i) MC_FOUR_OF(a, i), MC_FOUR_OF(a, i + 4), MC_FOUR_OF(a, i + 8), MC_FOUR_OF(a, i + 12)

void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
void GOMP_barrier(void);
void GOMP_critical_start(void);
void GOMP_critical_end(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);

typedef void (*mc_region)(int32_t*, int32_t*, ...);
typedef struct { mc_region region; void* shared[MC_MOST]; } mc_call;

// a function may be given more than it takes: the caller puts it on the stack and takes it away
static void mc_run(void* given) {
    mc_call* call = (mc_call*)given;
    void** a = call->shared;
    int32_t thread = omp_get_thread_num(), bound = 0;
    call->region(&thread, &bound, MC_ALL_OF(a, 0), MC_ALL_OF(a, 16), MC_ALL_OF(a, 32), MC_ALL_OF(a, 48));
}
MC_INTERNAL void __kmpc_fork_call(void* place, int32_t count, mc_region region, ...) {
    mc_call call = {region, {0}};
    va_list given;
    va_start(given, region);
    if (count > MC_MOST) __builtin_trap();
    for (int i = 0; i < count; i++) call.shared[i] = va_arg(given, void*);
    va_end(given);
    GOMP_parallel(mc_run, &call, 0, 0);
}

// where `if(...)` says no: one thread does all, though the caller may be one of several
static __thread int mc_alone;
MC_INTERNAL void __kmpc_serialized_parallel(void* place, int32_t thread) { mc_alone++; }
MC_INTERNAL void __kmpc_end_serialized_parallel(void* place, int32_t thread) { mc_alone--; }
MC_INTERNAL int32_t __kmpc_global_thread_num(void* place) { return mc_alone ? 0 : omp_get_thread_num(); }
MC_INTERNAL void __kmpc_barrier(void* place, int32_t thread) {
    if (!mc_alone) GOMP_barrier();
}

// this thread's share of a loop from *lower to *upper: equal ones, the first of them longer by one
MC_INTERNAL void __kmpc_for_static_init_8(void* place, int32_t thread, int32_t schedule, int32_t* last,
                                          int64_t* lower, int64_t* upper, int64_t* stride, int64_t step,
                                          int64_t chunk) {
    int64_t all = *upper - *lower + 1, threads = mc_alone ? 1 : omp_get_num_threads();
    int64_t id = __kmpc_global_thread_num(place);
    int64_t share = all / threads, longer = all % threads;
    *stride = all;
    *lower += id * share + (id < longer ? id : longer);
    *upper = *lower + share - (id < longer ? 0 : 1);
    *last = id == (share ? threads : longer) - 1;
}
MC_INTERNAL __attribute__((alias("__kmpc_for_static_init_8"))) __typeof__(__kmpc_for_static_init_8)
    __kmpc_for_static_init_8u;
MC_INTERNAL void __kmpc_for_static_fini(void* place, int32_t thread) {}

// `reduction`: 1 means that the caller adds its part now, alone
#define MC_REDUCE void *place, int32_t thread, int32_t count, int64_t size, void *data, void *function, void *lock
MC_INTERNAL int32_t __kmpc_reduce_nowait(MC_REDUCE) { return GOMP_critical_start(), 1; }
MC_INTERNAL int32_t __kmpc_reduce(MC_REDUCE) { return GOMP_critical_start(), 1; }
MC_INTERNAL void __kmpc_end_reduce_nowait(void* place, int32_t thread, void* lock) { GOMP_critical_end(); }
MC_INTERNAL void __kmpc_end_reduce(void* place, int32_t thread, void* lock) {
    GOMP_critical_end();
    __kmpc_barrier(place, thread);
}
