// What a step does by row on a CPU, in plain C++: kernels.py builds it and declares the functions at the end of the file.
// A row's result does not depend on the other rows, nor on the number of threads.

#pragma GCC optimize("tree-loop-vectorize")  // inductor's flags forbid it, as what it generates is vectors already

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr int64_t SMALL = 1 << 15;  // products for which a second thread is not woken

struct bfloat16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }

inline float wide(bfloat16 x) {
    union { uint32_t bits; float value; } y = {uint32_t(x.bits) << 16};
    return y.value;
}

inline void narrow(float x, float& y) { y = x; }

inline void narrow(float x, bfloat16& y) {
    union { float value; uint32_t bits; } u = {x};
    y.bits = x == x ? uint16_t((u.bits + 0x7FFF + ((u.bits >> 16) & 1)) >> 16) : 0x7FC0;  // to nearest, ties to even
}

// One query for each of B sequences. q and out [B, Hkv * G, D]; kv [rows, Hkv, D]; pages [B, P]: the row of each page's first key, its values
// `page` rows further; lengths [B]. A thread reads whole rows, or as many heads of them as there are more threads than sequences.
template <typename T>
void attend(const T* q, const T* kv, const int64_t* pages, const int64_t* lengths, T* out, int64_t B, int64_t Hkv, int64_t G, int64_t D,
            int64_t P, int64_t page, float scale, int threads) {
    int64_t products = 0;
    for (int64_t b = 0; b < B; b++) products += lengths[b] * Hkv * G * D;
    const int64_t parts = std::min(Hkv, (threads + B - 1) / B), most = (Hkv + parts - 1) / parts;
#pragma omp parallel num_threads(threads) if (products > SMALL)
    {
        std::vector<float> query(most * G * D), sum(most * G * D), row(D), weight;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < B * parts; item++) {
            const int64_t b = item / parts, n = lengths[b], first = item % parts * most, heads = std::min(most, Hkv - first);
            if (heads <= 0) continue;
            const auto at = [&](int64_t i) { return kv + ((pages[b * P + i / page] + i % page) * Hkv + first) * D; };
            const int64_t start = (b * Hkv + first) * G * D, rows = heads * G;
            for (int64_t j = 0; j < rows * D; j++) query[j] = wide(q[start + j]) * scale;
            weight.resize(rows * n);
            for (int64_t i = 0; i < n; i++) {
                const T* key = at(i);
                for (int64_t r = 0; r < rows; r++) {
                    if (r % G == 0) {
#pragma omp simd
                        for (int64_t d = 0; d < D; d++) row[d] = wide(key[r / G * D + d]);
                    }
                    float dot = 0;
#pragma omp simd reduction(+ : dot)
                    for (int64_t d = 0; d < D; d++) dot += query[r * D + d] * row[d];
                    weight[r * n + i] = dot;
                }
            }
            for (int64_t r = 0; r < rows; r++) {
                float* mine = &weight[r * n];
                const float peak = *std::max_element(mine, mine + n);
                float total = 0;
                for (int64_t i = 0; i < n; i++) total += mine[i] = std::exp(mine[i] - peak);
                for (int64_t i = 0; i < n; i++) mine[i] /= total;
            }
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (int64_t i = 0; i < n; i++) {
                const T* value = at(i) + page * Hkv * D;
                for (int64_t r = 0; r < rows; r++) {
                    if (r % G == 0) {
#pragma omp simd
                        for (int64_t d = 0; d < D; d++) row[d] = wide(value[r / G * D + d]);
                    }
                    const float share = weight[r * n + i];
#pragma omp simd
                    for (int64_t d = 0; d < D; d++) sum[r * D + d] += share * row[d];
                }
            }
            for (int64_t j = 0; j < rows * D; j++) narrow(sum[j], out[start + j]);
        }
    }
}

// The least of a row's entries that stays: see sampling.keep_likely. `kept` is room to work in.
float least_likely(const float* logits, int64_t V, int64_t top_k, float top_p, std::vector<float>& kept) {
    constexpr float never = -std::numeric_limits<float>::infinity();
    const bool all = top_k <= 0 || top_k >= V;
    if (all && top_p >= 1) return never;
    kept.resize(V);
    for (int64_t i = 0; i < V; i++) kept[i] = logits[i] == logits[i] ? logits[i] : never;  // no order has a place for NaN
    float least = never;
    if (!all) {
        std::nth_element(kept.begin(), kept.begin() + top_k - 1, kept.end(), std::greater<float>());
        least = kept[top_k - 1];
        kept.erase(std::remove_if(kept.begin() + top_k, kept.end(), [=](float x) { return x < least; }), kept.end());  // equals stay
    }
    if (top_p < 1) {
        std::make_heap(kept.begin(), kept.end());
        const float most = kept[0];
        float total = 0, held = 0;
        for (float x : kept) total += std::exp(x - most);
        for (auto end = kept.end(); end != kept.begin() && (held == 0 || held < top_p); end--) {
            least = kept[0];
            held += std::exp(least - most) / total;
            std::pop_heap(kept.begin(), end);
        }
    }
    return least;
}

// e^x for x from -87 to 0, and 0 below: a power of two, and the series for what is left, at most log(2) / 2.
inline float exponential(float x) {
    constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer
    const float k = (std::max(x, -87.0f) * 1.44269504f + rounder) - rounder;
    const float r = (std::max(x, -87.0f) - k * 0.693359375f) + k * 2.12194440e-4f;
    const float series = 1 + r * (1 + r * (0.5f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r / 720.0f)))));
    union { uint32_t bits; float value; } power = {uint32_t(int32_t(k) + 127) << 23};
    return x < -87.0f ? 0.0f : series * power.value;
}

// How many of a row's entries stay, and the least of them: see fish_s2/sampling.keep_likely. `kept` is room to work in.
int64_t count_likely(const float* logits, int64_t V, int64_t top_k, float top_p, std::vector<float>& kept, float& edge) {
    constexpr float never = -std::numeric_limits<float>::infinity();
    const int64_t limit = top_k <= 0 || top_k >= V ? V : top_k;
    edge = never;
    if (limit == V && top_p >= 1) return V;
    kept.resize(V);
    float* entries = kept.data();
    float most = never, total = 0, held = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < V; i++) {
        entries[i] = logits[i] == logits[i] ? logits[i] : never;  // no order has a place for NaN
        most = std::max(most, entries[i]);
    }
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < V; i++) total += exponential(entries[i] - most);
    if (limit < V) {
        std::nth_element(kept.begin(), kept.begin() + limit, kept.end(), std::greater<float>());
        kept.resize(limit);
    }
    std::make_heap(kept.begin(), kept.end());
    int64_t count = 0;
    for (auto end = kept.end(); count < limit; end--, count++) {
        held += exponential(kept[0] - most) / total;
        if (count > 0 && top_p < 1 && held > top_p) break;
        edge = kept[0];
        std::pop_heap(kept.begin(), end);
    }
    return count;
}

// sin^2(y). Of pi in three parts a multiple k is taken away without loss, and for what is left, at most pi / 2, the series is enough.
inline float sine_squared(float y) {
    constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer
    const float k = (y * 0.318309886f + rounder) - rounder;
    float r = ((y - k * 3.140625f) - k * 9.67502593994140625e-4f) - k * 1.509957990978376432e-7f;
    r = std::min(std::max(r, -1.6f), 1.6f);  // y of more than a million has no phase left
    const float s = r * r;
    const float sine = r + r * s * (-1 / 6.0f + s * (1 / 120.0f + s * (-1 / 5040.0f + s * (1 / 362880.0f - s / 39916800.0f))));
    return sine * sine;
}

}  // namespace

extern "C" {

void attend_float32(const float* q, const float* kv, const int64_t* pages, const int64_t* lengths, float* out, int64_t B, int64_t Hkv,
                    int64_t G, int64_t D, int64_t P, int64_t page, float scale, int threads) {
    attend(q, kv, pages, lengths, out, B, Hkv, G, D, P, page, scale, threads);
}

void attend_bfloat16(const bfloat16* q, const bfloat16* kv, const int64_t* pages, const int64_t* lengths, bfloat16* out, int64_t B,
                     int64_t Hkv, int64_t G, int64_t D, int64_t P, int64_t page, float scale, int threads) {
    attend(q, kv, pages, lengths, out, B, Hkv, G, D, P, page, scale, threads);
}

// x and out [B, C, N], frequency and gain [C].
void snake(const float* x, const float* frequency, const float* gain, float* out, int64_t B, int64_t C, int64_t N, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (B * C * N > SMALL)
    for (int64_t row = 0; row < B * C; row++) {
        const float f = frequency[row % C], g = gain[row % C];
#pragma omp simd
        for (int64_t i = row * N; i < (row + 1) * N; i++) out[i] = x[i] + g * sine_squared(f * x[i]);
    }
}

// logits and out [B, V], top_k and top_p [B].
void keep_likely_before_temperature(const float* logits, const int64_t* top_k, const float* top_p, float* out, int64_t B, int64_t V,
                                    int threads) {
#pragma omp parallel num_threads(threads) if (B * V > SMALL)
    {
        std::vector<float> kept;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) {
            constexpr float never = -std::numeric_limits<float>::infinity();
            const float* row = logits + b * V;
            float edge, *stays = out + b * V;
            int surplus = -int(count_likely(row, V, top_k[b], top_p[b], kept, edge));
#pragma omp simd reduction(+ : surplus)
            for (int i = 0; i < int(V); i++) {
                stays[i] = row[i] >= edge ? row[i] : never;
                surplus += row[i] >= edge;
            }
            for (int64_t i = V - 1; surplus > 0; i--) {  // of those at the edge the first ones stay
                if (row[i] == edge) stays[i] = never, surplus--;
            }
        }
    }
}

// logits and out [B, V], top_k and top_p [B].
void keep_likely(const float* logits, const int64_t* top_k, const float* top_p, float* out, int64_t B, int64_t V, int threads) {
#pragma omp parallel num_threads(threads) if (B * V > SMALL)
    {
        std::vector<float> kept;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) {
            const float least = least_likely(logits + b * V, V, top_k[b], top_p[b], kept);
            for (int64_t i = 0; i < V; i++) {
                const float x = logits[b * V + i];
                out[b * V + i] = x < least ? -std::numeric_limits<float>::infinity() : x;
            }
        }
    }
}
}
