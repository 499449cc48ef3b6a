// Operators that compiled code calls without Python. In a small step the interpreter would cost as much as the products, because the weights that stream
// through the caches between two calls displace its data. Torch's stable interface is used, which compiles in a fifth of the time of its usual headers.
// It is compiled after kernels_stack.cpp, as one source. Schemas are in zoo/nn, where `kernels.cpp_operator` declares them.

#include <torch/csrc/inductor/aoti_torch/c/shim_cpu.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <numeric>
#include <optional>
#include <tuple>

#pragma weak aoti_torch_cpu__linear_pointwise  // builds of torch without oneDNN lack it

namespace {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

template <typename T>
T* data(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

Weight weight_of(const Tensor& blocks, const std::optional<Tensor>& scales, int64_t num_columns) {
    const int64_t K = blocks.size(1);
    const bool has_32_bits = blocks.scalar_type() == ScalarType::Float;
    return {data<uint32_t>(blocks), scales ? data<float>(*scales) : nullptr, K, num_columns, scales ? K / scales->size(1) : K, has_32_bits};
}

// Return the result of run(rows, num, to), in x's dtype. rows: x [..., K] as float32 [num, K]; to: where `columns` values of each row are written.
template <typename Run>
Tensor by_rows(const Tensor& x, int64_t K, int64_t columns, const Run& run) {
    const Tensor given = torch::stable::contiguous(x);
    STD_TORCH_CHECK(given.size(-1) == K, "a weight for rows of ", K, ", and rows of ", given.size(-1));
    std::vector<int64_t> sizes(given.sizes().begin(), given.sizes().end());
    sizes.back() = columns;
    Tensor out = torch::stable::new_empty(given, sizes);
    const int64_t num = given.numel() / K;
    if (given.scalar_type() == ScalarType::Float) {
        run(data<float>(given), num, data<float>(out));
        return out;
    }
    STD_TORCH_CHECK(given.scalar_type() == ScalarType::BFloat16, "rows are neither float32 nor bfloat16");
    std::vector<float> rows(num * K), sums(num * columns);
    std::transform(data<bfloat16>(given), data<bfloat16>(given) + rows.size(), rows.begin(), [](bfloat16 value) { return wide(value); });
    run(rows.data(), num, sums.data());
    for (size_t i = 0; i < sums.size(); i++) narrow(sums[i], data<bfloat16>(out)[i]);
    return out;
}

// See nn/packed.py.
Tensor blocked_linear(const Tensor& x, const Tensor& blocks, const std::optional<Tensor>& scales, const std::optional<Tensor>& bias, int64_t num_columns) {
    const Weight weight = weight_of(blocks, scales, num_columns);
    const float* added = bias ? data<float>(*bias) : nullptr;
    const int threads = torch::stable::get_num_threads();
    return by_rows(x, weight.K, num_columns, [&](const float* rows, int64_t num, float* to) { linear(rows, weight, added, to, num, threads); });
}

// See nn/packed.py.
Tensor blocked_swiglu(const Tensor& x, const Tensor& gate_up, const std::optional<Tensor>& gate_up_scales, const Tensor& down,
                     const std::optional<Tensor>& down_scales, int64_t num_columns) {
    const Weight last = weight_of(down, down_scales, num_columns), first = weight_of(gate_up, gate_up_scales, 2 * last.K);
    const int threads = torch::stable::get_num_threads();
    return by_rows(x, first.K, num_columns, [&](const float* rows, int64_t num, float* to) { swiglu(rows, first, last, to, num, threads); });
}

// See nn/packed.py.
Tensor blocked_rows(const Tensor& index, const Tensor& blocks, int64_t num_rows) {
    STD_TORCH_CHECK(index.scalar_type() == ScalarType::Long, "the index of rows is not int64");
    const Weight weight = weight_of(blocks, std::nullopt, num_rows);
    const Tensor places = torch::stable::contiguous(index);
    const int64_t *first = data<int64_t>(places), num = places.numel();
    for (int64_t i = 0; i < num; i++) STD_TORCH_CHECK(first[i] >= 0 && first[i] < num_rows, "row ", first[i], " of ", num_rows);
    std::vector<int64_t> sizes(places.sizes().begin(), places.sizes().end());
    sizes.push_back(weight.K);
    Tensor out = torch::stable::new_empty(places, sizes, ScalarType::Float);
    const auto read = weight.has_32_bits ? &read_rows<float> : &read_rows<bfloat16>;
    read(weight, first, data<float>(out), num, torch::stable::get_num_threads());
    return out;
}

// See nn/packed.py. The weight is packed by oneDNN.
Tensor packed_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
    AtenTensorHandle added = bias ? bias->get() : nullptr, out;
    const char* algorithm = "";
    const auto failed = aoti_torch_cpu__linear_pointwise(x.get(), weight.get(), bias ? &added : nullptr, "none", nullptr, 0, &algorithm, &out);
    STD_TORCH_CHECK(!failed, "oneDNN's product failed");
    return Tensor(out);
}

// Return whether each of B sequences has one of the M queries.
bool is_step(const Tensor& cu_seqlens, int64_t M, int64_t B) {
    const int64_t* starts = data<int64_t>(cu_seqlens);
    bool is_one = M == B && cu_seqlens.is_contiguous();
    for (int64_t i = 0; is_one && i <= B; i++) is_one = starts[i] == i;
    return is_one;
}

// See nn/attention.py. It is written in torch.
Tensor attend_sequences(const Tensor& q, const Tensor& kv, const Tensor& page_table, const Tensor& kv_lens, const Tensor& cu_seqlens, int64_t page_tokens,
                        double scale) {
    using torch::stable::detail::from;
    std::array<StableIValue, 7> stack{from(q), from(kv), from(page_table), from(kv_lens), from(cu_seqlens), from(page_tokens), from(scale)};
    STD_TORCH_CHECK(!torch_call_dispatcher("zoo::attend_sequences", "", stack.data(), TORCH_ABI_VERSION), "attention failed");
    return torch::stable::detail::to<Tensor>(stack[0]);
}

// See nn/attention.py. If every sequence has one query, our kernel computes them all.
Tensor paged_attention(const Tensor& q, const Tensor& kv, const Tensor& page_table, const Tensor& kv_lens, const Tensor& cu_seqlens, int64_t page_tokens,
                       double scale) {
    const int64_t B = page_table.size(0);
    const bool is_float = q.scalar_type() == ScalarType::Float;
    if (!is_step(cu_seqlens, q.size(0), B) || q.scalar_type() != kv.scalar_type() || !(is_float || q.scalar_type() == ScalarType::BFloat16)) {
        return attend_sequences(q, kv, page_table, kv_lens, cu_seqlens, page_tokens, scale);
    }
    STD_TORCH_CHECK(kv.is_contiguous(), "the pages are not contiguous");
    const Tensor queries = torch::stable::contiguous(q), pages = torch::stable::contiguous(page_table), lengths = torch::stable::contiguous(kv_lens);
    Tensor out = torch::stable::new_empty(queries, queries.sizes());
    const int64_t H = q.size(1), D = q.size(2), Hkv = kv.size(1);
    const auto run = [&](auto zero) {
        using T = decltype(zero);
        const Pages<T> past{data<T>(kv), data<int64_t>(pages), data<int64_t>(lengths), B, Hkv, D, pages.size(1), page_tokens, 0};
        const int threads = int(torch::stable::get_num_threads());
        const int64_t num = std::accumulate(past.lengths, past.lengths + B, int64_t(0));
#pragma omp parallel num_threads(threads) if (num * H * D > SMALL)
        attend(data<T>(queries), past, data<T>(out), H / Hkv, float(scale), threads);
    };
    if (is_float) run(float{});
    else run(bfloat16{});
    return out;
}

// The rows of nn/blocked_stack.py's `addresses`, of a stack whose width is `width`, with `queries` and `keys` columns.
std::vector<Block> blocks_of(const Tensor& addresses, double eps, int64_t width, int64_t queries, int64_t keys) {
    STD_TORCH_CHECK(addresses.is_contiguous() && addresses.scalar_type() == ScalarType::Long && addresses.size(1) == 27, "the table of a stack is another's");
    std::vector<Block> blocks;
    for (int64_t i = 0; i < addresses.size(0); i++) {
        const int64_t* row = data<int64_t>(addresses) + i * addresses.size(1);
        const auto floats = [&](int64_t j) { return reinterpret_cast<const float*>(row[j]); };
        const auto weight = [&](int64_t j, int64_t K, int64_t N) {
            return Weight{reinterpret_cast<const uint32_t*>(row[j]), floats(j + 1), K, N, row[j + 2], row[j + 3] == 32};
        };
        const int64_t inner = row[25];
        const bool is_gated = row[26];
        blocks.push_back({{floats(0), floats(5), float(eps)}, {floats(1), floats(6), float(eps)}, weight(9, width, queries + 2 * keys),
                          weight(13, queries, width), weight(17, width, inner * (1 + is_gated)), weight(21, inner, width), floats(4), floats(2), floats(3),
                          floats(7), floats(8), is_gated});
    }
    return blocks;
}

Turn<float> turn_of(const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, int64_t positions, int64_t D, double eps, bool is_paired,
                    bool is_rounded) {
    for (const auto* table : {&cos, &sin})
        if (*table)
            STD_TORCH_CHECK((*table)->is_contiguous() && (*table)->scalar_type() == ScalarType::Float && (*table)->numel() == positions * D,
                            "the rotary table is not contiguous float32 [", positions, ", ", D, "]");
    return {cos ? data<float>(*cos) : nullptr, sin ? data<float>(*sin) : nullptr, float(eps), is_paired, is_rounded};
}

// See nn/blocked_stack.py.
Tensor blocked_stack(const Tensor& x, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& kv, const Tensor& kv_write_index,
                     const Tensor& page_table, const Tensor& kv_lens, const Tensor& cu_seqlens, int64_t page_tokens, int64_t first_layer, int64_t heads,
                     double scale, double eps, bool is_paired, const std::optional<Tensor>& norm, const Tensor& addresses) {
    const int64_t M = x.size(0), width = x.size(1), Hkv = kv.size(1), D = kv.size(2), B = page_table.size(0);
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && kv.scalar_type() == ScalarType::Float && kv.is_contiguous(),
                    "rows or pages are not contiguous float32");
    STD_TORCH_CHECK(kv_write_index.numel() == M, kv_write_index.numel(), " places for ", M, " rows");
    const Tensor given = torch::stable::contiguous(x), index = torch::stable::contiguous(kv_write_index), table = torch::stable::contiguous(page_table),
                 lengths = torch::stable::contiguous(kv_lens);
    const std::vector<Block> blocks = blocks_of(addresses, eps, width, heads * D, Hkv * D);
    const Turn<float> turn = turn_of(cos, sin, M, D, eps, is_paired, false);
    const Norm last{norm ? data<float>(*norm) : nullptr, nullptr, float(eps)};
    Rows rows(data<float>(given), M, blocks[0], Hkv, heads / Hkv, D);
    Tensor queries = torch::stable::new_empty(given, {M, heads, D}), out = torch::stable::new_empty(given, given.sizes());
    const int threads = int(torch::stable::get_num_threads());
    const bool is_large = M * blocks[0].qkv.K * blocks[0].qkv.N > SMALL;
    const auto offset = [&](size_t i) { return 2 * (first_layer + int64_t(i)) * page_tokens; };
    const auto begin = [&](size_t i) {
        rows.project(blocks[i], i ? &blocks[i - 1] : nullptr);
        rotate_and_write(rows, blocks[i], turn, data<float>(queries), data<float>(kv), data<int64_t>(index), offset(i), page_tokens);
    };
    if (is_step(cu_seqlens, M, B)) {
#pragma omp parallel num_threads(threads) if (is_large)
        {
            for (size_t i = 0; i < blocks.size(); i++) {
                begin(i);
                const Pages<float> past{data<float>(kv), data<int64_t>(table), data<int64_t>(lengths), B, Hkv, D, table.size(1), page_tokens, offset(i)};
                attend(data<float>(queries), past, rows.mixed.data(), heads / Hkv, float(scale), threads);
                rows.combine(blocks[i], rows.mixed.data());
            }
            rows.finish(blocks.back(), last, data<float>(out));
        }
        return out;
    }
    for (size_t i = 0; i < blocks.size(); i++) {
#pragma omp parallel num_threads(threads) if (is_large)
        begin(i);
        Tensor pages = torch::stable::new_empty(table, table.sizes());
        std::transform(data<int64_t>(table), data<int64_t>(table) + table.numel(), data<int64_t>(pages), [&](int64_t row) { return row + offset(i); });
        const Tensor mixed = attend_sequences(queries, kv, pages, kv_lens, cu_seqlens, page_tokens, scale);
#pragma omp parallel num_threads(threads) if (is_large)
        rows.combine(blocks[i], data<float>(mixed));
    }
#pragma omp parallel num_threads(threads) if (is_large)
    rows.finish(blocks.back(), last, data<float>(out));
    return out;
}

// See nn/blocked_stack.py.
Tensor blocked_frame_stack(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& position, const Tensor& cache, int64_t heads, double scale,
                           double eps, bool is_paired, bool is_rounded, const Tensor& norm, const Tensor& addresses) {
    const int64_t B = x.size(0), L = x.size(1), width = x.size(2), Hkv = cache.size(3), K = cache.size(4), D = cache.size(5), M = B * L;
    const int64_t first = *data<int64_t>(position);
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && cache.scalar_type() == ScalarType::Float && cache.is_contiguous(),
                    "rows or the cache are not contiguous float32");
    STD_TORCH_CHECK(first >= 0 && first + L <= K, "position ", first, " of ", K);
    const Tensor given = torch::stable::contiguous(x);
    const std::vector<Block> blocks = blocks_of(addresses, eps, width, heads * D, Hkv * D);
    STD_TORCH_CHECK(cache.size(0) == int64_t(blocks.size()) && cache.size(1) == B, "a cache of ", cache.size(0), " blocks and ", cache.size(1), " frames");
    const Turn<float> turn = turn_of(cos, sin, K, D, eps, is_paired, is_rounded);
    const Norm last{data<float>(norm), nullptr, float(eps)};
    Rows rows(data<float>(given), M, blocks[0], Hkv, heads / Hkv, D);
    Tensor out = torch::stable::new_empty(given, given.sizes());
    const int threads = int(torch::stable::get_num_threads());
#pragma omp parallel num_threads(threads) if (M * blocks[0].qkv.K * blocks[0].qkv.N > SMALL)
    {
        for (size_t i = 0; i < blocks.size(); i++) {
            const Block& block = blocks[i];
            rows.project(block, i ? &blocks[i - 1] : nullptr);
            const float *q = rows.product.data(), *k = q + heads * D, *v = k + Hkv * D;
            float* held = data<float>(cache) + i * 2 * B * Hkv * K * D;
            attend_frame(q, k, v, (heads + 2 * Hkv) * D, block.q_norm, block.k_norm, turn, held, held, rows.mixed.data(), B, L, Hkv, heads / Hkv, D, K, first,
                         float(scale));
            rows.combine(block, rows.mixed.data());
        }
        rows.finish(blocks.back(), last, data<float>(out));
    }
    return out;
}

// See nn/window_attention.py.
Tensor window_stack(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& rows_of_slots, const Tensor& slots, const Tensor& places,
                    const Tensor& seen, const Tensor& kept, int64_t heads, double scale, double eps, bool is_paired, const std::optional<Tensor>& norm,
                    const Tensor& addresses) {
    const int64_t B = x.size(0), N = x.size(1), width = x.size(2), D = cos.size(2), R = kept.size(1);
    const Tensor given = torch::stable::contiguous(x), cosines = torch::stable::contiguous(cos), sines = torch::stable::contiguous(sin);
    const Tensor from = torch::stable::contiguous(kept), mask = torch::stable::contiguous(seen), index = torch::stable::contiguous(slots);
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && rows_of_slots.scalar_type() == ScalarType::Float && rows_of_slots.is_contiguous(),
                    "positions or the rows of slots are not contiguous float32");
    STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool && mask.numel() == B * N * (R + N) && index.numel() == B && from.size(0) == B,
                    "what ", N, " positions of ", B, " streams see and keep has another shape");
    const std::vector<Block> blocks = blocks_of(addresses, eps, width, heads * D, heads * D);
    STD_TORCH_CHECK(places.is_contiguous() && places.numel() == int64_t(blocks.size()), places.numel(), " places for ", blocks.size(), " layers");
    const Turn<float> turn = turn_of(cosines, sines, B * N, D, eps, is_paired, false);
    const Norm last{norm ? data<float>(*norm) : nullptr, nullptr, float(eps)};
    const Rings rings{data<float>(rows_of_slots), rows_of_slots.size(1), R, data<int64_t>(index), data<int64_t>(from), data<bool>(mask)};
    const std::vector<int64_t> ends = ends_of(rings.seen, B, N, R + N);
    Rows rows(data<float>(given), B * N, blocks[0], heads, 1, D);
    Tensor out = torch::stable::new_empty(given, given.sizes());
    const int threads = int(torch::stable::get_num_threads());
#pragma omp parallel num_threads(threads) if (B * N * blocks[0].qkv.K * blocks[0].qkv.N > SMALL)
    {
        std::vector<float> scratch(D);
        for (size_t i = 0; i < blocks.size(); i++) {
            rows.project(blocks[i], i ? &blocks[i - 1] : nullptr);
#pragma omp for schedule(static)
            for (int64_t item = 0; item < B * N * 2 * heads; item++) {
                float* head = &rows.product[(item / (2 * heads) * 3 * heads + item % (2 * heads)) * D];
                turn(head, nullptr, item / (2 * heads), D, head, scratch.data());
            }
            rings.attend(rows.product.data(), rows.mixed.data(), data<int64_t>(places)[i], B, N, heads, D, ends, float(scale));
            rows.combine(blocks[i], rows.mixed.data());
        }
        rows.finish(blocks.back(), last, data<float>(out));
    }
    return out;
}

// See sampling.draw. logits and noise [B, V] float32, temperature and top_p [B] float32, top_k [B] int64.
Tensor draw_tokens(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& noise, double greedy) {
    const Tensor given = torch::stable::contiguous(logits), heat = torch::stable::contiguous(temperature), most = torch::stable::contiguous(top_k),
                 mass = torch::stable::contiguous(top_p);
    const int64_t B = given.size(0), V = given.size(1);
    STD_TORCH_CHECK(noise.stride(1) == 1 && noise.size(1) == V, "the noise of a row is not contiguous");
    for (const Tensor* x : {&given, &heat, &mass, &noise})
        STD_TORCH_CHECK(x->scalar_type() == ScalarType::Float, "logits, temperature, top_p or noise is not float32");
    Tensor out = torch::stable::new_empty(given, {B}, ScalarType::Long);
    draw(data<float>(given), data<float>(heat), data<int64_t>(most), data<float>(mass), data<float>(noise), noise.stride(0), float(greedy),
         data<int64_t>(out), B, V, int(torch::stable::get_num_threads()));
    return out;
}

template <typename T>
void grow(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin, double scale, int64_t first, const Tensor& cache,
          const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps, bool is_paired, bool is_rounded, Tensor& out, Tensor& grown) {
    const int64_t B = q.size(0), L = q.size(1), H = q.size(2), D = q.size(3), Hkv = k.size(2);
    const Turn<T> turn{data<float>(cos), data<float>(sin), float(eps), is_paired, is_rounded};
    const auto norm = [](const std::optional<Tensor>& weight) { return weight ? data<T>(*weight) : nullptr; };
    const int threads = int(torch::stable::get_num_threads());
#pragma omp parallel num_threads(threads) if (B * L * H * (first + L) * D > SMALL)
    attend_frame(data<T>(q), data<T>(k), data<T>(v), k.stride(L > 1 ? 1 : 0), norm(q_norm), norm(k_norm), turn, data<float>(cache), data<float>(grown),
                 data<T>(out), B, L, Hkv, H / Hkv, D, cache.size(3), first, float(scale));
}

// See nn/frame_attention.py. q, k and v have the same dtype, float32 or bfloat16, and may be slices of one product.
std::tuple<Tensor, Tensor> grow_frame_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin, double scale,
                                                const Tensor& position, const Tensor& cache, const std::optional<Tensor>& q_norm,
                                                const std::optional<Tensor>& k_norm, double eps, bool is_paired, bool is_rounded) {
    const int64_t L = q.size(1), D = q.size(3), first = *data<int64_t>(position), step = k.stride(L > 1 ? 1 : 0);
    for (const Tensor* x : {&q, &k, &v})
        STD_TORCH_CHECK(x->stride(3) == 1 && x->stride(2) == D && (L == 1 || x->stride(1) == step) && (x->size(0) == 1 || x->stride(0) == L * step),
                        "tokens of queries, keys and values lie differently far apart");
    STD_TORCH_CHECK(q.scalar_type() == ScalarType::Float || q.scalar_type() == ScalarType::BFloat16, "queries are neither float32 nor bfloat16");
    STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "queries, keys and values differ in dtype");
    STD_TORCH_CHECK(first >= 0 && first + L <= cache.size(3) && cos.size(0) == cache.size(3), "position ", first, " of ", cache.size(3));
    STD_TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.scalar_type() == ScalarType::Float && sin.scalar_type() == ScalarType::Float,
                    "the rotary table is not contiguous float32");
    const Tensor held = torch::stable::contiguous(cache);
    Tensor out = torch::stable::new_empty(q, q.sizes()), grown = torch::stable::new_empty(held, held.sizes());
    const auto run = q.scalar_type() == ScalarType::Float ? &grow<float> : &grow<bfloat16>;
    run(q, k, v, cos, sin, scale, first, held, q_norm, k_norm, eps, is_paired, is_rounded, out, grown);
    return {out, grown};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zoo, CPU, library) {
    library.impl("blocked_linear", TORCH_BOX(&blocked_linear));
    library.impl("blocked_swiglu", TORCH_BOX(&blocked_swiglu));
    library.impl("blocked_rows", TORCH_BOX(&blocked_rows));
    library.impl("blocked_stack", TORCH_BOX(&blocked_stack));
    library.impl("blocked_frame_stack", TORCH_BOX(&blocked_frame_stack));
    library.impl("window_stack", TORCH_BOX(&window_stack));
    if (&aoti_torch_cpu__linear_pointwise) library.impl("packed_linear", TORCH_BOX(&packed_linear));
    library.impl("paged_attention_cpp", TORCH_BOX(&paged_attention));
    library.impl("draw_cpp", TORCH_BOX(&draw_tokens));
    library.impl("grow_frame_attention_cpp", TORCH_BOX(&grow_frame_attention));
}
