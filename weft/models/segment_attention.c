/* Attention of short segments, and its gradients, for CPUs.
 *
 * Compiled by weft/models/segment_attention.py with -DWIDTH, the elements of a head, a multiple of 16. A segment attends
 * causally to itself, and to all tokens of the segment that it follows, if it follows one. A task is the part of a segment
 * that shares a key head; all its tensors stay in the caches.
 */
#include "kernel_parts.h"

extern void GOMP_barrier(void);

/* Numbers of a register, and how many registers have room for sums. */
#ifdef __AVX512F__
#define WIDE 16
#define SUMS 24
#define MOST 64
#else
#define WIDE 8
#define SUMS 12
#define MOST 32
#endif

/* Columns that are computed at once, in so many registers, and rows. */
#define COLUMNS (WIDTH % MOST == 0 ? MOST : WIDTH % 32 == 0 ? 32 : 16)
#define VECTORS (COLUMNS / WIDE)
#define TILE (SUMS / VECTORS > 6 ? 6 : SUMS / VECTORS)

typedef float numbers __attribute__((vector_size(4 * WIDE), aligned(4)));

/* A pass. heads, of_heads: queries, keys and values of all heads beside each other, before they are rotated, and their
 * gradients, [tokens, joined]. bias: what is added to heads, [joined], or NULL. cos, sin: [tokens, WIDTH / 2]. out, grad:
 * the result and its gradient, [tokens, heads * WIDTH]. edges: where segments begin, and where the last one ends; parents:
 * of each the segment that it follows, or -1. own: room for each thread, own_step numbers. keys: most keys of a segment.
 */
typedef struct {
    const float *heads, *bias, *cos, *sin, *grad;
    float *of_heads, *out, *own;
    const int32_t *edges, *parents;
    int64_t own_step, tokens, segments, kv_heads, group, keys;
    float scale;
} Pass;

/* sums[count][COLUMNS] (+)= a * b: a(i, k) = a[i * rows + k * inner], b: rows of COLUMNS numbers, b_step apart. */
static inline __attribute__((always_inline)) void tile(const float *a, int64_t rows, int64_t inner, const float *b,
                                                       int64_t b_step, int64_t first, int64_t last, float *out,
                                                       int64_t out_step, const int add, const int count) {
    numbers sum[TILE][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < TILE; i++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            sum[i][v] = i < count && add ? *(const numbers *)(out + i * out_step + v * WIDE) : (numbers){0};
    for (int64_t k = first; k < last; k++) {
        const float *line = b + k * b_step;
#pragma GCC unroll 8
        for (int i = 0; i < TILE; i++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                if (i < count) sum[i][v] += a[i * rows + k * inner] * *(const numbers *)(line + v * WIDE);
    }
#pragma GCC unroll 8
    for (int i = 0; i < TILE; i++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            if (i < count) *(numbers *)(out + i * out_step + v * WIDE) = sum[i][v];
}

/* Which k of a product count: all, those up to a row's own key (lower), or those from a row's own query on (upper). */
enum { ALL, LOWER, UPPER };

/* out[m][columns] (+)= a * b, over k below depth. behind: keys before the first own one. */
static inline __attribute__((always_inline)) void product(const float *a, int64_t rows, int64_t inner, const float *b,
                                                          int64_t b_step, int64_t depth, float *out, int64_t out_step,
                                                          int64_t m, int64_t columns, const int add, const int which,
                                                          int64_t behind) {
    for (int64_t c = 0; c < columns; c += COLUMNS)
        for (int64_t i = 0; i < m;) {
            const int whole = i + TILE <= m;
            const int64_t end = whole ? i + TILE : i + 1, reach = behind + end;
            const int64_t first = which == UPPER && i > behind ? i - behind : 0;
            const int64_t last = which == LOWER && reach < depth ? reach : depth;
            if (whole)
                tile(a + i * rows, rows, inner, b + c, b_step, first, last, out + i * out_step + c, out_step, add, TILE);
            else
                tile(a + i * rows, rows, inner, b + c, b_step, first, last, out + i * out_step + c, out_step, add, 1);
            i = end;
        }
}

/* Rotate a head, plus a bias if there is one; or rotate back. */
static inline void rotate(const float *x, const float *bias, const float *cos, const float *sin, float *to) {
    for (int64_t i = 0; i < WIDTH / 2; i++) {
        const int64_t j = i + WIDTH / 2;
        const float a = x[i] + (bias ? bias[i] : 0), b = x[j] + (bias ? bias[j] : 0);
        to[i] = a * cos[i] - b * sin[i];
        to[j] = b * cos[i] + a * sin[i];
    }
}

static inline void rotate_back(const float *x, const float *cos, const float *sin, float *to) {
    for (int64_t i = 0; i < WIDTH / 2; i++) {
        const int64_t j = i + WIDTH / 2;
        const float a = x[i], b = x[j];
        to[i] = a * cos[i] + b * sin[i];
        to[j] = b * cos[i] - a * sin[i];
    }
}

static void turn(const float *rows, int64_t count, int64_t padded, float *columns) {
    for (int64_t i = 0; i < WIDTH; i++) {
        for (int64_t j = 0; j < count; j++) columns[i * padded + j] = rows[j * WIDTH + i];
        for (int64_t j = count; j < padded; j++) columns[i * padded + j] = 0;
    }
}

/* Shares of the keys that the query i sees, and 0 behind them. */
static void softmax(float *scores, int64_t seen, int64_t padded, float scale) {
    float most = -INFINITY, total = 0;
    for (int64_t j = 0; j < seen; j++) most = scores[j] > most ? scores[j] : most;
    for (int64_t j = 0; j < seen; j++) {
        scores[j] = exponential((scores[j] - most) * scale);
        total += scores[j];
    }
    const float share = 1.0f / total;
    for (int64_t j = 0; j < seen; j++) scores[j] *= share;
    for (int64_t j = seen; j < padded; j++) scores[j] = 0;
}

/* Compute one task. of_keys, of_values: this thread's sums of gradients, [tokens, kv_heads, WIDTH]. */
static void attend(const Pass *p, int64_t segment, int64_t kv_head, float *room, float *of_keys, float *of_values) {
    const int64_t first = p->edges[segment], count = p->edges[segment + 1] - first, parent = p->parents[segment];
    const int64_t before = parent < 0 ? 0 : p->edges[parent], behind = parent < 0 ? 0 : p->edges[parent + 1] - before;
    const int64_t keys = behind + count, padded = (keys + COLUMNS - 1) / COLUMNS * COLUMNS, half = WIDTH / 2;
    const int64_t heads = p->kv_heads * p->group * WIDTH, kv = p->kv_heads * WIDTH, joined = heads + 2 * kv;
    float *k = room, *v = k + keys * WIDTH, *dk = v + keys * WIDTH, *dv = dk + keys * WIDTH;
    float *q = dv + keys * WIDTH, *g = q + count * WIDTH, *o = g + count * WIDTH, *dq = o + count * WIDTH;
    float *kt = dq + count * WIDTH, *vt = kt + padded * WIDTH, *s = vt + padded * WIDTH, *ds = s + count * padded;

    for (int64_t j = 0; j < keys; j++) {
        const int64_t token = j < behind ? before + j : first + j - behind;
        const float *key = p->heads + token * joined + heads + kv_head * WIDTH, *value = key + kv;
        const float *bias = p->bias ? p->bias + heads + kv_head * WIDTH : 0;
        rotate(key, bias, p->cos + token * half, p->sin + token * half, k + j * WIDTH);
        for (int64_t i = 0; i < WIDTH; i++) v[j * WIDTH + i] = value[i] + (bias ? bias[kv + i] : 0);
    }
    turn(k, keys, padded, kt);
    turn(v, keys, padded, vt);
    memset(dk, 0, 2 * keys * WIDTH * sizeof *dk);
    for (int64_t head = kv_head * p->group; head < (kv_head + 1) * p->group; head++) {
        for (int64_t i = 0; i < count; i++) {
            const int64_t token = first + i;
            rotate(p->heads + token * joined + head * WIDTH, p->bias ? p->bias + head * WIDTH : 0, p->cos + token * half,
                   p->sin + token * half, q + i * WIDTH);
            memcpy(g + i * WIDTH, p->grad + token * heads + head * WIDTH, WIDTH * sizeof *g);
        }
        product(q, WIDTH, 1, kt, padded, WIDTH, s, padded, count, padded, 0, ALL, 0);
        for (int64_t i = 0; i < count; i++) softmax(s + i * padded, behind + i + 1, padded, p->scale);
        product(s, padded, 1, v, WIDTH, keys, o, WIDTH, count, WIDTH, 0, LOWER, behind);
        product(g, WIDTH, 1, vt, padded, WIDTH, ds, padded, count, padded, 0, ALL, 0);
        for (int64_t i = 0; i < count; i++) {
            float sum = 0;
            for (int64_t w = 0; w < WIDTH; w++) sum += g[i * WIDTH + w] * o[i * WIDTH + w];
            for (int64_t j = 0; j < padded; j++) ds[i * padded + j] = s[i * padded + j] * (ds[i * padded + j] - sum) * p->scale;
        }
        product(ds, padded, 1, k, WIDTH, keys, dq, WIDTH, count, WIDTH, 0, LOWER, behind);
        product(ds, 1, padded, q, WIDTH, count, dk, WIDTH, keys, WIDTH, 1, UPPER, behind);
        product(s, 1, padded, g, WIDTH, count, dv, WIDTH, keys, WIDTH, 1, UPPER, behind);
        for (int64_t i = 0; i < count; i++) {
            const int64_t token = first + i;
            memcpy(p->out + token * heads + head * WIDTH, o + i * WIDTH, WIDTH * sizeof *o);
            rotate_back(dq + i * WIDTH, p->cos + token * half, p->sin + token * half,
                        p->of_heads + token * joined + head * WIDTH);
        }
    }
    for (int64_t j = 0; j < keys; j++) {
        const int64_t token = j < behind ? before + j : first + j - behind, at = (token * p->kv_heads + kv_head) * WIDTH;
        for (int64_t i = 0; i < WIDTH; i++) of_keys[at + i] += dk[j * WIDTH + i];
        for (int64_t i = 0; i < WIDTH; i++) of_values[at + i] += dv[j * WIDTH + i];
    }
}

static void run_tasks(void *given) {
    const Pass *p = given;
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), half = WIDTH / 2;
    const int64_t kv = p->kv_heads * WIDTH, heads = kv * p->group, joined = heads + 2 * kv, size = p->tokens * kv;
    float *sums = p->own + thread * p->own_step;
    memset(sums, 0, 2 * size * sizeof *sums);
    for (int64_t task = thread; task < p->segments * p->kv_heads; task += threads)
        attend(p, task / p->kv_heads, task % p->kv_heads, sums + 2 * size, sums, sums + size);
    GOMP_barrier();
    for (int64_t token = p->tokens * thread / threads; token < p->tokens * (thread + 1) / threads; token++) {
        float *to = p->of_heads + token * joined + heads, *sum = p->own + token * kv;
        for (int64_t other = 1; other < threads; other++) {
            const float *from = sum + other * p->own_step;
            for (int64_t i = 0; i < kv; i++) sum[i] += from[i];
            for (int64_t i = 0; i < kv; i++) sum[size + i] += from[size + i];
        }
        for (int64_t head = 0; head < p->kv_heads; head++)
            rotate_back(sum + head * WIDTH, p->cos + token * half, p->sin + token * half, to + head * WIDTH);
        memcpy(to + kv, sum + size, kv * sizeof *to);
    }
}

/* Compute a pass in so many threads. */
void weft_segments(Pass *pass, unsigned threads) { GOMP_parallel(run_tasks, pass, threads, 0); }
