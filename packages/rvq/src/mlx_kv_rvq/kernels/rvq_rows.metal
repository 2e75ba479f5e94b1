// Reads RVQ's rows for attention, in the rotated basis: encoded rows as they are, exact first rows and the full-precision tail by
// rotating them. `place` holds for the keys, then for the values: exact rows held, rows packed; first row in `exact`, in `codes`, in
// `norm` and in `mean`, and in `tail` less its row; and all rows of each of the five. Of values the means stand for nothing.

// Channels first..first+N-1 of a rotated row of DIM = ODD * POWER channels; every lane of a simdgroup asks for the N that follow
// those of the lane before, and `own` are these before the rotation.
template <int DIM, int ODD, int N, typename T>
METAL_FUNC void read_rotated(
    const device T* row, thread const RunOfNumbers<T, N>& own, const device uint* flips, const device uint* hadamard, int first,
    thread float (&x)[N]) {
    const float scale = metal::rsqrt(float(DIM));
    if constexpr (ODD == 1) {  // N is a power of two, and all lanes have N channels
        for (int j = 0; j < N; j++) x[j] = own.get(j) * (scale * minus_one_if(flips[(first + j) / 32] >> ((first + j) % 32) & 1));
        add_and_subtract(first, x);
    } else {  // few rows, so that the plain product will do
        constexpr int POWER = DIM / ODD;
        for (int j = 0; j < N; j++) x[j] = 0;
        if (first >= DIM) return;
        for (int c = 0; c < DIM; c++) {
            const float value = float(row[c]) * scale;
            for (int j = 0; j < N; j++) {
                const int i = first + j < DIM ? first + j : first;
                x[j] += value * minus_one_if(minus_at<POWER>(hadamard, i, c) ^ (flips[c / 32] >> (c % 32) & 1));
            }
        }
        for (int j = 0; j < N; j++) {
            if (first + j >= DIM) x[j] = 0;
        }
    }
}

template <typename T, int DIM, int ODD, int BITS, int STAGES, bool CENTER, bool SUBNORMAL> struct RvqRows {
    static constexpr constant int LEVELS = 1 << BITS, STREAM = (DIM * BITS + 31) / 32, WORDS = STAGES * STREAM, BLOCK = 128;
    const device uint* codes;
    const device bfloat* norm;
    const device T* mean;
    const device T* exact;
    const device T* tail;
    const device uint* flips;
    const device uint* hadamard;
    const device float* levels;
    int exact_rows, packed_rows;
    float step, ratio_of_bits, lowest;  // of two bits: what the lower one adds, what half the upper one adds beside it, and code 0

    template <int N> struct Row {
        bool packed;
        RunOfCodes<BITS, N, STREAM> codes[STAGES];
        bfloat norm;
        RunOfNumbers<T, N> mean, others;
        const device T* rotated;                     // the row, if it is one that is still to be rotated
    };
    template <int N> METAL_FUNC void load(int row, int first, thread Row<N>& r) const {
        r.packed = row >= exact_rows && row < packed_rows;
        r.rotated = (row < exact_rows ? exact : tail) + long(row) * DIM;
        if (r.packed) {
            const device uint* own = codes + long(row) * WORDS;
            #pragma unroll
            for (int stage = 0; stage < STAGES; stage++) r.codes[stage].load(own + stage * STREAM, first);
            r.norm = norm[row];
            if constexpr (CENTER) r.mean.load(mean + long(row / BLOCK) * DIM + first, DIM - first);
        } else {
            if constexpr (ODD == 1) r.others.load(r.rotated + first, DIM - first);
        }
    }
    template <int N> METAL_FUNC void read(thread const Row<N>& r, int first, thread float (&x)[N]) const {
        if (!r.packed) return read_rotated<DIM, ODD>(r.rotated, r.others, flips, hadamard, first, x);
        const float size = float(r.norm);
        for (int j = 0; j < N; j++) {
            x[j] = 0;
            if (first + j >= DIM) continue;
            #pragma unroll
            for (int stage = 0; stage < STAGES; stage++) x[j] += levels[stage * LEVELS + r.codes[stage].get(first, j)];
            x[j] *= size;
            if constexpr (CENTER) x[j] += r.mean.get(j);
        }
    }

    // A query in the keys' basis.
    static constexpr constant bool TURNED = true;
    template <int N> METAL_FUNC void turn(const device T* query, int first, thread float (&x)[N]) const {
        RunOfNumbers<T, N> own;
        if constexpr (ODD == 1) own.load(query + first, DIM - first);
        read_rotated<DIM, ODD>(query, own, flips, hadamard, first, x);
    }

    // For tiles: the same rows counted from `row`, a row's words, two codes as halves, and what a row and its block do to them.
    // Four levels that lie symmetrically are a sum over the two bits: a plane for the upper bits, one for the lower. In a fragment
    // a bit stands as a half number times 4^(place in the byte), as subnormals or as differences of numbers above 1024.
    static constexpr constant bool ROW_FACTORS = true;
    static constexpr constant int PLANES = BITS == 2 ? 2 : 1;
    static constexpr constant float UNIT = PLANES == 2 && SUBNORMAL ? 16777216.0f : 1.0f;
    METAL_FUNC RvqRows from(int row, int = 0) const {
        RvqRows moved = *this;
        moved.codes += long(row) * WORDS;
        moved.norm += row;
        if constexpr (CENTER) moved.mean += long(row / BLOCK) * DIM;
        return moved;
    }
    METAL_FUNC const device uint* words(int row) const { return codes + row * WORDS; }
    METAL_FUNC half2 fragment(uint units, int code) const {
        constexpr uint MASK = LEVELS - 1;
        return pack_half2(levels[units >> (BITS * code) & MASK], levels[units >> (16 + BITS * code) & MASK]);
    }
    template <int PLANE> METAL_FUNC half2 fragment(uint units, int code) const {
        constexpr uint MASK = PLANE == 0 ? 0x00020002u : 0x00010001u;
        const uint bits = (units >> (8 * (code / 4))) & (MASK << (2 * (code % 4)));
        if constexpr (SUBNORMAL) return as_type<half2>(bits);
        else return as_type<half2>(bits | 0x64006400u) - as_type<half2>(0x64006400u);
    }
    METAL_FUNC float ratio() const { return ratio_of_bits; }
    METAL_FUNC float origin() const { return lowest; }
    static METAL_FUNC float weight(int code) { return PLANES == 2 ? 1.0f / float(1 << (2 * (code % 4))) : 1.0f; }
    METAL_FUNC float factor(int row) const { return float(norm[row]); }
    template <int N> struct Fold {
        uint minima[N / 2];
        float step;
        METAL_FUNC float2 scale(int) const { return float2{step, step}; }
        METAL_FUNC float2 minimum(int pair) const {
            if constexpr (CENTER) return float2{numbers<T>::lower(minima[pair]), numbers<T>::upper(minima[pair])};
            else return float2{0.0f, 0.0f};
        }
    };
    template <int N> METAL_FUNC void fold(int first, thread Fold<N>& f) const {
        f.step = step;
        if constexpr (CENTER) load_words(reinterpret_cast<const device uint*>(mean + first), f.minima);
    }
    template <int N> struct Scales {
        float size, step, lowest;
        METAL_FUNC float scale(int) const { return size * step; }
        METAL_FUNC float minimum(int) const { return size * lowest; }
    };
    template <int STEP, int N> METAL_FUNC void scales(int row, thread Scales<N>& s) const {
        s.size = float(norm[row]);
        s.step = step;
        s.lowest = lowest;
    }
};
template <int DIM, typename Rows, typename T>
METAL_FUNC void place_rows(
    thread Rows& rows, const device int* place, long kv_head, const device uint* codes, const device bfloat* norm,
    const device T* mean, const device T* exact, const device T* tail, const device float* levels) {
    rows.exact_rows = place[0];
    rows.packed_rows = place[1];
    rows.exact = exact + (kv_head * place[7] + place[2]) * DIM;
    rows.codes = codes + (kv_head * place[8] + place[3]) * Rows::WORDS;
    rows.norm = norm + kv_head * place[9] + place[4];
    rows.mean = mean + (kv_head * place[10] + place[5]) * DIM;
    rows.tail = tail + (kv_head * place[11] + place[6]) * DIM;
    rows.levels = levels;
    rows.step = Rows::PLANES == 2 ? levels[1] - levels[0] : 1.0f;
    rows.ratio_of_bits = Rows::PLANES == 2 ? (levels[2] - levels[0]) / (2 * rows.step) : 1.0f;
    rows.lowest = Rows::PLANES == 2 ? levels[0] : 0.0f;
}
// --- body ---
    RvqRows<T, KEY_DIM, KEY_ODD, CODE_BITS_OF_KEYS, STAGES, CENTER, SUBNORMAL> keys;
    keys.flips = key_flips;
    keys.hadamard = key_hadamard;
    place_rows<KEY_DIM>(keys, place, kv_head, key_codes, key_norm, key_mean, key_exact, key_tail, key_levels);
    RvqRows<T, VALUE_DIM, VALUE_ODD, CODE_BITS_OF_VALUES, STAGES, false, SUBNORMAL> values;
    values.flips = value_flips;
    values.hadamard = value_hadamard;
    place_rows<VALUE_DIM>(
        values, place + 12, kv_head, value_codes, value_norm, value_mean, value_exact, value_tail, value_levels);
