/* Feed-forward neurons with ReLU for a few tokens, from records in memory, for CPUs.
 *
 * Compiled by weft/memory/neuron_kernel.py with -DNARROW=1 for weights in bfloat16, 0 for float32. Each neuron's weights
 * are read once, and those of its up and down only if its gate is positive for some token. What a token gets depends on
 * no other token.
 */
#include <stdint.h>
#include <string.h>

#if NARROW
typedef uint16_t stored;
static inline float wide(stored value) {
    const uint32_t bits = (uint32_t)value << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}
#else
typedef float stored;
static inline float wide(stored value) { return value; }
#endif

/* Bytes of a line of the processor's cache. */
#define LINE 64

static float product(const stored *restrict row, const float *restrict x, int64_t width) {
    float sum = 0;
    for (int64_t i = 0; i < width; i++) sum += wide(row[i]) * x[i];
    return sum;
}

static void add(float *restrict out, const stored *restrict row, float factor, int64_t width) {
    for (int64_t i = 0; i < width; i++) out[i] += factor * wide(row[i]);
}

static void bring(const stored *row, int64_t width) {
    for (int64_t i = 0; i < width; i += LINE / (int64_t)sizeof(stored)) __builtin_prefetch(row + i);
}

/* Write relu(x gate') of the neurons first to last to out [tokens, neurons]; x: [tokens, width]. */
void weft_neuron_gates(const stored *gate, const float *x, float *out, int64_t first, int64_t last, int64_t neurons,
                       int64_t tokens, int64_t width) {
    for (int64_t n = first; n < last; n++)
        for (int64_t t = 0; t < tokens; t++) {
            const float value = product(gate + n * width, x + t * width, width);
            out[t * neurons + n] = value > 0 ? value : 0;
        }
}

/* Add to out [tokens, width] what count neurons give for x [tokens, width].
 *
 * memory: records that are stride bytes apart, each with up and down, and before them with the gate if gates is null;
 * records: which of them are the neurons'; neurons: their numbers in the layer; active: whether each token uses each
 * neuron of the layer, [tokens, all]; gates: the values of their gates, of the same shape. */
void weft_neuron_sums(const uint8_t *memory, const int64_t *records, const int64_t *neurons, const uint8_t *active,
                      const float *gates, const float *x, float *out, int64_t stride, int64_t count, int64_t all,
                      int64_t tokens, int64_t width) {
    for (int64_t n = 0; n < count; n++) {
        const stored *gate = (const stored *)(memory + records[n] * stride);
        const stored *up = gates ? gate : gate + width, *down = up + width;
        if (n + 1 < count) bring((const stored *)(memory + records[n + 1] * stride), width);
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t at = t * all + neurons[n];
            if (!active[at]) continue;
            const float value = gates ? gates[at] : product(gate, x + t * width, width);
            if (!(value > 0)) continue;
            add(out + t * width, down, value * product(up, x + t * width, width), width);
        }
    }
}
