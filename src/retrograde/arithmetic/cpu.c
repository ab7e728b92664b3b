/* The kernels of arithmetic/reference.py for state in 32 and 16 bits and floats of at most 32, one pass over memory each.
 *
 *   advance   v <- v*n/d + round(f*scale)     x <- x + (v + half >> guard)      out = x*unit
 *   pull      x <- x - (v + half >> guard)                                      out = x*unit
 *   retreat   v <- (v - round(f*scale)) * d/n                                    and, with an out, pull after it
 *
 * f is y (form 0), y - x~ (1) or relu(x~ + y) - x~ (2), where x~ = x*unit as the block saw it; an advance then sets the bits of
 * the mask, if there is one, where the relu lets its input through. The multiplication by n/d is the one of multiply.py. Quotients
 * of integers are floor((a + 1/2) * (1/b)) in float64: exact, because |a| < 2^50 and (a + 1/2)/b is at least 1/(2b) from any
 * integer. By 1/2^k and by 2^k v is shifted instead.
 *
 * Work is done in pieces that fit the cache. A piece of float32 or of 32-bit integers is worked on where it is; others are widened
 * into a room first, and rounded back after.
 *
 * Python calls with its tensors as they are: to ask fifteen of them for their addresses in Python takes longer than a small step.
 * What is needed of Python's C interface comes by `retrograde_connect`, so that no header of Python is.
 *
 * Must be compiled without contraction of products and sums, and with the default rounding mode. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
extern int omp_get_max_threads(void);
#endif

typedef struct python_object object;
enum { FLOAT32, BFLOAT16, FLOAT16, UINT8, INT16, INT32, KINDS, NONE };

static struct {
    object *(*call)(object *, object *, ...); /* PyObject_CallMethodObjArgs */
    object *(*attribute)(object *, object *); /* PyObject_GetAttr */
    void *(*number)(object *);                /* PyLong_AsVoidPtr */
    void (*let_go)(object *);                 /* Py_DecRef */
    void *(*unlock)(void);                    /* PyEval_SaveThread */
    void (*lock)(void *);                     /* PyEval_RestoreThread */
    void (*raise)(object *, const char *);    /* PyErr_SetString */
    object *type_error, *none, *data_ptr, *numel, *nbytes, *itemsize, *dtype, *dtypes[KINDS];
} python;

void retrograde_connect(const void *pointers) { memcpy(&python, pointers, sizeof python); }

typedef struct {
    void *at;
    int32_t kind;
} tensor;

static int32_t kind_of(object *dtype) {
    for (int32_t kind = 0; kind < KINDS; kind++)
        if (dtype == python.dtypes[kind]) return kind;
    return NONE;
}

/* A whole number that Python has given; 0, and `bad`, where it has raised instead. */
static uintptr_t number(object *given, int *bad) {
    *bad |= !given;
    if (!given) return 0;
    const uintptr_t value = (uintptr_t)python.number(given);
    python.let_go(given);
    return value;
}

static tensor find(object *t, int *bad) {
    tensor found = {0, NONE};
    if (t == python.none || *bad) return found;
    found.at = (void *)number(python.call(t, python.data_ptr, NULL), bad);
    object *dtype = *bad ? 0 : python.attribute(t, python.dtype);
    if (!dtype) {
        *bad = 1;
        return found;
    }
    found.kind = kind_of(dtype);
    python.let_go(dtype);
    if (found.kind == NONE) {
        python.raise(python.type_error, "the compiled kernels do not take tensors of this dtype");
        *bad = 1;
    }
    return found;
}

static int64_t size_of(object *t, int *bad) { return *bad ? 0 : (int64_t)number(python.call(t, python.numel, NULL), bad); }

enum { PIECE = 2048, ALONE = 1 << 16 }; /* elements: of a piece; up to which one thread does it all, and Python waits */

static int32_t threads_for(int64_t size) {
#ifdef _OPENMP
    const int64_t most = omp_get_max_threads(), useful = 1 + size / ALONE;
    return (int32_t)(most < useful ? most : useful);
#else
    return size < 0 ? 0 : 1;
#endif
}

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bfloat16(uint16_t h) { return as_float((uint32_t)h << 16); }

static inline uint16_t to_bfloat16(float value) { /* to the nearest, ties to even */
    const uint32_t bits = as_bits(value);
    return value != value ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static inline float from_float16(uint16_t h) {
    const uint32_t w = (uint32_t)h << 16, twice = w + w;
    const uint32_t normal = as_bits(as_float((twice >> 4) + (0xE0u << 23)) * 0x1p-112f);
    const uint32_t small = as_bits(as_float((twice >> 17) | (126u << 23)) - 0.5f);
    return as_float((w & 0x80000000u) | (twice < (1u << 27) ? small : normal));
}

static inline uint16_t to_float16(float value) { /* products overflow and round as conversion does */
    const uint32_t w = as_bits(value), twice = w + w, exponent = twice & 0xFF000000u;
    const float base = fabsf(value) * 0x1p+112f * 0x1p-110f;
    const uint32_t bits = as_bits(as_float(((exponent < 0x71000000u ? 0x71000000u : exponent) >> 1) + 0x07800000u) + base);
    const uint32_t rest = (bits >> 13 & 0x7C00u) + (bits & 0xFFFu);
    return (uint16_t)(w >> 16 & 0x8000u) | (uint16_t)(twice > 0xFF000000u ? 0x7E00u : rest);
}

/* A piece of a tensor as float32: where it is, or in a room. */
static float *floats(tensor t, int64_t from, int64_t size, float *room) {
    if (t.kind == FLOAT32) return (float *)t.at + from;
    const uint16_t *h = (const uint16_t *)t.at + from;
    if (t.kind == BFLOAT16)
        for (int64_t e = 0; e < size; e++) room[e] = from_bfloat16(h[e]);
    else
        for (int64_t e = 0; e < size; e++) room[e] = from_float16(h[e]);
    return room;
}

/* Where a piece of a tensor is to be written as float32; `put` takes it from there. */
static float *space(tensor t, int64_t from, float *room) { return t.kind == FLOAT32 ? (float *)t.at + from : t.at ? room : 0; }

static void put(tensor t, int64_t from, int64_t size, const float *values) {
    uint16_t *h = (uint16_t *)t.at + from;
    if (t.kind == BFLOAT16)
        for (int64_t e = 0; e < size; e++) h[e] = to_bfloat16(values[e]);
    else if (t.kind == FLOAT16)
        for (int64_t e = 0; e < size; e++) h[e] = to_float16(values[e]);
}

/* Round values as a dtype would. */
static void as_kind(int32_t kind, int64_t size, float *values) {
    if (kind == BFLOAT16)
        for (int64_t e = 0; e < size; e++) values[e] = from_bfloat16(to_bfloat16(values[e]));
    else if (kind == FLOAT16)
        for (int64_t e = 0; e < size; e++) values[e] = from_float16(to_float16(values[e]));
}

static int32_t *integers(tensor t, int64_t from, int64_t size, int32_t *room) {
    if (t.kind == INT32) return (int32_t *)t.at + from;
    for (int64_t e = 0; e < size; e++) room[e] = ((int16_t *)t.at)[from + e];
    return room;
}

/* Hold integers as the tensor does: what leaves 16 bits wraps, and comes back by the opposite step. */
static void hold(tensor t, int64_t from, int64_t size, int32_t *values) {
    if (t.kind == INT16)
        for (int64_t e = 0; e < size; e++) values[e] = ((int16_t *)t.at)[from + e] = (int16_t)values[e];
}

static inline float larger(float a, float b) { return a != a || a > b ? a : b; } /* NaN above all */

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


typedef struct {
    tensor x, v, i, y, out, mask, before;
    int64_t size;
    int32_t seen, n, d, guard, form, what, over;
    float scale, unit;
} job;

enum { ADVANCE, PULL, RETREAT };

#define MOVE(BUFFER)                                                                            \
    do {                                                                                        \
        BUFFER *i = (BUFFER *)j->i.at + from, *before = j->before.at ? (BUFFER *)j->before.at + from : 0; \
        if (k && d > n) push_##BUFFER(v, i, before, size, k, j->over);                          \
        else if (k) pop_##BUFFER(v, i, before, size, k, j->over);                               \
        else multiply_##BUFFER(v, i, size, n, d);                                               \
    } while (0)

static void multiply(const job *j, int64_t from, int64_t size, int32_t *v, int32_t n, int32_t d) {
    if (n == d) return;
    if (n == 0) {
        for (int64_t e = 0; e < size; e++) v[e] = 0;
        return;
    }
    const int32_t less = n < d ? n : d, more = n < d ? d : n;
    int k = 0; /* n/d = 1/2^k or 2^k */
    if (less == 1 && (more & (more - 1)) == 0)
        while (1 << k < more) k++;
    if (j->i.kind == UINT8) MOVE(uint8_t);
    else if (j->i.kind == INT16) MOVE(int16_t);
    else MOVE(int32_t);
}

/* Where a relu lets its input through: element 8b + k is bit k of byte b. */
static void bits(const float *restrict s, int64_t size, uint8_t *restrict mask) {
    for (int64_t b = 0; b < size / 8; b++) {
        uint8_t byte = 0;
        for (int k = 0; k < 8; k++) byte |= (uint8_t)(!(s[8 * b + k] <= 0.0f) << k);
        mask[b] = byte;
    }
    if (size % 8) {
        uint8_t byte = 0;
        for (int64_t e = size / 8 * 8; e < size; e++) byte |= (uint8_t)(!(s[e] <= 0.0f) << e % 8);
        mask[size / 8] = byte;
    }
}

/* Steps of a piece, as floats, 0 where they are NaN or out of range; returns the worst of those, or 0. */
static float steps(const job *j, int64_t from, int64_t size, const int32_t *restrict x, float *restrict step) {
    float y_room[PIECE], x0[PIECE], s[PIECE], worst = 0.0f;
    const float *restrict y = floats(j->y, from, size, y_room), scale = j->scale, unit = j->unit;
    const int32_t single = j->seen == FLOAT32 && j->y.kind == FLOAT32;
    if (j->form && !single) {
        for (int64_t e = 0; e < size; e++) x0[e] = (float)x[e] * unit;
        as_kind(j->seen, size, x0);
    }
    if (j->form == 2) {
        if (single) {
            for (int64_t e = 0; e < size; e++) {
                const float z = (float)x[e] * unit, sum = z + y[e];
                s[e] = sum;
                step[e] = rintf(((sum <= 0.0f ? 0.0f : sum) - z) * scale);
            }
        } else {
            for (int64_t e = 0; e < size; e++) s[e] = x0[e] + y[e];
            as_kind(j->y.kind, size, s);
            for (int64_t e = 0; e < size; e++) step[e] = rintf(((s[e] <= 0.0f ? 0.0f : s[e]) - x0[e]) * scale);
        }
        if (j->mask.at) bits(s, size, (uint8_t *)j->mask.at + from / 8);
    } else if (j->form && single) {
        for (int64_t e = 0; e < size; e++) step[e] = rintf((y[e] - (float)x[e] * unit) * scale);
    } else if (j->form) {
        for (int64_t e = 0; e < size; e++) step[e] = rintf((y[e] - x0[e]) * scale);
    } else {
        for (int64_t e = 0; e < size; e++) step[e] = rintf(y[e] * scale);
    }
    int32_t bad = 0;
    for (int64_t e = 0; e < size; e++) bad |= !(fabsf(step[e]) <= 1073741824.0f);
    for (int64_t e = 0; bad && e < size; e++)
        if (!(fabsf(step[e]) <= 1073741824.0f)) {
            worst = larger(fabsf(step[e]), worst);
            step[e] = 0.0f;
        }
    return worst;
}

static void run(const job *j, int64_t begin, int64_t end, float *peak) {
    float step[PIECE], out_room[PIECE], worst = 0.0f;
    int32_t x_room[PIECE], v_room[PIECE], peak_v = 0, peak_x = 0, low_v = 0, low_x = 0;
    const float unit = j->unit;
    const int32_t guard = j->guard, half = guard ? 1 << (guard - 1) : 0;
    for (int64_t from = begin; from < end; from += PIECE) {
        const int64_t size = end - from < PIECE ? end - from : PIECE;
        int32_t *x = integers(j->x, from, size, x_room), *v = integers(j->v, from, size, v_room);
        float *out = space(j->out, from, out_room);
        if (j->what != PULL) worst = larger(steps(j, from, size, x, step), worst);
        if (j->what == ADVANCE) {
            multiply(j, from, size, v, j->n, j->d);
            for (int64_t e = 0; e < size; e++) {
                const int32_t w = (int32_t)((uint32_t)v[e] + (uint32_t)(int32_t)step[e]);
                v[e] = w;
                peak_v = w > peak_v ? w : peak_v;
                low_v = w < low_v ? w : low_v;
            }
            hold(j->v, from, size, v);
            for (int64_t e = 0; e < size; e++) x[e] = (int32_t)((uint32_t)x[e] + (uint32_t)((v[e] + half) >> guard));
            hold(j->x, from, size, x);
            for (int64_t e = 0; e < size; e++) {
                const int32_t z = x[e];
                out[e] = (float)z * unit;
                peak_x = z > peak_x ? z : peak_x;
                low_x = z < low_x ? z : low_x;
            }
            put(j->out, from, size, out);
            continue;
        }
        if (j->what == RETREAT) {
            for (int64_t e = 0; e < size; e++) v[e] = (int32_t)((uint32_t)v[e] - (uint32_t)(int32_t)step[e]);
            hold(j->v, from, size, v);
            multiply(j, from, size, v, j->d, j->n);
            hold(j->v, from, size, v);
        }
        if (out) {
            for (int64_t e = 0; e < size; e++) x[e] = (int32_t)((uint32_t)x[e] - (uint32_t)((v[e] + half) >> guard));
            hold(j->x, from, size, x);
            for (int64_t e = 0; e < size; e++) out[e] = (float)x[e] * unit;
            put(j->out, from, size, out);
        }
    }
    peak[0] = worst != 0.0f ? worst : fmaxf((float)peak_v, -(float)low_v);
    peak[1] = fmaxf((float)peak_x, -(float)low_x);
}

/* Run a job, on several threads if it is large; `peak` receives the largest |v| and |x| of an advance. */
static void run_all(const job *j, float *peak) {
    void *state = j->size > ALONE ? python.unlock() : 0;
    const int32_t threads = threads_for(j->size);
    float found[2] = {0, 0};
    if (threads <= 1) {
        run(j, 0, j->size, found);
    } else {
        const int64_t share = (j->size / threads + PIECE) / PIECE * PIECE; /* whole bytes of the mask */
#pragma omp parallel for num_threads(threads)
        for (int32_t t = 0; t < threads; t++) {
            const int64_t from = t * share < j->size ? t * share : j->size, left = j->size - from;
            float own[2];
            run(j, from, from + (left < share ? left : share), own);
#pragma omp critical
            for (int k = 0; k < 2; k++) found[k] = larger(own[k], found[k]);
        }
    }
    if (state) python.lock(state);
    if (peak) memcpy(peak, found, sizeof found);
}

void retrograde_advance(object *x, object *v, object *i, object *y, object *seen, int32_t n, int32_t d, float scale, float unit,
                        int32_t form, int32_t guard, object *out, object *watch, object *mask, object *before, int32_t over) {
    int bad = 0;
    const job j = {find(x, &bad), find(v, &bad), find(i, &bad), find(y, &bad), find(out, &bad), find(mask, &bad), find(before, &bad),
                   size_of(x, &bad), kind_of(seen), n, d, guard, form, ADVANCE, over, scale, unit};
    float *peak = find(watch, &bad).at;
    if (!bad) run_all(&j, peak);
}

void retrograde_pull(object *x, object *v, float unit, int32_t guard, object *out) {
    int bad = 0;
    const job j = {.x = find(x, &bad), .v = find(v, &bad), .out = find(out, &bad), .size = size_of(x, &bad), .guard = guard,
                   .what = PULL, .unit = unit};
    if (!bad) run_all(&j, 0);
}

void retrograde_retreat(object *x, object *v, object *i, object *y, object *seen, int32_t n, int32_t d, float scale, float unit,
                        int32_t form, int32_t guard, object *out, object *before, int32_t over) {
    int bad = 0;
    const job j = {find(x, &bad), find(v, &bad), find(i, &bad), find(y, &bad), find(out, &bad), {0, NONE}, find(before, &bad),
                   size_of(x, &bad), kind_of(seen), n, d, guard, form, RETREAT, over, scale, unit};
    if (!bad) run_all(&j, 0);
}

void retrograde_encode(object *given, float scale, object *result, object *watch, int32_t column) {
    int bad = 0;
    const tensor x = find(given, &bad), q = find(result, &bad);
    float *peak = find(watch, &bad).at, x_room[PIECE], most = 0.0f;
    int32_t q_room[PIECE];
    const int64_t whole = size_of(given, &bad);
    for (int64_t from = 0; !bad && from < whole; from += PIECE) {
        const int64_t size = whole - from < PIECE ? whole - from : PIECE;
        const float *values = floats(x, from, size, x_room);
        int32_t *held = q.kind == INT32 ? (int32_t *)q.at + from : q_room;
        for (int64_t e = 0; e < size; e++) {
            const float scaled = values[e] * scale;
            most = larger(fabsf(scaled), most);
            held[e] = fabsf(scaled) <= 1073741824.0f ? (int32_t)rintf(scaled) : 0;
        }
        hold(q, from, size, held);
    }
    if (!bad) peak[column] = larger(most, peak[column]);
}

void retrograde_decode(object *integer, float unit, object *result) {
    int bad = 0;
    const tensor q = find(integer, &bad), out = find(result, &bad);
    const int64_t whole = size_of(integer, &bad);
    if (bad) return;
    void *state = whole > ALONE ? python.unlock() : 0;
#pragma omp parallel for num_threads(threads_for(whole)) schedule(static) if (whole > ALONE)
    for (int64_t from = 0; from < whole; from += PIECE) {
        const int64_t size = whole - from < PIECE ? whole - from : PIECE;
        int32_t room[PIECE];
        float out_room[PIECE], *values = space(out, from, out_room);
        const int32_t *held = integers(q, from, size, room);
        for (int64_t e = 0; e < size; e++) values[e] = (float)held[e] * unit;
        put(out, from, size, values);
    }
    if (state) python.lock(state);
}

static inline int32_t bit(const uint8_t *mask, int64_t k) { return mask[k >> 3] >> (k & 7) & 1; }

typedef struct {
    tensor p, h, d, out, gy, cast, mask, after;
    float c, e, e1, gain;
    int32_t form;
} carrying;

/* The gradient of a step, see reference.py: gx = p + d, s = gx + c*h, gy = gain*s, out = gx or gx - gy. Without p, it is e*h, or e1*h
   where the bits of `after` are set; without h, it is 0; without out, gx goes nowhere. out may be p. With a mask, cast is gy and out is gx
   where its bits are set, elsewhere cast is 0 and out is gx - gy. */
static void carry(const carrying *j, int64_t from, int64_t size) {
    float p_room[PIECE], h_room[PIECE], d_room[PIECE], out_room[PIECE], gy_room[PIECE], cast_room[PIECE];
    const float *p = j->p.at ? floats(j->p, from, size, p_room) : 0, *h = j->h.at ? floats(j->h, from, size, h_room) : 0;
    const float *d = floats(j->d, from, size, d_room), c = j->c, gain = j->gain;
    float *out = space(j->out, from, out_room), *gy = space(j->gy, from, gy_room);
    const uint8_t *mask = j->mask.at ? (uint8_t *)j->mask.at + from / 8 : 0;
    const uint8_t *after = j->after.at ? (uint8_t *)j->after.at + from / 8 : 0;
    if (p && h && out && mask && j->gy.kind == FLOAT32 && j->cast.kind == FLOAT32) {
        float *cast = (float *)j->cast.at + from;
        for (int64_t k = 0; k < size; k++) {
            const float x = p[k] + d[k], y = (x + h[k] * c) * gain;
            const int32_t m = bit(mask, k);
            gy[k] = y;
            cast[k] = m ? y : 0.0f;
            out[k] = m ? x : x - y;
        }
        put(j->out, from, size, out);
        return;
    }
    if (p && h && out && !mask) {
        const int32_t less = j->form != 0;
        for (int64_t k = 0; k < size; k++) {
            const float x = p[k] + d[k], y = (x + h[k] * c) * gain;
            gy[k] = y;
            out[k] = less ? x - y : x;
        }
    } else {
        for (int64_t k = 0; k < size; k++) {
            const float u = after && bit(after, k) ? j->e1 : j->e;
            const float x = p ? p[k] + d[k] : h ? h[k] * u + d[k] : d[k], y = (h ? x + h[k] * c : x) * gain;
            gy[k] = y;
            if (out) out[k] = (mask ? bit(mask, k) : !j->form) ? x : x - y;
        }
    }
    put(j->gy, from, size, gy);
    if (out) put(j->out, from, size, out);
    if (j->cast.at == j->gy.at) return;
    as_kind(j->gy.kind, size, gy);
    float *cast = space(j->cast, from, cast_room);
    for (int64_t k = 0; k < size; k++) cast[k] = mask && !bit(mask, k) ? 0.0f : gy[k];
    put(j->cast, from, size, cast);
}

void retrograde_carry(object *p, object *h, object *d, float c, float e, float e1, float gain, int32_t form, object *out, object *gy,
                      object *cast, object *mask, object *after) {
    int bad = 0;
    const carrying j = {find(p, &bad),  find(h, &bad),    find(d, &bad),    find(out, &bad), find(gy, &bad), find(cast, &bad),
                        find(mask, &bad), find(after, &bad), c, e, e1, gain, form};
    const int64_t whole = size_of(gy, &bad);
    if (bad) return;
    void *state = whole > ALONE ? python.unlock() : 0;
#pragma omp parallel for num_threads(threads_for(whole)) schedule(static) if (whole > ALONE)
    for (int64_t from = 0; from < whole; from += PIECE) carry(&j, from, whole - from < PIECE ? whole - from : PIECE);
    if (state) python.lock(state);
}

/* The hash of reference.digest: words in rows of 16, the left half of each times the right one, after adding keys. */
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

/* The hash of some elements of a tensor, as if they lay in a row: how many, and how many elements it is from one to the next. At most
   SAMPLE bytes. They are far apart and come from memory; a loop that knows their width asks for many at a time. */
#define SAMPLE 8192
#define GATHER(width) \
    for (int64_t k = 0; k < count; k++) memcpy(row + k * (width), from + k * step * (width), width)

void retrograde_sample(object *t, int64_t count, int64_t step, object *result, int64_t seed, int64_t sign) {
    int bad = 0;
    const char *from = (const char *)number(python.call(t, python.data_ptr, NULL), &bad);
    const int64_t width = bad ? 0 : (int64_t)number(python.attribute(t, python.itemsize), &bad);
    uint64_t *into = bad ? 0 : (uint64_t *)number(python.call(result, python.data_ptr, NULL), &bad);
    if (bad || !from) return; /* no memory: it was let go, to be filled again from outside */
    char row[SAMPLE];
    const int64_t bytes = count * width, rows = (bytes + 4 * ROW - 1) / (4 * ROW);
    if (step == 1) memcpy(row, from, bytes);
    else if (width == 4) GATHER(4);
    else if (width == 2) GATHER(2);
    else GATHER(width);
    memset(row + bytes, 0, rows * 4 * ROW - bytes);
    *into += (uint64_t)sign * digest(row, rows, 0, (uint32_t)seed);
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

/* The tensor is dense; it may be of any dtype. */
void retrograde_digest(object *t, object *result, int64_t seed, int64_t sign) {
    int bad = 0;
    const char *memory = (const char *)number(python.call(t, python.data_ptr, NULL), &bad);
    const int64_t bytes = bad ? 0 : (int64_t)number(python.attribute(t, python.nbytes), &bad);
    uint64_t *into = bad ? 0 : (uint64_t *)number(python.call(result, python.data_ptr, NULL), &bad), sum = 0;
    if (bad) return;
    void *state = bytes > 4 * ALONE ? python.unlock() : 0;
    const int32_t threads = threads_for(bytes / 4);
    const int64_t row = 4 * ROW, rows = bytes / row, share = (rows + threads - 1) / threads;
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
    if (state) python.lock(state);
}
