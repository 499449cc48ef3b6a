// Snakes and ELUs, and the convolutions behind them, on a CPU. It is compiled after kernels_render.cpp, as part of one source.

namespace {

constexpr int COLUMNS = 64;  // outputs that are computed together; weights are padded with zeros to a multiple of it
static_assert(COLUMNS % WIDTH == 0);

// x + gain sin^2(frequency x). Subtracting k * pi in three parts loses no precision; the series is accurate for the remainder, at most pi / 2.
inline Vector snake_of(Vector x, Vector frequency, Vector gain) {
    const Vector rounder = spread(12582912.0f), y = frequency * x;  // 1.5 * 2^23: adding it leaves an integer
    const Vector k = multiply_add(rounder, y, spread(0.318309886f)) - rounder;
    Vector r = multiply_add(multiply_add(multiply_add(y, k, spread(-3.140625f)), k, spread(-9.67502593994140625e-4f)), k, spread(-1.509957990978376432e-7f));
    r = -larger(-larger(r, spread(-1.6f)), spread(-1.6f));  // beyond a million, y has too few bits for a phase
    const Vector s = r * r;
    Vector series = multiply_add(spread(1 / 362880.0f), s, spread(-1 / 39916800.0f));
    series = multiply_add(spread(-1 / 5040.0f), s, series);
    series = multiply_add(spread(1 / 120.0f), s, series);
    series = multiply_add(spread(-1 / 6.0f), s, series);
    const Vector sine = multiply_add(r, r * s, series);
    return multiply_add(x, gain, sine * sine);
}

// The snake of n numbers, each with a frequency and a gain, of which there is one if `step` is 0.
template <int step = 1>
inline void snake_row(const float* x, const float* frequency, const float* gain, float* out, int64_t n) {
    const auto values = [](const float* from, int64_t i) { return step ? load(from + i) : spread(*from); };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, snake_of(load(x + i), values(frequency, i), values(gain, i)));
    if (i == n) return;
    float rest[3][LANES] = {};
    for (int64_t j = i; j < n; j++) rest[0][j - i] = x[j], rest[1][j - i] = frequency[step * j], rest[2][j - i] = gain[step * j];
    store(rest[0], snake_of(load(rest[0]), load(rest[1]), load(rest[2])));
    std::copy(rest[0], rest[0] + (n - i), out + i);
}

// x above 0, e^x - 1 below.
inline Vector elu_of(Vector x) { return larger(spread(0), x) + (powers_of_two(-larger(spread(0), -x) * 1.44269504f) - 1); }

inline void elu_row(const float* x, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, elu_of(load(x + i)));
    if (i == n) return;
    float rest[LANES] = {};
    std::copy(x + i, x + n, rest);
    store(rest, elu_of(load(rest)));
    std::copy(rest, rest + (n - i), out + i);
}

// What a row goes through before a convolution: a snake if there are frequencies, an ELU, or nothing.
struct Activation {
    const float *frequency, *gain;
    bool is_elu;

    // `to` may be x.
    void apply(const float* x, float* to, int64_t n) const {
        if (frequency) snake_row(x, frequency, gain, to, n);
        else if (is_elu) elu_row(x, to, n);
        else if (to != x) std::copy(x, x + n, to);
    }
};

// A convolution's weights w [panels, in_panel, C, WIDTH], of which `places` [count] are the taps of a filter.
struct Taps {
    const float* w;
    int64_t in_panel, count;
    const int64_t* places;
};

// Multiply ROWS rows, whose `taps` read n numbers each, `step` apart, by V vectors of a panel b [in_panel, n, WIDTH] -> c. Unrolled, because otherwise
// GCC keeps the sums in memory.
template <int V>
inline void product_of_panel(const float* const* rows, const Taps& taps, int64_t step, const float* b, int64_t n, float* c, int64_t stride_c) {
    const float* a[ROWS];
    Vector sum[ROWS][V];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        a[r] = rows[r];
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) sum[r][j] = spread(0);
    }
    for (int64_t k = 0; k < taps.count; k++) {
        const float* weights = b + taps.places[k] * n * WIDTH;
        for (int64_t i = 0; i < n; i++, weights += WIDTH) {
            Vector columns[V];
#pragma GCC unroll 4
            for (int j = 0; j < V; j++) columns[j] = load(weights + j * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const Vector x = spread(a[r][i]);
#pragma GCC unroll 4
                for (int j = 0; j < V; j++) sum[r][j] = multiply_add(sum[r][j], x, columns[j]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) a[r] += step;
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) store(c + r * stride_c + j * LANES, sum[r][j]);
}

// Multiply `num` rows of n numbers, row(r), by outputs first .. first + columns, `first` a multiple of WIDTH -> c [num up to a multiple of ROWS, columns
// up to a multiple of WIDTH].
template <typename Row>
inline void multiply_panels(const Row& row, int64_t num, const Taps& taps, int64_t step, int64_t first, int64_t n, float* c, int64_t stride_c,
                            int64_t columns) {
    for (int64_t j = 0; j < columns; j += WIDTH)
        for (int64_t begin = 0; begin < num; begin += ROWS) {
            const float *rows[ROWS], *panel = taps.w + (first + j) * taps.in_panel * n;
            for (int r = 0; r < ROWS; r++) rows[r] = row(std::min(begin + r, num - 1));
            float* to = c + begin * stride_c + j;
            if (columns - j > WIDTH / 2) product_of_panel<VECTORS>(rows, taps, step, panel, n, to, stride_c);
            else if (VECTORS < 4 || columns - j > WIDTH / 4) product_of_panel<VECTORS / 2>(rows, taps, step, panel, n, to, stride_c);
            else product_of_panel<(VECTORS + 3) / 4>(rows, taps, step, panel, n, to, stride_c);
        }
}

// The part of a residual unit after its first convolution, row by row: an activation and a product. w [panels, D, WIDTH] has `width` outputs.
struct Pointwise {
    const float *w, *bias;
    Activation activation;
    int64_t width;

    // Write the activated rows x [num, D], multiplied, and the residual to to(r). x is changed; `room` is scratch space [num up to ROWS, COLUMNS].
    template <typename Residual, typename To>
    void apply(float* x, int64_t num, int64_t stride, int64_t D, const Residual& residual, const To& to, float* room) const {
        for (int64_t r = 0; r < num; r++) activation.apply(x + r * stride, x + r * stride, D);
        const int64_t place = 0;
        for (int64_t d = 0; d < width; d += COLUMNS) {
            const int64_t columns = std::min<int64_t>(COLUMNS, width - d);
            multiply_panels([&](int64_t r) { return x + r * stride; }, num, {w, 1, 1, &place}, 0, d, D, room, COLUMNS, columns);
            for (int64_t r = 0; r < num; r++) {
                const float *sum = room + r * COLUMNS, *more = residual(r);
                float* y = to(r) + d;
                for (int64_t j = 0; j < columns; j++) y[j] = sum[j] + bias[d + j] + (more ? more[d + j] : 0);
            }
        }
    }
};

// What stands before the inputs of streams: P rows of C numbers for each stream or, with `slots` [B], for each slot. The pasts of slots are then replaced
// by the ends of the activated inputs, of which `valid` [B] rows are not padding.
struct Past {
    float* rows;
    int64_t step;  // between streams or slots
    const int64_t *slots, *valid;

    float* of(int64_t b) const { return rows + (slots ? slots[b] : b) * step; }

    // x [B, ..., C], `x_step` apart.
    void replace(const float* x, int64_t x_step, const Activation& activation, int64_t B, int64_t P, int64_t C, int threads) const {
        if (!rows || !slots) return;
#pragma omp parallel for schedule(static) num_threads(threads) if (B * P * C > SMALL)
        for (int64_t b = 0; b < B; b++)
            for (int64_t i = 0; i < P && valid[b] > 0; i++) {  // slots of nobody may occur twice, and have nothing valid
                const int64_t at = valid[b] - P + i;
                if (at < 0) std::copy(of(b) + (at + P) * C, of(b) + (at + P + 1) * C, of(b) + i * C);
                else activation.apply(x + b * x_step + at * C, of(b) + i * C, C);
            }
    }
};

// A convolution of x's activated rows, which are zero where the mask is false; then `then`, and the residual is added, if given. `past` stands before
// them, unchanged; without it, P rows of zeros do. There are zeros behind x, too. x [B, N, C]; mask [B, P + N]; residual and out [B, M, D], or the width
// of `then` for D. The steps of x, mask and residual are their strides between streams.
struct SnakeConvolution {
    Past past;
    const float *x, *w, *bias;
    Activation activation;
    const bool* mask;
    Pointwise then;
    const float* residual;
    float* out;
    int64_t B, P, N, M, C, D, taps, dilation, x_step, mask_step, residual_step;

    // Write a row of past, an activated row of x, or the zeros around them.
    void read(int64_t b, int64_t at, float* to) const {
        if (at >= P + N || (at < P && !past.rows) || (mask && !mask[b * mask_step + at])) std::fill(to, to + C, 0.0f);
        else if (at < P) std::copy(past.of(b) + at * C, past.of(b) + (at + 1) * C, to);
        else activation.apply(x + b * x_step + (at - P) * C, to, C);
    }

    int64_t width() const { return then.w ? then.width : D; }
    float* place(int64_t b, int64_t row) const { return out + (b * M + row) * width(); }
    const float* added(int64_t b, int64_t row) const { return residual ? residual + b * residual_step + row * width() : nullptr; }
};

// Convolve tap by tap. The rows of all streams are computed as one list, so that short signals of many streams share what is read of the weights.
void convolve_by_taps(const SnakeConvolution& c, const Taps& taps, int threads) {
    const int64_t M = c.M, C = c.C, D = c.D, all = c.B * M, reach = (c.taps - 1) * c.dilation, wide = rounded_up(D, WIDTH);
    // The weights are read once per tile, and its rows stay in a core's cache. Each thread gets a tile, or a part of the outputs.
    const int64_t largest = rounded_up(std::max<int64_t>((3 << 12) / C, 96), ROWS);
    int64_t tiles = (all + largest - 1) / largest, parts = 1;
    if (tiles > threads) tiles = rounded_up(tiles, threads);  // all threads end at the same time
    const int64_t more = (threads + tiles - 1) / tiles, blocks = (all + ROWS - 1) / ROWS;
    if (c.then.w) tiles = std::min(tiles * more, blocks);
    else parts = std::min(more, (D + COLUMNS - 1) / COLUMNS);
    const int64_t each = (blocks + tiles - 1) / tiles * ROWS, share = rounded_up((D + parts - 1) / parts, COLUMNS);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> signal((each + (each / M + 2) * reach) * C), sums(each * wide), room(c.then.w ? each * COLUMNS : 0);
        std::vector<const float*> starts(each);  // where a row's first tap lies
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < tiles * parts; item++) {
            const int64_t tile = item / parts, begin = item % parts * share, end = std::min(D, begin + share);
            const int64_t first = tile * blocks / tiles * ROWS, rows = std::min(all, (tile + 1) * blocks / tiles * ROWS) - first;
            if (rows <= 0 || begin >= end) continue;
            float* to = signal.data();
            for (int64_t r = 0; r < rows;) {  // a stream's rows
                const int64_t b = (first + r) / M, at = (first + r) % M, num = std::min(rows - r, M - at);
                for (int64_t i = 0; i < num; i++) starts[r + i] = to + i * C;
                for (int64_t i = 0; i < num + reach; i++, to += C) c.read(b, at + i, to);
                r += num;
            }
            multiply_panels([&](int64_t r) { return starts[r]; }, rows, taps, c.dilation * C, begin, C, &sums[begin], wide, end - begin);
            const auto place = [&](int64_t r) { return c.place((first + r) / M, (first + r) % M); };
            const auto added = [&](int64_t r) { return c.added((first + r) / M, (first + r) % M); };
            for (int64_t r = 0; r < rows; r++) {
                float *sum = &sums[r * wide], *result = c.then.w ? sum : place(r);
                const float* add = c.then.w ? nullptr : added(r);
                for (int64_t j = begin; j < end; j++) result[j] = sum[j] + c.bias[j] + (add ? add[j] : 0);
            }
            if (c.then.w) c.then.apply(sums.data(), rows, wide, D, added, place, room.data());
        }
    }
}

// A fast FIR filter (Mou and Duhamel 1991), nested once: nine short filters of sums of a signal's four phases, instead of sixteen filters.
// With U the even rows and V the odd ones, P = even taps * V, Q = odd taps * U, C = (even + odd taps) * (U + V):
//     y[2q] = C[q] - P[q] - Q[q]      y[2q + 1] = P[q] + Q[q + 1]
// P, Q and C are computed the same way. READS: the input of each of the nine, as an index into: x0 x1 x2 x3 x0+x1 x2+x3 x0+x2 x1+x3 x0+x1+x2+x3
constexpr int NINE = 9, READS[NINE] = {3, 1, 7, 2, 0, 6, 5, 4, 8};  // even, odd and sum of P, then of Q, then of C

// The nine filters of a weight: their numbers of taps, and where the first of each lies in a panel.
struct Nine {
    int64_t lengths[NINE], begins[NINE + 1];

    explicit Nine(int64_t taps) {
        const auto phase = [&](int64_t i) { return (taps - i + 3) / 4; };  // taps i, i + 4, ...
        const int64_t all[NINE] = {phase(0), phase(2), phase(0), phase(1), phase(3), phase(1), phase(0), phase(2), phase(0)};
        begins[0] = 0;
        for (int k = 0; k < NINE; k++) lengths[k] = all[k], begins[k + 1] = begins[k] + all[k];
    }

    // The place of a tap of the whole filter, which one of the short ones has, too.
    int64_t place(int64_t tap) const { return begins[tap % 2 * 3 + tap % 4 / 2] + tap / 4; }
};

// Convolve by nine short filters. `order` counts all taps in a panel. Rows first, first + dilation, ... of a stream are a phase: a signal without
// dilation. The quarters of several short phases are one list of rows.
void convolve_by_nine(const SnakeConvolution& c, const Nine& nine, const int64_t* order, int threads) {
    const int64_t B = c.B, M = c.M, C = c.C, D = c.D, dilation = c.dilation, longest_filter = nine.lengths[0];
    // Rows of a tile of a phase: its input stays in a core's cache, weights are read once per tile, and all threads have work.
    const int64_t limit = std::max<int64_t>((1 << 12) / C, 6 * ROWS), longest = (M + dilation - 1) / dilation;
    const int64_t wanted = (2 * threads + B - 1) / B;  // items of a stream
    const int64_t tiles = std::max((longest + 4 * limit - 5) / (4 * limit - 4), std::min((wanted + dilation - 1) / dilation, longest / (4 * ROWS)));
    const int64_t each = rounded_up((longest + tiles - 1) / tiles, 4), quarters = each / 4 + 1, held = quarters + longest_filter - 1;
    const int64_t together = std::max<int64_t>(1, std::min({limit / quarters, tiles * dilation / wanted, dilation}));
    const int64_t groups = (dilation + together - 1) / together, most = rounded_up(together * quarters, ROWS), part = most * COLUMNS;
    const int64_t chunk = tiles >= wanted ? groups : 1;  // if there are enough tiles, one thread reads and writes all rows of one
#pragma omp parallel num_threads(threads)
    {
        const int64_t room = together * held * C;
        std::vector<float> signals(NINE * room), sums(NINE * part), rows_between(c.then.w ? together * each * D : 0);
        std::vector<int64_t> targets(together * each);  // the rows that are computed
        float *x0 = signals.data(), *between = rows_between.data();
        float *x1 = x0 + room, *x2 = x1 + room, *x3 = x2 + room, *x01 = x3 + room, *x23 = x01 + room, *x02 = x23 + room, *x13 = x02 + room, *all = x13 + room;
#pragma omp for schedule(dynamic, chunk)
        for (int64_t item = 0; item < B * tiles * groups; item++) {
            const int64_t b = item / (tiles * groups), begin = item / groups % tiles * each * dilation + item % groups * together;
            const int64_t phases = std::min(together, dilation - item % groups * together);
            const auto rows_of = [&](int64_t p) { return std::max<int64_t>(0, std::min(each, (M - begin - p + dilation - 1) / dilation)); };
            int64_t num = 0;
            for (int64_t p = 0; p < phases; p++) {
                const int64_t first = begin + p, rows = rows_of(p);
                const int64_t read = rows ? 4 * ((rows + 3) / 4 + longest_filter) : 0;  // set by the number of rows; some of it cancels out, except for rounding
                for (int64_t i = 0; i < 4 * held; i++) {
                    float* to = x0 + i % 4 * room + (p * held + i / 4) * C;
                    if (i < read) c.read(b, first + i * dilation, to);
                    else std::fill(to, to + C, 0.0f);
                }
                for (int64_t r = 0; r < rows; r++) targets[num++] = first + r * dilation;
            }
            if (!num) continue;
#pragma omp simd
            for (int64_t i = 0; i < phases * held * C; i++) {
                x01[i] = x0[i] + x1[i], x23[i] = x2[i] + x3[i], x02[i] = x0[i] + x2[i], x13[i] = x1[i] + x3[i];
                all[i] = x01[i] + x23[i];
            }
            const auto place = [&](int64_t r) { return c.place(b, targets[r]); };
            const auto added = [&](int64_t r) { return c.added(b, targets[r]); };
            for (int64_t d = 0; d < D; d += COLUMNS) {
                const int64_t columns = std::min<int64_t>(COLUMNS, D - d);
                for (int k = 0; k < NINE; k++) {
                    const float* from = x0 + READS[k] * room;
                    const auto row = [&](int64_t r) { return from + (r / quarters * held + r % quarters) * C; };
                    multiply_panels(row, phases * quarters, {c.w, nine.begins[NINE], nine.lengths[k], order + nine.begins[k]}, C, d, C, &sums[k * part], COLUMNS,
                                    columns);
                }
                for (int64_t q = 0, done = 0; done < num; q++) {
                    const int64_t rows = std::min<int64_t>(4, rows_of(q / quarters) - q % quarters * 4);
                    if (rows <= 0) continue;  // the last quarter of a phase is only read for the one before
                    const float* s = &sums[q * COLUMNS];
                    float y[4][COLUMNS];
#pragma omp simd
                    for (int64_t j = 0; j < columns; j++) {
                        const float *at = s + j, *next = at + COLUMNS;
                        const float p0 = at[2 * part] - at[0] - at[part], p1 = at[0] + next[part];
                        const float q0 = at[5 * part] - at[3 * part] - at[4 * part], q1 = at[3 * part] + next[4 * part];
                        const float q2 = next[5 * part] - next[3 * part] - next[4 * part];
                        const float c0 = at[8 * part] - at[6 * part] - at[7 * part], c1 = at[6 * part] + next[7 * part];
                        y[0][j] = c0 - p0 - q0, y[1][j] = p0 + q1, y[2][j] = c1 - p1 - q1, y[3][j] = p1 + q2;
                    }
                    for (int64_t r = 0; r < rows; r++, done++) {
                        float* to = (c.then.w ? between + done * D : place(done)) + d;
                        const float* more = c.then.w ? nullptr : added(done);
                        for (int64_t j = 0; j < columns; j++) to[j] = y[r][j] + c.bias[d + j] + (more ? more[d + j] : 0);
                    }
                }
            }
            if (c.then.w) c.then.apply(between, num, D, D, added, place, sums.data());
        }
    }
}

constexpr int64_t LEAST_ROWS = 40;  // of a signal for which nine short filters are faster

// Convolve in the faster way. Weights that have nine filters have the taps of the whole one, too.
void convolve(const SnakeConvolution& c, bool has_nine, int threads) {
    const Nine nine(c.taps);
    const int64_t in_panel = has_nine ? nine.begins[NINE] : c.taps;
    std::vector<int64_t> order(in_panel), places(c.taps);
    for (int64_t i = 0; i < in_panel; i++) order[i] = i;
    for (int64_t tap = 0; tap < c.taps; tap++) places[tap] = has_nine ? nine.place(tap) : tap;
    if (has_nine && c.M >= LEAST_ROWS * c.dilation) convolve_by_nine(c, nine, order.data(), threads);
    else convolve_by_taps(c, {c.w, in_panel, c.taps, places.data()}, threads);
    c.past.replace(c.x, c.x_step, c.activation, c.B, c.P, c.C, threads);
}

// A residual unit whose first convolution is depthwise: x + product(snake(convolution(snake x))). `past` stands before the snake of x, unchanged; without
// it, the result lacks the positions at both ends of x. It has (taps - 1) * dilation rows; x [B, N, C], with streams `x_step` apart; w [taps, C]; out [B,
// M, C].
void depthwise_unit(const Past& past, const float* x, const float* w, const float* bias, Activation activation, Pointwise then, float* out, int64_t B,
                    int64_t N, int64_t C, int64_t taps, int64_t dilation, int64_t x_step, int threads) {
    const int64_t reach = (taps - 1) * dilation, P = past.rows ? reach : 0, M = N - reach + P, edge = past.rows ? 0 : reach / 2;
    const int64_t limit = std::max<int64_t>((1 << 15) / C, 8 * ROWS), wanted = std::min((2 * threads + B - 1) / B, M / (4 * ROWS));
    const int64_t tiles = std::max((M + limit - 1) / limit, wanted), each = rounded_up((M + tiles - 1) / tiles, ROWS);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> signal((each + reach) * C), between(each * C), sums(each * COLUMNS);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < B * tiles; item++) {
            const int64_t b = item / tiles, first = item % tiles * each, rows = std::min(each, M - first);
            if (rows <= 0) continue;
            const float* own = x + b * x_step;
            for (int64_t i = 0; i < rows + reach; i++) {
                const int64_t at = first + i - P;
                const float* from = at < 0 ? past.of(b) + (at + P) * C : own + at * C;
                if (at < 0) std::copy(from, from + C, &signal[i * C]);
                else activation.apply(from, &signal[i * C], C);
            }
            for (int64_t r = 0; r < rows; r++) {
                const float* s = &signal[r * C];
                float* y = &between[r * C];
                int64_t c = 0;
                for (; c + LANES <= C; c += LANES) {
                    Vector sum = load(bias + c);
                    for (int64_t k = 0; k < taps; k++) sum = multiply_add(sum, load(s + k * dilation * C + c), load(w + k * C + c));
                    store(y + c, sum);
                }
                for (; c < C; c++) {
                    y[c] = bias[c];
                    for (int64_t k = 0; k < taps; k++) y[c] += s[k * dilation * C + c] * w[k * C + c];
                }
            }
            const auto place = [&](int64_t r) { return out + (b * M + first + r) * C; };
            const auto added = [&](int64_t r) { return own + (first + edge + r) * C; };
            then.apply(between.data(), rows, C, C, added, place, sums.data());
        }
    }
    past.replace(x, x_step, activation, B, P, C, threads);
}

}  // namespace

extern "C" {

int panel_columns() { return WIDTH; }  // outputs whose weights lie together

// x and out [B, N, C], frequency and gain [C].
void snake_of_rows(const float* x, const float* frequency, const float* gain, float* out, int64_t B, int64_t C, int64_t N, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (B * C * N > SMALL)
    for (int64_t row = 0; row < B * N; row++) snake_row(x + row * C, frequency, gain, out + row * C, C);
}

// See SnakeConvolution. `has_nine` says whether the weights are those of nine short filters.
void convolve_snake_of_rows(float* past, const int64_t* slots, const int64_t* valid, const float* x, const float* w, const float* bias, const float* frequency, const float* gain,
                            const bool* mask, const float* w2, const float* bias2, const float* frequency2, const float* gain2, const float* residual,
                            float* out, int64_t B, int64_t P, int64_t N, int64_t M, int64_t C, int64_t D, int64_t width2, int64_t taps, int64_t dilation,
                            int64_t past_step, int64_t x_step, int64_t mask_step, int64_t residual_step, bool is_elu, bool is_elu2, bool has_nine,
                            int threads) {
    const Pointwise then{w2, bias2, {frequency2, gain2, is_elu2}, width2};
    convolve({{past, past_step, slots, valid}, x, w, bias, {frequency, gain, is_elu}, mask, then, residual, out, B, P, N, M, C, D, taps, dilation, x_step,
              mask_step, residual_step}, has_nine, threads);
}

// See depthwise_unit.
void depthwise_unit_of_rows(float* past, const int64_t* slots, const int64_t* valid, const float* x, const float* w, const float* bias, const float* frequency, const float* gain,
                            const float* w2, const float* bias2, const float* frequency2, const float* gain2, float* out, int64_t B, int64_t N,
                            int64_t C, int64_t taps, int64_t dilation, int64_t past_step, int64_t x_step, int threads) {
    const Pointwise then{w2, bias2, {frequency2, gain2, false}, C};
    depthwise_unit({past, past_step, slots, valid}, x, w, bias, {frequency, gain, false}, then, out, B, N, C, taps, dilation, x_step, threads);
}

// x and out [B, C, N], frequency and gain [C].
void snake(const float* x, const float* frequency, const float* gain, float* out, int64_t B, int64_t C, int64_t N, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (B * C * N > SMALL)
    for (int64_t row = 0; row < B * C; row++) snake_row<0>(x + row * N, frequency + row % C, gain + row % C, out + row * N, N);
}
}
