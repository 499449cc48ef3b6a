// Stacks of decoder blocks: see nn/blocked_stack.py. It is compiled after kernels_products.cpp, as part of one source.

namespace {

// An RMS norm's weight, and what it adds to the mean square.
struct Norm {
    const float* weight;
    float eps;

    // to [K] = the norm of x [K]
    void operator()(const float* x, float* to, int64_t K) const {
        const float factor = 1 / std::sqrt(sum_of_squares(x, K) / float(K) + eps);
#pragma omp simd
        for (int64_t k = 0; k < K; k++) to[k] = x[k] * factor * weight[k];
    }
};

struct Block {
    Norm norm, mlp_norm;
    Weight qkv, out, gate_up, down;
    const float *bias, *q_norm, *k_norm;  // of qkv [qkv.N], and of each head [D]; null if there is none
};

// The rows of a stack of blocks with Hkv * G heads of width D. All threads of a team call each function, and leave it together.
struct Rows {
    int64_t M, width, Hkv, G, D;
    std::vector<float> x, normed, sums, product, mixed, both, gated;

    Rows(const float* given, int64_t M, const Block& block, int64_t Hkv, int64_t G, int64_t D)
        : M(M), width(block.out.N), Hkv(Hkv), G(G), D(D), x(given, given + M * width), normed(M * width), sums(M * width), product(M * block.qkv.N),
          mixed(M * block.out.K), both(M * block.gate_up.N), gated(M * block.down.K) {}

    // Add `sums` to x, if asked for, and write the norm of x to `to` [M, width], or x itself if there is no norm.
    void normalize(const Norm& norm, bool adds, float* to) {
#pragma omp for schedule(static)
        for (int64_t m = 0; m < M; m++) {
            float* row = &x[m * width];
            if (adds) {
#pragma omp simd
                for (int64_t i = 0; i < width; i++) row[i] += sums[m * width + i];
            }
            if (norm.weight) norm(row, to + m * width, width);
            else std::copy(row, row + width, to + m * width);
        }
    }

    // Compute queries, keys and values: `product`. is_first: of the blocks of the stack.
    void project(const Block& block, bool is_first) {
        normalize(block.norm, !is_first, normed.data());
        multiply(normed.data(), block.qkv, block.bias, product.data(), M);
    }

    // Compute what follows attention, whose result is `mixed`. What the block adds last is left in `sums`.
    void combine(const Block& block, const float* mixed) {
        multiply(mixed, block.out, nullptr, sums.data(), M);
        normalize(block.mlp_norm, true, normed.data());
        gated_mlp(normed.data(), block.gate_up, block.down, sums.data(), M, both.data(), gated.data());
    }
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

}  // namespace
