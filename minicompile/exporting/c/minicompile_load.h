// Loads a package after a look at each of its files: sizes and checksums are as metadata.json says.
// The checksums (zip's CRC-32) find damage, not malice: a package is as trustworthy as where it came from.

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "minicompile_package.h"

// The functions of a package's library; `handle` is NULL where it was not loaded, and `error` says why.
typedef struct {
    void* handle;
    mc_model* (*open)(const char*);
    int (*run)(mc_model*, const mc_tensor*, int, mc_tensor*, int);
    const char* (*error_text)(void);
    void (*free)(mc_tensor*, int);
    void (*close)(mc_model*);
    char error[512];
} mc_library;

// CRC-32 of more bytes, eight at a time (M. E. Kounavis, F. L. Berry: slicing by 8).
static uint32_t mc_crc32(uint32_t crc, const unsigned char* at, int64_t bytes) {
    static uint32_t table[8][256];
    static volatile int ready;
    if (!ready) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0xedb88320u : c >> 1;
            table[0][i] = c;
        }
        for (int i = 0; i < 256; i++)
            for (int k = 1; k < 8; k++) table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
        __sync_synchronize();
        ready = 1;
    }
    crc = ~crc;
    for (; bytes >= 8; at += 8, bytes -= 8) {
        uint32_t low, high;
        memcpy(&low, at, 4), memcpy(&high, at + 4, 4);
        low ^= crc;
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24]
            ^ table[3][high & 255] ^ table[2][high >> 8 & 255] ^ table[1][high >> 16 & 255] ^ table[0][high >> 24];
    }
    for (; bytes > 0; at++, bytes--) crc = crc >> 8 ^ table[0][(crc ^ *at) & 255];
    return ~crc;
}

// A file in memory, whose private copy may be written; NULL if it can't be read or is empty.
static char* mc_map(const char* folder, const char* name, int64_t* bytes) {
    char path[4096];
    struct stat about;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return NULL;
    int file = open(path, O_RDONLY);
    if (file < 0) return NULL;
    void* found = MAP_FAILED;
    if (fstat(file, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > 0)
        found = mmap(NULL, (size_t)about.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    close(file);
    *bytes = found == MAP_FAILED ? 0 : (int64_t)about.st_size;
    return found == MAP_FAILED ? NULL : (char*)found;
}

#define MC_REFUSE(...) do { snprintf(library.error, sizeof library.error, __VA_ARGS__); goto end; } while (0)

// The weights are left to mc_open. dlclose(handle) when all models are closed.
static mc_library mc_load(const char* folder) {
    mc_library library = {0};
    int64_t bytes = 0, length;
    char name[256], program[4400] = "", tail[64], *text = NULL, *last = NULL, *at;
    const char* names[] = {"mc_open", "mc_run", "mc_error", "mc_free", "mc_close"};
    void* functions[5];
    unsigned sum;
    int version = 0;
    char* given = mc_map(folder, "metadata.json", &bytes);
    if (!given || !(text = (char*)calloc(1, (size_t)bytes + 1))) MC_REFUSE("%s/metadata.json can't be read", folder);
    memcpy(text, given, (size_t)bytes);
    for (at = text; (at = strstr(at, "\"crc32_above\": ")); at++) last = at;
    if (last) snprintf(tail, sizeof tail, "\"crc32_above\": %u\n}\n", mc_crc32(0, (unsigned char*)text, last - text));
    if (!last || strcmp(last, tail) || strlen(text) != (size_t)bytes) MC_REFUSE("%s/metadata.json is damaged", folder);
    at = strstr(text, "\"version\": ");
    if (!at || sscanf(at, "\"version\": %d", &version) != 1 || version != MC_VERSION)
        MC_REFUSE("the package has version %d, this program loads version %d", version, MC_VERSION);
    for (at = text; (at = strstr(at, "{\"file\": \"")); at++) {
        if (sscanf(at, "{\"file\": \"%255[^\"/]\", \"bytes\": %ld, \"crc32\": %u}", name, &length, &sum) != 3)
            MC_REFUSE("%s/metadata.json is damaged", folder);
        int64_t found = 0;
        char* content = mc_map(folder, name, &found);
        int weights = strcmp(name, "weights.bin") == 0;  // mc_open reads them
        int whole = content && found == length && (weights || sum == mc_crc32(0, (unsigned char*)content, found));
        if (content) munmap(content, (size_t)found);
        if (!whole) MC_REFUSE("%s/%s is missing, truncated or damaged", folder, name);
        size_t n = strlen(name);
        if (n > 3 && strcmp(name + n - 3, ".so") == 0) snprintf(program, sizeof program, "%s%s/%s", folder[0] == '/' ? "" : "./", folder, name);
    }
    library.handle = dlopen(program, RTLD_NOW | RTLD_LOCAL);
    if (!library.handle) MC_REFUSE("the library can't be loaded: %s", dlerror());
    for (int i = 0; i < 5; i++)
        if (!(functions[i] = dlsym(library.handle, names[i]))) {
            dlclose(library.handle), library.handle = NULL;
            MC_REFUSE("the library has no function %s", names[i]);
        }
    memcpy(&library.open, functions, sizeof functions);
end:
    free(text);
    if (given) munmap(given, (size_t)bytes);
    return library;
}
