/* Weights of tokens, nuclei, and draws from rows of logits, for CPUs. A row stays in the second level of the caches.
 *
 * Compiled by weft/generate/row_kernel.py with -DBLOCK: so many values of a row, a multiple of 16, are summed up at once.
 * What a row gets depends on no other row.
 */
#include "../models/kernel_parts.h"

/* So few weights are sorted. */
#define FEW 64

/* 2^x for x <= 0, and 0 below 2^-126; NaN stays NaN. Taylor's polynomial is exact to float32 from -1/2 to 1/2. */
static inline float power_of_two(float x) {
    const float low = x < -126.0f ? -126.0f : x, whole = rintf(low), f = low - whole;
    float y = 1.5252734e-5f * f + 1.5403530e-4f;
    y = y * f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    const int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -126.0f ? 0.0f : y * power;
}

/* The first values of a block of a row of n values, and how many they are. */
#define EACH_BLOCK(b, first, count)                                                  \
    for (int64_t b = 0, first = 0, count; first < n; b++, first += BLOCK)            \
        if ((count = n - first < BLOCK ? n - first : BLOCK))

/* Write weights 2^((logit - largest logit) * scale), or 0 where this is below least, and the sums of their blocks. Returns
 * the sum of all. logits and weights may be the same.
 */
static double weigh(const float *logits, float *weights, float *sums, int64_t n, float scale, float least) {
    const float best = largest(logits, n);
    double total = 0;
    EACH_BLOCK(b, first, count) {
        float sum = 0;
#pragma GCC ivdep
        for (int64_t i = first; i < first + count; i++) {
            const float weight = power_of_two((logits[i] - best) * scale);
            weights[i] = weight < least ? 0.0f : weight;
            sum += weights[i];
        }
        sums[b] = sum;
        total += sum;
    }
    return total;
}

/* The sum of the weights that are at least low. */
static double sum_from(const float *weights, const float *sums, int64_t n, float low) {
    double total = 0;
    EACH_BLOCK(b, first, count)
        if (sums[b] >= low) {
            float sum = 0;
            for (int64_t i = first; i < first + count; i++) sum += weights[i] >= low ? weights[i] : 0.0f;
            total += sum;
        }
    return total;
}

/* Write the weights from low to below high to near, the largest first, at most 2 * FEW of them. Returns how many. */
static int64_t between(const float *weights, const float *sums, int64_t n, float low, float high, float *near) {
    int64_t count = 0;
    EACH_BLOCK(b, first, length) {
        if (sums[b] < low) continue;
        int32_t inside = 0;
        for (int64_t i = first; i < first + length; i++) inside += weights[i] >= low && weights[i] < high;
        for (int64_t i = first; inside && i < first + length; i++)
            if (weights[i] >= low && weights[i] < high && count < 2 * FEW) {
                int64_t at = count++;
                for (; at && near[at - 1] < weights[i]; at--) near[at] = near[at - 1];
                near[at] = weights[i];
            }
    }
    return count;
}

/* Floats that are not negative have the order of their bits, which are about their logarithms. */
static inline float of_bits(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The smallest weight of the nucleus: the largest weights, as many as are needed for a sum of least, which is below total,
 * the sum of all. Sets *equal to how many tokens of exactly this weight are in it; 0: all.
 *
 * The border is looked for between two numbers: the weights from low on have enough together, those from high on have not.
 */
static float border(const float *weights, const float *sums, int64_t n, double total, double least, int64_t *equal) {
    /* all smaller weights together are less than what the nucleus leaves out */
    int32_t low = bits_of((float)((total - least) / (double)n)), high = bits_of(1.0f) + 1;
    double all = total, above = 0;
    int halve = 0;
    while (high - low > 1 && all - above > FEW * (double)of_bits(low)) {
        const int32_t width = high - low, guess = (int32_t)(width * ((all - least) / (all - above)));
        int32_t step = halve ? width / 2 : guess;
        step = step < 1 ? 1 : step > width - 1 ? width - 1 : step;
        const double sum = sum_from(weights, sums, n, of_bits(low + step));
        if (sum >= least)
            low += step, all = sum;
        else
            high = low + step, above = sum;
        halve = high - low > width / 2;
    }
    if (high - low <= 1) {
        *equal = (int64_t)ceil((least - above) / of_bits(low));
        return of_bits(low);
    }
    float near[2 * FEW];
    const int64_t count = between(weights, sums, n, of_bits(low), of_bits(high), near);
    int64_t last = 0, same = 0;
    for (double sum = above; last < count && (sum += near[last]) < least;) last++;
    if (last == count) return of_bits(low);
    for (int64_t i = 0; i < count; i++) same += near[i] == near[last];
    for (*equal = 1; *equal <= last && near[last - *equal] == near[last];) ++*equal;
    *equal = *equal < same ? *equal : 0;
    return near[last];
}

/* Change the logits of the tokens ids, which have been written so often. */
static void penalise(float *logits, int64_t n, const int64_t *ids, const float *often, int64_t count,
                     const float *penalties) {
    const float repetition = penalties[0], presence = penalties[1], frequency = penalties[2];
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= n) continue;
        const float seen = logits[ids[i]], changed = seen > 0 ? seen / repetition : seen * repetition;
        logits[ids[i]] = changed - ((often[i] > 0 ? presence : 0) + frequency * often[i]);
    }
}

/* Set the weights below low to 0, and of those that equal low all but the first equal ones, if equal is not 0. */
static void cut(float *weights, float *sums, int64_t n, float low, int64_t equal) {
    int64_t left = equal;
    EACH_BLOCK(b, first, count) {
        float sum = 0;
        if (equal)
            for (int64_t i = first; i < first + count; i++)
                if (weights[i] == low && left-- <= 0) weights[i] = 0;
        for (int64_t i = first; i < first + count; i++) {
            weights[i] = weights[i] < low ? 0.0f : weights[i];
            sum += weights[i];
        }
        sums[b] = sum;
    }
}

/* The first index at which the sum of the weights up to it exceeds the fraction number of their total. Its weight is not
 * 0. Returns -1 if the total is not a number above 0.
 */
static int64_t draw(const float *weights, const float *sums, int64_t n, double number) {
    double total = 0, end = 0, begin = 0;
    int64_t at = -1, place = -1;
    EACH_BLOCK(b, first, count) total += count ? sums[b] : 0;
    if (!(total > 0)) return -1;
    const double wanted = number * total;
    EACH_BLOCK(b, first, count)
        if (count && sums[b] > 0) {
            at = first, begin = end;
            if ((end += sums[b]) > wanted) break;
        }
    for (int64_t i = at; i < n && i < at + BLOCK; i++)
        if (weights[i] > 0) {
            place = i;
            if ((begin += weights[i]) > wanted) break;
        }
    return place;
}

/* Draw a token of each row of logits, [all rows, n], from the row first to before the row last; or only write the weights
 * of the tokens that can be drawn.
 *
 * scales: factors of logits, which are then powers of two. least: weights relative to the largest below which tokens are
 * left out. shares: of each nucleus in all weights; 1 or more: no nucleus. numbers: fractions of the sum of weights; NULL:
 * nothing is drawn. tokens: of each row the token that is drawn, -1 if the row has NaN or infinity or nothing else.
 * ends: of each row and one row more, how many of ids belong to the rows before; NULL: there are no penalties. ids: tokens
 * of each row that are penalised. often: how often they have been written. penalties: repetition, presence and frequency of
 * each row. weights: [rows, n], or with step 0 instead of n room for one row. sums: [rows, blocks], likewise.
 */
void weft_draw_tokens(const float *logits, float *weights, float *sums, const float *scales, const float *least,
                      const double *shares, const double *numbers, int64_t *tokens, const int64_t *ends, const int64_t *ids,
                      const float *often, const float *penalties, int64_t first, int64_t last, int64_t n, int64_t step) {
    for (int64_t row = first; row < last; row++) {
        const float *from = logits + row * n;
        float *own = weights + row * step, *parts = sums + (step ? row * ((n + BLOCK - 1) / BLOCK) : 0);
        if (ends && ends[row] < ends[row + 1]) {
            memcpy(own, from, n * sizeof *own);
            const int64_t begin = ends[row];
            penalise(own, n, ids + begin, often + begin, ends[row + 1] - begin, penalties + 3 * row);
            from = own;
        }
        const int nucleus = shares[row] < 1;
        const double total = weigh(from, own, parts, n, scales[row], nucleus ? 0 : least[row]);
        if (nucleus && total > 0) {
            int64_t equal = 0;
            const float low = border(own, parts, n, total, shares[row] * total, &equal);
            if (least[row] > low)
                cut(own, parts, n, least[row], 0);
            else
                cut(own, parts, n, low, equal);
        }
        if (numbers) tokens[row] = draw(own, parts, n, numbers[row]);
    }
}
