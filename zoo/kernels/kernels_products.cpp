// Products whose weights have 32, 16 or 8 bits and are summed in fp32. It is compiled after kernels_frame.cpp, as one source.
//
// Each sum runs over k from first to last, whatever the number of rows, so a row's result does not depend on the other rows.

namespace {

typedef uint32_t Words __attribute__((vector_size(sizeof(Vector)), aligned(4), may_alias));
typedef int32_t Signed __attribute__((vector_size(sizeof(Vector)), aligned(4), may_alias));

// A block of weights has EIGHT vectors of columns. For each k it holds EIGHT / PER_WORD vectors of words, and a word holds one weight of each of
// PER_WORD vectors of columns.
constexpr int EIGHT = 8, BLOCK = EIGHT * LANES;
constexpr int64_t LINE = 64, STRETCH = 16 << 10;  // bytes; a round of tiles reads a stretch of weights from the first cache and fetches the next one

// Sizes of tiles. With few rows, a tile reads all columns of a block at once; with more, it has as many sums as stay in registers. Up to ONE_TILE rows
// have a single tile, which reads each weight once and so needs no stretches.
constexpr int ONE_TILE = 3;
#if defined(__AVX512F__)
constexpr int FEW = 3, MOST_ROWS = 6, MOST_VECTORS = 4;
#else
constexpr int FEW = 5, MOST_ROWS = 6, MOST_VECTORS = 2;
#endif

struct Wholes {  // float32
    static constexpr int PER_WORD = 1;
    static constexpr bool IS_SCALED = false;
    static Vector weight(Words words, int) { return Vector(words); }
};

struct Halves {  // bf16
    static constexpr int PER_WORD = 2;
    static constexpr bool IS_SCALED = false;
    static Vector weight(Words words, int which) { return Vector(which ? words & 0xFFFF0000u : words << 16); }
};

struct Quarters {  // int8
    static constexpr int PER_WORD = 4;
    static constexpr bool IS_SCALED = true;
    static Vector weight(Words words, int which) {
        const Signed bits = Signed(words << (24 - 8 * which)) >> 24;
#if defined(__AVX512F__)
        return _mm512_cvtepi32_ps(__m512i(bits));
#elif defined(__FMA__)
        return _mm256_cvtepi32_ps(__m256i(bits));
#else
        return Vector(__builtin_convertvector(bits, Loose));
#endif
    }
};

// Add R rows of x times V vectors of n rows of a block, times scale [BLOCK] if the weights are scaled, to y (R rows of BLOCK sums). Meanwhile, fetch
// LINES lines for each of the first `fetching` rows of the block from `ahead` on.
template <typename Packed, int R, int V, int LINES>
inline void tile(const float* x, int64_t stride, const uint32_t* w, int64_t n, const float* scale, float* y, const char* ahead, int64_t fetching) {
    constexpr int PER_WORD = Packed::PER_WORD, TOGETHER = std::max(2, PER_WORD);  // weights for which a factor is spread once
    Vector sum[R][V];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) sum[r][j] = Packed::IS_SCALED ? spread(0) : load(y + r * BLOCK + j * LANES);
    for (int64_t k = 0; k < n; k++) {
        if (k < fetching) {
#pragma GCC unroll 4
            for (int i = 0; i < LINES; i++) __builtin_prefetch(ahead + (k * LINES + i) * LINE, 0, 2);
        }
#pragma GCC unroll 4
        for (int j = 0; j < V; j += TOGETHER) {
            Vector weight[TOGETHER];
#pragma GCC unroll 2
            for (int i = 0; i < TOGETHER; i += PER_WORD) {
                const Words words = *reinterpret_cast<const Words*>(w + (k * EIGHT + j + i) / PER_WORD * LANES);
#pragma GCC unroll 4
                for (int part = 0; part < PER_WORD; part++) weight[i + part] = Packed::weight(words, part);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const Vector factor = spread(x[r * stride + k]);
#pragma GCC unroll 4
                for (int i = 0; i < TOGETHER; i++) sum[r][j + i] = multiply_add(sum[r][j + i], factor, weight[i]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) {
            float* to = y + r * BLOCK + j * LANES;
            store(to, Packed::IS_SCALED ? multiply_add(load(to), sum[r][j], load(scale + j * LANES)) : sum[r][j]);
        }
}

// Do the same for `rows` rows, at most MOST, and all vectors of the block, V at a time. Each tile fetches for `fetching` rows.
template <typename Packed, int MOST, int V, int LINES>
inline void tiles_of(int64_t rows, const float* x, int64_t stride, const uint32_t* w, int64_t n, const float* scale, float* y, const char* ahead, int64_t fetching) {
    if constexpr (MOST > 1) {
        if (rows < MOST) return tiles_of<Packed, MOST - 1, V, LINES>(rows, x, stride, w, n, scale, y, ahead, fetching);
    }
    for (int j = 0; j < EIGHT; j += V, ahead += fetching * LINES * LINE) {
        const uint32_t* from = w + j / Packed::PER_WORD * LANES;
        tile<Packed, MOST, V, LINES>(x, stride, from, n, scale + (Packed::IS_SCALED ? j * LANES : 0), y + j * LANES, ahead, fetching);
    }
}

// Do the same for M rows. Together the tiles fetch as many lines as they read. Each has an equal share, because memory cannot deliver all of them at once.
template <typename Packed>
inline void tiles(const float* x, int64_t stride, const uint32_t* w, int64_t n, const float* scale, float* y, int64_t M) {
    constexpr int LINES = std::max<int>(1, BLOCK * 4 / Packed::PER_WORD / LINE), HALF = std::max(1, LINES / 2), NARROW = std::max(MOST_VECTORS, Packed::PER_WORD);
    const char* ahead = reinterpret_cast<const char*>(w) + STRETCH;
    if (M <= ONE_TILE) return tiles_of<Packed, ONE_TILE, EIGHT, LINES>(M, x, stride, w, n, scale, y, ahead, n);
    const bool is_few = M <= FEW;
    const int64_t most = is_few ? ONE_TILE : MOST_ROWS, groups = (M + most - 1) / most, tiles_each = is_few ? 1 : EIGHT / NARROW;
    const int64_t shares = groups * tiles_each * HALF, fetching = std::min(n, (n * LINES + shares - 1) / shares);
    for (int64_t m = 0, group = 0; group < groups; group++, ahead += tiles_each * fetching * HALF * LINE) {
        const int64_t rows = (M - m + groups - group - 1) / (groups - group);
        const float* from = x + m * stride;
        float* to = y + m * BLOCK;
        if (is_few) tiles_of<Packed, ONE_TILE, EIGHT, HALF>(rows, from, stride, w, n, scale, to, ahead, fetching);
        else tiles_of<Packed, MOST_ROWS, NARROW, HALF>(rows, from, stride, w, n, scale, to, ahead, fetching);
        m += rows;
    }
}

// A weight of N columns in blocks [blocks, K, BLOCK]. scales [blocks, K / group, BLOCK], if it has 8 bits: what the sum over each group of `group`
// positions of k is multiplied by. Without scales it has 32 or 16 bits.
struct Weight {
    const uint32_t* words;
    const float* scales;
    int64_t K, N, group;
    bool has_32_bits;
};

// y [M, N] = x [M, K] times a weight, plus bias [N] if given. All threads of a team call it, and leave it together.
template <typename Packed>
void multiply_as(const float* x, const Weight& w, const float* bias, float* y, int64_t M) {
    constexpr int64_t WORDS = BLOCK / Packed::PER_WORD;
    const int64_t K = w.K, N = w.N, blocks = (N + BLOCK - 1) / BLOCK, stretch = Packed::IS_SCALED ? w.group : M <= ONE_TILE ? K : STRETCH / 4 / WORDS;
    std::vector<float> sums(M * BLOCK);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t k = 0; k < K; k += stretch) {
            const int64_t n = std::min(stretch, K - k);
            const float* scale = Packed::IS_SCALED ? w.scales + (b * (K / w.group) + k / w.group) * BLOCK : nullptr;
            tiles<Packed>(x + k, K, w.words + (b * K + k) * WORDS, n, scale, sums.data(), M);
        }
        const int64_t first = b * BLOCK, columns = std::min<int64_t>(BLOCK, N - first);
        for (int64_t m = 0; m < M; m++) {
            const float* from = &sums[m * BLOCK];
            float* to = y + m * N + first;
            if (!bias) std::copy(from, from + columns, to);
            else
                for (int64_t j = 0; j < columns; j++) to[j] = from[j] + bias[first + j];
        }
    }
}

// to [M, K]: rows index [M] of a matrix of T, float or bfloat16. They are columns of its blocks.
template <typename T>
void read_rows(const Weight& w, const int64_t* index, float* to, int64_t M, int threads) {
    constexpr int64_t PER_WORD = 4 / sizeof(T);
#pragma omp parallel for schedule(static) num_threads(threads) if (M * w.K > SMALL)
    for (int64_t m = 0; m < M; m++) {
        const int64_t block = index[m] / BLOCK, vector = index[m] % BLOCK / LANES, lane = index[m] % LANES;
        const int64_t place = (vector / PER_WORD * LANES + lane) * PER_WORD + vector % PER_WORD;
        const T* from = reinterpret_cast<const T*>(w.words) + block * w.K * BLOCK + place;
        for (int64_t k = 0; k < w.K; k++) to[m * w.K + k] = wide(from[k * BLOCK]);
    }
}

void multiply(const float* x, const Weight& w, const float* bias, float* y, int64_t M) {
    if (w.scales) multiply_as<Quarters>(x, w, bias, y, M);
    else if (w.has_32_bits) multiply_as<Wholes>(x, w, bias, y, M);
    else multiply_as<Halves>(x, w, bias, y, M);
}

void linear(const float* x, const Weight& w, const float* bias, float* y, int64_t M, int threads) {
#pragma omp parallel num_threads(threads) if (M * w.K * w.N > SMALL)
    multiply(x, w, bias, y, M);
}

// erf(x): x times a quotient of two series in x^2, for x up to 4. Source: Eigen, generic_fast_erf_float.
inline float error_function(float x) {
    x = std::min(std::max(x, -4.0f), 4.0f);
    const float s = x * x;
    float above = -2.72614225801306e-10f, below = -1.45660718464996e-5f;
    above = above * s + 2.77068142495902e-8f, below = below * s - 2.13374055278905e-4f;
    above = above * s - 2.10102402082508e-6f, below = below * s - 1.68282697438203e-3f;
    above = above * s - 5.69250639462346e-5f, below = below * s - 7.37332916720468e-3f;
    above = above * s - 7.34990630326855e-4f, below = below * s - 1.42647390514189e-2f;
    above = above * s - 2.95459980854025e-3f;
    above = above * s - 1.60960333262415e-2f;
    return x * above / below;
}

// y [M, last.N] = an MLP of x [M, first.K]: (silu(gate) * up) times `last`, where gate and up are the halves of x times `first`, or gelu of all of it.
// both [M, first.N] and product [M, last.K] are scratch space. All threads of a team call it, and leave it together.
void run_mlp(const float* x, const Weight& first, const Weight& last, bool is_gated, float* y, int64_t M, float* both, float* product) {
    const int64_t inner = last.K;
    multiply(x, first, nullptr, both, M);
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
        const float *gate = both + m * first.N, *up = gate + inner;
        float* to = product + m * inner;
        if (is_gated) {
#pragma omp simd
            for (int64_t i = 0; i < inner; i++) {
                const float small = exponential(-std::abs(gate[i]));  // e^x overflows for large x
                to[i] = gate[i] * ((gate[i] < 0 ? small : 1.0f) / (1.0f + small)) * up[i];
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < inner; i++) to[i] = 0.5f * gate[i] * (1 + error_function(gate[i] * 0.70710678f));
        }
    }
    multiply(product, last, nullptr, y, M);
}

void swiglu(const float* x, const Weight& gate_up, const Weight& down, float* y, int64_t M, int threads) {
    std::vector<float> both(M * gate_up.N), product(M * down.K);
#pragma omp parallel num_threads(threads) if (M * gate_up.K * gate_up.N > SMALL)
    run_mlp(x, gate_up, down, true, y, M, both.data(), product.data());
}

}  // namespace

extern "C" {

// Return the columns of a block.
int block_columns() { return BLOCK; }
}
