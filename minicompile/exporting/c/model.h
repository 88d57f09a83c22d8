// What the parts of a package's library know of one another.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include "minicompile_package.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    const char* name;
    int64_t offset, bytes;
} mc_weight;

// The new contents of an input or a buffer, which go there when all else is done.
typedef struct {
    mc_tensor value;
    void* target;
} mc_written;

// model.c: the compiled graph.
extern const mc_weight mc_weights[];
int mc_check(const mc_tensor* in, int64_t* size);
int64_t mc_plan(const int64_t* size, int64_t* at);
int mc_call(char* const* state, const mc_tensor* in, mc_tensor* out, mc_written* written,
    const int64_t* size, char* arena, const int64_t* at);

// runtime.c. All give 1 and keep a text for mc_error where something is wrong, else 0.
int mc_fail(const char* form, ...);
int mc_expect(const mc_tensor* given, const char* name, int dtype, int ndim);
int mc_expect_size(const mc_tensor* given, const char* name, int axis, int64_t size);
int mc_check_processor(void);
int mc_check_call(const mc_model* model, const mc_tensor* in, int inputs, int outputs, int64_t* size);
size_t mc_bytes_of(const mc_tensor* tensor);
// The weights' file, whole. NULL, and a text, if it isn't.
char* mc_map_weights(const char* folder);

// A result, whose elements may lie in strided memory.
int mc_give(mc_tensor* out, const void* from, int dtype, int bytes, int ndim, const int64_t* shape,
    const int64_t* strides);
// Elements of strided memory, one after the other.
void mc_gather(void* to, const void* from, int bytes, int ndim, const int64_t* shape, const int64_t* strides);

// operators.c takes structs by address: gcc 12 copies some constant ones wrongly with AVX-512 ({4, 4, 0, 0} as
// {4, 4, 4, 4}) when they are passed by value.

// Element (i, j) of matrix n is data[n * batch + i * row + j * column].
typedef struct {
    float* data;
    int64_t batch, row, column;
} mc_matrix;

// out = alpha * a @ b + beta * added; added may be NULL; out->column is 1.
int mc_product(int64_t batch, int64_t rows, int64_t columns, int64_t depth, const mc_matrix* out, const mc_matrix* a,
    const mc_matrix* b, const mc_matrix* added, float alpha, float beta);

// Four dimensions: batch, heads, tokens, channels.
typedef struct {
    float* data;
    int64_t stride[4];
} mc_heads;

// softmax(scale * q @ k^T + mask) @ v; mask may be NULL. size: batch, heads, queries, keys, channels of k and v.
int mc_attention(const int64_t size[6], const mc_heads* out, const mc_heads* q, const mc_heads* k, const mc_heads* v,
    const mc_heads* mask, int causal, float scale);

// Images: batch, channels, height, width.
typedef struct {
    float* data;
    int64_t size[4], stride[4];
} mc_images;

typedef struct {
    int64_t stride[2], padding[2], dilation[2], groups;
} mc_window;

int mc_convolution(const mc_images* out, const mc_images* in, const mc_images* weight, const float* bias,
    const mc_window* window);
