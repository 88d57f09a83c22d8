// Runs a package: ./main FOLDER DTYPE:SHAPE:FILE ...
//
//     ./main gpt int64:1,16:tokens.bin        the numbers as they lie in memory; `int64::step.bin` is a scalar
//
// Each result is written to out0.bin, out1.bin, ...

#include <stdlib.h>

#include "minicompile_load.h"
#include "target.h"

static const char* const NAMES[] = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64"};
static const int BYTES[] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8};

static int64_t size_of(const mc_tensor* tensor) {
    int64_t bytes = BYTES[tensor->dtype];
    for (int i = 0; i < tensor->ndim; i++) bytes *= tensor->shape[i];
    return bytes;
}

static int stop(const char* why) {
    fprintf(stderr, "error: %s\n", why);
    return 1;
}

// "int64:1,16:tokens.bin" as a tensor; NULL if the file is there and large enough, else what is wrong.
static const char* read_tensor(char* text, mc_tensor* tensor) {
    char *shape = strchr(text, ':'), *file = shape ? strchr(shape + 1, ':') : NULL;
    if (!file) return "an input is DTYPE:SHAPE:FILE";
    char* at = shape + 1;
    *shape = *file++ = 0;
    for (tensor->dtype = 0; strcmp(NAMES[tensor->dtype], text); tensor->dtype++)
        if (tensor->dtype == MC_FLOAT64) return "no such dtype";
    while (*at && tensor->ndim < MC_MOST_DIMENSIONS) {
        char* end;
        tensor->shape[tensor->ndim++] = strtoll(at, &end, 10);
        if (end == at || (*end && *end != ',')) return "a shape is 1,16";
        at = *end ? end + 1 : end;
    }
    int64_t bytes = 0;
    tensor->data = mc_map(".", file, &bytes);
    return bytes == size_of(tensor) ? NULL : "a file has not as many bytes as its tensor";
}

int main(int count, char** given) {
    if (count != 2 + MC_INPUTS) return stop("give a folder, and DTYPE:SHAPE:FILE of each input");
    mc_library library = mc_load(given[1]);
    if (!library.handle) return stop(library.error);
    mc_model* model = library.open(given[1]);
    if (!model) return stop(library.error_text());

    mc_tensor in[MC_INPUTS + 1] = {0}, out[MC_OUTPUTS + 1];
    for (int i = 0; i < MC_INPUTS; i++) {
        const char* wrong = read_tensor(given[2 + i], &in[i]);
        if (wrong) return stop(wrong);
    }
    if (library.run(model, in, MC_INPUTS, out, MC_OUTPUTS)) return stop(library.error_text());
    for (int i = 0; i < MC_OUTPUTS; i++) {
        char name[32];
        snprintf(name, sizeof name, "out%d.bin", i);
        FILE* file = fopen(name, "wb");
        if (!file || fwrite(out[i].data, 1, (size_t)size_of(&out[i]), file) != (size_t)size_of(&out[i]) || fclose(file))
            return stop("a result can't be written");
        printf("%s: %s [", name, NAMES[out[i].dtype]);
        for (int j = 0; j < out[i].ndim; j++) printf(j ? ", %ld" : "%ld", (long)out[i].shape[j]);
        printf("]\n");
    }
    library.free(out, MC_OUTPUTS);
    library.close(model);
    return 0;
}
