/* The integer steps of arithmetic/reference.py for 32-bit state, one pass over memory each.
 *
 *   advance   v <- v*n/d + round(f*scale)     x <- x + (v + half >> guard)      out = x*unit
 *   pull      x <- x - (v + half >> guard)                                      out = x*unit
 *   retreat   v <- (v - round(f*scale)) * d/n                                    and, with an out, pull after it
 *
 * f is y (form 0), y - x*unit (1) or relu(x*unit + y) - x*unit (2); an advance then sets the bits of the mask, if there is one,
 * where the relu lets its input through. The multiplication by n/d is the one of multiply.py. Quotients of integers are
 * floor((a + 1/2) * (1/b)) in float64: exact, because |a| < 2^50 and (a + 1/2)/b is at least 1/(2b) from any integer.
 * By 1/2^k and by 2^k v is shifted instead.
 * Must be compiled without contraction of products and sums, and with the default rounding mode. */

#include <math.h>
#include <stdint.h>
#include <string.h>

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
    int32_t form, what;
    float *peak;        /* receives the largest |v| and |x| of an advance */
    int32_t bad;        /* a step was not finite or out of range */
    uint8_t *mask;      /* one bit an element, or null */
    void *before;       /* of n/d = 1/2^k: the buffer that takes the lowest `over` of the k bits, or null */
    int32_t over;
} job;

enum { ADVANCE, PULL, RETREAT };

/* k bits from v to the buffers, and from them to v. */
#define SHIFT(BUFFER)                                                                           \
    static void push_##BUFFER(int32_t *restrict v, BUFFER *restrict i, BUFFER *restrict before, int64_t size, int k, int over) { \
        const int rest = k - over, mask = (1 << rest) - 1, low = (1 << over) - 1;               \
        if (before)                                                                             \
            for (int64_t e = 0; e < size; e++) before[e] = (BUFFER)(before[e] << over | (v[e] & low)); \
        for (int64_t e = 0; e < size; e++) {                                                    \
            i[e] = (BUFFER)(i[e] << rest | (v[e] >> over & mask));                              \
            v[e] >>= k;                                                                         \
        }                                                                                       \
    }                                                                                           \
    static void pop_##BUFFER(int32_t *restrict v, BUFFER *restrict i, BUFFER *restrict before, int64_t size, int k, int over) { \
        const int rest = k - over, mask = (1 << rest) - 1, low = (1 << over) - 1;               \
        for (int64_t e = 0; e < size; e++) {                                                    \
            v[e] = (int32_t)((uint32_t)v[e] << rest | (uint32_t)(i[e] & mask));                 \
            i[e] = (BUFFER)(i[e] >> rest);                                                      \
        }                                                                                       \
        if (before)                                                                             \
            for (int64_t e = 0; e < size; e++) {                                                \
                v[e] = (int32_t)((uint32_t)v[e] << over | (uint32_t)(before[e] & low));         \
                before[e] = (BUFFER)(before[e] >> over);                                        \
            }                                                                                   \
    }
SHIFT(uint8_t)
SHIFT(int16_t)
SHIFT(int32_t)

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

#define MOVE(BUFFER)                                                                            \
    do {                                                                                        \
        BUFFER *i = (BUFFER *)j->i + from, *before = j->before ? (BUFFER *)j->before + from : 0; \
        if (k && d > n) push_##BUFFER(j->v + from, i, before, size, k, j->over);                \
        else if (k) pop_##BUFFER(j->v + from, i, before, size, k, j->over);                     \
        else multiply_##BUFFER(j->v + from, i, size, n, d);                                     \
    } while (0)

static void multiply(const job *j, int64_t from, int64_t size, int32_t n, int32_t d) {
    if (n == d) return;
    if (n == 0) {
        for (int64_t e = from; e < from + size; e++) j->v[e] = 0;
        return;
    }
    const int32_t less = n < d ? n : d, more = n < d ? d : n;
    int k = 0; /* n/d = 1/2^k or 2^k */
    if (less == 1 && (more & (more - 1)) == 0)
        while (1 << k < more) k++;
    if (j->width == 1) MOVE(uint8_t);
    else if (j->width == 2) MOVE(int16_t);
    else MOVE(int32_t);
}

/* Where the relu of a piece lets its input through: element 8b + k is bit k of byte b. */
static void bits(const job *j, int64_t from, int64_t size) {
    const float *restrict y = j->y + from, unit = j->unit;
    const int32_t *restrict x = j->x + from;
    uint8_t *restrict mask = j->mask + from / 8;
    for (int64_t b = 0; b < size / 8; b++) {
        uint8_t byte = 0;
        for (int k = 0; k < 8; k++) byte |= (uint8_t)(!((float)x[8 * b + k] * unit + y[8 * b + k] <= 0.0f) << k);
        mask[b] = byte;
    }
    if (size % 8) {
        uint8_t byte = 0;
        for (int64_t e = size / 8 * 8; e < size; e++) byte |= (uint8_t)(!((float)x[e] * unit + y[e] <= 0.0f) << e % 8);
        mask[size / 8] = byte;
    }
}

/* Steps of a piece, as floats; whether any is out of range. */
static int32_t steps(const job *j, int64_t from, int64_t size, float *restrict step) {
    const float *restrict y = j->y + from;
    const int32_t *restrict x = j->x + from;
    const float scale = j->scale, unit = j->unit;
    int32_t bad = 0;
    if (j->form == 2) {
        for (int64_t e = 0; e < size; e++) {
            const float x0 = (float)x[e] * unit, s = x0 + y[e];
            step[e] = rintf(((s <= 0.0f ? 0.0f : s) - x0) * scale);
        }
        if (j->mask) bits(j, from, size);
    } else if (j->form) {
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

static void run(job *j, float *peak) {
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
            continue;
        }
        if (j->what == RETREAT) {
            for (int64_t e = 0; e < size; e++) v[e] = (int32_t)((uint32_t)v[e] - (uint32_t)(int32_t)step[e]);
            multiply(j, from, size, j->d, j->n);
        }
        if (j->out) {
            float *restrict out = j->out + from;
            for (int64_t e = 0; e < size; e++) {
                x[e] = (int32_t)((uint32_t)x[e] - (uint32_t)((v[e] + half) >> guard));
                out[e] = (float)x[e] * unit;
            }
        }
    }
    peak[0] = fmaxf((float)peak_v, -(float)low_v);
    peak[1] = fmaxf((float)peak_x, -(float)low_x);
}

/* Run a job on several threads; its peaks and flag are those of the whole. */
void retrograde_run(job *whole, int32_t threads) {
    if (threads == 1) {
        float peak[2];
        run(whole, whole->peak ? whole->peak : peak);
        return;
    }
    const int64_t share = (whole->size / threads + PIECE) / PIECE * PIECE;
    float peak_v = 0, peak_x = 0;
    int32_t bad = 0;
#pragma omp parallel for num_threads(threads) reduction(max : peak_v, peak_x) reduction(| : bad)
    for (int32_t t = 0; t < threads; t++) { /* shares are whole bytes of the mask */
        const int64_t from = t * share < whole->size ? t * share : whole->size;
        job part = *whole;
        part.x += from;
        part.v += from;
        part.i = (char *)part.i + from * part.width;
        part.before = part.before ? (char *)part.before + from * part.width : 0;
        part.y += from;
        part.out = part.out ? part.out + from : part.out;
        part.mask = part.mask ? part.mask + from / 8 : part.mask;
        part.size = whole->size - from < share ? whole->size - from : share;
        float peak[2];
        run(&part, peak);
        peak_v = fmaxf(peak_v, peak[0]);
        peak_x = fmaxf(peak_x, peak[1]);
        bad |= part.bad;
    }
    if (whole->peak) {
        whole->peak[0] = peak_v;
        whole->peak[1] = peak_x;
    }
    whole->bad = bad;
}

static inline int32_t bit(const uint8_t *mask, int64_t k) { return mask[k >> 3] >> (k & 7) & 1; }

/* The gradient of a step, see reference.py: gx = p + d, s = gx + c*h, gy = gain*s, out = gx or gx - gy. Without p, it is e*h, or e1*h
   where the bits of `after` are set; without h, it is 0; without out, gx goes nowhere. out may be p. With a mask, cast is gy and out is gx
   where its bits are set, elsewhere cast is 0 and out is gx - gy. */
static void carry(const float *p, const float *h, const float *d, float *out, float *gy, float *cast, const uint8_t *mask,
                  const uint8_t *after, int64_t size, float c, float e, float e1, float gain, int32_t form) {
    if (mask && p && h && out) {
        for (int64_t k = 0; k < size; k++) {
            const float x = p[k] + d[k], y = (x + h[k] * c) * gain;
            const int32_t m = bit(mask, k);
            gy[k] = y;
            cast[k] = m ? y : 0.0f;
            out[k] = m ? x : x - y;
        }
        return;
    }
    if (!mask && p && h && out) {
        for (int64_t k = 0; k < size; k++) {
            const float x = p[k] + d[k], y = (x + h[k] * c) * gain;
            gy[k] = y;
            out[k] = form ? x - y : x;
        }
        return;
    }
    for (int64_t k = 0; k < size; k++) {
        const float u = after && bit(after, k) ? e1 : e;
        const float x = p ? p[k] + d[k] : h ? h[k] * u + d[k] : d[k], y = (h ? x + h[k] * c : x) * gain;
        const int32_t m = mask ? bit(mask, k) : !form;
        gy[k] = y;
        if (mask) cast[k] = m ? y : 0.0f;
        if (out) out[k] = m ? x : x - y;
    }
}

void retrograde_carry(const float *p, const float *h, const float *d, float *out, float *gy, float *cast, const uint8_t *mask,
                      const uint8_t *after, int64_t size, float c, float e, float e1, float gain, int32_t form, int32_t threads) {
    if (threads == 1) {
        carry(p, h, d, out, gy, cast, mask, after, size, c, e, e1, gain, form);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t from = 0; from < size; from += PIECE) {
        const int64_t piece = size - from < PIECE ? size - from : PIECE;
        carry(p ? p + from : p, h ? h + from : h, d + from, out ? out + from : out, gy + from, cast + from,
              mask ? mask + from / 8 : mask, after ? after + from / 8 : after, piece, c, e, e1, gain, form);
    }
}

/* The hash of hash.py: words in rows of 16, the left half of each times the right one, after adding keys. */
enum { HALF = 8, ROW = 16 };
typedef uint32_t half __attribute__((vector_size(4 * HALF)));
typedef uint64_t wide __attribute__((vector_size(8 * HALF)));
#ifdef __AVX512F__  /* one instruction, which compilers do not find */
#include <immintrin.h>
static inline wide products(half a, half b) {
    return (wide)_mm512_mul_epu32(_mm512_cvtepu32_epi64((__m256i)a), _mm512_cvtepu32_epi64((__m256i)b));
}
#else
static inline wide products(half a, half b) { return __builtin_convertvector(a, wide) * __builtin_convertvector(b, wide); }
#endif

static uint64_t digest(const char *memory, int64_t rows, uint32_t place, uint32_t seed);

/* Of each tensor `places` has its address, the number of groups of bytes to be hashed, the bytes from one to the next, and
   those of one. At most SAMPLE bytes of a tensor; they are hashed as if they lay in a row. */
#define SAMPLE 8192

void retrograde_sample(const int64_t *places, int64_t tensors, int64_t sign, uint64_t *into) {
    char row[SAMPLE];
    uint64_t sum = 0;
    for (int64_t t = 0; t < tensors; t++, places += 4) {
        const char *from = (const char *)(intptr_t)places[0];
        const int64_t width = places[3];
        int64_t bytes = 0;
        for (int64_t k = 0; k < places[1]; k++, bytes += width) memcpy(row + bytes, from + k * places[2], width);
        const int64_t rows = (bytes + 4 * ROW - 1) / (4 * ROW);
        memset(row + bytes, 0, rows * 4 * ROW - bytes);
        sum += digest(row, rows, 0, (uint32_t)t);
    }
    *into += (uint64_t)sign * sum;
}

static uint64_t digest(const char *memory, int64_t rows, uint32_t place, uint32_t seed) {
    half step = {0, 1, 2, 3, 4, 5, 6, 7};
    wide sums = {0};
    uint64_t sum = 0;
    step = (step + place) * 0x9E3779B1u + seed + 0xC2B2AE3Du;
    for (int64_t r = 0; r < rows; r++) {
        half left, right, k = (step ^ (step >> 15)) * 0x85EBCA77u;
        memcpy(&left, memory + r * 4 * ROW, sizeof left);
        memcpy(&right, memory + r * 4 * ROW + 4 * HALF, sizeof right);
        k ^= k >> 13;
        sums += products(left + k, right + k * 0xC2B2AE3Du);
        step += HALF * 0x9E3779B1u;
    }
    for (int j = 0; j < HALF; j++) sum += sums[j];
    return sum;
}

void retrograde_digest(const char *memory, int64_t bytes, int64_t seed, int64_t sign, uint64_t *into, int32_t threads) {
    const int64_t row = 4 * ROW, rows = bytes / row, share = (rows + threads - 1) / threads;
    uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) if (threads > 1)
    for (int32_t t = 0; t < threads; t++) {
        const int64_t from = t * share < rows ? t * share : rows, size = rows - from < share ? rows - from : share;
        sum += digest(memory + from * row, size, (uint32_t)(from * HALF), (uint32_t)seed);
    }
    if (bytes % row) {
        char last[4 * ROW] = {0};
        memcpy(last, memory + rows * row, bytes % row);
        sum += digest(last, 1, (uint32_t)(rows * HALF), (uint32_t)seed);
    }
    *into += (uint64_t)sign * sum;
}
