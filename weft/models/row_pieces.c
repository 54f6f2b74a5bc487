/* Elementwise parts of a decoder's blocks and their gradients, for CPUs: each reads and writes its rows once.
 *
 * Compiled by weft/models/row_pieces.py. What a row gets depends on no other row, but for sums over rows.
 */
#include "kernel_parts.h"

static inline float sigmoid(float x) {
    const float e = exponential(-fabsf(x));
    return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

/* Rows of some tensors, size numbers each, but for inverse with one, and sums, [threads, size]. What each is, the functions
 * below say.
 */
typedef struct {
    const float *a, *b, *c, *d;
    float *x, *y, *inverse, *sums;
    int64_t rows, size;
    float eps;
} Pieces;

/* a: [rows, 2 * size], gate beside up. x = silu(gate) * up. */
static void gate(const Pieces *p, int64_t first, int64_t last, int64_t thread) {
    for (int64_t row = first; row < last; row++) {
        const float *open = p->a + row * 2 * p->size, *up = open + p->size;
        float *to = p->x + row * p->size;
#pragma GCC ivdep
        for (int64_t i = 0; i < p->size; i++) to[i] = open[i] * sigmoid(open[i]) * up[i];
    }
}

/* b: the gradient of gate's result. x, y: the gradients of gate and up. */
static void gate_back(const Pieces *p, int64_t first, int64_t last, int64_t thread) {
    for (int64_t row = first; row < last; row++) {
        const float *open = p->a + row * 2 * p->size, *up = open + p->size, *grad = p->b + row * p->size;
        float *of_gate = p->x + row * p->size, *of_up = p->y + row * p->size;
#pragma GCC ivdep
        for (int64_t i = 0; i < p->size; i++) {
            const float s = sigmoid(open[i]), silu = open[i] * s, slope = s + silu * (1.0f - s), g = grad[i];
            of_gate[i] = g * up[i] * slope;
            of_up[i] = g * silu;
        }
    }
}

/* a: rows, b: scale. x = a / sqrt(mean(a^2) + eps) * scale; inverse: 1 / that root. */
static void norm(const Pieces *p, int64_t first, int64_t last, int64_t thread) {
    for (int64_t row = first; row < last; row++) {
        const float *from = p->a + row * p->size;
        float *to = p->x + row * p->size, sum = 0;
        for (int64_t i = 0; i < p->size; i++) sum += from[i] * from[i];
        const float inverse = 1.0f / sqrtf(sum / (float)p->size + p->eps);
        p->inverse[row] = inverse;
#pragma GCC ivdep
        for (int64_t i = 0; i < p->size; i++) to[i] = from[i] * inverse * p->b[i];
    }
}

/* c: the gradient of norm's result; d: what is added to that of its rows. x = the sum; sums: a thread's part of the gradient
 * of scale.
 */
static void norm_back(const Pieces *p, int64_t first, int64_t last, int64_t thread) {
    float *sums = p->sums + thread * p->size;
    for (int64_t row = first; row < last; row++) {
        const float *from = p->a + row * p->size, *grad = p->c + row * p->size, *plus = p->d + row * p->size;
        const float inverse = p->inverse[row];
        float *to = p->x + row * p->size, product = 0;
#pragma GCC ivdep
        for (int64_t i = 0; i < p->size; i++) {
            const float each = grad[i] * from[i];
            product += each * p->b[i];
            sums[i] += each * inverse;
        }
        const float pull = -product * inverse * inverse * inverse / (float)p->size;
#pragma GCC ivdep
        for (int64_t i = 0; i < p->size; i++) to[i] = plus[i] + grad[i] * p->b[i] * inverse + from[i] * pull;
    }
}

typedef void (*Part)(const Pieces *, int64_t, int64_t, int64_t);

typedef struct {
    const Pieces *pieces;
    Part part;
} Work;

static void run_part(void *given) {
    const Work *work = given;
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), rows = work->pieces->rows;
    work->part(work->pieces, rows * thread / threads, rows * (thread + 1) / threads, thread);
}

/* Run the part of this number in so many threads. */
void weft_pieces(const Pieces *pieces, unsigned threads, int number) {
    static const Part parts[] = {gate, gate_back, norm, norm_back};
    Work work = {pieces, parts[number]};
    GOMP_parallel(run_part, &work, threads, 0);
}
