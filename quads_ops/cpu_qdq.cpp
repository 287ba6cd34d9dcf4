// NVFP4 on a CPU: the arithmetic of nvfp4.py, residual.py and receipt.py, in vectors as long as the machine's
// registers: a block of 16 elements is one vector with AVX-512, two with AVX2 and four elsewhere. Vectors are GCC's
// (`vector_size`); longer ones it would split, keep in memory and shuffle lane by lane.
// Must be compiled with -ffp-contract=off and without -ffast-math: results equal the torch definition in every bit.
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace {

constexpr int BLOCK = 16;
#ifndef LANES  // of 32 bits in a vector; each of the three is right on every machine, one is fast
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX2__
#define LANES 8
#else
#define LANES 4
#endif
#endif
constexpr int VECTORS = BLOCK / LANES;  // in a block
constexpr int TILE_BLOCKS = 64;         // all their scales are found first, so that no block waits for its own
constexpr int TILE = BLOCK * TILE_BLOCKS;
constexpr int PARTIAL_ROWS = 16;  // statistics: rows in a partial sum, whatever the number of threads

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef int16_t Pairs __attribute__((vector_size(LANES * 4)));
typedef uint64_t Longs __attribute__((vector_size(LANES * 4)));
typedef uint8_t Quarters __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint8_t HalfBytes __attribute__((vector_size(LANES / 2)));
struct bfloat16 { uint16_t bits; };

constexpr uint32_t MAGNITUDE = 0x7FFFFFFF, SIGN = 0x80000000, EXPONENT = 0x7F800000, CANONICAL_NAN = 0x7FC00000;
constexpr uint32_t UPPER = 0xFFFF0000;
#if LANES == 16
constexpr Bits LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
constexpr Bits LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr Bits LANE = {0, 1, 2, 3};
#endif

// ---- vectors

inline Bits bits(Floats x) { return (Bits)x; }
inline Floats floats(Bits b) { return (Floats)b; }
inline Bits all(uint32_t b) { return Bits{} + b; }
inline Floats all(float x) { return x - Floats{}; }
template <class V> inline V larger(V a, V b) { return a > b ? a : b; }
inline Bits smaller(Bits a, Bits b) { return a < b ? a : b; }
inline uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
inline float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

template <class V, class T> inline V read(const T *p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V, class T> inline void write(T *p, V v) { memcpy(p, &v, sizeof v); }

inline Floats load(const float *x) { return read<Floats>(x); }
inline Floats load(const bfloat16 *x) { return floats(__builtin_convertvector(read<Halves>(x), Bits) << 16); }

// The upper halves are BF16, rounded to nearest, ties to even. Not for a NaN with a bit set in its lower half.
inline Bits round_to_bf16(Floats x) { return bits(x) + 0x7FFF + ((bits(x) >> 16) & 1); }
inline void store(float *out, Floats x) { write(out, x); }
inline void store(bfloat16 *out, Floats x) { write(out, __builtin_convertvector(round_to_bf16(x) >> 16, Halves)); }

// x >= 0, rounded to `mantissa` bits behind the leading one, ties to even; below 2^min_exponent to the spacing there.
// Adding and subtracting the right power of two leaves the rounding to the processor.
inline Floats round_mantissa(Floats x, int mantissa, int min_exponent) {
    Bits exponent = larger(bits(x) & EXPONENT, all(uint32_t(min_exponent + 127) << 23));
    Floats magic = floats(exponent + (uint32_t(23 - mantissa) << 23));
    return (x + magic) - magic;
}

// ---- the largest magnitude of each block; as integers, NaN > Inf > every finite magnitude

// Of each run of 2 * RUN lanes the larger of its two halves, lane by lane: those of a, then those of b.
// Where a vector has no such run, that is the larger of a and b.
template <int RUN, class V> inline V merge(V a, V b) {
    if (RUN >= LANES) return larger(a, b);
    constexpr Bits first = LANE / RUN * 2 * RUN + LANE % RUN;
    return larger((V)__builtin_shuffle((Bits)a, (Bits)b, first), (V)__builtin_shuffle((Bits)a, (Bits)b, first + RUN));
}

// m: magnitudes of LANES blocks in turn, 8 lanes for each. Lane i of the result: block i.
template <class V> inline V largest_of_eights(V *m) {
    for (int i = 0; i < 4; i++) m[i] = merge<4>(m[2 * i], m[2 * i + 1]);
    for (int i = 0; i < 2; i++) m[i] = merge<2>(m[2 * i], m[2 * i + 1]);
    return merge<1>(m[0], m[1]);
}

// Of LANES blocks.
inline Bits block_amax(const float *x) {
    Bits m[8];
    for (int j = 0; j < 8; j++, x += 2 * LANES)
        m[j] = merge<8>(bits(load(x)) & MAGNITUDE, bits(load(x + LANES)) & MAGNITUDE);
    return largest_of_eights(m);
}

// BF16 is compared as it is, two in a lane: its order is that of the upper halves of FP32.
inline Bits block_amax(const bfloat16 *x) {
    Pairs m[8];
    for (int j = 0; j < 8; j++) m[j] = read<Pairs>(x + j * 2 * LANES) & 0x7FFF;
    Bits pairs = (Bits)largest_of_eights(m);
    return larger(pairs << 16, pairs & UPPER);
}

// ---- NVFP4

inline float finite_or_nan(uint32_t magnitude) { return float_of(magnitude < EXPONENT ? magnitude : CANONICAL_NAN); }

float global_scale_dec(uint32_t amax) {
    if (amax == 0) return 1.0f;
    float g = finite_or_nan(amax) / 2688.0f;
    return g < 0x1p-117f ? 0x1p-117f : g;
}

// Of a tile's blocks.
struct Scales {
    float scale[TILE_BLOCKS];    // on the E4M3 grid; NaN where the block holds NaN or Inf
    float divisor[TILE_BLOCKS];  // scale * g; infinite where that is 0 or NaN, so that every finite magnitude becomes 0
};

inline float canonical(float g) { return g == g ? g : float_of(CANONICAL_NAN); }  // see round_to_bf16

inline void block_scales(Bits amax, float g, float *scale, float *divisor) {
    Floats s = floats(amax >= EXPONENT ? all(CANONICAL_NAN) : amax) / all(6.0f * g);
    Bits is_nan = (Bits)(s != s);
    s = round_mantissa(s > 448.0f ? all(448.0f) : s, 3, -6);
    s = floats(is_nan ? all(CANONICAL_NAN) : bits(s));
    write(scale, s);
    s *= g;
    write(divisor, s > 0.0f ? bits(s) : all(EXPONENT));
}

// Blocks that do not fill a vector of scales are padded with zeros.
template <class T> inline void find_scales(const T *x, int blocks, float g, Scales *s) {
    int b = 0;
    for (; b + LANES <= blocks; b += LANES) block_scales(block_amax(x + b * BLOCK), g, s->scale + b, s->divisor + b);
    if (b == blocks) return;
    T rest[LANES * BLOCK] = {};
    memcpy(rest, x + b * BLOCK, (blocks - b) * BLOCK * sizeof(T));
    block_scales(block_amax(rest), g, s->scale + b, s->divisor + b);
}

// |x| / divisor on the E2M1 grid.
inline Floats e2m1(Floats x, Floats divisor) {
    Bits y = bits(floats(bits(x) & MAGNITUDE) / divisor);
    return round_mantissa(floats(smaller(y, bits(all(6.0f)))), 1, 0);
}

inline Floats magnitude_of_qdq(Floats x, Floats scale, Floats divisor, float g) {
    return (e2m1(x, divisor) * scale) * g;
}

inline Floats qdq(Floats x, Floats scale, Floats divisor, float g) {
    return floats(bits(magnitude_of_qdq(x, scale, divisor, g)) | (bits(x) & SIGN));
}

inline uint8_t e4m3_byte(float s) {
    if (s != s) return 0x7F;
    return s < 0x1p-6f ? uint8_t(s * 512.0f) : uint8_t((bits_of(s) >> 20) - (120u << 3));
}

// The lowest byte of each.
inline HalfBytes lowest_bytes(Longs v) {
#if LANES == 16
    return __builtin_convertvector(v, HalfBytes);  // one instruction there; elsewhere GCC takes the lanes one by one
#else
    constexpr Quarters first = {0, 8, 16, 24};
    Quarters bytes = __builtin_shuffle((Quarters)v, first);
    return read<HalfBytes>(&bytes);
#endif
}

// Codes of a vector, two a byte; 0 in a block with a NaN scale.
inline HalfBytes packed_codes(Floats x, Floats scale, Floats divisor) {
    Floats magnitude = e2m1(x, divisor);
    Bits small = __builtin_convertvector(magnitude * 2.0f, Bits);
    Bits code = magnitude < 1.0f ? small : (bits(magnitude) >> 22) - (126u << 1);
    code |= (bits(x) >> 28) & 8;
    Longs pairs = (Longs)(scale == scale ? code : Bits{});
    return lowest_bytes(pairs | (pairs >> 28));
}

// ---- rows

inline int tile_blocks(int64_t at, int64_t k) { return int((k - at < TILE ? k - at : TILE) / BLOCK); }

// Vectors `from` to `to` of a tile.
template <class In, class Out>
inline void qdq_vectors(const In *x, Out *out, const Scales &s, float g, int from, int to) {
    for (int i = from; i < to; i++) {
        int b = i / VECTORS;
        store(out + i * LANES, qdq(load(x + i * LANES), all(s.scale[b]), all(s.divisor[b]), g));
    }
}

template <class In, class Out> void qdq_row(const In *x, Out *out, float g, int64_t k) {
    Scales s;
    for (int64_t at = 0; at < k; at += TILE) {
        int blocks = tile_blocks(at, k);
        find_scales(x + at, blocks, g, &s);
        qdq_vectors(x + at, out + at, s, g, 0, blocks * VECTORS);
    }
}

// For vector j of those that hold a tile's blocks in turn, 8 lanes for each: in every lane the value of its block.
inline Floats eights_of(const float *values, int j) {
#if LANES == 16
    return LANE < 8 ? all(values[2 * j]) : all(values[2 * j + 1]);
#else
    return all(values[j * LANES / 8]);
#endif
}

// Two elements in a lane: an even one in its lower half, an odd one in its upper.
inline Bits qdq_pairs(Bits x, Floats scale, Floats divisor, float g) {
    Bits even = round_to_bf16(magnitude_of_qdq(floats(x << 16), scale, divisor, g));
    Bits odd = round_to_bf16(magnitude_of_qdq(floats(x & UPPER), scale, divisor, g));
    return (even >> 16) | (odd & UPPER) | (x & (SIGN | SIGN >> 16));
}

// BF16 to BF16, the trainer's weights: both elements of a lane become FP32 in place, so no lane has to move.
inline void qdq_row(const bfloat16 *x, bfloat16 *out, float g, int64_t k) {
    Scales s;
    for (int64_t at = 0; at < k; at += TILE) {
        int blocks = tile_blocks(at, k), whole = blocks * 8 / LANES;
        find_scales(x + at, blocks, g, &s);
        for (int j = 0; j < whole; j++) {
            int64_t i = at + j * 2 * LANES;
            write(out + i, qdq_pairs(read<Bits>(x + i), eights_of(s.scale, j), eights_of(s.divisor, j), g));
        }
        qdq_vectors(x + at, out + at, s, g, 2 * whole, blocks * VECTORS);  // of odd blocks the last
    }
}

template <class In> void quantize_row(const In *x, uint8_t *packed, uint8_t *scales, float g, int64_t k) {
    Scales s;
    for (int64_t at = 0; at < k; at += TILE) {
        int blocks = tile_blocks(at, k);
        find_scales(x + at, blocks, g, &s);
        for (int b = 0; b < blocks; b++) scales[at / BLOCK + b] = e4m3_byte(s.scale[b]);
        for (int i = 0; i < blocks * VECTORS; i++) {
            int b = i / VECTORS;
            HalfBytes codes = packed_codes(load(x + at + i * LANES), all(s.scale[b]), all(s.divisor[b]));
            write(packed + (at + i * LANES) / 2, codes);
        }
    }
}

// Bits of the largest magnitude. The order of BF16 is that of the upper halves of FP32, so it is compared as it is.
template <class T, class B> inline B amax_bits(const T *x, int64_t n, B magnitude) {
    B largest = 0;
    for (int64_t i = 0; i < n; i++) {
        B m = read<B>(x + i) & magnitude;
        largest = m > largest ? m : largest;
    }
    return largest;
}

inline uint32_t amax_row(const float *x, int64_t n) { return amax_bits(x, n, MAGNITUDE); }
inline uint32_t amax_row(const bfloat16 *x, int64_t n) { return uint32_t(amax_bits(x, n, uint16_t(0x7FFF))) << 16; }

// ---- residual compensation

enum Keep { KEEP_NONE, KEEP_ALL, KEEP_BLOCKS, KEEP_CHANNELS };

inline Floats masked(Floats rest, Keep kind, const uint8_t *keep, int64_t at) {
    if (kind != KEEP_CHANNELS) return rest;
    Bits kept = __builtin_convertvector(read<Bytes>(keep + at), Bits);
    return kept != 0u ? rest : Floats{};
}

inline void add_squares(Floats rest, float *sums) {
    Floats square = rest * rest;
    store(sums, load(sums) + (square == square ? square : Floats{}));  // a token that holds NaN or Inf does not count
}

// One token: out[k] = Xq + Rq with the token's own scale. sums[k] += r^2 unless null.
template <class In> void compensate_row(const In *x, float *out, Keep kind, const uint8_t *keep, float *sums,
                     int64_t k) {
    float g = global_scale_dec(amax_row(x, k));
    Scales s;
    float rest[TILE];
    for (int64_t at = 0; at < k; at += TILE) {
        int blocks = tile_blocks(at, k);
        find_scales(x + at, blocks, g, &s);
        for (int i = 0; i < blocks * VECTORS; i++) {
            int b = i / VECTORS;
            Floats value = load(x + at + i * LANES);
            Floats first = qdq(value, all(s.scale[b]), all(s.divisor[b]), g);
            store(out + at + i * LANES, first);
            if (sums) add_squares(value - first, sums + at + i * LANES);
            store(rest + i * LANES, masked(value - first, kind, keep, at + i * LANES));
        }
        if (kind == KEEP_NONE) continue;
        find_scales(rest, blocks, g, &s);
        for (int i = 0; i < blocks * VECTORS; i++) {
            int b = i / VECTORS;
            Floats second = {};  // added where nothing is kept too: -0 becomes 0, as in the definition
            if (kind != KEEP_BLOCKS || keep[at / BLOCK + b])
                second = qdq(load(rest + i * LANES), all(s.scale[b]), all(s.divisor[b]), g);
            store(out + at + i * LANES, load(out + at + i * LANES) + second);
        }
    }
}

struct Part { int64_t group, row, end; };  // up to PARTIAL_ROWS rows of one group

std::vector<Part> parts_of(const int64_t *counts, int64_t groups) {
    std::vector<Part> parts;
    int64_t row = 0;
    for (int64_t group = 0; group < groups; group++) {
        int64_t end = row + counts[group];
        for (; row < end; row += PARTIAL_ROWS)
            parts.push_back({group, row, row + PARTIAL_ROWS < end ? row + PARTIAL_ROWS : end});
        row = end;
    }
    return parts;
}

// stats[group, size] += the sums of the group's parts, in order; over blocks of channels where size is k / 16.
void add_partial(const std::vector<Part> &parts, const std::vector<float> &sums, float *stats, int64_t size,
                 int64_t k) {
    for (size_t p = 0; p < parts.size(); p++) {
        float *total = stats + parts[p].group * size;
        for (int64_t i = 0; i < k; i++) total[size == k ? i : i / BLOCK] += sums[p * k + i];
    }
}

template <class In>
void compensate(const In *x, float *out, Keep kind, const uint8_t *keep, float *stats, int64_t stats_size,
                const int64_t *counts, int64_t groups, int64_t k, int threads) {
    std::vector<Part> parts = parts_of(counts, groups);
    std::vector<float> sums(stats ? parts.size() * k : 0);
    int64_t keep_size = kind == KEEP_BLOCKS ? k / BLOCK : kind == KEEP_CHANNELS ? k : 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (size_t p = 0; p < parts.size(); p++)
        for (int64_t row = parts[p].row; row < parts[p].end; row++)
            compensate_row(x + row * k, out + row * k, kind, keep + parts[p].group * keep_size,
                           stats ? &sums[p * k] : nullptr, k);
    if (stats) add_partial(parts, sums, stats, stats_size, k);
}

template <class In, class Out>
void qdq_rows(const void *x, void *out, const float *g, int64_t rows, int64_t k, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        qdq_row((const In *)x + row * k, (Out *)out + row * k, canonical(g[row]), k);
}

template <class In>
void quantize_rows(const In *x, uint8_t *packed, uint8_t *scales, const float *g, int64_t rows, int64_t k,
                   int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        quantize_row(x + row * k, packed + row * k / 2, scales + row * k / BLOCK, g[row], k);
}

template <class In> void amax_rows(const In *x, uint32_t *amax, int64_t rows, int64_t n, int threads) {
    constexpr int64_t CHUNK = 1 << 14;
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
    for (int64_t row = 0; row < rows; row++) {
        uint32_t largest = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(max : largest)
        for (int64_t c = 0; c < chunks; c++) {
            uint32_t m = amax_row(x + row * n + c * CHUNK, c + 1 < chunks ? CHUNK : n - c * CHUNK);
            largest = m > largest ? m : largest;
        }
        amax[row] = largest;
    }
}

// ---- receipts

inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

}  // namespace

// Inputs are FP32, or BF16 where `bf16` is set. All arrays are contiguous; k is a multiple of 16.
extern "C" {

// out[rows, k] = qdq(x[rows, k], g[rows]), in FP32 or BF16
void quads_qdq(const void *x, int bf16, void *out, int out_bf16, const float *g, int64_t rows, int64_t k, int threads) {
    auto run = bf16 ? (out_bf16 ? qdq_rows<bfloat16, bfloat16> : qdq_rows<bfloat16, float>)
                    : (out_bf16 ? qdq_rows<float, bfloat16> : qdq_rows<float, float>);
    run(x, out, g, rows, k, threads);
}

// packed[rows, k/2] and scales[rows, k/16]
void quads_quantize(const void *x, int bf16, uint8_t *packed, uint8_t *scales, const float *g, int64_t rows, int64_t k,
                    int threads) {
    if (bf16) quantize_rows((const bfloat16 *)x, packed, scales, g, rows, k, threads);
    else quantize_rows((const float *)x, packed, scales, g, rows, k, threads);
}

// amax[rows]: FP32, NaN where x[row, n] holds NaN
void quads_amax(const void *x, int bf16, float *amax, int64_t rows, int64_t n, int threads) {
    if (bf16) amax_rows((const bfloat16 *)x, (uint32_t *)amax, rows, n, threads);
    else amax_rows((const float *)x, (uint32_t *)amax, rows, n, threads);
}

// out[rows, k] = Xq + Rq. Rows come sorted by group, counts[groups] of each. keep: uint8 [groups, k/16] or [groups, k],
// or null, by keep_kind. stats: FP32 [groups, stats_size], stats_size k/16 or k, to which the sums of r^2 are added; or
// null.
// Returns 0, or 1 where memory ran out.
int quads_compensate(const void *x, int bf16, float *out, int keep_kind, const uint8_t *keep, float *stats,
                     int64_t stats_size, const int64_t *counts, int64_t groups, int64_t k, int threads) {
    Keep kind = (Keep)keep_kind;
    try {
        if (bf16) compensate((const bfloat16 *)x, out, kind, keep, stats, stats_size, counts, groups, k, threads);
        else compensate((const float *)x, out, kind, keep, stats, stats_size, counts, groups, k, threads);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// codes_out and scales_out [matrices]: digests of packed[matrices, rows, 8 * blocks] and scales[matrices, rows, blocks],
// which lie at (row0, block0) of a matrix with full_blocks blocks in a row
void quads_digest(const uint8_t *packed, const uint8_t *scales, uint64_t *codes_out, uint64_t *scales_out,
                  int64_t matrices, int64_t rows, int64_t blocks, int64_t row0, int64_t block0, int64_t full_blocks) {
    for (int64_t m = 0; m < matrices; m++) {
        uint64_t codes_sum = 0, scales_sum = 0;
        for (int64_t row = 0; row < rows; row++) {
            uint64_t index = (row0 + row) * full_blocks + block0 + 1;
            int64_t at = (m * rows + row) * blocks;
            for (int64_t b = 0; b < blocks; b++) {
                uint64_t key = mix((index + b) * 0x9E3779B97F4A7C15);
                codes_sum += mix(read<uint64_t>(packed + 8 * (at + b)) + key);
                scales_sum += mix(scales[at + b] + key);
            }
        }
        codes_out[m] = codes_sum;
        scales_out[m] = scales_sum;
    }
}

}
