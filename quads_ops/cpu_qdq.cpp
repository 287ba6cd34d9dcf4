// NVFP4 on a CPU: the arithmetic of nvfp4.py, residual.py and receipt.py, with a block of 16 elements in one vector.
// Vectors are GCC's (`vector_size`); it compiles them to whatever registers the machine has.
// Must be compiled with -ffp-contract=off and without -ffast-math: results equal the torch definition in every bit.
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace {

constexpr int BLOCK = 16;
constexpr int TILE_BLOCKS = 16;  // blocks whose scales are computed together
constexpr int TILE = BLOCK * TILE_BLOCKS;
constexpr int PARTIAL_ROWS = 16;  // statistics: rows in a partial sum, whatever the number of threads

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t BytePairs __attribute__((vector_size(16)));
typedef uint8_t HalfBytes __attribute__((vector_size(8)));
struct bfloat16 { uint16_t bits; };

constexpr uint32_t MAGNITUDE = 0x7FFFFFFF, SIGN = 0x80000000, EXPONENT = 0x7F800000, CANONICAL_NAN = 0x7FC00000;
constexpr uint32_t UPPER = 0xFFFF0000;

// ---- vectors

inline Bits bits(Floats x) { return (Bits)x; }
inline Floats floats(Bits b) { return (Floats)b; }
inline Bits all(uint32_t b) { return Bits{} + b; }
inline Floats all(float x) { return x - Floats{}; }
inline Bits larger(Bits a, Bits b) { return a > b ? a : b; }
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
// Without 512-bit registers a shuffle of 16 lanes goes through memory one lane at a time, so there plain loops do it.

#ifdef __AVX512F__

// Of each run of 2 * RUN lanes the larger of its two halves, lane by lane: those of a, then those of b.
template <int RUN> inline Bits merge(Bits a, Bits b) {
    constexpr Bits lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    constexpr Bits first = lane / RUN * 2 * RUN + lane % RUN;
    return larger(__builtin_shuffle(a, b, first), __builtin_shuffle(a, b, first + RUN));
}

// m[j]: magnitudes of block 2j in the first 8 lanes, of block 2j + 1 in the others. Lane i of the result: block i.
inline Bits largest_of_pairs(Bits *m) {
    for (int i = 0; i < 4; i++) m[i] = merge<4>(m[2 * i], m[2 * i + 1]);
    for (int i = 0; i < 2; i++) m[i] = merge<2>(m[2 * i], m[2 * i + 1]);
    return merge<1>(m[0], m[1]);
}

inline Bits block_amax(const Floats *x) {
    Bits m[TILE_BLOCKS / 2];
    for (int j = 0; j < TILE_BLOCKS / 2; j++)
        m[j] = merge<8>(bits(x[2 * j]) & MAGNITUDE, bits(x[2 * j + 1]) & MAGNITUDE);
    return largest_of_pairs(m);
}

// Lanes 0-7 v[2j], lanes 8-15 v[2j + 1].
inline Floats pair_of(Floats v, int j) {
    return __builtin_shuffle(v, Bits{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1} + 2 * j);
}

#else

template <int LANES> inline Bits largest_of_runs(const Bits *m) {
    uint32_t in[TILE_BLOCKS * LANES], out[TILE_BLOCKS];
    memcpy(in, m, sizeof in);
    for (int b = 0; b < TILE_BLOCKS; b++) {
        out[b] = 0;
        for (int i = 0; i < LANES; i++) out[b] = in[b * LANES + i] > out[b] ? in[b * LANES + i] : out[b];
    }
    return read<Bits>(out);
}

inline Bits largest_of_pairs(const Bits *m) { return largest_of_runs<8>(m); }

inline Bits block_amax(const Floats *x) {
    Bits m[TILE_BLOCKS];
    for (int b = 0; b < TILE_BLOCKS; b++) m[b] = bits(x[b]) & MAGNITUDE;
    return largest_of_runs<16>(m);
}

inline Floats pair_of(const Floats &v, int j) {
    float a = v[2 * j], b = v[2 * j + 1];
    return Floats{a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
}

#endif

// ---- NVFP4

inline float finite_or_nan(uint32_t magnitude) { return float_of(magnitude < EXPONENT ? magnitude : CANONICAL_NAN); }

float global_scale_dec(uint32_t amax) {
    if (amax == 0) return 1.0f;
    float g = finite_or_nan(amax) / 2688.0f;
    return g < 0x1p-117f ? 0x1p-117f : g;
}

struct Scales {
    Floats scale;    // on the E4M3 grid; NaN where the block holds NaN or Inf
    Floats divisor;  // scale * g; infinite where that is 0 or NaN, so that every finite magnitude becomes 0
};

inline float canonical(float g) { return g == g ? g : float_of(CANONICAL_NAN); }  // see round_to_bf16

inline Scales block_scales(Bits amax, float g) {
    Floats s = floats(amax >= EXPONENT ? all(CANONICAL_NAN) : amax) / all(6.0f * g);
    Bits is_nan = (Bits)(s != s);
    s = round_mantissa(s > 448.0f ? all(448.0f) : s, 3, -6);
    s = floats(is_nan ? all(CANONICAL_NAN) : bits(s));
    Floats divisor = s * g;
    return {s, floats(divisor > 0.0f ? bits(divisor) : all(EXPONENT))};
}

// |x| / divisor on the E2M1 grid.
inline Floats e2m1(Floats x, Floats divisor) {
    Bits y = bits(floats(bits(x) & MAGNITUDE) / divisor);
    return round_mantissa(floats(smaller(y, bits(all(6.0f)))), 1, 0);
}

inline Floats qdq(Floats x, Floats scale, Floats divisor, float g) {
    Floats value = (e2m1(x, divisor) * scale) * g;
    return floats(bits(value) | (bits(x) & SIGN));
}

inline uint8_t e4m3_byte(float s) {
    if (s != s) return 0x7F;
    return s < 0x1p-6f ? uint8_t(s * 512.0f) : uint8_t((bits_of(s) >> 20) - (120u << 3));
}

// Codes of a block, two a byte. In a block with a NaN scale every magnitude is 0; a NaN counts as positive.
inline HalfBytes packed_codes(Floats x, float scale, Floats divisor) {
    Floats magnitude = e2m1(x, divisor);
    Bits small = __builtin_convertvector(magnitude * 2.0f, Bits);
    Bits code = magnitude < 1.0f ? small : (bits(magnitude) >> 22) - (126u << 1);
    if (scale != scale) code = Bits{};
    Bits sign = (bits(x) & MAGNITUDE) <= EXPONENT ? (bits(x) >> 28) & 8 : Bits{};
    BytePairs pairs = (BytePairs)__builtin_convertvector(code | sign, Bytes);
    return __builtin_convertvector(pairs | (pairs >> 4), HalfBytes);
}

// ---- rows

// Calls tile(at, blocks) along a row. The count is a constant for full tiles, which the compiler unrolls.
template <class F> inline void for_tiles(int64_t k, F tile) {
    int64_t at = 0;
    for (; at + TILE <= k; at += TILE) tile(at, TILE_BLOCKS);
    if (at < k) tile(at, int((k - at) / BLOCK));
}

template <class T> inline void load_tile(const T *x, int blocks, Floats *tile) {
    for (int b = 0; b < blocks; b++) tile[b] = load(x + b * BLOCK);
    for (int b = blocks; b < TILE_BLOCKS; b++) tile[b] = Floats{};
}

template <class In, class Out> void qdq_row(const In *x, Out *out, float g, int64_t k) {
    for_tiles(k, [=](int64_t at, int blocks) __attribute__((always_inline)) {
        Floats tile[TILE_BLOCKS];
        load_tile(x + at, blocks, tile);
        Scales s = block_scales(block_amax(tile), g);
        for (int b = 0; b < blocks; b++)
            store(out + at + b * BLOCK, qdq(tile[b], all(s.scale[b]), all(s.divisor[b]), g));
    });
}

// BF16 to BF16, the trainer's weights: a vector holds two blocks, an even element in the lower half of each lane and an
// odd one in the upper. Both halves become FP32 in place, so no lane has to move.
template <> void qdq_row(const bfloat16 *x, bfloat16 *out, float g, int64_t k) {
    for_tiles(k, [=](int64_t at, int blocks) __attribute__((always_inline)) {
        Bits tile[TILE_BLOCKS / 2] = {}, m[TILE_BLOCKS / 2];
        size_t bytes = blocks * BLOCK * sizeof(bfloat16);
        memcpy(tile, x + at, bytes);
        for (int j = 0; j < TILE_BLOCKS / 2; j++)
            m[j] = larger((tile[j] << 16) & MAGNITUDE, tile[j] & MAGNITUDE & UPPER);
        Scales s = block_scales(largest_of_pairs(m), g);
        for (int j = 0; j < (blocks + 1) / 2; j++) {
            Floats scale = pair_of(s.scale, j), divisor = pair_of(s.divisor, j);
            Bits even = round_to_bf16(qdq(floats(tile[j] << 16), scale, divisor, g));
            Bits odd = round_to_bf16(qdq(floats(tile[j] & UPPER), scale, divisor, g));
            tile[j] = (even >> 16) | (odd & UPPER);
        }
        memcpy(out + at, tile, bytes);
    });
}

template <class In> void quantize_row(const In *x, uint8_t *packed, uint8_t *scales, float g, int64_t k) {
    for_tiles(k, [=](int64_t at, int blocks) __attribute__((always_inline)) {
        Floats tile[TILE_BLOCKS];
        load_tile(x + at, blocks, tile);
        Scales s = block_scales(block_amax(tile), g);
        for (int b = 0; b < blocks; b++) {
            scales[at / BLOCK + b] = e4m3_byte(s.scale[b]);
            write(packed + (at + b * BLOCK) / 2, packed_codes(tile[b], s.scale[b], all(s.divisor[b])));
        }
    });
}

inline Bits magnitudes(const float *x) { return read<Bits>(x) & MAGNITUDE; }
inline Halves magnitudes(const bfloat16 *x) { return read<Halves>(x) & 0x7FFF; }
inline uint32_t as_float_bits(uint32_t magnitude) { return magnitude; }
inline uint32_t as_float_bits(uint16_t magnitude) { return uint32_t(magnitude) << 16; }

// Bits of the largest magnitude. A plain loop: without 512-bit registers a vector of 16 is kept in memory.
inline uint32_t amax_row(const float *x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t m = read<uint32_t>(x + i) & MAGNITUDE;
        largest = m > largest ? m : largest;
    }
    return largest;
}

// BF16 is compared as it is: its order is that of the upper halves of FP32.
inline uint32_t amax_row(const bfloat16 *x, int64_t n) {
    bfloat16 tail[BLOCK] = {};
    int64_t whole = n / BLOCK * BLOCK;
    memcpy(tail, x + whole, (n - whole) * sizeof(bfloat16));
    auto largest = magnitudes(tail);
    for (int64_t i = 0; i < whole; i += BLOCK) {
        auto m = magnitudes(x + i);
        largest = m > largest ? m : largest;
    }
    auto lane = largest[0];
    for (int i = 1; i < BLOCK; i++) lane = largest[i] > lane ? largest[i] : lane;
    return as_float_bits(lane);
}

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
    for_tiles(k, [=](int64_t at, int blocks) __attribute__((always_inline)) {
        Floats tile[TILE_BLOCKS], first[TILE_BLOCKS];
        load_tile(x + at, blocks, tile);
        Scales s = block_scales(block_amax(tile), g);
        for (int b = 0; b < blocks; b++) {
            first[b] = qdq(tile[b], all(s.scale[b]), all(s.divisor[b]), g);
            tile[b] -= first[b];
            if (sums) add_squares(tile[b], sums + at + b * BLOCK);
            tile[b] = masked(tile[b], kind, keep, at + b * BLOCK);
        }
        if (kind != KEEP_NONE) s = block_scales(block_amax(tile), g);
        for (int b = 0; b < blocks; b++) {
            bool kept = kind == KEEP_BLOCKS ? keep[at / BLOCK + b] : kind != KEEP_NONE;
            if (kept) first[b] += qdq(tile[b], all(s.scale[b]), all(s.divisor[b]), g);
            else if (kind != KEEP_NONE) first[b] += 0.0f;  // -0 becomes 0, as in the definition
            store(out + at + b * BLOCK, first[b]);
        }
    });
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
