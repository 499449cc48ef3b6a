// The row-wise operators of a step on a CPU, in plain C++. cpu.py builds this file and declares the functions at its end.
// A row's result does not depend on the other rows, nor on the number of threads.

#pragma GCC optimize("tree-loop-vectorize")  // inductor's flags disable it, because the code that it generates is already vectorized

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t SMALL = 1 << 15;  // number of products up to which one thread is faster than two

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

// The pages of B sequences. kv [rows, Hkv, D]; pages [B, P]: the row of each page's first key, less `offset`, with its values `page` rows further;
// lengths [B].
template <typename T>
struct Pages {
    const T* kv;
    const int64_t *pages, *lengths;
    int64_t B, Hkv, D, P, page, offset;

    const T* key(int64_t b, int64_t i) const { return kv + (pages[b * P + i / page] + offset + i % page) * Hkv * D; }
};

// Attention with one query per sequence: q and out [B, Hkv * G, D]. A thread reads whole rows, or a part of the heads if there are more threads than
// sequences. All threads of a team call it, and leave it together.
template <typename T>
void attend(const T* q, const Pages<T>& past, T* out, int64_t G, float scale, int threads) {
    const int64_t B = past.B, Hkv = past.Hkv, D = past.D, parts = std::min(Hkv, (threads + B - 1) / B), most = (Hkv + parts - 1) / parts;
    std::vector<float> query(most * G * D), sum(most * G * D), row(D), weight;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < B * parts; item++) {
        const int64_t b = item / parts, n = past.lengths[b], first = item % parts * most, heads = std::min(most, Hkv - first);
        if (heads <= 0) continue;
        const int64_t start = (b * Hkv + first) * G * D, rows = heads * G;
        for (int64_t j = 0; j < rows * D; j++) query[j] = wide(q[start + j]) * scale;
        weight.resize(rows * n);
        for (int64_t i = 0; i < n; i++) {
            const T* key = past.key(b, i) + first * D;
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
            const T* value = past.key(b, i) + (past.page * Hkv + first) * D;
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

// e^x for x from -87 to 0, and 0 below: a power of two, times a series for the remainder, at most log(2) / 2.
inline float exponential(float x) {
    constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer
    const float k = (std::max(x, -87.0f) * 1.44269504f + rounder) - rounder;
    const float r = (std::max(x, -87.0f) - k * 0.693359375f) + k * 2.12194440e-4f;
    const float series = 1 + r * (1 + r * (0.5f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r / 720.0f)))));
    union { uint32_t bits; float value; } power = {uint32_t(int32_t(k) + 127) << 23};
    return x < -87.0f ? 0.0f : series * power.value;
}

// Return the least of the likeliest entries x [n] that hold top_p of the probability. x is changed; `room` is scratch space [2 n].
float least_of_mass(float* x, int64_t n, float top_p, float* room) {
    float most = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < n; i++) most = std::max(most, x[i]);
    const auto mass = [=](const float* entries, int64_t num) {
        constexpr int64_t block = 1024;  // one sum in float32 over a whole vocabulary would be off by 1e-5
        double sum = 0;
        for (int64_t first = 0; first < num; first += block) {
            float part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t i = first; i < std::min(num, first + block); i++) part += exponential(entries[i] - most);
            sum += part;
        }
        return sum;
    };
    const double total = mass(x, n), wanted = top_p * total;
    if (!(total > 0)) return most;  // nothing is possible, or something is infinite
    // Entries below this hold less than 1 - top_p of the probability, all together. These loops have no branches: half of them would be guessed wrong.
    const float unlikely = most + float(std::log(std::min((1 - double(top_p)) * total / double(n), 1.0)));
    int64_t num = 0;
    for (int64_t i = 0; i < n; i++) {
        const float entry = x[i];
        x[num] = entry, num += entry >= unlikely;
    }
    // Of `num` entries, those above and below a pivot. `held` is the mass of all others that are likelier.
    float *entries = x, *above = room, *below = room + n;
    for (double held = 0;;) {
        const float a = entries[0], b = entries[num / 2], c = entries[num - 1], pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
        int64_t num_above = 0, num_below = 0;
        for (int64_t i = 0; i < num; i++) {
            const float entry = entries[i];
            above[num_above] = entry, num_above += entry > pivot;
            below[num_below] = entry, num_below += entry < pivot;
        }
        const double before = held + mass(above, num_above);
        if (num_above > 0 && before >= wanted) {
            std::swap(entries, above), num = num_above;
            continue;
        }
        held = before + double(num - num_above - num_below) * exponential(pivot - most);
        if (held >= wanted || num_below == 0) return pivot;
        std::swap(entries, below), num = num_below;
    }
}

// Return the least entry of a row that is kept: see sampling.keep_likely. `kept` is scratch space.
float least_likely(const float* logits, int64_t V, int64_t top_k, float top_p, std::vector<float>& kept) {
    constexpr float never = -std::numeric_limits<float>::infinity();
    const bool all = top_k <= 0 || top_k >= V;
    if (all && top_p >= 1) return never;
    kept.resize(3 * V);
    float *entries = kept.data(), *end = entries + V, least = never;
    for (int64_t i = 0; i < V; i++) entries[i] = logits[i] == logits[i] ? logits[i] : never;  // NaN cannot be ordered
    if (!all) {
        std::nth_element(entries, entries + top_k - 1, end, std::greater<float>());
        least = entries[top_k - 1];
        end = std::remove_if(entries + top_k, end, [=](float x) { return x < least; });  // ties are kept
    }
    return top_p < 1 ? least_of_mass(entries, end - entries, top_p, entries + V) : least;
}

// Return how many entries of a row are kept, and set `edge` to the least of them: see fish_s2/sampling.keep_likely. `kept` is scratch space.
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
        entries[i] = logits[i] == logits[i] ? logits[i] : never;  // NaN cannot be ordered
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

// Remove all but the likeliest entries of a row: see cosyvoice2/sampling.nucleus. `kept` is scratch space.
void keep_nucleus(const float* logits, int64_t V, int64_t top_k, float top_p, float* out, std::vector<std::pair<float, int>>& kept) {
    constexpr float never = -std::numeric_limits<float>::infinity();
    const int64_t limit = top_k <= 0 || top_k >= V ? V : top_k;
    if (limit == V && top_p >= 1) {
        std::copy(logits, logits + V, out);
        return;
    }
    kept.resize(V);
    float most = never, total = 0, before = 0;
    for (int64_t i = 0; i < V; i++) kept[i] = {logits[i] == logits[i] ? logits[i] : never, -int(i)};  // among ties, the first one ranks higher
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < V; i++) most = std::max(most, logits[i]);
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < V; i++) total += exponential(logits[i] - most);
    if (limit < V) {
        std::nth_element(kept.begin(), kept.begin() + limit, kept.end(), std::greater<>());
        kept.resize(limit);
    }
    std::make_heap(kept.begin(), kept.end());
    std::fill(out, out + V, never);
    for (auto end = kept.end(); end != kept.begin(); end--) {
        const auto [x, place] = kept[0];
        if (before > 0 && top_p < 1 && before >= top_p) break;
        out[-place] = x;
        before += exponential(x - most) / total;
        std::pop_heap(kept.begin(), end);
    }
}

// A bijection of 32 bits: see sampling._mix.
inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = (x ^ (x >> 15)) * 0x735A2D97u;
    return x ^ (x >> 15);
}

inline uint32_t noise_key(int64_t seed, int64_t step, int64_t stream) {
    const uint32_t key = mix(mix(uint32_t(seed) ^ 0x6A09E667u) ^ uint32_t(uint64_t(seed) >> 32));
    return mix(mix(key ^ uint32_t(step)) ^ uint32_t(stream));
}

inline float uniform_of(uint32_t key, uint32_t i) { return (float(int32_t(mix(key ^ i * 0x9E3779B1u) >> 9)) + 0.5f) * 0x1p-23f; }

// log x of a normal x > 0: the log of its power of two, plus a series for the rest, between sqrt(1 / 2) and sqrt(2). Source: Cephes, logf.
inline float logarithm(float x) {
    union { float value; int32_t bits; } u = {x};
    const int32_t power = (u.bits - 0x3F3504F3) >> 23;
    u.bits -= power * (1 << 23);
    const float f = u.value - 1, square = f * f, k = float(power);
    float series = 7.0376836292e-2f;
    series = series * f - 1.1514610310e-1f;
    series = series * f + 1.1676998740e-1f;
    series = series * f - 1.2420140846e-1f;
    series = series * f + 1.4249322787e-1f;
    series = series * f - 1.6668057665e-1f;
    series = series * f + 2.0000714765e-1f;
    series = series * f - 2.4999993993e-1f;
    series = series * f + 3.3333331174e-1f;
    return f + (series * f * square + k * -2.12194440e-4f - 0.5f * square) + k * 0.693359375f;
}

// The square root of x >= 0, by Newton's method from an estimate of its exponent. The library's sqrt may set errno, which prevents vectorization.
inline float root(float x) {
    union { float value; int32_t bits; } u = {x};
    u.bits = 0x5F3759DF - (u.bits >> 1);
    float inverse = u.value;
    inverse *= 1.5f - 0.5f * x * inverse * inverse;
    inverse *= 1.5f - 0.5f * x * inverse * inverse;
    inverse *= 1.5f - 0.5f * x * inverse * inverse;
    return x * inverse;
}

// The standard normal quantile of u. Source: M. Giles, Approximating the erfinv function, GPU Computing Gems (2011), single precision.
inline float normal_of(float u) {
    const float x = 2 * u - 1, w = -logarithm((1 - x) * (1 + x)), a = w - 2.5f, b = root(std::max(w, 0.0f)) - 3;
    float near = 2.81022636e-08f, far = -0.000200214257f;
    near = near * a + 3.43273939e-07f, far = far * b + 0.000100950558f;
    near = near * a - 3.5233877e-06f, far = far * b + 0.00134934322f;
    near = near * a - 4.39150654e-06f, far = far * b - 0.00367342844f;
    near = near * a + 0.00021858087f, far = far * b + 0.00573950773f;
    near = near * a - 0.00125372503f, far = far * b - 0.0076224613f;
    near = near * a - 0.00417768164f, far = far * b + 0.00943887047f;
    near = near * a + 0.246640727f, far = far * b + 1.00167406f;
    near = near * a + 1.50140941f, far = far * b + 2.83297682f;
    return 1.41421356f * x * (w < 5 ? near : far);
}

// Draw a token per row: see sampling.draw. Rows of noise are `step` values apart. A NaN counts as the largest logit, as in torch.
void draw(const float* logits, const float* temperature, const int64_t* top_k, const float* top_p, const float* noise, int64_t step, float greedy,
          int64_t* out, int64_t B, int64_t V, int threads) {
#pragma omp parallel num_threads(threads) if (B * V > SMALL)
    {
        std::vector<float> kept, row(V);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) {
            const float *from = logits + b * V, *added = noise + b * step;
            const bool is_hot = temperature[b] > greedy;
            if (is_hot) {
                for (int64_t i = 0; i < V; i++) row[i] = from[i] / temperature[b];
                const float least = least_likely(row.data(), V, top_k[b], top_p[b], kept);
                for (int64_t i = 0; i < V; i++) row[i] = (row[i] < least ? -std::numeric_limits<float>::infinity() : row[i]) + added[i];
                from = row.data();
            }
            int64_t at = 0;
            for (int64_t i = 1; i < V && from[at] == from[at]; i++)
                if (!(from[i] <= from[at])) at = i;
            out[b] = at;
        }
    }
}

}  // namespace

extern "C" {

// seed and step [B] -> out [B, streams, width], which depends on seed, step and stream only, not on the row.
void uniform(const int64_t* seed, const int64_t* step, float* out, int64_t B, int64_t first, int64_t streams, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (B * streams * width > SMALL)
    for (int64_t row = 0; row < B * streams; row++) {
        const uint32_t key = noise_key(seed[row / streams], step[row / streams], first + row % streams);
        float* to = out + row * width;
#pragma omp simd
        for (int32_t i = 0; i < int32_t(width); i++) to[i] = uniform_of(key, uint32_t(i));
    }
}

// seed and step [B] -> standard normal noise out [B, width], from the first stream.
void normal(const int64_t* seed, const int64_t* step, float* out, int64_t B, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (B * width > SMALL)
    for (int64_t row = 0; row < B; row++) {
        const uint32_t key = noise_key(seed[row], step[row], 0);
        float* to = out + row * width;
#pragma omp simd
        for (int32_t i = 0; i < int32_t(width); i++) to[i] = normal_of(uniform_of(key, uint32_t(i)));
    }
}

// logits and out [B, V], top_k and top_p [B].
void keep_nucleus(const float* logits, const int64_t* top_k, const float* top_p, float* out, int64_t B, int64_t V, int threads) {
#pragma omp parallel num_threads(threads) if (B * V > SMALL)
    {
        std::vector<std::pair<float, int>> kept;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) keep_nucleus(logits + b * V, V, top_k[b], top_p[b], out + b * V, kept);
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
            for (int64_t i = V - 1; surplus > 0; i--) {  // among ties at the edge, the first ones are kept
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
