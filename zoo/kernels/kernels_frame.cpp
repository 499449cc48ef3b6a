// Attention among the tokens of a frame: see nn/frame_attention.py. It is compiled after kernels_render.cpp, as part of one source.

namespace {

// How queries and keys are prepared. cos and sin [K, D]: null if nothing is rotated; a norm is null if there is none.
template <typename T>
struct Turn {
    const float *cos, *sin;
    float eps;
    bool is_paired, is_rounded;

    static float rounded(float x) {
        T y;
        narrow(x, y);
        return wide(y);
    }

    // Normalize a row x [D], rotate it as position p, and write it to y. `row` [D] is scratch space.
    void operator()(const T* x, const T* norm, int64_t p, int64_t D, float* y, float* row) const {
        for (int64_t d = 0; d < D; d++) row[d] = wide(x[d]);
        if (norm) {
            const float scale = 1 / std::sqrt(sum_of_squares(row, D) / float(D) + eps);
            for (int64_t d = 0; d < D; d++) row[d] = rounded(rounded(row[d] * scale) * wide(norm[d]));
        }
        if (!cos) {
            std::copy(row, row + D, y);
            return;
        }
        const float *c = cos + p * D, *s = sin + p * D;
        const int64_t half = D / 2;
        if (is_paired) {
            for (int64_t d = 0; d < D; d += 2) {
                y[d] = row[d] * c[d] - row[d + 1] * s[d];
                y[d + 1] = row[d + 1] * c[d + 1] + row[d] * s[d + 1];
            }
        } else {
#pragma omp simd
            for (int64_t d = 0; d < half; d++) {
                y[d] = row[d] * c[d] - row[d + half] * s[d];
                y[d + half] = row[d + half] * c[d + half] + row[d] * s[d + half];
            }
        }
        if (is_rounded)
            for (int64_t d = 0; d < D; d++) y[d] = rounded(y[d]);
    }
};

// L new tokens of B frames, from position `first` on. q [B, L, Hkv * G, D], k and v [B, L, Hkv, D], with `step` values between two tokens; cache and
// grown [B, 2, Hkv, K, D]: positions before and after this call, which may be the same; out like q, contiguous. All threads of a team call it, and leave
// it together.
template <typename T>
void attend_frame(const T* q, const T* k, const T* v, int64_t step, const T* q_norm, const T* k_norm, const Turn<T>& turn, const float* cache,
                  float* grown, T* out, int64_t B, int64_t L, int64_t Hkv, int64_t G, int64_t D, int64_t K, int64_t first, float scale) {
    std::vector<float> row(D), query(D), sum(D), weight(K);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < B * Hkv; item++) {
        const int64_t b = item / Hkv, h = item % Hkv, at = (2 * b * Hkv + h) * K * D, value_at = at + Hkv * K * D;
        float *keys = grown + at, *values = grown + value_at;
        if (grown != cache) {
            std::copy(cache + at, cache + at + first * D, keys);
            std::copy(cache + value_at, cache + value_at + first * D, values);
        }
        for (int64_t l = 0; l < L; l++) {
            const int64_t from = (b * L + l) * step + h * D, p = first + l;
            turn(k + from, k_norm, p, D, keys + p * D, row.data());
            for (int64_t d = 0; d < D; d++) values[p * D + d] = wide(v[from + d]);
        }
        for (int64_t l = 0; l < L; l++)
            for (int64_t g = 0; g < G; g++) {
                const int64_t head = h * G + g, p = first + l;
                turn(q + (b * L + l) * step + head * D, q_norm, p, D, query.data(), row.data());
                float peak = -std::numeric_limits<float>::infinity(), total = 0;
                for (int64_t i = 0; i <= p; i++) {
                    float dot = 0;
#pragma omp simd reduction(+ : dot)
                    for (int64_t d = 0; d < D; d++) dot += query[d] * keys[i * D + d];
                    weight[i] = dot * scale;
                    peak = std::max(peak, weight[i]);
                }
                for (int64_t i = 0; i <= p; i++) total += weight[i] = std::exp(weight[i] - peak);
                std::fill(sum.begin(), sum.end(), 0.0f);
                for (int64_t i = 0; i <= p; i++) {
                    const float share = weight[i] / total;
#pragma omp simd
                    for (int64_t d = 0; d < D; d++) sum[d] += share * values[i * D + d];
                }
                T* to = out + ((b * L + l) * Hkv * G + head) * D;
                for (int64_t d = 0; d < D; d++) narrow(sum[d], to[d]);
            }
    }
}

}  // namespace
