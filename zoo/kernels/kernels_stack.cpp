// Stacks of decoder blocks: see nn/blocked_stack.py. It is compiled after kernels_products.cpp, as part of one source.

namespace {

// An RMS norm's weight and what it adds to the mean square, or a layer norm's, which has an offset.
struct Norm {
    const float *weight, *offset;
    float eps;

    // to [K] = the norm of x [K]
    void operator()(const float* x, float* to, int64_t K) const {
        if (offset) {
            Vector part = spread(0);
            for (int64_t k = 0; k + LANES <= K; k += LANES) part = part + load(x + k);
            float sum = 0;
            for (int i = 0; i < LANES; i++) sum += part[i];
            for (int64_t k = K / LANES * LANES; k < K; k++) sum += x[k];
            const float mean = sum / float(K);
            for (int64_t k = 0; k < K; k++) to[k] = x[k] - mean;
            const float factor = 1 / std::sqrt(sum_of_squares(to, K) / float(K) + eps);
#pragma omp simd
            for (int64_t k = 0; k < K; k++) to[k] = to[k] * factor * weight[k] + offset[k];
            return;
        }
        const float factor = 1 / std::sqrt(sum_of_squares(x, K) / float(K) + eps);
#pragma omp simd
        for (int64_t k = 0; k < K; k++) to[k] = x[k] * factor * weight[k];
    }
};

struct Block {
    Norm norm, mlp_norm;
    Weight qkv, out, first, last;  // the last two are the MLP's
    const float *bias, *q_norm, *k_norm, *attention_scale, *mlp_scale;  // of qkv, of each head [D], and of what is added to x; null if there is none
    bool is_gated;  // the MLP
};

// The rows of a stack of blocks with Hkv * G heads of width D. All threads of a team call each function, and leave it together.
struct Rows {
    int64_t M, width, Hkv, G, D;
    std::vector<float> x, normed, sums, product, mixed, both, gated;

    Rows(const float* given, int64_t M, const Block& block, int64_t Hkv, int64_t G, int64_t D)
        : M(M), width(block.out.N), Hkv(Hkv), G(G), D(D), x(given, given + M * width), normed(M * width), sums(M * width), product(M * block.qkv.N),
          mixed(M * block.out.K), both(M * block.first.N), gated(M * block.last.K) {}

    // Add `sums`, times `scale` if there is one, to x, if asked for, and write the norm of x to `to` [M, width], or x itself if there is no norm.
    void normalize(const Norm& norm, bool adds, const float* scale, float* to) {
#pragma omp for schedule(static)
        for (int64_t m = 0; m < M; m++) {
            float *row = &x[m * width], *more = &sums[m * width];
            if (adds && scale) {
#pragma omp simd
                for (int64_t i = 0; i < width; i++) row[i] += scale[i] * more[i];
            } else if (adds) {
#pragma omp simd
                for (int64_t i = 0; i < width; i++) row[i] += more[i];
            }
            if (norm.weight) norm(row, to + m * width, width);
            else std::copy(row, row + width, to + m * width);
        }
    }

    // Compute queries, keys and values: `product`. before: the block before this one in the stack, or null.
    void project(const Block& block, const Block* before) {
        normalize(block.norm, before, before ? before->mlp_scale : nullptr, normed.data());
        multiply(normed.data(), block.qkv, block.bias, product.data(), M);
    }

    // Compute what follows attention, whose result is `mixed`. What the block adds last is left in `sums`.
    void combine(const Block& block, const float* mixed) {
        multiply(mixed, block.out, nullptr, sums.data(), M);
        normalize(block.mlp_norm, true, block.attention_scale, normed.data());
        run_mlp(normed.data(), block.first, block.last, block.is_gated, sums.data(), M, both.data(), gated.data());
    }

    // Compute what follows the last block: `to` [M, width].
    void finish(const Block& last, const Norm& norm, float* to) { normalize(norm, true, last.mlp_scale, to); }
};

// Rotate the M queries and keys of `product`. Queries go to queries [M, Hkv * G, D]; keys and values to rows of kv [rows, Hkv, D], values `page` rows
// behind keys. All threads of a team call it, and leave it together.
void rotate_and_write(const Rows& rows, const Block& block, const Turn<float>& turn, float* queries, float* kv, const int64_t* write, int64_t offset,
                      int64_t page) {
    const int64_t D = rows.D, Hkv = rows.Hkv, H = Hkv * rows.G, step = H + 2 * Hkv;
    std::vector<float> scratch(D);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < rows.M * step; item++) {
        const int64_t m = item / step, head = item % step;
        const float* from = &rows.product[item * D];
        float* keys = kv + (write[m] + offset) * Hkv * D;
        if (head < H) turn(from, block.q_norm, m, D, queries + (m * H + head) * D, scratch.data());
        else if (head < H + Hkv) turn(from, block.k_norm, m, D, keys + (head - H) * D, scratch.data());
        else std::copy(from, from + D, keys + (page * Hkv + head - H - Hkv) * D);
    }
}

// The rings of a window: see nn/window_attention.py. rows [slots, V]; slots [B]; seen [B, N, R + N]; kept [B, R].
struct Rings {
    float* rows;
    int64_t V, R;
    const int64_t *slots, *kept;
    const bool* seen;

    // Attend with N queries for each of B streams to a layer's ring, at `place` of a row, and to the new keys, which are then written to it. product
    // [B * N, 3, H, D]; mixed [B * N, H, D]. All threads of a team call it, and leave it together.
    void attend(const float* product, float* mixed, int64_t place, int64_t B, int64_t N, int64_t H, int64_t D, const std::vector<int64_t>& ends,
                float scale) const {
        const int64_t width = H * D, K = R + N, groups = int64_t(ends.size()) / B;
        HeadAttention<float> attention(N, K, D);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < B * H; item++) {
            const int64_t b = item / H, h = item % H;
            float* ring = rows + slots[b] * V + place + h * D;
            const auto query = [&](int64_t i) { return product + (b * N + i) * 3 * width + h * D; };
            const auto key = [&](int64_t i) { return i < R ? ring + i * 2 * width : query(i - R) + width; };
            const auto value = [&](int64_t i) { return key(i) + width; };
            attention(key, value, query, seen + b * N * K, &ends[b * groups], scale, [&](int64_t i) { return mixed + (b * N + i) * width + h * D; });
            for (int64_t i = 0; i < R; i++) {
                const int64_t from = kept[b * R + i];
                if (from < R) continue;
                std::copy(key(from), key(from) + D, ring + i * 2 * width);
                std::copy(value(from), value(from) + D, ring + i * 2 * width + width);
            }
        }
    }
};

}  // namespace
