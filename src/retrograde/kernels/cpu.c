/* The integer steps of retrograde.core.ops for 32-bit state, one pass over memory each.
 *
 *   advance   v <- v*n/d + round(f*scale)     x <- x + (v + half >> guard)      out = x*unit
 *   pull      x <- x - (v + half >> guard)                                      out = x*unit
 *   retreat   v <- (v - round(f*scale)) * d/n
 *
 * f is y, or y - x*unit (residual). The multiplication by n/d is the one of core/multiply.py. Quotients of integers are
 * floor((a + 1/2) * (1/b)) in float64: exact, because |a| < 2^50 and (a + 1/2)/b is at least 1/(2b) from any integer.
 * Must be compiled without contraction of products and sums, and with the default rounding mode. */

#include <math.h>
#include <stdint.h>

typedef struct {
    int32_t *x, *v;
    void *i;            /* the information buffer, or null */
    const float *y;
    float *out;
    int64_t size;
    int32_t width;      /* bytes of a buffer element */
    int32_t n, d;       /* multiply v by n/d */
    int32_t guard;      /* further bits of v */
    float scale, unit;
    int32_t residual, what;
    float peak[2];      /* largest |v| and |x| */
    int32_t bad;        /* a step was not finite or out of range */
} job;

enum { ADVANCE, PULL, RETREAT };

#define MULTIPLY(BUFFER)                                                                        \
    static void multiply_##BUFFER(int32_t *restrict v, BUFFER *restrict i, int64_t size, double n, double d) { \
        const double inverse_n = 1.0 / n, inverse_d = 1.0 / d;                                  \
        for (int64_t e = 0; e < size; e++) {                                                    \
            const double digits = (double)i[e];                                                 \
            const double rest = floor((digits + 0.5) * inverse_n);                              \
            const double u = (double)v[e] * n + (digits - rest * n);                            \
            const double q = floor((u + 0.5) * inverse_d);                                      \
            v[e] = (int32_t)q;                                                                  \
            i[e] = (BUFFER)(int32_t)(rest * d + (u - q * d));                                   \
        }                                                                                       \
    }
MULTIPLY(uint8_t)
MULTIPLY(int16_t)
MULTIPLY(int32_t)

static void multiply(const job *j, int64_t from, int64_t size, int32_t n, int32_t d) {
    if (n == d) return;
    if (n == 0) {
        for (int64_t e = from; e < from + size; e++) j->v[e] = 0;
    } else if (j->width == 1) {
        multiply_uint8_t(j->v + from, (uint8_t *)j->i + from, size, n, d);
    } else if (j->width == 2) {
        multiply_int16_t(j->v + from, (int16_t *)j->i + from, size, n, d);
    } else {
        multiply_int32_t(j->v + from, (int32_t *)j->i + from, size, n, d);
    }
}

/* Steps of a piece, as floats; whether any is out of range. */
static int32_t steps(const job *j, int64_t from, int64_t size, float *restrict step) {
    const float *restrict y = j->y + from;
    const int32_t *restrict x = j->x + from;
    const float scale = j->scale, unit = j->unit;
    int32_t bad = 0;
    if (j->residual) {
        for (int64_t e = 0; e < size; e++) step[e] = rintf((y[e] - (float)x[e] * unit) * scale);
    } else {
        for (int64_t e = 0; e < size; e++) step[e] = rintf(y[e] * scale);
    }
    for (int64_t e = 0; e < size; e++) {
        const int32_t out = !(fabsf(step[e]) <= 1073741824.0f);
        bad |= out;
        step[e] = out ? 0.0f : step[e];
    }
    return bad;
}

enum { PIECE = 2048 };

static void run(job *j) {
    float step[PIECE];
    int32_t peak_v = 0, peak_x = 0, low_v = 0, low_x = 0;
    for (int64_t from = 0; from < j->size; from += PIECE) {
        const int64_t size = j->size - from < PIECE ? j->size - from : PIECE;
        int32_t *restrict x = j->x + from, *restrict v = j->v + from;
        const float unit = j->unit;
        const int32_t guard = j->guard, half = guard ? 1 << (guard - 1) : 0;
        if (j->what != PULL) j->bad |= steps(j, from, size, step);
        if (j->what == ADVANCE) {
            float *restrict out = j->out + from;
            multiply(j, from, size, j->n, j->d);
            for (int64_t e = 0; e < size; e++) {
                const int32_t w = (int32_t)((uint32_t)v[e] + (uint32_t)(int32_t)step[e]);
                const int32_t z = (int32_t)((uint32_t)x[e] + (uint32_t)((w + half) >> guard));
                v[e] = w;
                x[e] = z;
                out[e] = (float)z * unit;
                peak_v = w > peak_v ? w : peak_v;
                low_v = w < low_v ? w : low_v;
                peak_x = z > peak_x ? z : peak_x;
                low_x = z < low_x ? z : low_x;
            }
        } else if (j->what == PULL) {
            float *restrict out = j->out + from;
            for (int64_t e = 0; e < size; e++) {
                x[e] = (int32_t)((uint32_t)x[e] - (uint32_t)((v[e] + half) >> guard));
                out[e] = (float)x[e] * unit;
            }
        } else {
            for (int64_t e = 0; e < size; e++) v[e] = (int32_t)((uint32_t)v[e] - (uint32_t)(int32_t)step[e]);
            multiply(j, from, size, j->d, j->n);
        }
    }
    j->peak[0] = fmaxf((float)peak_v, -(float)low_v);
    j->peak[1] = fmaxf((float)peak_x, -(float)low_x);
}

/* Run a job on several threads; its peaks and flag are those of the whole. */
void retrograde_run(job *whole, int32_t threads) {
    const int64_t share = (whole->size / threads + PIECE) / PIECE * PIECE;
    float peak_v = 0, peak_x = 0;
    int32_t bad = 0;
#pragma omp parallel for num_threads(threads) reduction(max : peak_v, peak_x) reduction(| : bad)
    for (int32_t t = 0; t < threads; t++) {
        const int64_t from = t * share < whole->size ? t * share : whole->size;
        job part = *whole;
        part.x += from;
        part.v += from;
        part.i = (char *)part.i + from * part.width;
        part.y += from;
        part.out += from;
        part.size = whole->size - from < share ? whole->size - from : share;
        run(&part);
        peak_v = fmaxf(peak_v, part.peak[0]);
        peak_x = fmaxf(peak_x, part.peak[1]);
        bad |= part.bad;
    }
    whole->peak[0] = peak_v;
    whole->peak[1] = peak_x;
    whole->bad = bad;
}

/* The gradient of a step: gx <- gx + d, s = gv + gx, gy = s*gain, gv <- s*gamma, and gx <- gx - gy where residual. */
void retrograde_carry(float *restrict gx, float *restrict gv, const float *restrict d, float *restrict gy,
                      int64_t size, float gamma, float gain, int32_t residual, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t from = 0; from < size; from += PIECE) {
        const int64_t to = size - from < PIECE ? size : from + PIECE;
        for (int64_t e = from; e < to; e++) {
            const float x = gx[e] + d[e], s = gv[e] + x, y = s * gain;
            gv[e] = s * gamma;
            gy[e] = y;
            gx[e] = residual ? x - y : x;
        }
    }
}
