/* The merge of partial results, in float32, for the protocol of cmd: (docs/conform/protocol.md).
 * C99, for a little-endian machine.  A sketch: a real program reads JSON with a JSON library.
 *
 *   cc -std=c99 -O2 -o merge merge.c -lm
 *   ringspec check cmd:./merge
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LINE = 1 << 20, MAX_RANK = 8 };
struct tensor { long shape[MAX_RANK], rank; const float *data; };

static void stop(const char *what) { /* the reason goes to the log; the status is a failure */
    fprintf(stderr, "merge: %s\n", what);
    exit(1);
}

static char *file(const char *path) { /* the whole file, followed by a 0 */
    FILE *in = fopen(path, "rb");
    if (!in || fseek(in, 0, SEEK_END)) stop("no such file");
    long length = ftell(in);
    char *data = calloc((size_t)length + 1, 1);
    rewind(in);
    if (!data || fread(data, 1, (size_t)length, in) != (size_t)length) stop("cannot read");
    fclose(in);
    return data;
}

static const char *after(const char *json, const char *text) {
    const char *at = strstr(json, text);
    if (!at) stop(text);
    return at + strlen(text);
}

static void value(const char *json, const char *key, char *out, size_t size) { /* "key":"value" */
    const char *at = after(json, key);
    size_t length = strcspn(at, "\"");
    if (length >= size) stop("too long a path");
    memcpy(out, at, length);
    out[length] = 0;
}

static struct tensor find(const char *data, const char *entry) {
    struct tensor t = {{0}, 0, NULL};
    uint64_t header;
    memcpy(&header, data, 8);
    char *at = (char *)after(data + 8, entry); /* now at the shape: 1,2,3],"data_offsets":[ */
    for (; *at != ']' && t.rank < MAX_RANK; at += *at == ',') t.shape[t.rank++] = strtol(at, &at, 10);
    t.data = (const float *)(data + 8 + header + strtol(after(at, "["), NULL, 10));
    return t;
}

static void merge(const char *inputs, const char *result) {
    char *data = file(inputs), header[512];
    struct tensor o = find(data, "\"parts_o\":{\"dtype\":\"F32\",\"shape\":[");
    struct tensor lse = find(data, "\"parts_lse\":{\"dtype\":\"F32\",\"shape\":[");
    long parts = o.shape[1], rows = o.shape[2] * o.shape[3] * o.shape[4], d = o.shape[5];
    float *out = calloc((size_t)(rows * d + rows), sizeof *out), *total = out + rows * d;
    if (o.rank != 6 || !out) stop("parts_o [1, N, B, H, S, d] was expected");
    for (long row = 0; row < rows; row++) {
        double most = -INFINITY, sum = 0;
        for (long n = 0; n < parts; n++) most = fmax(most, lse.data[n * rows + row]);
        for (long n = 0; n < parts && most > -INFINITY; n++)
            sum += exp(lse.data[n * rows + row] - most);
        for (long n = 0; n < parts && most > -INFINITY; n++)
            for (long i = 0; i < d; i++)
                out[row * d + i] += (float)(exp(lse.data[n * rows + row] - most) / sum
                                            * o.data[(n * rows + row) * d + i]);
        total[row] = (float)(most > -INFINITY ? most + log(sum) : -INFINITY);
    }
    const long *s = o.shape; /* the worker's axis, 1, stays in front */
    int length = sprintf(header,
        "{\"o\":{\"dtype\":\"F32\",\"shape\":[1,%ld,%ld,%ld,%ld],\"data_offsets\":[0,%ld]},"
        "\"lse\":{\"dtype\":\"F32\",\"shape\":[1,%ld,%ld,%ld],\"data_offsets\":[%ld,%ld]}}",
        s[2], s[3], s[4], d, 4 * rows * d, s[2], s[3], s[4], 4 * rows * d, 4 * rows * (d + 1));
    uint64_t bytes = (uint64_t)length;
    FILE *to = fopen(result, "wb");
    if (!to || fwrite(&bytes, 8, 1, to) != 1 || fwrite(header, bytes, 1, to) != 1
        || fwrite(out, 4, (size_t)(rows * d + rows), to) != (size_t)(rows * d + rows) || fclose(to))
        stop("cannot write the result");
    free(out);
    free(data);
}

int main(void) {
    static char line[MAX_LINE], inputs[4096], result[4096];
    while (fgets(line, sizeof line, stdin)) {
        if (strstr(line, "\"kind\":\"hello\"")) {
            puts("{\"kind\":\"hello\",\"name\":\"merge in C\",\"capabilities\":"
                 "{\"operations\":[\"merge\"],\"formats\":[\"float32\"]}}");
        } else if (!strstr(line, "\"operation\":\"merge\"")) {
            puts("{\"kind\":\"refused\",\"reason\":\"only merges\"}");
        } else {
            const char *files = after(after(line, "\"formats\":{"), "}");
            value(files, "\"inputs\":\"", inputs, sizeof inputs);
            value(files, "\"result\":\"", result, sizeof result);
            merge(inputs, result);
            puts("{\"kind\":\"result\"}");
        }
        fflush(stdout); /* or the harness waits forever */
    }
    return 0;
}
