/* What kernels in C share: the threads of PyTorch's operators, exponentials, and the largest value of a row. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel_threads.h"

/* a * b + c, whose roundings no compiler may change. */
#if defined(__FMA__) || defined(__aarch64__)
#define FUSED(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#endif

/* exp(x) for x <= 0 (the polynomial of Cephes); NaN stays NaN. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float whole = rintf(x * 1.44269504f);
    const float f = FUSED(whole, 2.12194440e-4f, FUSED(whole, -0.693359375f, x));
    float y = 1.9875691500e-4f * f + 1.3981999507e-3f;
    y = y * f + 8.3334519073e-3f;
    y = y * f + 4.1665795894e-2f;
    y = y * f + 1.6666665459e-1f;
    y = y * f + 5.0000001201e-1f;
    y = y * f * f + f + 1.0f;
    const int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

/* Values that are compared at once. */
#define LANES 16

/* The largest value that is a number. */
static inline float largest(const float *row, int64_t n) {
    float most[LANES], best = -INFINITY;
    int64_t i = 0;
    for (int64_t j = 0; j < LANES; j++) most[j] = -INFINITY;
    for (; i + LANES <= n; i += LANES)
        for (int64_t j = 0; j < LANES; j++) most[j] = row[i + j] > most[j] ? row[i + j] : most[j];
    for (; i < n; i++) best = row[i] > best ? row[i] : best;
    for (int64_t j = 0; j < LANES; j++) best = most[j] > best ? most[j] : best;
    return best;
}
