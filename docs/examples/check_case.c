/* Compare an array with an expected tensor of a golden case.  C99, needs nothing but libc.
 *
 *   cc -std=c99 -O2 -o check_case check_case.c
 *   check_case CASE_DIR                                 list the tensors: name, dtype, shape
 *   check_case CASE_DIR TENSOR FILE.bin [--ulps N]      compare FILE.bin with one of them
 *
 * FILE.bin: your array as little-endian elements in C order, of TENSOR's dtype and shape.
 * If TENSOR is bits.RECIPE.NAME, the bits of a merge recipe, only the elements are compared that
 * certain.RECIPE.NAME marks, and every NaN is equal to every NaN.
 * Exit status: 0 all bytes are equal (with --ulps N: no element differs by more than N steps), 1 if not,
 * 2 bad input.
 *
 * CASE_DIR/tensors.safetensors is the length of a header (8 bytes, little endian), the header
 *   {"out.o.bfloat16":{"dtype":"BF16","shape":[1,2,16,4],"data_offsets":[0,256]}, ...}
 * padded with blanks, and the data, to which the offsets refer.  In a golden case the keys have this
 * order and the tensors follow each other without gaps.  Anything else is refused here.
 */
#include <math.h> /* NAN, INFINITY, fabs; no function of libm */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TENSORS = 128, MAX_NAME = 64, MAX_RANK = 8, MAX_HEADER = 1 << 20, MAX_FILE = 1 << 26 };

struct format { const char *name; unsigned size, fraction_bits; }; /* fraction_bits 0: integers */
static const struct format FORMATS[] = {{"F64", 8, 52}, {"F32", 4, 23}, {"F16", 2, 10},
    {"BF16", 2, 7}, {"I64", 8, 0}, {"BOOL", 1, 0}, {NULL, 0, 0}}, *const FLOAT64 = FORMATS;

struct tensor {
    char name[MAX_NAME];
    const struct format *format;
    uint64_t shape[MAX_RANK], count;
    int rank;
    const unsigned char *data;
};
static struct tensor tensors[MAX_TENSORS];
static int n_tensors;
static const char *at; /* position in the header; a 0 after the header ends every loop */

static void fail(const char *where, const char *what) {
    fprintf(stderr, "check_case: %s: %s\n", where, what);
    exit(2);
}

static unsigned char *read_file(const char *path, uint64_t most, uint64_t *length) {
    FILE *file = fopen(path, "rb");
    unsigned char *data = malloc(most + 1);
    if (!file || !data) fail(path, "cannot be opened");
    *length = fread(data, 1, most + 1, file);
    if (ferror(file) || *length > most) fail(path, "cannot be read, or is longer than it may be");
    fclose(file);
    unsigned char *fitting = realloc(data, *length ? *length : 1); /* so that tools see an overrun */
    return fitting ? fitting : data;
}

static void expect(const char *text) {
    if (strncmp(at, text, strlen(text))) fail(text, "expected in the header, but not found");
    at += strlen(text);
}

static void read_name(char *text) { /* up to the closing quote */
    size_t n = strcspn(at, "\"\\");
    if (n == 0 || n >= MAX_NAME || at[n] != '"') fail("header", "a name that no golden case has");
    memcpy(text, at, n);
    text[n] = 0;
    at += n + 1;
}

static uint64_t read_number(void) {
    uint64_t value = 0;
    if (*at < '0' || *at > '9') fail("header or --ulps", "a number was expected");
    for (; *at >= '0' && *at <= '9'; at++)
        if ((value = value * 10 + (uint64_t)(*at - '0')) > MAX_FILE) fail("a number", "too large");
    return value;
}

static struct tensor *find(const char *name) {
    for (int i = 0; i < n_tensors; i++)
        if (!strcmp(tensors[i].name, name)) return &tensors[i];
    return NULL;
}

/* The next entry of the header; its data begin at `begin`.  Returns where they end. */
static uint64_t read_entry(struct tensor *t, uint64_t begin) {
    char dtype[MAX_NAME];
    expect("\"");
    read_name(t->name);
    if (find(t->name)) fail(t->name, "stands twice");
    expect(":{\"dtype\":\"");
    read_name(dtype);
    for (t->format = FORMATS; t->format->name && strcmp(dtype, t->format->name);) t->format++;
    if (!t->format->name) fail(t->name, "has an unknown dtype");
    expect(",\"shape\":[");
    for (t->rank = 0, t->count = 1; *at != ']'; t->rank++) {
        if (t->rank == MAX_RANK) fail(t->name, "has too many axes");
        if (t->rank) expect(",");
        t->count *= t->shape[t->rank] = read_number(); /* both at most 2**26: no overflow */
        if (t->count > MAX_FILE) fail(t->name, "has too many elements");
    }
    expect("],\"data_offsets\":[");
    if (read_number() != begin) fail(t->name, "begins after a gap, or inside another tensor");
    expect(",");
    uint64_t end = read_number();
    if (end != begin + t->count * t->format->size) fail(t->name, "has a shape that does not fit");
    expect("]}");
    return end;
}

static void load(const char *folder) {
    static char path[4096], text[MAX_HEADER + 1];
    uint64_t length, header = 0, end = 0;
    if (strlen(folder) > sizeof path - 32) fail("CASE_DIR", "is too long");
    sprintf(path, "%s/tensors.safetensors", folder);
    const unsigned char *file = read_file(path, MAX_FILE, &length);
    if (length < 8) fail(path, "is too short");
    for (int i = 7; i >= 0; i--) header = header << 8 | file[i];
    if (header > MAX_HEADER || header > length - 8) fail(path, "has too long a header");
    memcpy(text, file + 8, header);
    const unsigned char *data = file + 8 + header;
    for (at = text, expect("{"); *at != '}'; n_tensors++) {
        if (n_tensors == MAX_TENSORS) fail(path, "holds too many tensors");
        if (n_tensors) expect(",");
        tensors[n_tensors].data = data + end;
        end = read_entry(&tensors[n_tensors], end);
    }
    at += 1 + strspn(at + 1, " ");
    if (at != text + header || end != length - 8 - header) fail(path, "has a header that does not fit its data");
}

/* One element as bits, on a machine of any byte order. */
static uint64_t bits_of(const struct format *f, const unsigned char *data, uint64_t index) {
    uint64_t bits = 0;
    for (unsigned i = f->size; i-- > 0;) bits = bits << 8 | data[index * f->size + i];
    return bits;
}

static uint64_t magnitude(const struct format *f, uint64_t bits) { /* without the sign */
    return bits & ~((uint64_t)1 << (8 * f->size - 1));
}

/* Infinity, NaN, integer: right or wrong, never nearly right. */
static int is_odd(const struct format *f, uint64_t bits) {
    uint64_t all = magnitude(f, ~(uint64_t)0 >> (64 - 8 * f->size));
    return !f->fraction_bits || magnitude(f, bits) >= all >> f->fraction_bits << f->fraction_bits;
}

static int value_is_nan(const struct format *f, uint64_t bits) {
    return is_odd(f, bits) && magnitude(f, bits) % ((uint64_t)1 << f->fraction_bits);
}

/* Steps from one number to the other; +0 and -0 are one number. */
static uint64_t ulps(const struct format *f, uint64_t a, uint64_t b) {
    uint64_t x = magnitude(f, a), y = magnitude(f, b);
    return (a == x) != (b == y) ? x + y : x > y ? x - y : y - x;
}

static double value_of(const struct format *f, const unsigned char *data, uint64_t index) {
    uint64_t bits = bits_of(f, data, index), size = magnitude(f, bits);
    if (!f->fraction_bits) return (double)(int64_t)bits;
    uint64_t one = (uint64_t)1 << f->fraction_bits, exponent = size >> f->fraction_bits;
    double value = (double)(size % one + (exponent ? one : 0)), sign = bits == size ? 1 : -1;
    if (is_odd(f, bits)) return size % one ? NAN : sign * INFINITY;
    int power = (int)(exponent + !exponent) - (1 << (8 * f->size - f->fraction_bits - 2)) + 1;
    for (power -= (int)f->fraction_bits; power > 0; power--) value *= 2; /* exact */
    for (; power < 0; power++) value /= 2;
    return sign * value;
}

static void show(const char *what, const struct tensor *t, const unsigned char *got, uint64_t i) {
    uint64_t stride = t->count, rest = i;
    printf("%s at [", what);
    for (int axis = 0; axis < t->rank; rest %= stride, axis++) {
        stride /= t->shape[axis];
        printf("%s%lu", axis ? ", " : "", (unsigned long)(rest / stride));
    }
    double want = value_of(t->format, t->data, i);
    printf("]: expected %.17g, got %.17g\n", want, value_of(t->format, got, i));
}

/* For t = out.NAME.FORMAT: scale.NAME, one number for each row, and out.NAME.float64. */
static int find_scale(const struct tensor *t, struct tensor **scale, struct tensor **truth) {
    char name[MAX_NAME + 16];
    const char *dot = strrchr(t->name, '.');
    if (strncmp(t->name, "out.", 4) || dot < t->name + 4) return 0;
    sprintf(name, "scale.%.*s", (int)(dot - t->name - 4), t->name + 4);
    *scale = find(name);
    sprintf(name, "%.*s.float64", (int)(dot - t->name), t->name);
    *truth = find(name);
    return *scale && *truth && (*scale)->format == FLOAT64 && (*truth)->format == FLOAT64
        && (*truth)->count == t->count && (*scale)->count && t->count % (*scale)->count == 0;
}

/* For t = bits.RECIPE.NAME: certain.RECIPE.NAME, or NULL. */
static const struct tensor *find_certain(const struct tensor *t) {
    char name[MAX_NAME + 16];
    if (strncmp(t->name, "bits.", 5)) return NULL;
    sprintf(name, "certain.%s", t->name + 5);
    const struct tensor *certain = find(name);
    if (!certain || certain->format->size != 1 || certain->count != t->count)
        fail(name, "does not fit, or is missing");
    return certain;
}

static int compare(const struct tensor *t, const unsigned char *got, uint64_t limit) {
    uint64_t first = 0, first_odd = 0, most = 0, most_at = 0, worst_at = 0;
    unsigned long differ = 0, odd = 0, compared = 0;
    const struct tensor *certain = find_certain(t);
    struct tensor *scale = NULL, *truth = NULL;
    const int has_scale = find_scale(t, &scale, &truth);
    double worst = 0;
    for (uint64_t i = 0; i < t->count; i++) {
        uint64_t a = bits_of(t->format, t->data, i), b = bits_of(t->format, got, i);
        if (certain && !certain->data[i]) continue;
        compared++;
        if (certain && value_is_nan(t->format, a) && value_is_nan(t->format, b)) continue;
        if (a != b && differ++ == 0) first = i;
        if (is_odd(t->format, a) || is_odd(t->format, b)) {
            if (a != b && odd++ == 0) first_odd = i;
            continue;
        }
        uint64_t apart = ulps(t->format, a, b);
        if (apart > most) most = apart, most_at = i;
        if (!has_scale) continue;
        double error = value_of(t->format, got, i) - value_of(FLOAT64, truth->data, i);
        if (error != 0) error /= value_of(FLOAT64, scale->data, i / (t->count / scale->count));
        if (!(fabs(error) <= worst)) worst = fabs(error), worst_at = i;
    }
    printf("%s: %lu of %lu elements differ\n", t->name, differ, compared);
    if (differ) show("first", t, got, first);
    if (odd) printf("NaN, infinite or integer: %lu, the first", odd), show("", t, got, first_odd);
    if (most) printf("largest difference: %llu ulps", (unsigned long long)most);
    if (most) show("", t, got, most_at);
    if (has_scale) printf("largest error / row scale: %.3g%s", worst, worst == 0 ? "\n" : "");
    if (worst != 0) show("", t, got, worst_at);
    return odd || most > limit || (limit == 0 && differ);
}

int main(int argc, char **argv) {
    uint64_t length, limit = 0;
    int has_limit = argc == 6 && !strcmp(argv[4], "--ulps");
    if (argc != 2 && argc != 4 && !has_limit) fail("usage", "CASE_DIR [TENSOR FILE [--ulps N]]");
    if (has_limit) at = argv[5], limit = read_number();
    if (has_limit && *at) fail("--ulps", "a number was expected");
    load(argv[1]);
    for (int i = 0; argc == 2 && i < n_tensors; i++) {
        printf("%s %s [", tensors[i].name, tensors[i].format->name);
        for (int axis = 0; axis < tensors[i].rank; axis++)
            printf("%s%lu", axis ? ", " : "", (unsigned long)tensors[i].shape[axis]);
        printf("]\n");
    }
    if (argc == 2) return 0;
    const struct tensor *t = find(argv[2]);
    if (!t) fail(argv[2], "no such tensor in this case");
    unsigned char *got = read_file(argv[3], t->count * t->format->size, &length);
    if (length != t->count * t->format->size) fail(argv[3], "is shorter than the tensor");
    return compare(t, got, limit);
}
