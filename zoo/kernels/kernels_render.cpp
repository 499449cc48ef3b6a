// The row-wise operators of a render on a CPU. It is compiled after kernels.cpp, as one source.

namespace {

// Products in registers: ROWS rows of the left matrix by WIDTH columns of the right one. A matrix consists of units of 32 bits: a float, or, if the
// CPU multiplies pairs of bfloat16, two neighbours along the summed axis.
#if defined(__AVX512F__)
using Vector = __m512;
constexpr int ROWS = 6, VECTORS = 4;
inline Vector spread(float x) { return _mm512_set1_ps(x); }
inline Vector multiply_add(Vector sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
#elif defined(__FMA__)
using Vector = __m256;
constexpr int ROWS = 6, VECTORS = 2;
inline Vector spread(float x) { return _mm256_set1_ps(x); }
inline Vector multiply_add(Vector sum, Vector a, Vector b) { return _mm256_fmadd_ps(a, b, sum); }
#else
typedef float Vector __attribute__((vector_size(16)));
constexpr int ROWS = 4, VECTORS = 4;
inline Vector spread(float x) { return Vector{x, x, x, x}; }
inline Vector multiply_add(Vector sum, Vector a, Vector b) { return sum + a * b; }
#endif
constexpr int LANES = sizeof(Vector) / sizeof(float), WIDTH = VECTORS * LANES;
typedef float Loose __attribute__((vector_size(sizeof(Vector)), aligned(4), may_alias));  // anywhere in memory
typedef int32_t Integers __attribute__((vector_size(sizeof(Vector))));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

inline Vector load(const float* from) { return Vector(*reinterpret_cast<const Loose*>(from)); }
inline void store(float* to, Vector x) { *reinterpret_cast<Loose*>(to) = Loose(x); }

// The order of additions is written out, so that each row has the same one: where GCC inlines a plain loop, it may begin or end it with single values.
inline float sum_of_squares(const float* x, int64_t n) {
    Vector squares = spread(0);
    for (int64_t i = 0; i + LANES <= n; i += LANES) squares = multiply_add(squares, load(x + i), load(x + i));
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += squares[i];
    for (int64_t i = n / LANES * LANES; i < n; i++) sum += x[i] * x[i];
    return sum;
}

struct Floats {
    static constexpr int PER_UNIT = 1;
    static Vector add(Vector sum, Vector a, Vector b) { return multiply_add(sum, a, b); }
    static void put(float* to, int64_t i, Vector x) { store(to + i, x); }  // values i .. i + LANES of a row
};

#if defined(__AVX512BF16__)
struct Pairs {
    static constexpr int PER_UNIT = 2;
    static Vector add(Vector sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, __m512bh(a), __m512bh(b)); }
    static void put(float* to, int64_t i, Vector x) { _mm256_storeu_si256((__m256i*)(to + i / 2), __m256i(_mm512_cvtneps_pbh(x))); }
};
template <typename T>
using Units = std::conditional_t<std::is_same_v<T, float>, Floats, Pairs>;
#else
template <typename T>
using Units = Floats;
#endif

// Load n consecutive numbers as units, padded with zeros.
template <typename U, typename T>
inline void to_units(const T* row, int64_t n, float* units) {
    if constexpr (U::PER_UNIT == 1) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) units[i] = wide(row[i]);
    } else {
        if (n % 2) units[n / 2] = 0;
        __builtin_memcpy(units, row, n * sizeof(T));
    }
}

// Load n numbers of two rows as units that each hold a column's pair; only of the first row if a unit is one number.
template <typename U, typename T>
inline void to_units(const T* first, const T* second, int64_t n, float* units) {
    if constexpr (U::PER_UNIT == 1) return to_units<U>(first, n, units);
    else {
        uint32_t* pairs = reinterpret_cast<uint32_t*>(units);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) pairs[i] = uint32_t(first[i].bits) | uint32_t(second[i].bits) << 16;
    }
}

// Prefetch memory that is far from what was read before.
inline void fetch(const void* from, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(static_cast<const char*>(from) + byte);
}

#if defined(__AVX512F__)
// Transpose 16 rows of 16 units to 16 columns, `stride` apart.
inline void transpose(const float* const rows[16], float* to, int64_t stride) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(rows[i]);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)  // a column of each quarter of the four rows
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512 first = _mm512_shuffle_f32x4(a[j], a[j + 4], 0x88), third = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0x88);
        const __m512 second = _mm512_shuffle_f32x4(a[j], a[j + 4], 0xdd), fourth = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0xdd);
        _mm512_storeu_ps(to + j * stride, _mm512_shuffle_f32x4(first, third, 0x88));
        _mm512_storeu_ps(to + (j + 4) * stride, _mm512_shuffle_f32x4(second, fourth, 0x88));
        _mm512_storeu_ps(to + (j + 8) * stride, _mm512_shuffle_f32x4(first, third, 0xdd));
        _mm512_storeu_ps(to + (j + 12) * stride, _mm512_shuffle_f32x4(second, fourth, 0xdd));
    }
}
#elif defined(__FMA__)
// Transpose 8 rows of 8 units to 8 columns, `stride` apart.
inline void transpose(const float* const rows[8], float* to, int64_t stride) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows[i]);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)  // a column of each half of the four rows
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const __m256d low = _mm256_castps_pd(b[i + j]), high = _mm256_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high)), a[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        _mm256_storeu_ps(to + j * stride, _mm256_permute2f128_ps(a[j], a[j + 4], 0x20));
        _mm256_storeu_ps(to + (j + 4) * stride, _mm256_permute2f128_ps(a[j], a[j + 4], 0x31));
    }
}
#endif

// Rows 0 .. n of `width` numbers, row(i), as units -> blocks of WIDTH columns. Columns after the last one, up to a multiple of LANES, are undefined.
// `room` is scratch space for a row.
template <typename U, typename T, typename Row>
inline void to_columns(const Row& row, int64_t n, int64_t width, float* columns, float* room) {
    const int64_t units = (width + U::PER_UNIT - 1) / U::PER_UNIT;
    const auto at = [&](int64_t i) { return columns + i / WIDTH * units * WIDTH + i % WIDTH; };
    int64_t i = 0;
#if defined(__FMA__)
    if (sizeof(T) * U::PER_UNIT == sizeof(float) && width % (LANES * U::PER_UNIT) == 0) {  // units can be read directly from memory
        for (; i < n; i += LANES) {
            const float* rows[LANES];
            for (int r = 0; r < LANES; r++) {
                rows[r] = reinterpret_cast<const float*>(row(std::min(i + r, n - 1)));
                fetch(row(std::min(i + r + LANES, n - 1)), 4 * units);
            }
            for (int64_t d = 0; d < units; d += LANES) {
                const float* parts[LANES];
                for (int r = 0; r < LANES; r++) parts[r] = rows[r] + d;
                transpose(parts, at(i) + d * WIDTH, WIDTH);
            }
        }
    }
#endif
    for (; i < n; i++) {
        to_units<U>(row(i), width, room);
        for (int64_t d = 0; d < units; d++) at(i)[d * WIDTH] = room[d];
    }
}

// Multiply a (ROWS rows of `stride_a` units) by b (n rows of `stride_b` units) -> c (ROWS rows of WIDTH values, `stride_c` apart). Unrolled, because
// otherwise GCC keeps the sums in memory.
template <typename U>
inline void product(const float* a, int64_t stride_a, const float* b, int64_t stride_b, int64_t n, float* c, int64_t stride_c) {
    Vector sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) sum[r][j] = spread(0);
    for (int64_t i = 0; i < n; i++) {
        Vector columns[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) columns[j] = load(b + i * stride_b + j * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const Vector x = spread(a[r * stride_a + i]);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) sum[r][j] = U::add(sum[r][j], x, columns[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) store(c + r * stride_c + j * LANES, sum[r][j]);
}

// The larger of two values; b if one is NaN.
inline Vector larger(Vector a, Vector b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__FMA__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

// 2^x, and 0 for x below about -126.
inline Vector powers_of_two(Vector x) {
#if defined(__AVX512F__)
    x = larger(spread(-200), x);  // -inf would give NaN in x - k
    const Vector k = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Vector rounder = spread(12582912.0f), least = spread(-126.0f);
    const Integers is_small = x < least;
    x = is_small ? least : x;
    const Vector k = (x + rounder) - rounder;
#endif
    const Vector r = x - k;  // at most 1/2; a series gives e^(r log 2)
    Vector series = spread(1.5403530e-4f);
    series = multiply_add(spread(1.3333558e-3f), series, r);
    series = multiply_add(spread(9.6181291e-3f), series, r);
    series = multiply_add(spread(5.5504109e-2f), series, r);
    series = multiply_add(spread(2.4022651e-1f), series, r);
    series = multiply_add(spread(6.9314718e-1f), series, r);
    series = multiply_add(spread(1.0f), series, r);
#if defined(__AVX512F__)
    return _mm512_scalef_ps(series, k);
#else
    const Vector power = Vector((__builtin_convertvector(k, Integers) + 127) << 23);
    return is_small ? spread(0) : series * power;
#endif
}

// Return x [LANES], replaced by `below` where `sees` is 0, and from n on.
inline Vector where_seen(const bool* sees, int64_t n, Vector x, Vector below) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __mmask16 first = n < LANES ? (1u << n) - 1 : 0xFFFF;
    const __m128i bytes = _mm_maskz_loadu_epi8(first, sees);
    return _mm512_mask_blend_ps(_mm_test_epi8_mask(bytes, bytes), below, x);
#else
    int8_t bytes[LANES] = {}, all[LANES];
    __builtin_memset(all, 1, LANES);
    if (n >= LANES) __builtin_memcpy(bytes, sees, LANES);  // a length that the compiler knows is one load
    else __builtin_memcpy(bytes, sees, n);
    if (!__builtin_memcmp(bytes, all, LANES)) return x;
    const Integers is_seen = __builtin_convertvector(*reinterpret_cast<const Bytes*>(bytes), Integers) != 0;
    return is_seen ? x : below;
#endif
}

// Replace scores x [n], n a multiple of LANES, by softmax weights before the division by their sum, which is returned. Masked scores are -inf.
template <typename U>
inline float shares_of(const float* x, int64_t n, Vector most, float scale, float* shares) {
    float lanes[LANES], peak = -std::numeric_limits<float>::infinity(), total = 0;
    store(lanes, most);
    for (float lane : lanes) peak = std::max(peak, lane);
    const Vector factor = spread(scale * 1.44269504f), offset = spread(-peak * (scale * 1.44269504f));
    Vector sum = spread(0);
    for (int64_t i = 0; i < n; i += LANES) {
        const Vector share = powers_of_two(multiply_add(offset, load(x + i), factor));
        sum = sum + share;
        U::put(shares, i, share);
    }
    store(lanes, sum);
    for (float lane : lanes) total += lane;
    return total;
}

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Return the end of the positions that a row of a mask sees, at least `first`.
inline int64_t seen_until(const bool* sees, int64_t first, int64_t end) {
    for (uint64_t eight = 0; end - first >= 8; end -= 8) {
        __builtin_memcpy(&eight, sees + end - 8, 8);
        if (eight) break;
    }
    while (end > first && !sees[end - 1]) end--;
    return end;
}

// For each ROWS of the Q queries of B streams, the end of the keys that any of them sees: [B, groups]. mask [B, Q, K].
inline std::vector<int64_t> ends_of(const bool* mask, int64_t B, int64_t Q, int64_t K) {
    const int64_t groups = (Q + ROWS - 1) / ROWS;
    std::vector<int64_t> ends(B * groups);
    for (int64_t i = 0; i < B * groups; i++)
        for (int64_t r = i % groups * ROWS; r < std::min(Q, (i % groups + 1) * ROWS); r++) ends[i] = seen_until(mask + (i / groups * Q + r) * K, ends[i], K);
    return ends;
}

// One head's attention with Q queries over K keys and values of D numbers, and a thread's scratch space for it.
template <typename T>
struct HeadAttention {
    using U = Units<T>;
    int64_t Q, K, D, wide_k, wide_d, units_d;
    std::vector<float> keys, values, queries, score, share, sum, row;

    HeadAttention(int64_t Q, int64_t K, int64_t D)
        : Q(Q), K(K), D(D), wide_k(rounded_up(K, WIDTH)), wide_d(rounded_up(D, WIDTH)), units_d((D + U::PER_UNIT - 1) / U::PER_UNIT), keys(units_d * wide_k),
          values(wide_k / U::PER_UNIT * wide_d), queries(ROWS * units_d), score(ROWS * wide_k), share(ROWS * wide_k / U::PER_UNIT), sum(ROWS * wide_d),
          row(units_d) {}

    // key(i), value(i), query(i) and out(i) return rows of D numbers; mask [Q, K]; `ends` of the stream, see ends_of.
    template <typename Key, typename Value, typename Query, typename Out>
    void operator()(const Key& key, const Value& value, const Query& query, const bool* mask, const int64_t* ends, float scale, const Out& out) {
        const Vector never = spread(-std::numeric_limits<float>::infinity());
        to_columns<U, T>(key, K, D, keys.data(), row.data());
        for (int64_t i = 0; i < K; i += U::PER_UNIT) {  // if K is odd, the second value of the last pair has weight 0
            for (int64_t ahead = 16; ahead < 16 + U::PER_UNIT; ahead++) fetch(value(std::min(i + ahead, K - 1)), D * sizeof(T));
            to_units<U>(value(i), value(std::min(i + U::PER_UNIT, K) - 1), D, &values[i / U::PER_UNIT * wide_d]);
        }
        for (int64_t start = 0; start < Q; start += ROWS) {
            const auto at = [&](int64_t r) { return std::min(start + r, Q - 1); };
            const int64_t seen = ends[start / ROWS];
            for (int64_t r = 0; r < ROWS; r++) to_units<U>(query(at(r)), D, &queries[r * units_d]);
            Vector most[ROWS];
            for (Vector& peak : most) peak = never;
            for (int64_t i = 0; i < seen; i += WIDTH) {
                product<U>(queries.data(), units_d, &keys[i * units_d], WIDTH, units_d, &score[i], wide_k);
                for (int64_t r = 0; r < ROWS; r++)
                    for (int64_t j = i; j < std::min(i + WIDTH, seen); j += LANES) {
                        const Vector x = where_seen(mask + at(r) * K + j, seen - j, load(&score[r * wide_k + j]), never);
                        most[r] = larger(x, most[r]);
                        store(&score[r * wide_k + j], x);
                    }
            }
            float total[ROWS];
            for (int64_t r = 0; r < ROWS; r++)
                total[r] = shares_of<U>(&score[r * wide_k], rounded_up(seen, LANES), most[r], scale, &share[r * wide_k / U::PER_UNIT]);
            for (int64_t d = 0; d < wide_d; d += WIDTH)
                product<U>(share.data(), wide_k / U::PER_UNIT, &values[d], wide_d, (seen + U::PER_UNIT - 1) / U::PER_UNIT, &sum[d], wide_d);
            for (int64_t r = 0; r < std::min<int64_t>(ROWS, Q - start); r++) {
                T* to = out(start + r);
#pragma omp simd
                for (int64_t d = 0; d < D; d++) narrow(sum[r * wide_d + d] / total[r], to[d]);
            }
        }
    }
};

// Attend with Q queries for each of B * L lanes, over the first `held` positions of their slots in the cache and over the new keys, which are then
// written to the cache. q, k and v [B * L, Q, H * D], with rows `stride` apart; out has the same shape and is contiguous; cache [slots, positions, L,
// 2 * H * D], keys and values; slots [B]; index [B, Q], the places of the new keys; mask [B, Q, held + Q].
template <typename T>
void attend_stretch(const T* q, const T* k, const T* v, T* cache, const int64_t* slots, const int64_t* index, const bool* mask, T* out, int64_t B,
                    int64_t L, int64_t Q, int64_t held, int64_t positions, int64_t H, int64_t D, int64_t stride, float scale, int threads) {
    const int64_t K = held + Q;
    const std::vector<int64_t> ends = ends_of(mask, B, Q, K);
    const int64_t groups = int64_t(ends.size()) / B;
#pragma omp parallel num_threads(threads)
    {
        HeadAttention<T> attend(Q, K, D);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < B * L * H; item++) {
            const int64_t b = item / (L * H), lane = item / H % L, h = item % H;
            const auto kept = [&](int64_t i) { return cache + ((slots[b] * positions + i) * L + lane) * 2 * H * D + h * D; };
            const auto own = [&](const T* x, int64_t i) { return x + ((b * L + lane) * Q + i) * stride + h * D; };
            const auto key = [&](int64_t i) { return i < held ? kept(i) : own(k, i - held); };
            const auto value = [&](int64_t i) { return i < held ? kept(i) + H * D : own(v, i - held); };
            const auto query = [&](int64_t i) { return own(q, i); };
            attend(key, value, query, mask + b * Q * K, &ends[b * groups], scale, [&](int64_t i) { return out + ((b * L + lane) * Q + i) * H * D + h * D; });
            for (int64_t i = 0; i < Q; i++) {  // no other work item reads or writes this part of a row
                T* to = kept(index[b * Q + i]);
                std::copy(own(k, i), own(k, i) + D, to);
                std::copy(own(v, i), own(v, i) + D, to + H * D);
            }
        }
    }
}

// x tanh(softplus(x))
inline Vector mish(Vector x) {
    const Vector e = powers_of_two(-larger(-x, spread(-20)) * 1.44269504f);  // e^min(x, 20); above 20, the factor below is 1
    const Vector z = e * (e + 2);
    return x * (z / (z + 2));
}

// Return the `n` numbers at `from` in float32, and zeros up to a multiple of LANES; all are zero if there is no `from`.
template <typename T>
std::vector<float> widened(const T* from, int64_t n) {
    std::vector<float> whole(rounded_up(n, LANES));
    for (int64_t i = 0; from && i < n; i++) whole[i] = wide(from[i]);
    return whole;
}

// mish(layer norm of a row), plus `shift` if given. x and out [N, C]; weight, bias and shift [C].
template <typename T>
void norm_mish(const T* x, const T* weight, const T* bias, const T* shift, T* out, int64_t N, int64_t C, float eps, int threads) {
    const std::vector<float> factor = widened(weight, C), offset = widened(bias, C), added = widened(shift, C);
#pragma omp parallel num_threads(threads) if (N * C > SMALL)
    {
        std::vector<float> row(rounded_up(C, LANES));
#pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            const T* from = x + n * C;
            float *values = row.data(), total = 0, squares = 0;
#pragma omp simd reduction(+ : total)
            for (int64_t c = 0; c < C; c++) total += values[c] = wide(from[c]);
            const float mean = total / C;
#pragma omp simd reduction(+ : squares)
            for (int64_t c = 0; c < C; c++) squares += (values[c] - mean) * (values[c] - mean);
            const float scale = 1 / std::sqrt(squares / C + eps);
            for (int64_t c = 0; c < C; c += LANES) {
                const Vector y = multiply_add(load(&offset[c]), (load(values + c) - mean) * scale, load(&factor[c]));
                store(values + c, mish(y) + load(&added[c]));
            }
            T* to = out + n * C;
#pragma omp simd
            for (int64_t c = 0; c < C; c++) narrow(values[c], to[c]);
        }
    }
}

// mish(group norm), plus `shift` if given. A group is C / G channels of all rows of a stream. x and out [B, N, C]; weight, bias and shift [C].
void group_norm_mish(const float* x, const float* weight, const float* bias, const float* shift, float* out, int64_t B, int64_t N, int64_t C, int64_t G,
                     float eps, int threads) {
    const std::vector<float> factor = widened(weight, C), offset = widened(bias, C), added = widened(shift, C);
    const int64_t wide_c = rounded_up(C, LANES), width = C / G;
    std::vector<float> means(B * wide_c), scales(B * wide_c);  // of each channel's group
#pragma omp parallel num_threads(threads) if (B * N * C > SMALL)
    {
#pragma omp for schedule(static)
        for (int64_t item = 0; item < B * G; item++) {
            const int64_t b = item / G, first = item % G * width;
            const float* from = x + b * N * C + first;
            double total = 0, squares = 0;
            for (int64_t n = 0; n < N; n++) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t c = 0; c < width; c++) sum += from[n * C + c];
                total += sum;
            }
            const float mean = total / (N * width);
            for (int64_t n = 0; n < N; n++) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t c = 0; c < width; c++) sum += (from[n * C + c] - mean) * (from[n * C + c] - mean);
                squares += sum;
            }
            std::fill_n(&means[b * wide_c + first], width, mean);
            std::fill_n(&scales[b * wide_c + first], width, 1 / std::sqrt(float(squares / (N * width)) + eps));
        }
        std::vector<float> row(wide_c);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < B * N; n++) {
            const float *mean = &means[n / N * wide_c], *scale = &scales[n / N * wide_c];
            std::copy(x + n * C, x + (n + 1) * C, row.data());
            for (int64_t c = 0; c < wide_c; c += LANES) {
                const Vector y = multiply_add(load(&offset[c]), (load(&row[c]) - load(mean + c)) * load(scale + c), load(&factor[c]));
                store(&row[c], mish(y) + load(&added[c]));
            }
            std::copy(row.data(), row.data() + C, out + n * C);
        }
    }
}

}  // namespace

extern "C" {

void group_norm_mish_of_rows(const float* x, const float* weight, const float* bias, const float* shift, float* out, int64_t B, int64_t N, int64_t C,
                             int64_t G, float eps, int threads) {
    group_norm_mish(x, weight, bias, shift, out, B, N, C, G, eps, threads);
}

void attend_stretch_float32(const float* q, const float* k, const float* v, float* cache, const int64_t* slots, const int64_t* index,
                            const bool* mask, float* out, int64_t B, int64_t L, int64_t Q, int64_t held, int64_t positions, int64_t H, int64_t D,
                            int64_t stride, float scale, int threads) {
    attend_stretch(q, k, v, cache, slots, index, mask, out, B, L, Q, held, positions, H, D, stride, scale, threads);
}

void attend_stretch_bfloat16(const bfloat16* q, const bfloat16* k, const bfloat16* v, bfloat16* cache, const int64_t* slots,
                             const int64_t* index, const bool* mask, bfloat16* out, int64_t B, int64_t L, int64_t Q, int64_t held,
                             int64_t positions, int64_t H, int64_t D, int64_t stride, float scale, int threads) {
    attend_stretch(q, k, v, cache, slots, index, mask, out, B, L, Q, held, positions, H, D, stride, scale, threads);
}

void norm_mish_float32(const float* x, const float* weight, const float* bias, const float* shift, float* out, int64_t N, int64_t C, float eps,
                       int threads) {
    norm_mish(x, weight, bias, shift, out, N, C, eps, threads);
}

void norm_mish_bfloat16(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, const bfloat16* shift, bfloat16* out, int64_t N, int64_t C,
                        float eps, int threads) {
    norm_mish(x, weight, bias, shift, out, N, C, eps, threads);
}
}
