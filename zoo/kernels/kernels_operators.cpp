// Operators that compiled code calls without Python. In a small step the interpreter would cost as much as the products, because the weights that stream
// through the caches between two calls displace its data. Torch's stable interface is used, which compiles in a fifth of the time of its usual headers.
// It is compiled after kernels_products.cpp, as one source. Schemas are in zoo/nn, where `kernels.cpp_operator` declares them.

#include <torch/csrc/inductor/aoti_torch/c/shim_cpu.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
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

// See nn/packed.py. The weight is packed by oneDNN.
Tensor packed_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
    AtenTensorHandle added = bias ? bias->get() : nullptr, out;
    const char* algorithm = "";
    const auto failed = aoti_torch_cpu__linear_pointwise(x.get(), weight.get(), bias ? &added : nullptr, "none", nullptr, 0, &algorithm, &out);
    STD_TORCH_CHECK(!failed, "oneDNN's product failed");
    return Tensor(out);
}

// See nn/attention.py. If every sequence has one query, our kernel computes them all.
Tensor paged_attention(const Tensor& q, const Tensor& kv, const Tensor& page_table, const Tensor& kv_lens, const Tensor& cu_seqlens, int64_t page_tokens,
                       double scale) {
    const int64_t B = page_table.size(0);
    const bool is_float = q.scalar_type() == ScalarType::Float;
    if (q.size(0) != B || q.scalar_type() != kv.scalar_type() || !(is_float || q.scalar_type() == ScalarType::BFloat16)) {
        std::array<StableIValue, 7> stack{torch::stable::detail::from(q),       torch::stable::detail::from(kv),         torch::stable::detail::from(page_table),
                                          torch::stable::detail::from(kv_lens), torch::stable::detail::from(cu_seqlens), torch::stable::detail::from(page_tokens),
                                          torch::stable::detail::from(scale)};
        STD_TORCH_CHECK(!torch_call_dispatcher("zoo::attend_sequences", "", stack.data(), TORCH_ABI_VERSION), "attention failed");
        return torch::stable::detail::to<Tensor>(stack[0]);
    }
    STD_TORCH_CHECK(kv.is_contiguous(), "the pages are not contiguous");
    const Tensor queries = torch::stable::contiguous(q), pages = torch::stable::contiguous(page_table), lengths = torch::stable::contiguous(kv_lens);
    Tensor out = torch::stable::new_empty(queries, queries.sizes());
    const int64_t H = q.size(1), D = q.size(2), Hkv = kv.size(1);
    const auto run = [&](auto zero) {
        using T = decltype(zero);
        attend(data<T>(queries), data<T>(kv), data<int64_t>(pages), data<int64_t>(lengths), data<T>(out), B, Hkv, H / Hkv, D, pages.size(1), page_tokens,
               float(scale), int(torch::stable::get_num_threads()));
    };
    if (is_float) run(float{});
    else run(bfloat16{});
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
    attend_frame(data<T>(q), data<T>(k), data<T>(v), k.stride(L > 1 ? 1 : 0), norm(q_norm), norm(k_norm), turn, data<float>(cache), data<float>(grown),
                 data<T>(out), B, L, Hkv, H / Hkv, D, cache.size(3), first, float(scale), int(torch::stable::get_num_threads()));
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
    if (&aoti_torch_cpu__linear_pointwise) library.impl("packed_linear", TORCH_BOX(&packed_linear));
    library.impl("paged_attention_cpp", TORCH_BOX(&paged_attention));
    library.impl("draw_cpp", TORCH_BOX(&draw_tokens));
    library.impl("grow_frame_attention_cpp", TORCH_BOX(&grow_frame_attention));
}
