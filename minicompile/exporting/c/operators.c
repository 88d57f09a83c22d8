// Operators that are more than loops over elements: matrix products, attention, convolution, in float32.
// Products: K. Goto, R. van de Geijn, Anatomy of High-Performance Matrix Multiplication (2008).

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#endif
#include <stdlib.h>

#include "model.h"

#define SMALLER(a, b) ((a) < (b) ? (a) : (b))
#define LANES 16

// A tile of the product is summed in registers: ROWS x 2 vectors. (AVX-512 has 32 of 16 floats, AVX2 16 of 8.)
#ifdef __AVX512F__
enum { ROWS = 12 };
#else
enum { ROWS = 3 };
#endif
// Blocks fit the second cache, a panel of `b` the first.
enum { COLUMNS = 2 * LANES, DEPTH = 256, TALL = 288, WIDE = 16 * COLUMNS, FEW = 4 };

static void tile(int64_t depth, const float* a, const float* b, float* out, int64_t row) {
    mc_lanes sum[ROWS][2] = {0};
    for (int64_t k = 0; k < depth; k++, a += ROWS, b += COLUMNS) {
        mc_lanes left = mc_at(b), right = mc_at(b + LANES);
        _Pragma("GCC unroll 12") for (int i = 0; i < ROWS; i++) {
            sum[i][0] += a[i] * left;
            sum[i][1] += a[i] * right;
        }
    }
    _Pragma("GCC unroll 12") for (int i = 0; i < ROWS; i++) {
        *(mc_lanes*)(out + i * row) += sum[i][0];
        *(mc_lanes*)(out + i * row + LANES) += sum[i][1];
    }
}

// Panels of `width` lines, each with its elements for k = 0, 1, ... side by side; lines that are missing are 0.
static void pack(float* to, const float* from, int64_t line, int64_t step, int64_t lines, int64_t depth, int width) {
    for (int64_t first = 0; first < lines; first += width, to += width * depth) {
        int64_t here = SMALLER(width, lines - first);
        const float* panel = from + first * line;
        if (step == 1 && here == width && width % LANES == 0) {
            mc_transpose_4(panel, line, to, width, width, depth);
            continue;
        }
        for (int64_t k = 0; k < depth; k++) {
            if (line == 1 && here == width) {
                memcpy(to + k * width, panel + k * step, (size_t)width * sizeof(float));
                continue;
            }
            int64_t i = 0;
            for (; i < here; i++) to[k * width + i] = panel[i * line + k * step];
            for (; i < width; i++) to[k * width + i] = 0;
        }
    }
}

// One block of the product: at most TALL x WIDE. `space` holds its packed parts.
static void block(int64_t rows, int64_t columns, int64_t depth, const mc_matrix* out, const mc_matrix* a,
    const mc_matrix* b, float alpha, float* space) {
    float *packed_a = space, *packed_b = packed_a + (TALL + ROWS) * DEPTH, edge[ROWS * COLUMNS];
    for (int64_t k = 0; k < depth; k += DEPTH) {
        int64_t deep = SMALLER(DEPTH, depth - k);
        pack(packed_a, a->data + k * a->column, a->row, a->column, rows, deep, ROWS);
        pack(packed_b, b->data + k * b->row, b->column, b->row, columns, deep, COLUMNS);
        if (alpha != 1.0f)
            for (int64_t i = 0; i < (rows + ROWS - 1) / ROWS * ROWS * deep; i++) packed_a[i] *= alpha;
        for (int64_t j = 0; j < columns; j += COLUMNS)
            for (int64_t i = 0; i < rows; i += ROWS) {
                int64_t high = SMALLER(ROWS, rows - i), wide = SMALLER(COLUMNS, columns - j);
                float *left = packed_a + i * deep, *right = packed_b + j * deep, *to = out->data + i * out->row + j;
                if (high == ROWS && wide == COLUMNS) {
                    tile(deep, left, right, to, out->row);
                    continue;
                }
                memset(edge, 0, sizeof edge);
                tile(deep, left, right, edge, COLUMNS);
                for (int64_t y = 0; y < high; y++)
                    for (int64_t x = 0; x < wide; x++) to[y * out->row + x] += edge[y * COLUMNS + x];
            }
    }
}

// One row times a matrix whose rows lie in memory: eight of them at a time are added up.
static void add_rows(int64_t columns, int64_t depth, float* restrict out, const float* x, const float* b, int64_t row,
    float alpha) {
    int64_t k = 0;
    for (; k + 8 <= depth; k += 8) {
        const float *y = b + k * row, *z = x + k;
        float s0 = alpha * z[0], s1 = alpha * z[1], s2 = alpha * z[2], s3 = alpha * z[3];
        float s4 = alpha * z[4], s5 = alpha * z[5], s6 = alpha * z[6], s7 = alpha * z[7];
#pragma omp simd
        for (int64_t j = 0; j < columns; j++)
            out[j] += ((s0 * y[j] + s1 * y[j + row]) + (s2 * y[j + 2 * row] + s3 * y[j + 3 * row]))
                + ((s4 * y[j + 4 * row] + s5 * y[j + 5 * row]) + (s6 * y[j + 6 * row] + s7 * y[j + 7 * row]));
    }
    for (; k < depth; k++)
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) out[j] += alpha * x[k] * b[k * row + j];
}

// One row times a matrix whose columns lie in memory: four dot products at a time.
static void dot_columns(int64_t columns, int64_t depth, float* out, const float* x, const float* b, int64_t column,
    float alpha) {
    int64_t j = 0;
    for (; j + 4 <= columns; j += 4, b += 4 * column) {
        mc_lanes sum[4] = {0};
        int64_t k = 0;
        for (; k + LANES <= depth; k += LANES)
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) sum[i] += mc_at(x + k) * mc_at(b + i * column + k);
        for (int i = 0; i < 4; i++) {
            float total = mc_short_sum((float*)&sum[i], LANES);
            for (int64_t r = k; r < depth; r++) total += x[r] * b[i * column + r];
            out[j + i] += alpha * total;
        }
    }
    for (; j < columns; j++, b += column) {
        float total = 0;
        for (int64_t k = 0; k < depth; k++) total += x[k] * b[k];
        out[j] += alpha * total;
    }
}

static int product(int64_t rows, int64_t columns, int64_t depth, const mc_matrix* out, const mc_matrix* a,
    const mc_matrix* b, const mc_matrix* added, float alpha, float beta) {
    int64_t work = rows * columns * depth;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            float start = added && beta != 0 ? beta * added->data[i * added->row + j * added->column] : 0;
            out->data[i * out->row + j] = start;
        }
    if (rows <= FEW && (a->column == 1 || depth == 1) && (b->column == 1 || b->row == 1)) {
        int64_t threads = work < 1 << 15 ? 1 : omp_get_max_threads(), strip = (columns + threads - 1) / threads;
        strip = SMALLER((strip + 63) / 64 * 64, 4096);
#pragma omp parallel for if (threads > 1) schedule(static)
        for (int64_t j = 0; j < columns; j += strip)
            for (int64_t i = 0; i < rows; i++) {
                int64_t wide = SMALLER(strip, columns - j);
                float *to = out->data + i * out->row + j, *x = a->data + i * a->row, *from = b->data + j * b->column;
                if (b->column == 1) add_rows(wide, depth, to, x, from, b->row, alpha);
                else dot_columns(wide, depth, to, x, from, b->column, alpha);
            }
        return 0;
    }
    int64_t down = (rows + TALL - 1) / TALL, across = (columns + WIDE - 1) / WIDE, failed = 0;
    int64_t bytes = ((TALL + ROWS) + (WIDE + COLUMNS)) * DEPTH * (int64_t)sizeof(float);
#pragma omp parallel if (work > 1 << 16 && down * across > 1) reduction(| : failed)
    {
        float* space = aligned_alloc(64, (size_t)bytes);
        failed |= !space;
#pragma omp for collapse(2) schedule(static)
        for (int64_t j = 0; j < across; j++)
            for (int64_t i = 0; i < down; i++)
                if (space) {
                    mc_matrix to = *out, left = *a, right = *b;
                    to.data += i * TALL * to.row + j * WIDE;
                    left.data += i * TALL * left.row;
                    right.data += j * WIDE * right.column;
                    int64_t high = SMALLER(TALL, rows - i * TALL), wide = SMALLER(WIDE, columns - j * WIDE);
                    block(high, wide, depth, &to, &left, &right, alpha, space);
                }
        free(space);
    }
    return failed ? mc_fail("out of memory") : 0;
}

int mc_product(int64_t batch, int64_t rows, int64_t columns, int64_t depth, const mc_matrix* out, const mc_matrix* a,
    const mc_matrix* b, const mc_matrix* added, float alpha, float beta) {
    int failed = 0;
#pragma omp parallel for if (batch >= omp_get_max_threads() && batch * rows * columns * depth > 1 << 16) reduction(| : failed)
    for (int64_t n = 0; n < batch; n++) {
        mc_matrix to = *out, left = *a, right = *b, more = added ? *added : to;
        to.data += n * to.batch, left.data += n * left.batch, right.data += n * right.batch, more.data += n * more.batch;
        failed |= product(rows, columns, depth, &to, &left, &right, added ? &more : NULL, alpha, beta);
    }
    return failed ? mc_fail("out of memory") : 0;
}

// A row of scores as probabilities. Where nothing is visible all are 0, as in the library that eager calls.
static void softmax(float* row, int64_t n) {
    float most = mc_row_max(row, n);
    if (most == -INFINITY) {
        memset(row, 0, (size_t)n * sizeof *row);
        return;
    }
#pragma omp simd
    for (int64_t j = 0; j < n; j++) row[j] = mc_exp(row[j] - most);
    float total = mc_row_sum(row, n);
#pragma omp simd
    for (int64_t j = 0; j < n; j++) row[j] /= total;
}

// A few queries at a time, so that their scores stay in the cache.
int mc_attention(const int64_t size[6], const mc_heads* out, const mc_heads* q, const mc_heads* k, const mc_heads* v,
    const mc_heads* mask, int causal, float scale) {
    enum { QUERIES = 48 };
    const int64_t heads = size[1], queries = size[2], keys = size[3], channels = size[4], values = size[5];
    const int64_t blocks = (queries + QUERIES - 1) / QUERIES, count = size[0] * heads * blocks;
    int failed = 0;
#pragma omp parallel for if (count > 1) reduction(| : failed)
    for (int64_t n = 0; n < count; n++) {
        int64_t b = n / blocks / heads, h = n / blocks % heads, first = n % blocks * QUERIES;
        int64_t rows = SMALLER(QUERIES, queries - first), seen = causal ? SMALLER(keys, first + rows) : keys;
#define PART(x, token) (x->data + b * x->stride[0] + h * x->stride[1] + (token) * x->stride[2])
        float* space = malloc((size_t)(rows * seen + 1) * sizeof(float));
        if (!space) {
            failed = 1;
            continue;
        }
        mc_matrix scores = {space, 0, seen, 1}, left = {PART(q, first), 0, q->stride[2], q->stride[3]};
        mc_matrix right = {PART(k, 0), 0, k->stride[3], k->stride[2]};
        failed |= product(rows, seen, channels, &scores, &left, &right, NULL, scale, 0);
        for (int64_t i = 0; i < rows; i++) {
            float* row = space + i * seen;
            if (mask)
                for (int64_t j = 0; j < seen; j++) row[j] += PART(mask, first + i)[j * mask->stride[3]];
            for (int64_t j = first + i + 1; causal && j < seen; j++) row[j] = -INFINITY;
            softmax(row, seen);
        }
        mc_matrix to = {PART(out, first), 0, out->stride[2], 1}, from = {PART(v, 0), 0, v->stride[2], v->stride[3]};
        failed |= product(rows, values, seen, &to, &scores, &from, NULL, 1, 0);
        free(space);
    }
    return failed ? mc_fail("out of memory") : 0;
}

// The pixels under the window at each place: [places][channels * window], 0 outside of the image.
static void windows(float* to, const float* image, const mc_images* in, const mc_images* out,
    const mc_images* weight, const mc_window* w) {
    for (int64_t y = 0; y < out->size[2]; y++)
        for (int64_t x = 0; x < out->size[3]; x++)
            for (int64_t c = 0; c < weight->size[1]; c++)
                for (int64_t v = 0; v < weight->size[2]; v++)
                    for (int64_t u = 0; u < weight->size[3]; u++) {
                        int64_t i = y * w->stride[0] - w->padding[0] + v * w->dilation[0];
                        int64_t j = x * w->stride[1] - w->padding[1] + u * w->dilation[1];
                        int inside = i >= 0 && i < in->size[2] && j >= 0 && j < in->size[3];
                        *to++ = inside ? image[c * in->stride[1] + i * in->stride[2] + j * in->stride[3]] : 0;
                    }
}

// Each image and group of channels is a product of windows and weights.
int mc_convolution(const mc_images* out, const mc_images* in, const mc_images* weight, const float* bias,
    const mc_window* w) {
    const int64_t group = out->size[1] / w->groups, places = out->size[2] * out->size[3];
    const int64_t depth = weight->size[1] * weight->size[2] * weight->size[3];
    const int64_t count = out->size[0] * w->groups;
    float* filters = malloc((size_t)(out->size[1] * depth + 1) * sizeof(float));
    int failed = !filters;
    if (filters) mc_gather(filters, weight->data, sizeof(float), 4, weight->size, weight->stride);
#pragma omp parallel for if (count >= omp_get_max_threads()) reduction(| : failed)
    for (int64_t n = 0; n < count; n++) {
        int64_t image = n / w->groups, g = n % w->groups;
        float* space = filters ? malloc((size_t)(places * depth + 1) * sizeof(float)) : NULL;
        if (!space) {
            failed = 1;
            continue;
        }
        windows(space, in->data + image * in->stride[0] + g * weight->size[1] * in->stride[1], in, out, weight, w);
        float* to = out->data + image * out->stride[0] + g * group * out->stride[1];
        mc_matrix pixels = {space, 0, depth, 1}, kernels = {filters + g * group * depth, 0, depth, 1};
        int side_by_side = out->stride[1] == 1;  // the channels of a pixel
        mc_matrix result = {to, 0, out->stride[side_by_side ? 3 : 1], 1};
        mc_matrix added = {bias ? (float*)bias + g * group : NULL, 0, !side_by_side, side_by_side};
        const mc_matrix* start = bias ? &added : NULL;
        if (side_by_side) {
            kernels.row = 1, kernels.column = depth;
            failed |= product(places, group, depth, &result, &pixels, &kernels, start, 1, 1);
        } else {
            pixels.row = 1, pixels.column = depth;
            failed |= product(group, places, depth, &result, &kernels, &pixels, start, 1, 1);
        }
        free(space);
    }
    free(filters);
    return failed ? mc_fail("out of memory") : 0;
}
