// Products whose weights stay in the 16 or 8 bits of a checkpoint and are summed in fp32. It is compiled after kernels_render.cpp, as one source.
//
// Each sum runs over k from first to last, whatever the number of rows, so a row's result does not depend on the other rows.

namespace {

typedef uint32_t Words __attribute__((vector_size(sizeof(Vector)), aligned(4), may_alias));
typedef int32_t Signed __attribute__((vector_size(sizeof(Vector)), aligned(4), may_alias));

// A block of weights has EIGHT vectors of columns. For each k it holds EIGHT / PER_WORD vectors of words, and a word holds one weight of each of
// PER_WORD vectors of columns.
constexpr int EIGHT = 8, BLOCK = EIGHT * LANES;
constexpr int64_t STRETCH = 512;  // positions of k after which the next tile begins, so that the weights between them stay in a core's caches

// MOST_ROWS: of a tile. A weight that is unpacked is used as often; with more rows, sums would leave the registers too often.
struct Halves {  // bf16
    static constexpr int PER_WORD = 2;
    static constexpr int MOST_ROWS = 3;
    static constexpr bool IS_SCALED = false;
    static Vector weight(Words words, int which) { return Vector(which ? words & 0xFFFF0000u : words << 16); }
};

struct Quarters {  // int8
    static constexpr int PER_WORD = 4;
    static constexpr int MOST_ROWS = 2;
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

// Add R rows of x times n rows of a block, times scale [BLOCK] if the weights are scaled, to y (R rows of BLOCK sums).
template <typename Packed, int R>
inline void tile(const float* x, int64_t stride, const uint32_t* w, int64_t n, const float* scale, float* y) {
    constexpr int PER_WORD = Packed::PER_WORD;
    Vector sum[R][EIGHT];
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int j = 0; j < EIGHT; j++) sum[r][j] = Packed::IS_SCALED ? spread(0) : load(y + r * BLOCK + j * LANES);
    for (int64_t k = 0; k < n; k++) {
        Vector factor[R];
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) factor[r] = spread(x[r * stride + k]);
#pragma GCC unroll 8
        for (int j = 0; j < EIGHT; j++) {
            const Words words = *reinterpret_cast<const Words*>(w + (k * EIGHT / PER_WORD + j / PER_WORD) * LANES);
            const Vector weight = Packed::weight(words, j % PER_WORD);
#pragma GCC unroll 3
            for (int r = 0; r < R; r++) sum[r][j] = multiply_add(sum[r][j], factor[r], weight);
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int j = 0; j < EIGHT; j++) {
            float* to = y + r * BLOCK + j * LANES;
            store(to, Packed::IS_SCALED ? multiply_add(load(to), sum[r][j], load(scale + j * LANES)) : sum[r][j]);
        }
}

template <typename Packed>
inline void tiles(const float* x, int64_t stride, const uint32_t* w, int64_t n, const float* scale, float* y, int64_t M) {
    int64_t m = 0;
    for (; M - m >= Packed::MOST_ROWS; m += Packed::MOST_ROWS) tile<Packed, Packed::MOST_ROWS>(x + m * stride, stride, w, n, scale, y + m * BLOCK);
    if (M - m == 2) tile<Packed, 2>(x + m * stride, stride, w, n, scale, y + m * BLOCK);
    if (M - m == 1) tile<Packed, 1>(x + m * stride, stride, w, n, scale, y + m * BLOCK);
}

// y [M, N] = x [M, K] times blocks of weights w [blocks, K, BLOCK], plus bias [N] if given. scales [blocks, K / group, BLOCK], if the weights are
// scaled: what the sum over each group of `group` positions of k is multiplied by.
template <typename Packed>
void linear(const float* x, const uint32_t* w, const float* scales, const float* bias, float* y, int64_t M, int64_t K, int64_t N, int64_t group, int threads) {
    constexpr int64_t WORDS = BLOCK / Packed::PER_WORD;
    const int64_t blocks = (N + BLOCK - 1) / BLOCK, stretch = Packed::IS_SCALED ? group : STRETCH;
#pragma omp parallel num_threads(threads) if (M * K * N > SMALL)
    {
        std::vector<float> sums(M * BLOCK);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (int64_t k = 0; k < K; k += stretch) {
                const int64_t n = std::min(stretch, K - k);
                const float* scale = Packed::IS_SCALED ? scales + (b * (K / group) + k / group) * BLOCK : nullptr;
                tiles<Packed>(x + k, K, w + (b * K + k) * WORDS, n, scale, sums.data(), M);
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
}

}  // namespace

extern "C" {

// Return the columns of a block.
int block_columns() { return BLOCK; }

// See linear.
void linear_bf16(const float* x, const uint32_t* w, const float* bias, float* y, int64_t M, int64_t K, int64_t N, int threads) {
    linear<Halves>(x, w, nullptr, bias, y, M, K, N, K, threads);
}

// See linear.
void linear_int8(const float* x, const uint32_t* w, const float* scales, const float* bias, float* y, int64_t M, int64_t K, int64_t N, int64_t group,
                 int threads) {
    linear<Quarters>(x, w, scales, bias, y, M, K, N, group, threads);
}
}
