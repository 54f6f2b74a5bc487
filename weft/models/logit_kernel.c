/* Statistics and derivatives of rows of logits, for CPUs. A row stays in the caches while it is read several times.
 *
 * Compiled by weft/models/logit_kernel.py. What a row gets depends on no other row.
 */
#include "kernel_parts.h"

/* Values that are summed up in float32, before their sum is added in float64. */
#define BLOCK 256

/* Rows of logits, [rows, columns]. labels: columns, or -1 for a row without a label. scales: factors of the rows' losses;
 * NULL: logits stay, and results are, for each row, its log-sum-exp, the mean of its logits under their softmax, its
 * largest logit and that of its label. Otherwise logits become derivatives, and results are the losses of rows.
 */
typedef struct {
    float *logits;
    const int64_t *labels;
    const float *scales;
    double *results;
    int64_t rows, columns;
} Rows;

static void measure(const float *row, int64_t n, int64_t label, double *results) {
    const float top = largest(row, n);
    double total = 0, product = 0;
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t end = first + BLOCK < n ? first + BLOCK : n;
        float sum = 0, weighted = 0;
        for (int64_t i = first; i < end; i++) {
            const float below = row[i] - top, weight = exponential(below);
            sum += weight;
            weighted += weight * below;
        }
        total += sum;
        product += weighted;
    }
    results[0] = top + log(total);
    results[1] = top + product / total;
    results[2] = top;
    results[3] = label < 0 ? 0 : row[label];
}

static double differentiate(float *row, int64_t n, int64_t label, float scale) {
    if (label < 0) {
        memset(row, 0, n * sizeof *row);
        return 0;
    }
    const float top = largest(row, n), target = row[label];
    double total = 0;
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t end = first + BLOCK < n ? first + BLOCK : n;
        float sum = 0;
        for (int64_t i = first; i < end; i++) {
            row[i] = exponential(row[i] - top);
            sum += row[i];
        }
        total += sum;
    }
    const float factor = (float)(scale / total);
    for (int64_t i = 0; i < n; i++) row[i] *= factor;
    row[label] -= scale;
    return (top + log(total) - target) * scale;
}

static void run_rows(void *given) {
    const Rows *p = given;
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t row = p->rows * thread / threads; row < p->rows * (thread + 1) / threads; row++) {
        float *own = p->logits + row * p->columns;
        if (p->scales)
            p->results[row] = differentiate(own, p->columns, p->labels[row], p->scales[row]);
        else
            measure(own, p->columns, p->labels[row], p->results + 4 * row);
    }
}

/* Compute the rows in so many threads. */
void weft_logits(Rows *rows, unsigned threads) { GOMP_parallel(run_rows, rows, threads, 0); }
