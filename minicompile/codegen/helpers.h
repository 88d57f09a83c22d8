// Functions that generated kernels call. A kernel's source contains those that it uses, and what these use.
// Blocks are separated by empty lines (helpers.py reads them so).

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
// what is done to each element: a loop with a call that isn't inlined isn't vectorised either
#define MC_INLINE static inline __attribute__((always_inline))

// what is called often: gcc makes a function of vectors once, instead of a copy at each call
#if defined(__x86_64__) && !defined(__clang__)
#define MC_CALLED _Pragma("omp declare simd notinbranch") static __attribute__((noinline, const))
#else
#define MC_CALLED MC_INLINE
#endif

MC_INLINE float mc_float(int32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
MC_INLINE int32_t mc_bits(float f) { int32_t bits; memcpy(&bits, &f, 4); return bits; }

MC_INLINE double mc_double(int64_t bits) { double f; memcpy(&f, &bits, 8); return f; }
MC_INLINE int64_t mc_bits64(double f) { int64_t bits; memcpy(&bits, &f, 8); return bits; }

// hides where an integer is from: gcc takes (float)(int)x for truncf(x), which differs at -0.5 and infinity
MC_INLINE int64_t mc_opaque(int64_t x) { __asm__("" : "+r"(x)); return x; }

// a * b + c in one rounding where the processor can, else in two
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
#define mc_fma(a, b, c) __builtin_fmaf(a, b, c)
#else
#define mc_fma(a, b, c) ((a) * (b) + (c))
#endif

// polynomials in x of degree 2, 4 and 6, the highest coefficient first
MC_INLINE float mc_poly2(float x, float a, float b, float c) { return mc_fma(mc_fma(a, x, b), x, c); }
MC_INLINE float mc_poly4(float x, float a, float b, float c, float d, float e) {
    return mc_poly2(x, mc_poly2(x, a, b, c), d, e);
}
MC_INLINE float mc_poly6(float x, float a, float b, float c, float d, float e, float f, float g) {
    return mc_poly2(x, mc_poly4(x, a, b, c, d, e), f, g);
}

// exp(r) = 1 + r (1 + r P(r)) for |r| up to ln(2) / 2, and p 2^n for a shifted n (below) in two steps, so that
// 2^128 and denormals are reached; one of them is the same for most n
MC_INLINE float mc_exp_poly(float r) {
    return mc_poly4(r, 0.0013815033f, 0.00836878549f, 0.0416683927f, 0.166665196f, 0.49999994f);
}
MC_INLINE float mc_exp_near(float r) { return mc_fma(r, mc_fma(r, mc_exp_poly(r), 1.0f), 1.0f); }
MC_INLINE float mc_scaled(float p, float shifted) {
    bool low = shifted < 12582912.0f - 60.0f;
    uint32_t power = (uint32_t)mc_bits(shifted) << 23;
    return p * mc_float((int32_t)(power + (low ? 0x5f800000 : 0x3e800000))) * (low ? 0x1p-64f : 4.0f);
}

// exp(x) = 2^n exp(r), r = x - n ln 2;
// adding 1.5 * 2^23 rounds to an integer n and leaves it in the low bits
MC_INLINE float mc_exp(float x) {
    bool gone = x < -104.0f;  // 0, without the processor's slow path for denormals
    float c = x > 89.0f ? 89.0f : x;
    c = gone ? 0.0f : c;
    float shifted = mc_fma(c, 1.44269504f, 12582912.0f);
    float n = shifted - 12582912.0f;
    float r = mc_fma(n, -1.42860677e-6f, mc_fma(n, -0.693145752f, c));
    float found = mc_scaled(mc_exp_near(r), shifted);
    return gone ? 0.0f : found;
}

MC_INLINE float mc_exp2(float x) {
    bool gone = x < -151.0f;
    float c = x > 129.0f ? 129.0f : x;
    c = gone ? 0.0f : c;
    float shifted = c + 12582912.0f;
    float r = c - (shifted - 12582912.0f);
    float p = mc_exp_near(mc_fma(r, 0.693147182f, r * -1.90465421e-9f));
    float found = mc_scaled(p, shifted);
    return gone ? 0.0f : found;
}

// 2^n exp(r) - 1, by half of that: 2^127 is the largest power
MC_INLINE float mc_expm1(float x) {
    float c = x > 89.0f ? 89.0f : x;
    c = c < -20.0f ? -20.0f : c;
    float shifted = mc_fma(c, 1.44269504f, 12582912.0f);
    float n = shifted - 12582912.0f;
    float r = mc_fma(n, -1.42860677e-6f, mc_fma(n, -0.693145752f, c));
    float half = mc_float((mc_bits(shifted) - 0x4b400000 + 126) << 23);
    float part = mc_fma(r * r, mc_exp_poly(r), r);
    float found = 2.0f * mc_fma(part, half, half - 0.5f);
    return fabsf(x) < 1e-9f ? x : found;
}

// the logarithm of 2^k (1 + f), 1 + f between sqrt(1/2) and sqrt(2), to the base whose logarithms of 2 and e
// are given in two parts each
MC_INLINE float mc_log_of(float f, float k, float two, float two_low, float e, float e_low) {
    float p = mc_poly6(f, -0.0785961747f, 0.128816515f, -0.131287545f, 0.141811922f, -0.166245535f,
        0.200022861f, -0.250008106f);
    p = mc_fma(p, f, 0.333333164f);
    float square = f * f;
    float tail = mc_fma(square * f, p, square * -0.5f);
    return mc_fma(k, two, mc_fma(f, e, mc_fma(tail, e, mc_fma(f, e_low, k * two_low))));
}
MC_INLINE float mc_log_base(float x, float two, float two_low, float e, float e_low) {
    bool tiny = x < 1.17549435e-38f;
    float scale = tiny ? 8388608.0f : 1.0f, lost = tiny ? 23.0f : 0.0f;
    int32_t bits = mc_bits(x * scale);
    int32_t k = (bits - 0x3f3504f3) >> 23;
    float f = mc_float(bits - (int32_t)((uint32_t)k << 23)) - 1.0f;
    float found = mc_log_of(f, k - lost, two, two_low, e, e_low);
    found = x < INFINITY ? found : x;
    return x > 0.0f ? found : x == 0.0f ? -INFINITY : NAN;
}
MC_INLINE float mc_log(float x) { return mc_log_base(x, 0.693145752f, 1.42860677e-6f, 1.0f, 0.0f); }
MC_INLINE float mc_log2(float x) { return mc_log_base(x, 1.0f, 0.0f, 1.44269502f, 1.92596303e-8f); }
MC_INLINE float mc_log10(float x) {
    return mc_log_base(x, 0.301025391f, 4.60503907e-6f, 0.434294492f, -1.010305e-8f);
}

// f = (1 + x) / 2^k - 1 in one rounding, by a quarter of x: 2^-126 is the smallest power
MC_INLINE float mc_log1p(float x) {
    int32_t k = (mc_bits(x + 1.0f) - 0x3f3504f3) >> 23;
    float scale = mc_float((int32_t)(0x40800000u - ((uint32_t)k << 23)));
    float f = mc_fma(0.25f * x, scale, mc_fma(0.25f, scale, -1.0f));
    float found = mc_log_of(f, k, 0.693145752f, 1.42860677e-6f, 1.0f, 0.0f);
    found = x < INFINITY ? found : x;
    found = fabsf(x) < 1e-30f ? x : found;
    return x > -1.0f ? found : x == -1.0f ? -INFINITY : NAN;
}

// in doubles: polynomials, and 2^x to 29 bits, |x| below 1000, for what is rounded to float afterwards
MC_INLINE double mc_wide_poly4(double x, double a, double b, double c, double d, double e) {
    double upper = __builtin_fma(__builtin_fma(a, x, b), x, c);
    return __builtin_fma(__builtin_fma(upper, x, d), x, e);
}
MC_INLINE double mc_wide_exp2(double x) {
    double shifted = x + 6755399441055744.0;
    double r = x - (shifted - 6755399441055744.0);
    double p = __builtin_fma(0.00015345816438900667, r, 0.001339993130672523);
    p = mc_wide_poly4(r, p, 0.00961848894170975, 0.0555032877667487, 0.24022646890742702, 0.6931472057375063);
    p = __builtin_fma(p, r, 1.0000000005541747);
    return p * mc_double((int64_t)((uint64_t)(mc_bits64(shifted) + 1023) << 52));
}

// x^y = 2^(y log2 |x|), log2(m) by s = (m - 1) / (m + 1)
MC_INLINE float mc_pow(float x, float y) {
    float a = fabsf(x);
    bool tiny = a < 1.17549435e-38f;
    float scale = tiny ? 8388608.0f : 1.0f, lost = tiny ? 23.0f : 0.0f;
    int32_t bits = mc_bits(a * scale);
    int32_t k = (bits - 0x3f3504f3) >> 23;
    double m = mc_float(bits - (int32_t)((uint32_t)k << 23));
    double s = (m - 1.0) / (m + 1.0);
    double p = mc_wide_poly4(s * s, 0.3407383564280799, 0.41167221754442773, 0.5770835944832562,
        0.9617966732840222, 2.885390081790141);
    double power = __builtin_fma(s, p, k - lost);
    power = a < INFINITY ? power : a;
    power = a == 0.0f ? -INFINITY : power;
    power *= y;
    power = power > 200.0 ? 200.0 : power;
    power = power < -200.0 ? -200.0 : power;
    float found = mc_wide_exp2(power);
    bool whole = truncf(y) == y, odd = whole & (truncf(0.5f * y) != 0.5f * y);
    found = ((x < 0.0f) & !whole & (a < INFINITY)) ? NAN : found;
    found = ((mc_bits(x) < 0) & odd) ? -found : found;
    return (y == 0.0f) | (x == 1.0f) | ((a == 1.0f) & (fabsf(y) == INFINITY)) ? 1.0f : found;
}

// exp(-x^2) P(t), t = (x - 4) / (x + 4); 0 from 10.1 on
MC_INLINE float mc_erfc(float x) {
    float a = fabsf(x);
    double c = a > 10.1f ? 10.1f : a;
    double t = (c - 4.0) / (c + 4.0);
    double p = mc_wide_poly4(t, -0.00028835585141850445, -0.0009747613228259475, 0.004140819648729876,
        -0.012743787264796386, 0.031296501014623765);
    p = mc_wide_poly4(t, p, -0.06312637296675659, 0.1089624111711493, -0.16425646876117067, 0.2187197112640765);
    p = __builtin_fma(__builtin_fma(p, t, -0.25906807626797324), t, 0.1369994576842199);
    double found = p * mc_wide_exp2(c * c * -1.4426950408889634);
    return x < 0.0f ? 2.0 - found : found;
}

// x in quarter turns: the nearest integer's low bits, and the rest in radians, in two parts. 2/pi is given to
// 106 bits, without those that make whole turns: x from 2^50, 2^77, 2^104 on are multiples of 2^27, 2^54, 2^81.
typedef struct { int32_t quarters; float rest, low; } mc_angle;
MC_INLINE mc_angle mc_reduced(float x) {
    double c = x, a = fabs(c), high = 0.6366197723675814, low = -3.935735335036497e-17;
    high = a >= 0x1p50 ? -0.5529460512772132 * 0x1p-27 : high;
    low = a >= 0x1p50 ? 3.808591801500832e-17 * 0x1p-27 : low;
    high = a >= 0x1p77 ? 1.2910009524680295 * 0x1p-54 : high;
    low = a >= 0x1p77 ? -3.862804515881076e-17 * 0x1p-54 : low;
    high = a >= 0x1p104 ? -1.3139050952781812 * 0x1p-81 : high;
    low = a >= 0x1p104 ? 9.395526559852902e-17 * 0x1p-81 : low;
    double shifted = __builtin_fma(c, high, 6755399441055744.0);
    double rest = __builtin_fma(c, high, 6755399441055744.0 - shifted);
    rest = 1.5707963267948966 * __builtin_fma(c, low, rest);
    float rounded = rest;
    return (mc_angle){mc_bits64(shifted), rounded, rest - rounded};
}
// its sine, or with one quarter more its cosine
MC_INLINE float mc_sine(mc_angle angle, int32_t more) {
    float r = angle.rest, t = r * r;
    float sine = mc_fma(r * t, mc_poly2(t, -0.000194569278f, 0.00833170582f, -0.166666478f), r);
    float cosine = mc_poly2(t, 2.43707182e-05f, -0.00138867449f, 0.0416666344f);
    cosine = mc_fma(t * t, cosine, mc_fma(t, -0.5f, 1.0f));
    int32_t quarters = angle.quarters + more;
    float found = quarters & 1 ? cosine : sine;
    return quarters & 2 ? -found : found;
}
MC_INLINE float mc_sin(float x) {
    float found = mc_sine(mc_reduced(x), 0);
    return x == 0.0f ? x : found;
}
MC_INLINE float mc_cos(float x) { return mc_sine(mc_reduced(x), 1); }
MC_INLINE float mc_tan(float x) {
    mc_angle angle = mc_reduced(x);
    float r = angle.rest, t = r * r;
    float p = mc_poly6(t, 0.00561819784f, -0.0026253215f, 0.0131506622f, 0.0203143861f, 0.0542636216f,
        0.133307025f, 0.333334118f);
    float rest = mc_fma(r * t, p, mc_fma(angle.low, t, angle.low)), tangent = r + rest;
    rest -= tangent - r;  // what the sum lost
    float other = -1.0f / tangent;
    other = mc_fma(other, mc_fma(other, rest, mc_fma(other, tangent, 1.0f)), other);
    return x == 0.0f ? x : angle.quarters & 1 ? other : tangent;
}

MC_INLINE float mc_tanh(float x) {
    float a = fabsf(x);
    float t = x * x;
    float p = mc_poly4(t, -0.00566078722f, 0.0206020065f, -0.0537292287f, 0.133313283f, -0.333332777f);
    float near = mc_fma(t * x, p, x);
    float far = 1.0f - 2.0f / (mc_exp(2.0f * a) + 1.0f);
    return copysignf(a < 0.63f ? near : far, x);
}

MC_INLINE float mc_sigmoid(float x) { return 1.0f / (1.0f + mc_exp(-x)); }

// x + x P(x^2) near 0; from 0.9 on 1 - exp(Q(|x|)), which is 1 from 4 on; NaN stays in the former
MC_INLINE float mc_erf(float x) {
    float a = fabsf(x);
    float t = x * x;
    float p = mc_poly6(t, 8.53884339e-05f, -0.000818192842f, 0.0052044359f, -0.0268607531f, 0.112837195f,
        -0.376126349f, 0.128379166f);
    float near = mc_fma(x, p, x);
    float b = a > 4.0f ? 4.0f : a;
    float q = mc_poly6(b, 0.000198279828f, -0.00306629972f, 0.0223193616f, -0.104124278f, -0.636961699f,
        -1.12780714f, -0.000163713732f);
    float shifted = mc_fma(q, 1.44269504f, 12582912.0f);
    float r = mc_fma(shifted - 12582912.0f, -0.693147182f, q);
    uint32_t power = (uint32_t)mc_bits(shifted) << 23;
    float far = 1.0f - mc_float((int32_t)((uint32_t)mc_bits(mc_exp_near(r)) + power));
    return a >= 0.9f ? copysignf(far, x) : near;
}

// Philox4x32-10, ten rounds of two multiplications: a word of the numbers of `seed` at place `offset`
static inline uint32_t mc_philox(int64_t seed, int64_t offset, bool second) {
    uint32_t c0 = (uint32_t)offset, c1 = (uint32_t)(offset >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    _Pragma("GCC unroll 10") for (int i = 0; i < 10; i++) {
        uint64_t a = (uint64_t)c0 * 0xd2511f53u, b = (uint64_t)c2 * 0xcd9e8d57u;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0, c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1, c3 = (uint32_t)a;
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    return second ? c1 : c0;
}

// 0 to below 1: a word as a signed number, folded, in steps of a little under 2^-31
static inline float mc_uniform(uint32_t word) {
    int32_t folded = (int32_t)(word >> 31 ? ~word : word);
    return (float)folded * 4.6566127342e-10f;
}

static inline float mc_rand(int64_t seed, int64_t offset) {
    return mc_uniform(mc_philox(seed, offset, false));
}

// Box and Muller: how far, times the cosine of a random direction, which is sin(2 pi x) of an x within 1/4
static inline float mc_randn(int64_t seed, int64_t offset) {
    float first = mc_uniform(mc_philox(seed, offset, false));
    float x = 0.25f - fabsf(mc_uniform(mc_philox(seed, offset, true)) - 0.5f);
    float sine = mc_poly4(x * x, 39.7109184f, -76.5749893f, 81.6022339f, -41.3416786f, 6.28318548f) * x;
    return -sine * sqrtf(-2.0f * mc_log(first < 1e-7f ? 1e-7f : first));
}

// bfloat16 is the upper half of a float32; rounding is to nearest, ties to even
MC_INLINE float mc_from_bf16(uint16_t h) { return mc_float((int32_t)((uint32_t)h << 16)); }
MC_INLINE uint16_t mc_to_bf16(float f) {
    uint32_t u = (uint32_t)mc_bits(f);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return f != f ? (uint16_t)0x7fc0 : (uint16_t)rounded;
}

// float16 by integers: gcc does not vectorise _Float16. Adding 0.5 aligns a denormal's bits and rounds them.
MC_INLINE float mc_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)(h & 0x7fffu);
    uint32_t normal = (magnitude << 13) + 0x38000000u;
    uint32_t denormal = (uint32_t)mc_bits(mc_float((int32_t)(0x3f000000u | magnitude)) - 0.5f);
    uint32_t special = (magnitude << 13) | 0x7f800000u;
    uint32_t bits = magnitude < 0x0400u ? denormal : magnitude < 0x7c00u ? normal : special;
    return mc_float((int32_t)(sign | bits));
}
MC_INLINE uint16_t mc_to_f16(float f) {
    uint32_t bits = (uint32_t)mc_bits(f);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t u = bits & 0x7fffffffu;
    uint32_t normal = (u + 0xfffu + ((u >> 13) & 1u) - 0x38000000u) >> 13;
    uint32_t denormal = (uint32_t)mc_bits(mc_float((int32_t)u) + 0.5f) - 0x3f000000u;
    uint32_t found = u < 0x38800000u ? denormal : u < 0x477ff000u ? normal : 0x7c00u;
    found = u > 0x7f800000u ? 0x7e00u : found;
    return (uint16_t)(sign | found);
}

// division and remainder of indices that can be negative, towards minus infinity; b > 0
MC_INLINE int64_t mc_index_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a ^ b) < 0); }
MC_INLINE int64_t mc_index_mod(int64_t a, int64_t b) { return a % b + (a % b != 0 && (a ^ b) < 0 ? b : 0); }

// division that can't trap: by 0 it gives 0 (the kernel reports it), by -1 it wraps around
MC_INLINE int64_t mc_div(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? -a : a / b; }
MC_INLINE int64_t mc_mod(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }

static inline int64_t mc_int_pow(int64_t base, int64_t exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent & 1 ? -1 : 1) : 0;
    uint64_t result = 1, factor = (uint64_t)base;
    for (; exponent; exponent >>= 1, factor *= factor) result *= exponent & 1 ? factor : 1;
    return (int64_t)result;
}

// shifts by a negative or too large count push every bit out, as in eager
static inline int64_t mc_lshift(int64_t a, int64_t by, int64_t bits) {
    return by < 0 || by >= bits ? 0 : (int64_t)((uint64_t)a << by);
}
static inline int64_t mc_rshift(int64_t a, int64_t by, int64_t bits) {
    return a >> (by < 0 || by >= bits ? 63 : by);
}

// sixteen floats that are computed together; compilers make of them what the processor has
typedef float mc_lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t mc_masks __attribute__((vector_size(64), aligned(4), may_alias));
static inline mc_lanes mc_at(const float* x) { return *(const mc_lanes*)x; }
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MC_SHUFFLES
#endif
#endif
// f(0, step), f(1, step), ... f(15, step): the places a shuffle takes its lanes from
#define MC_FOUR(f, i, step) f(i, step), f(i + 1, step), f(i + 2, step), f(i + 3, step)
#define MC_PLACES(f, step) MC_FOUR(f, 0, step), MC_FOUR(f, 4, step), MC_FOUR(f, 8, step), MC_FOUR(f, 12, step)
#define MC_OTHER(i, step) ((i) ^ step)
#ifdef MC_SHUFFLES
#define mc_swapped(v, step) __builtin_shufflevector(v, v, MC_PLACES(MC_OTHER, step))
#else
static inline mc_lanes mc_swapped(mc_lanes v, int step) {
    mc_lanes found;
    for (int i = 0; i < 16; i++) found[i] = v[i ^ step];
    return found;
}
#endif

// how many of n columns each thread takes: whole vectors
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#endif
static inline int64_t mc_share(int64_t n) {
    int64_t threads = omp_get_max_threads();
    return (n + 16 * threads - 1) / (16 * threads) * 16;
}

// a reduction of n floats that lie side by side, in 64 lanes
#define MC_ROW(start, both, next) \
    mc_lanes a = (mc_lanes){0} + start, b = a, c = a, d = a; \
    int64_t i = 0; \
    for (; i + 64 <= n; i += 64) { \
        a = both(a, mc_at(x + i)); \
        b = both(b, mc_at(x + i + 16)); \
        c = both(c, mc_at(x + i + 32)); \
        d = both(d, mc_at(x + i + 48)); \
    } \
    for (; i + 16 <= n; i += 16) a = both(a, mc_at(x + i)); \
    a = both(both(a, b), both(c, d)); \
    a = both(a, mc_swapped(a, 8)); \
    a = both(a, mc_swapped(a, 4)); \
    a = both(a, mc_swapped(a, 2)); \
    a = both(a, mc_swapped(a, 1)); \
    float found = a[0]; \
    for (; i < n; i++) found = next; \
    return found;

// for short rows of which there are many, where doubles would take longer. What fills no vector is summed apart:
// each addition to the whole sum would round by its size
static inline mc_lanes mc_both(mc_lanes a, mc_lanes b) { return a + b; }
static inline float mc_whole_sum(const float* x, int64_t n) { MC_ROW(0.0f, mc_both, found) }
static inline float mc_short_sum(const float* x, int64_t n) {
    float rest = 0.0f;
    for (int64_t i = n & -16; i < n; i++) rest += x[i];
    return mc_whole_sum(x, n & -16) + rest;
}

// a sum in 64 lanes; they are added up as doubles, and so is what fills no vector
static inline double mc_lanes_sum(double* lanes) {
    for (int k = 0; k < 8; k++) lanes[k] += lanes[k + 8];
    for (int k = 0; k < 4; k++) lanes[k] += lanes[k + 4];
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}
static inline double mc_block_sum(const float* x, int64_t n) {
    mc_lanes a = {0}, b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        a += mc_at(x + i);
        b += mc_at(x + i + 16);
        c += mc_at(x + i + 32);
        d += mc_at(x + i + 48);
    }
    for (; i + 16 <= n; i += 16) a += mc_at(x + i);
    a = (a + b) + (c + d);
    double lanes[16];
    for (int k = 0; k < 16; k++) lanes[k] = a[k];
    double total = n < 16 ? 0.0 : mc_lanes_sum(lanes);
    for (; i < n; i++) total += x[i];
    return total;
}
// of a long row four floats at a time go into doubles: rounding errors don't pile up
static inline float mc_row_sum(const float* x, int64_t n) {
    if (n < 2048) return mc_block_sum(x, n);
    double lanes[16] = {0};
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        mc_lanes four = (mc_at(x + i) + mc_at(x + i + 16)) + (mc_at(x + i + 32) + mc_at(x + i + 48));
        for (int k = 0; k < 16; k++) lanes[k] += four[k];
    }
    return mc_lanes_sum(lanes) + mc_block_sum(x + i, n - i);
}

// NaN stays: it is taken, and nothing compares better than it
#define MC_LANES_BEST(better) \
    mc_masks take = (mc_masks)((b better a) | (b != b)); \
    return (mc_lanes)((take & (mc_masks)b) | (~take & (mc_masks)a));
#define MC_NEXT(better) ((x[i] better found) | (x[i] != x[i]) ? x[i] : found)
static inline mc_lanes mc_lanes_max(mc_lanes a, mc_lanes b) { MC_LANES_BEST(>) }
static inline mc_lanes mc_lanes_min(mc_lanes a, mc_lanes b) { MC_LANES_BEST(<) }
static inline float mc_row_max(const float* x, int64_t n) { MC_ROW((-INFINITY), mc_lanes_max, MC_NEXT(>)) }
static inline float mc_row_min(const float* x, int64_t n) { MC_ROW(INFINITY, mc_lanes_min, MC_NEXT(<)) }

// the first place of what mc_row_max or mc_row_min has found
static inline int64_t mc_row_find(const float* x, int64_t n, float best) {
    int64_t i = 0;
    for (int32_t found = 0; i + 64 <= n; i += 64) {
        _Pragma("omp simd reduction(|:found)")
        for (int64_t j = i; j < i + 64; j++) found |= (x[j] == best) | ((x[j] != x[j]) & (best != best));
        if (found) break;
    }
    while (i < n && x[i] != best && (x[i] == x[i] || best == best)) i++;
    return i;
}

// the same for doubles: OpenMP's max and min may drop a NaN, so that is noted apart; clang's start at -DBL_MAX
#pragma omp declare reduction(mc_max: double: omp_out = omp_in > omp_out ? omp_in : omp_out) initializer(omp_priv = -INFINITY)
#pragma omp declare reduction(mc_min: double: omp_out = omp_in < omp_out ? omp_in : omp_out) initializer(omp_priv = INFINITY)
#define MC_ROW_DOUBLE(better, worst, simd) \
    double found = worst; \
    int32_t nan = 0; \
    _Pragma(simd) \
    for (int64_t i = 0; i < n; i++) { \
        found = x[i] better found ? x[i] : found; \
        nan |= x[i] != x[i]; \
    } \
    return nan ? NAN : found;
static inline double mc_row_max_double(const double* x, int64_t n) {
    MC_ROW_DOUBLE(>, -INFINITY, "omp simd reduction(mc_max:found) reduction(|:nan)")
}
static inline double mc_row_min_double(const double* x, int64_t n) {
    MC_ROW_DOUBLE(<, INFINITY, "omp simd reduction(mc_min:found) reduction(|:nan)")
}

// a square of a matrix, turned: target[j][i] = source[i][j], in blocks of 16 x 16 by four rounds of shuffles
#define MC_SQUARE const void* from, int64_t jump, void* to, int64_t width, int64_t rows, int64_t columns
#ifdef MC_SHUFFLES
#define MC_LOW(i, step) ((i) & step ? ((i) ^ step) + 16 : (i))
#define MC_HIGH(i, step) ((i) & step ? (i) + 16 : (i) ^ step)
#define MC_ROUND(from, to, step) \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) if (!(i & step)) { \
        to[i] = __builtin_shufflevector(from[i], from[i | step], MC_PLACES(MC_LOW, step)); \
        to[i | step] = __builtin_shufflevector(from[i], from[i | step], MC_PLACES(MC_HIGH, step)); \
    }
static inline void mc_transpose16(const int32_t* source, int64_t jump, int32_t* target, int64_t width) {
    mc_masks a[16], b[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) a[i] = *(const mc_masks*)(source + i * jump);
    MC_ROUND(a, b, 1)
    MC_ROUND(b, a, 2)
    MC_ROUND(a, b, 4)
    MC_ROUND(b, a, 8)
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) *(mc_masks*)(target + i * width) = a[i];
}
#endif
static inline void mc_transpose_4(MC_SQUARE) {
    const int32_t* source = (const int32_t*)from;
    int32_t* target = (int32_t*)to;
    int64_t whole_rows = 0, whole_columns = 0;
#ifdef MC_SHUFFLES
    whole_rows = rows / 16 * 16, whole_columns = columns / 16 * 16;
    for (int64_t i = 0; i < whole_rows; i += 16)
        for (int64_t j = 0; j < whole_columns; j += 16)
            mc_transpose16(source + i * jump + j, jump, target + j * width + i, width);
#endif
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; j++)
            memcpy(target + j * width + i, source + i * jump + j, 4);
}

#define MC_TRANSPOSE(type) \
    for (int64_t i = 0; i < rows; i++) \
        for (int64_t j = 0; j < columns; j++) \
            memcpy((type*)to + j * width + i, (const type*)from + i * jump + j, sizeof(type));
static inline void mc_transpose_1(MC_SQUARE) { MC_TRANSPOSE(int8_t) }
static inline void mc_transpose_2(MC_SQUARE) { MC_TRANSPOSE(int16_t) }
static inline void mc_transpose_8(MC_SQUARE) { MC_TRANSPOSE(int64_t) }
