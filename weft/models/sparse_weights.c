/* Products with a weight of which most elements are zero, stored as a bitmap and values, for CPUs.
 *
 * Compiled by weft/models/sparse_weights.py with -DNARROW=1 for values in bfloat16, 0 for float32. Each bit of the
 * bitmap says whether an element has a value; bit 0 of a byte is the first element. Eight elements are spread to a
 * register by a table and multiplied there, so that memory gives bits and values only. (AVX-512 has an instruction for
 * it, which took 3 times as long on a Zen 4.) What a row of x gets depends on no other row.
 */
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

/* Elements that are spread at once, and whose bits are read at once. */
#define LANES 8
#define WORD 32
/* Bytes that values are brought into the cache ahead of their use. */
#define AHEAD 2048
#define COUNT __builtin_popcount
/* An end of values that is never reached. */
#define ANYWHERE ((const stored *)UINTPTR_MAX)
#if NARROW
typedef uint16_t stored;
#else
typedef float stored;
#endif

/* The bits of 32 elements from element number column on; those behind the end are 0. */
static inline uint32_t bits_at(const uint8_t *line, int64_t column, int64_t bytes) {
    uint32_t bits = 0;
    const int64_t at = column / 8;
    if (at + 4 <= bytes)
        memcpy(&bits, line + at, 4);
    else
        memcpy(&bits, line + at, bytes - at);
    return bits;
}

#if defined(__AVX2__) && defined(__FMA__)
typedef __m256 lanes;

/* For each byte of the bitmap: where each of its eight elements lies among the values. Of bfloat16, in bytes: its two
 * are the upper half of a float, and what has its highest bit set becomes 0. */
#if NARROW
static uint8_t places[256][4 * LANES] __attribute__((aligned(32)));
#else
static int32_t places[256][LANES] __attribute__((aligned(32)));
#endif
__attribute__((constructor)) static void fill_places(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int i = 0, next = 0; i < LANES; i++) {
            const int set = byte >> i & 1;
#if NARROW
            uint8_t *of = places[byte] + 4 * i;
            of[0] = of[1] = 0x80;
            of[2] = set ? 2 * next : 0x80;
            of[3] = set ? 2 * next + 1 : 0x80;
#else
            places[byte][i] = next;
#endif
            next += set;
        }
}

static inline __attribute__((always_inline)) lanes spread(uint8_t byte, const stored *from, const stored *end) {
    stored last[LANES];
    if (end != ANYWHERE && from + LANES > end) {
        memset(last, 0, sizeof last);
        from = memcpy(last, from, COUNT(byte) * sizeof *last);
    }
    const __m256i place = _mm256_load_si256((const __m256i *)places[byte]);
#if NARROW
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(twice, place));
#elif defined(__AVX512VL__)
    return _mm256_maskz_permutexvar_ps(byte, place, _mm256_loadu_ps(from));
#else
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(byte), bit), bit);
    return _mm256_and_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(from), place), _mm256_castsi256_ps(set));
#endif
}
static inline lanes times_added(lanes sum, lanes wide, const float *x) {
    return _mm256_fmadd_ps(wide, _mm256_loadu_ps(x), sum);
}
static inline void store(float *to, lanes wide) { _mm256_storeu_ps(to, wide); }
#else
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
static inline lanes spread(uint8_t byte, const stored *from, const stored *end) {
    lanes wide = {0};
    (void)end;
    for (int i = 0; i < LANES; i++)
        if (byte >> i & 1) {
#if NARROW
            const uint32_t bits = (uint32_t)*from++ << 16;
            float value;
            memcpy(&value, &bits, sizeof value);
            wide[i] = value;
#else
            wide[i] = *from++;
#endif
        }
    return wide;
}
static inline lanes times_added(lanes sum, lanes wide, const float *x) { return sum + wide * *(const lanes *)x; }
static inline void store(float *to, lanes wide) { *(lanes *)to = wide; }
#endif

static inline float total(lanes a, lanes b) {
    float each[LANES], sum = 0;
    store(each, a + b);
    for (int i = 0; i < LANES; i++) sum += each[i];
    return sum;
}

/* Add the products of the 32 elements that bits describes with x to two sums, which do not wait for each other. Nor do
 * the places of the values: each is counted from that of the first. */
#define ADD_WORD(a, b, bits, next, end, x)                                                                    \
    {                                                                                                         \
        const uint32_t word = bits;                                                                           \
        a = times_added(a, spread(word, next, end), x);                                                       \
        b = times_added(b, spread(word >> 8, next + COUNT(word & 0xff), end), x + LANES);                     \
        a = times_added(a, spread(word >> 16, next + COUNT(word & 0xffff), end), x + 2 * LANES);              \
        b = times_added(b, spread(word >> 24, next + COUNT(word & 0xffffff), end), x + 3 * LANES);            \
        next += COUNT(word);                                                                                  \
    }

/* Multiply count rows of x with the weight's rows first to last.
 *
 * bitmap: [rows, bytes of a row]; offsets: of each row, where its values begin, and of the end; x: [count, columns
 * rounded up to a multiple of 32], zeros behind the end; out: [count, rows]. Two rows of the weight are multiplied at a
 * time, but for the last rows, where a register could be filled from behind the values' end.
 */
void weft_sparse_times(const uint8_t *bitmap, const stored *values, const int64_t *offsets, const float *x, float *out,
                       int64_t first, int64_t last, int64_t rows, int64_t columns, int64_t count) {
    const int64_t bytes = (columns + 7) / 8, width = (columns + WORD - 1) / WORD * WORD;
    int64_t row = first, inside = last;
    while (inside > first && offsets[inside] + LANES > offsets[rows]) inside--;
    for (; row + 2 <= inside; row += 2) {
        const uint8_t *line = bitmap + row * bytes, *second = line + bytes;
        for (int64_t c = 0; c < count; c++) {
            const stored *n0 = values + offsets[row], *n1 = values + offsets[row + 1];
            lanes a0 = {0}, b0 = {0}, a1 = {0}, b1 = {0};
            for (int64_t i = 0; i < columns; i += WORD) {
                __builtin_prefetch((const char *)n0 + AHEAD);
                __builtin_prefetch((const char *)n1 + AHEAD);
                const float *from = x + c * width + i;
                ADD_WORD(a0, b0, bits_at(line, i, bytes), n0, ANYWHERE, from)
                ADD_WORD(a1, b1, bits_at(second, i, bytes), n1, ANYWHERE, from)
            }
            out[c * rows + row] = total(a0, b0);
            out[c * rows + row + 1] = total(a1, b1);
        }
    }
    for (; row < last; row++)
        for (int64_t c = 0; c < count; c++) {
            const stored *next = values + offsets[row], *end = values + offsets[rows];
            lanes a = {0}, b = {0};
            for (int64_t i = 0; i < columns; i += WORD) {
                const float *from = x + c * width + i;
                ADD_WORD(a, b, bits_at(bitmap + row * bytes, i, bytes), next, end, from)
            }
            out[c * rows + row] = total(a, b);
        }
}

/* Write the weight's rows first to last as floats to out [last - first, columns]. */
void weft_sparse_spread(const uint8_t *bitmap, const stored *values, const int64_t *offsets, float *out, int64_t first,
                        int64_t last, int64_t rows, int64_t columns) {
    const int64_t bytes = (columns + 7) / 8;
    const stored *end = values + offsets[rows];
    for (int64_t row = first; row < last; row++) {
        const stored *next = values + offsets[row];
        float *to = out + (row - first) * columns;
        for (int64_t i = 0; i < columns; i += LANES) {
            const uint8_t byte = bitmap[row * bytes + i / 8];
            const lanes wide = spread(byte, next, end);
            next += COUNT(byte);
            if (i + LANES <= columns) {
                store(to + i, wide);
                continue;
            }
            float part[LANES];
            store(part, wide);
            memcpy(to + i, part, (columns - i) * sizeof *part);
        }
    }
}
