/* Layers of a decoder, and single products, for passes of at most ROWS rows on CPUs. Weights are read where they lie.
 *
 * Compiled by weft/models/row_layers.py with -DROWS (a multiple of 16) and the macros of native_kernel.c, whose attention
 * it calls. The rows of a pass are the lanes of registers: a number of a weight is multiplied with that number's input of
 * all rows at once, so that no weight has to be packed and no sum goes over lanes. All threads run through all layers, and
 * wait for each other where one needs what others have computed.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel_threads.h"
#include "native_kernel.c"

/* Numbers of a register, and how many registers have room for sums. */
#ifdef __AVX512F__
#define WIDE 16
#define SUMS 24
#else
#define WIDE 8
#define SUMS 12
#endif

/* Registers with one number of all rows, rows of a weight that are multiplied at once, and elements of them that are copied
 * at once: where rows of a weight begin a power of two apart, the first level of the caches could not hold a line of each.
 */
#define VECTORS (ROWS / WIDE)
#define TILE (SUMS / VECTORS)
#define FEWER (TILE < 4 ? TILE : 4)
#define LINE 16
/* Outputs that are computed before they are turned to rows. */
#define CHUNK 48

typedef float numbers __attribute__((vector_size(4 * WIDE), aligned(4)));
typedef int32_t places_of __attribute__((vector_size(4 * WIDE)));

#define EACH_OF_8(f, i) f(i) f(i + 1) f(i + 2) f(i + 3) f(i + 4) f(i + 5) f(i + 6) f(i + 7)
#define EACH_SUM(f) EACH_OF_8(f, 0) EACH_OF_8(f, 8) EACH_OF_8(f, 16)

/* The pointers of a layer. Weights: [out, in]; bias: of queries, keys and values, or NULL; keys, values: the cache's tokens,
 * [tokens, kv_heads, WIDTH]; kept: room for what the products make of the rows, [ROWS, out], or NULL.
 */
typedef struct {
    const float *attention_norm, *heads[3], *bias[3], *out, *ffn_norm, *gate, *up, *down;
    float *keys, *values;
    float *kept_heads, *kept_out, *kept_wide, *kept_down;
} Layer;

/* A pass. slots: of each row the token of the cache that it becomes. tables to places: as in weft_attend. cos, sin: [rows,
 * WIDTH / 2]. x: the residual stream, [ROWS, embed], changed in place. shared: room for all threads; own: for each thread,
 * own_step numbers.
 */
typedef struct {
    const Layer *layers;
    int64_t count, rows, embed, kv_heads, ffn, blocks;
    const int64_t *slots;
    const int32_t *tables, *tokens, *texts, *places;
    const float *cos, *sin;
    float *x, *shared, *own;
    int64_t own_step;
    float eps, scale;
} Pass;

/* A product of x, [ROWS, in], with a weight [out, in]: y, [ROWS, out]. own: room of ROWS * in numbers for each thread. */
typedef struct {
    const float *x, *weight;
    float *y, *own;
    int64_t in, out;
} Product;

/* Multiply count rows of a weight, at most TILE, with the columns x, [in, ROWS]: y, [count, ROWS]. */
static inline __attribute__((always_inline)) void tile(const float *weight, int64_t in, const float *x, float *y,
                                                       const int count) {
    numbers sum[SUMS], column[VECTORS];
    float line[2][TILE * LINE] __attribute__((aligned(64)));
#define CLEAR(i)                                    \
    if ((i) < count * VECTORS) sum[i] = (numbers){0};
#define LOAD(i)                                     \
    if ((i) < VECTORS) column[i] = *(const numbers *)(at + WIDE * (i));
#define ADD(i)                                      \
    if ((i) < count * VECTORS) sum[i] += now[LINE * ((i) / VECTORS) + j] * column[(i) % VECTORS];
#define STORE(i)                                    \
    if ((i) < count * VECTORS) *(numbers *)(y + WIDE * (i)) = sum[i];
    EACH_SUM(CLEAR)
    for (int t = 0; t < count; t++) memcpy(line[0] + LINE * t, weight + t * in, LINE * sizeof *weight);
    for (int64_t k = 0; k < in; k += LINE) {
        const float *now = line[k / LINE % 2];
        float *later = line[1 - k / LINE % 2];
        const float *next = weight + (k + LINE < in ? k + LINE : k), *far = weight + count * in + k;
        for (int t = 0; t < count; t++) {
            memcpy(later + LINE * t, next + t * in, LINE * sizeof *weight);
            __builtin_prefetch(far + t * in, 0, 2);
        }
        for (int64_t j = 0; j < LINE; j++) {
            const float *at = x + (k + j) * ROWS;
            EACH_OF_8(LOAD, 0)
            EACH_SUM(ADD)
        }
    }
    EACH_SUM(STORE)
}

/* Multiply the rows first to last of a weight with the columns x, [in, ROWS]: y, [last - first, ROWS]. */
static void multiply(const float *weight, int64_t in, const float *x, int64_t first, int64_t last, float *y) {
    int64_t o = first;
    for (; o + TILE <= last; o += TILE) tile(weight + o * in, in, x, y + (o - first) * ROWS, TILE);
    for (; o + FEWER <= last; o += FEWER) tile(weight + o * in, in, x, y + (o - first) * ROWS, FEWER);
    for (; o < last; o++) tile(weight + o * in, in, x, y + (o - first) * ROWS, 1);
}

/* Turn a square of WIDE rows to columns. */
static inline void turn(const float *from, int64_t from_step, float *to, int64_t to_step) {
    numbers row[WIDE];
#define LOW(l, d) (((l) & (d)) ? (l) - (d) + WIDE : (l))
#define HIGH(l, d) (((l) & (d)) ? (l) + WIDE : (l) + (d))
#define OF_8(f, l, d) f(l, d), f(l + 1, d), f(l + 2, d), f(l + 3, d), f(l + 4, d), f(l + 5, d), f(l + 6, d), f(l + 7, d)
#if WIDE == 16
#define MASK(f, d) {OF_8(f, 0, d), OF_8(f, 8, d)}
#else
#define MASK(f, d) {OF_8(f, 0, d)}
#endif
#define STAGE(d)                                                       \
    {                                                                  \
        const places_of low = MASK(LOW, d), high = MASK(HIGH, d);      \
        _Pragma("GCC unroll 16") for (int i = 0; i < WIDE; i++) if (!(i & (d))) { \
            const numbers a = row[i], b = row[i + (d)];                \
            row[i] = __builtin_shuffle(a, b, low);                     \
            row[i + (d)] = __builtin_shuffle(a, b, high);              \
        }                                                              \
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++) row[i] = *(const numbers *)(from + i * from_step);
#if WIDE == 16
    STAGE(8)
#endif
    STAGE(4) STAGE(2) STAGE(1)
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++) *(numbers *)(to + i * to_step) = row[i];
}

/* Turn rows, [ROWS, size], to columns, [size, ROWS]. */
static void turn_rows(const float *rows, int64_t size, float *columns) {
    for (int64_t i = 0; i < size; i += WIDE)
        for (int64_t r = 0; r < ROWS; r += WIDE) turn(rows + r * size + i, size, columns + i * ROWS + r, ROWS);
}

/* Turn columns, [size, ROWS], to rows that begin step numbers apart. */
static void turn_columns(const float *columns, int64_t size, float *rows, int64_t step) {
    for (int64_t i = 0; i < size; i += WIDE)
        for (int64_t r = 0; r < ROWS; r += WIDE) turn(columns + i * ROWS + r, ROWS, rows + r * step + i, step);
}

/* Multiply the rows first to last of a weight with the columns x, and write the results to these places of rows. */
static void multiply_to_rows(const float *weight, int64_t in, const float *x, int64_t first, int64_t last, float *rows,
                             int64_t step) {
    float part[CHUNK * ROWS] __attribute__((aligned(64)));
    for (int64_t o = first; o < last; o += CHUNK) {
        const int64_t end = o + CHUNK < last ? o + CHUNK : last;
        multiply(weight, in, x, o, end, part);
        turn_columns(part, end - o, rows + o, step);
    }
}

/* RMSNorm of rows, [ROWS, size], as columns, [size, ROWS]. */
static void norm_rows(const float *rows, const float *scale, float eps, int64_t size, float *columns) {
    float inverse[ROWS] = {0};
    turn_rows(rows, size, columns);
    for (int64_t i = 0; i < size; i++)
        for (int64_t r = 0; r < ROWS; r++) inverse[r] += columns[i * ROWS + r] * columns[i * ROWS + r];
    for (int64_t r = 0; r < ROWS; r++) inverse[r] = 1.0f / sqrtf(inverse[r] / (float)size + eps);
    for (int64_t i = 0; i < size; i++)
        for (int64_t r = 0; r < ROWS; r++) columns[i * ROWS + r] *= inverse[r] * scale[i];
}

/* Where the share of a thread begins; that of a thread behind the last one is the end. size: a multiple of 16. */
static inline int64_t share(int64_t size, int64_t thread, int64_t threads) {
    return size / 16 * thread / threads * 16;
}

/* Rotate count heads of a row, plus a bias if there is one. */
static void rotate(const float *heads, const float *bias, int64_t count, const float *cos, const float *sin, float *out) {
    for (int64_t head = 0; head < count; head++)
        for (int64_t i = 0; i < WIDTH / 2; i++) {
            const int64_t at = head * WIDTH + i, other = at + WIDTH / 2;
            const float a = heads[at] + (bias ? bias[at] : 0), b = heads[other] + (bias ? bias[other] : 0);
            out[at] = a * cos[i] - b * sin[i];
            out[other] = b * cos[i] + a * sin[i];
        }
}

/* Rotate the queries of rows; rotate their keys, and write keys and values into the cache. */
static void write_rows(const Pass *p, const Layer *layer, const float *joined, int64_t first, int64_t last, float *queries) {
    const int64_t kv = p->kv_heads * WIDTH, heads = kv * GROUP, half = WIDTH / 2;
    for (int64_t row = first; row < last; row++) {
        const float *own = joined + row * (heads + 2 * kv), *value = own + heads + kv;
        const float *cos = p->cos + row * half, *sin = p->sin + row * half;
        float *to = layer->values + p->slots[row] * kv;
        rotate(own, layer->bias[0], p->kv_heads * GROUP, cos, sin, queries + row * heads);
        rotate(own + heads, layer->bias[1], p->kv_heads, cos, sin, layer->keys + p->slots[row] * kv);
        for (int64_t i = 0; i < kv; i++) to[i] = value[i] + (layer->bias[2] ? layer->bias[2][i] : 0);
    }
}

/* gate = silu(gate) * up. */
static void activate(float *gate, const float *up, int64_t count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) {
        const float x = gate[i], e = exponential(-fabsf(x));
        gate[i] = x * ((x >= 0 ? 1.0f : e) / (1.0f + e)) * up[i];
    }
}

/* Add a product of columns to the residual stream: the elements from first to last. room: room for it, [ROWS, embed]. */
static void add_product(const Pass *p, const float *weight, int64_t in, const float *columns, int64_t first, int64_t last,
                        float *room) {
    multiply_to_rows(weight, in, columns, first, last, room, p->embed);
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t i = first; i < last; i++) p->x[r * p->embed + i] += room[r * p->embed + i];
}

static void run_layers(void *given) {
    const Pass *p = given;
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t embed = p->embed, ffn = p->ffn, kv = p->kv_heads * WIDTH, heads = kv * GROUP, joined = heads + 2 * kv;
    const int64_t sizes[] = {heads, kv, kv}, before[] = {0, heads, heads + kv};
    float *columns = p->own + thread * p->own_step, *scores = columns + ROWS * (embed > heads ? embed : heads);
    float *queries = p->shared, *attended = queries + ROWS * heads, *gates = attended + ROWS * heads;
    float *ups = gates + ROWS * ffn, *raw = ups + ROWS * ffn, *sums = raw + ROWS * joined;
    const int64_t e0 = share(embed, thread, threads), e1 = share(embed, thread + 1, threads);
    const int64_t f0 = share(ffn, thread, threads), f1 = share(ffn, thread + 1, threads);
    const int64_t first = p->rows * thread / threads, last = p->rows * (thread + 1) / threads;

    for (const Layer *layer = p->layers; layer < p->layers + p->count; layer++) {
        float *own = layer->kept_heads ? layer->kept_heads : raw;
        norm_rows(p->x, layer->attention_norm, p->eps, embed, columns);
        for (int i = 0; i < 3; i++)
            multiply_to_rows(layer->heads[i], embed, columns, share(sizes[i], thread, threads),
                             share(sizes[i], thread + 1, threads), own + before[i], joined);
        GOMP_barrier();
        write_rows(p, layer, own, first, last, queries);
        GOMP_barrier();
        weft_attend(queries, layer->keys, layer->values, attended, p->tables, p->tokens, p->texts, p->places, first, last,
                    p->blocks, p->kv_heads, 0, p->scale, scores);
        GOMP_barrier();
        turn_rows(attended, heads, columns);
        add_product(p, layer->out, heads, columns, e0, e1, layer->kept_out ? layer->kept_out : sums);
        GOMP_barrier();
        norm_rows(p->x, layer->ffn_norm, p->eps, embed, columns);
        multiply(layer->gate, embed, columns, f0, f1, gates + f0 * ROWS);
        multiply(layer->up, embed, columns, f0, f1, ups + f0 * ROWS);
        if (layer->kept_wide) {
            turn_columns(gates + f0 * ROWS, f1 - f0, layer->kept_wide + f0, 2 * ffn);
            turn_columns(ups + f0 * ROWS, f1 - f0, layer->kept_wide + ffn + f0, 2 * ffn);
        }
        activate(gates + f0 * ROWS, ups + f0 * ROWS, (f1 - f0) * ROWS);
        GOMP_barrier();
        add_product(p, layer->down, ffn, gates, e0, e1, layer->kept_down ? layer->kept_down : sums);
        GOMP_barrier();
    }
}

static void run_product(void *given) {
    const Product *p = given;
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    float *columns = p->own + thread * p->in * ROWS;
    turn_rows(p->x, p->in, columns);
    multiply_to_rows(p->weight, p->in, columns, share(p->out, thread, threads), share(p->out, thread + 1, threads), p->y,
                     p->out);
}

/* Run all layers of a pass in so many threads. */
void weft_layers(Pass *pass, unsigned threads) { GOMP_parallel(run_layers, pass, threads, 0); }

/* Compute a product in so many threads. */
void weft_rows_product(Product *product, unsigned threads) { GOMP_parallel(run_product, product, threads, 0); }
