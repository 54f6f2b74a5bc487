/* Attention of single tokens to keys and values in the blocks of a paged cache, for CPUs.
 *
 * Compiled by weft/models/native_kernel.py with -DWIDTH (elements of a head, a multiple of 16), -DGROUP (query heads of a
 * key head) and -DSIZE (tokens of a block), so that the inner loops have fixed lengths. What a token gets depends on
 * nothing else in the batch.
 */
#include <stdint.h>
#include <string.h>

/* Elements that are added at once, and keys that are read ahead of their use: more would wait for each other. */
#define LANES 16
#define AHEAD 8
#define PIECES (WIDTH / LANES)

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));

/* exp(x) for x <= 0 (the polynomial of Cephes); NaN stays NaN. Not that of kernel_parts.h, whose roundings differ: the
 * texts of a seed would change. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    const int32_t n = (int32_t)(x * 1.44269504f - 0.5f);
    x = x - (float)n * 0.693359375f + (float)n * 2.12194440e-4f;
    float y = 1.9875691500e-4f * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    const int32_t bits = (n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

static inline void softmax(float *scores, int64_t count) {
    float most = scores[0], total = 0;
    for (int64_t i = 1; i < count; i++) most = scores[i] > most ? scores[i] : most;
    for (int64_t i = 0; i < count; i++) scores[i] = exponential(scores[i] - most);
    for (int64_t i = 0; i < count; i++) total += scores[i];
    for (int64_t i = 0; i < count; i++) scores[i] /= total;
}

/* What all heads of one key hold; the key AHEAD of it is brought into the second level of the caches. */
static inline const float *row_of(const float *store, const int32_t *table, int64_t key, int64_t end, int64_t row) {
    const int64_t later = key + AHEAD < end ? key + AHEAD : key;
    const float *ahead = store + (table[later / SIZE] * (int64_t)SIZE + later % SIZE) * row;
    for (int64_t i = 0; i < row; i += LANES) __builtin_prefetch(ahead + i, 0, 2);
    return store + (table[key / SIZE] * (int64_t)SIZE + key % SIZE) * row;
}

/* Write the attention of the tokens number first to last of a batch to out.
 *
 * q, out: [packed tokens, kv_heads, GROUP, WIDTH]; keys, values: [blocks, SIZE, kv_heads, WIDTH]; tables: [texts,
 * blocks]. rows, texts, places: of each token its index in q, its text, and the number of the text's tokens before it.
 * window: the number of tokens that a token sees, itself included; 0: all. scores: room for all heads' keys.
 */
void weft_attend(const float *q, const float *keys, const float *values, float *out, const int32_t *tables,
                 const int32_t *rows, const int32_t *texts, const int32_t *places, int64_t first, int64_t last,
                 int64_t blocks, int64_t kv_heads, int64_t window, float scale, float *scores) {
    const int64_t heads = kv_heads * GROUP, row = kv_heads * WIDTH;
    for (int64_t token = first; token < last; token++) {
        const int32_t *table = tables + texts[token] * blocks;
        const float *queries = q + rows[token] * heads * WIDTH;
        float *results = out + rows[token] * heads * WIDTH;
        const int64_t end = places[token] + (int64_t)1;
        const int64_t begin = window && end > window ? end - window : 0;
        const int64_t count = end - begin;

        for (int64_t key = begin; key < end; key++) {
            const float *at = row_of(keys, table, key, end, row);
            for (int64_t head = 0; head < heads; head++) {
                const float *query = queries + head * WIDTH, *k = at + head / GROUP * WIDTH;
                float sum = 0;
                for (int64_t i = 0; i < WIDTH; i++) sum += query[i] * k[i];
                scores[head * count + key - begin] = sum * scale;
            }
        }
        for (int64_t head = 0; head < heads; head++) softmax(scores + head * count, count);

        memset(results, 0, heads * WIDTH * sizeof *results);
        for (int64_t part = begin; part < end; part += AHEAD) {
            const int64_t length = end - part < AHEAD ? end - part : AHEAD;
            const float *at[AHEAD];
            for (int64_t i = 0; i < length; i++) at[i] = row_of(values, table, part + i, end, row);
            for (int64_t head = 0; head < heads; head++) {
                const float *shares = scores + head * count + part - begin;
                lanes *result = (lanes *)(results + head * WIDTH), sum[PIECES];
                for (int64_t p = 0; p < PIECES; p++) sum[p] = result[p];
                for (int64_t i = 0; i < length; i++)
                    for (int64_t p = 0; p < PIECES; p++)
                        sum[p] += shares[i] * ((const lanes *)(at[i] + head / GROUP * WIDTH))[p];
                for (int64_t p = 0; p < PIECES; p++) result[p] = sum[p];
            }
        }
    }
}
