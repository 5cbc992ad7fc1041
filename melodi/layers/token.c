/* The arithmetic of one token in one layer: see native.py, which compiles this file, and token.py,
   which has the same equations in torch.

   A token is bound by the bytes of its weights. Each is read once here, for all rows, by the threads
   that torch has, without anything between the products that would cost a call.

   REAL is float or double; WEIGHT is REAL, or with NARROW 2 bfloat16, with NARROW 1 whole numbers of
   one byte with a scale for each output. Sums are in REAL, and in an order that does not depend on
   the number of threads.

   Letters: B rows, D width, H heads, E head width, X = H*E, F width of the feed-forward, k keys. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if NARROW == 2
typedef uint16_t WEIGHT;
static inline REAL value(WEIGHT w) {
    uint32_t bits = (uint32_t)w << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}
#elif NARROW == 1
typedef int8_t WEIGHT;
static inline REAL value(WEIGHT w) { return w; }
#else
typedef REAL WEIGHT;
static inline REAL value(WEIGHT w) { return w; }
#endif

#if REAL_IS_DOUBLE
#define EXP exp
#define SQRT sqrt
#define ERF erf
#else
#define EXP expf
#define SQRT sqrtf
#define ERF erff
#endif

enum { RELU, RELU2, GELU };

typedef struct {
    const WEIGHT *weight; /* outputs x stride */
    const REAL *scale;    /* of each output; NULL: 1 */
    const REAL *bias;     /* NULL: none */
    int64_t inputs, outputs, stride;
} Product;

typedef struct {
    int64_t width, heads, head_width;
    int64_t slots;     /* keys that an open window has room for, its past included */
    int64_t distances; /* entries of the bias for each head */
    int64_t activation;
    const REAL *attention_norm, *ffn_norm; /* the norms' weights */
    const REAL *lengths; /* of each head's queries, keys having unit length; NULL: as they come */
    const REAL *bias;    /* H x distances; NULL: none */
    REAL query_factor, epsilon;
    Product query, key, value, output, hidden, ffn_output;
} Layer;

/* Four outputs at a time, so that sums do not wait for each other. */
static void four(const Product *p, int64_t first, const REAL *x, REAL *y) {
    const WEIGHT *w0 = p->weight + first * p->stride, *w1 = w0 + p->stride;
    const WEIGHT *w2 = w1 + p->stride, *w3 = w2 + p->stride;
    REAL a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
    for (int64_t i = 0; i < p->inputs; i++) {
        a += value(w0[i]) * x[i];
        b += value(w1[i]) * x[i];
        c += value(w2[i]) * x[i];
        d += value(w3[i]) * x[i];
    }
    y[first] = a, y[first + 1] = b, y[first + 2] = c, y[first + 3] = d;
}

static void one(const Product *p, int64_t output, const REAL *x, REAL *y) {
    const WEIGHT *w = p->weight + output * p->stride;
    REAL a = 0;
#pragma omp simd reduction(+ : a)
    for (int64_t i = 0; i < p->inputs; i++) a += value(w[i]) * x[i];
    y[output] = a;
}

/* Asks for the weights of the next four outputs: their rows are too short for the processor to see
   that more follow. Beyond the end nothing is read, and nothing fails. */
static void fetch(const WEIGHT *weight, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(WEIGHT)) __builtin_prefetch(weight + i);
}

/* y = W x + b of every row, shared out over the threads that come here. */
static void multiply(const Product *p, int64_t rows, const REAL *x, REAL *y) {
    int64_t blocks = (p->outputs + 3) / 4;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * 4, last = first + 4 < p->outputs ? first + 4 : p->outputs;
        fetch(p->weight + last * p->stride, 4 * p->stride);
        for (int64_t row = 0; row < rows; row++) {
            const REAL *from = x + row * p->inputs;
            REAL *to = y + row * p->outputs;
            if (last - first == 4)
                four(p, first, from, to);
            else
                for (int64_t output = first; output < last; output++) one(p, output, from, to);
            for (int64_t output = first; output < last; output++) {
                if (p->scale) to[output] *= p->scale[output];
                if (p->bias) to[output] += p->bias[output];
            }
        }
    }
}

static REAL squares(const REAL *x, int64_t count) {
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += x[i] * x[i];
    return sum;
}

/* RMSNorm of every row. */
static void normalise(const Layer *l, const REAL *weight, int64_t rows, const REAL *x, REAL *h) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const REAL *from = x + row * l->width;
        REAL factor = 1 / SQRT(squares(from, l->width) / l->width + l->epsilon);
        for (int64_t i = 0; i < l->width; i++) h[row * l->width + i] = from[i] * factor * weight[i];
    }
}

static void stretch(REAL *x, int64_t count, REAL length, REAL epsilon) {
    REAL factor = length / SQRT(squares(x, count) + epsilon);
    for (int64_t i = 0; i < count; i++) x[i] *= factor;
}

/* softmax(q.K + bias).V of one query; `scores` has room for all keys. */
static void attend(const REAL *q, const REAL *keys, const REAL *values, const REAL *bias,
                   int64_t count, int64_t width, REAL *scores, REAL *a) {
    REAL most = -INFINITY, sum = 0;
    for (int64_t k = 0; k < count; k++) {
        REAL score = bias ? bias[k] : 0;
#pragma omp simd reduction(+ : score)
        for (int64_t e = 0; e < width; e++) score += q[e] * keys[k * width + e];
        scores[k] = score;
        most = score > most ? score : most;
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < count; k++) {
        scores[k] = EXP(scores[k] - most);
        sum += scores[k];
    }
    for (int64_t e = 0; e < width; e++) a[e] = 0;
    for (int64_t k = 0; k < count; k++)
#pragma omp simd
        for (int64_t e = 0; e < width; e++) a[e] += scores[k] * values[k * width + e];
    for (int64_t e = 0; e < width; e++) a[e] /= sum;
}

/* From the tokens x (B, D) to what they attend to in their windows, a (B, X): normed tokens h,
   queries q, keys and values, of which the latter two are also written to slot `own` of the window
   (B, H, slots, E). Seen are `count` keys from `first` on, their bias begins at `distance`. */
void begin_token(const Layer *l, int64_t rows, const REAL *x, REAL *keys, REAL *values, int64_t own,
                 int64_t first, int64_t count, int64_t distance, REAL *h, REAL *q, REAL *k, REAL *v,
                 REAL *scores, REAL *a) {
    int64_t width = l->head_width, heads = rows * l->heads;
#pragma omp parallel
    {
        normalise(l, l->attention_norm, rows, x, h);
        multiply(&l->query, rows, h, q);
        multiply(&l->key, rows, h, k);
        multiply(&l->value, rows, h, v);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < heads; i++) {
            REAL *q_E = q + i * width, *k_E = k + i * width, *v_E = v + i * width;
            if (l->lengths) {
                stretch(q_E, width, l->lengths[i % l->heads], l->epsilon);
                stretch(k_E, width, 1, l->epsilon);
            } else {
                for (int64_t e = 0; e < width; e++) q_E[e] *= l->query_factor;
            }
            REAL *keys_kE = keys + i * l->slots * width, *values_kE = values + i * l->slots * width;
            memcpy(keys_kE + own * width, k_E, width * sizeof(REAL));
            memcpy(values_kE + own * width, v_E, width * sizeof(REAL));
            const REAL *bias =
                l->bias ? l->bias + (i % l->heads) * l->distances + distance : 0;
            attend(q_E, keys_kE + first * width, values_kE + first * width, bias, count, width,
                   scores + i * l->slots, a + i * width);
        }
    }
}

static REAL activated(REAL x, int64_t activation) {
    if (activation == GELU) return x * (REAL)0.5 * (1 + ERF(x * (REAL)0.70710678118654752440));
    REAL positive = x > 0 || x != x ? x : 0;
    return activation == RELU2 ? positive * positive : positive;
}

/* From what was attended to, a (B, sources X), and the tokens x, to the layer's output y (B, D). */
void finish_token(const Layer *l, int64_t rows, const REAL *x, const REAL *a, REAL *h, REAL *f,
                  REAL *y) {
    int64_t all = rows * l->width, hidden = rows * l->hidden.outputs;
#pragma omp parallel
    {
        multiply(&l->output, rows, a, y);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < all; i++) y[i] += x[i];
        normalise(l, l->ffn_norm, rows, y, h);
        multiply(&l->hidden, rows, h, f);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < hidden; i++) f[i] = activated(f[i], l->activation);
        multiply(&l->ffn_output, rows, f, h);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < all; i++) y[i] += h[i];
    }
}

/* y (B, outputs) = W x + b. */
void product(const Product *p, int64_t rows, const REAL *x, REAL *y) {
#pragma omp parallel
    multiply(p, rows, x, y);
}
