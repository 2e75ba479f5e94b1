// Reads KIVI's rows for attention: exact first rows, packed rows, full-precision tail (packed.py). `place` holds for the keys,
// then for the values: exact rows held, rows packed; first row in `exact`, in `codes`, in `scale`, and in `tail` less its row; and
// all rows of each of the four (a kernel that asked for shapes would pass an argument more for each array); then how many of the
// newest values are read exactly. Older ones in the tail wait to be packed (packing.py) and are read as they then will be.

// In a matrix fragment codes stand as half numbers times 2^(BITS * place in the byte): the bits of a subnormal, in units of 2^-24,
// where the hardware keeps subnormals, else the difference of two numbers above 1024. The last code stands with the others of its
// byte: a whole byte takes one instruction, one code of it another.
template <int BITS, bool SUBNORMAL> struct code_fragments {
    static constexpr constant int IN_BYTE = 8 / BITS, LUMP = IN_BYTE;
    static constexpr constant float UNIT = SUBNORMAL ? 16777216.0f : 1.0f;
    static METAL_FUNC half2 fragment(uint units, int code) {
        constexpr uint MASK = ((1u << BITS) - 1) * 0x00010001u;
        const uint byte = code < IN_BYTE ? units : upper_bytes(units);
        const uint bits = code == 2 * IN_BYTE - 1 ? byte : byte & (MASK << (BITS * (code % IN_BYTE)));
        if constexpr (SUBNORMAL) return as_type<half2>(bits);
        else return as_type<half2>(bits | 0x64006400u) - as_type<half2>(0x64006400u);
    }
    static METAL_FUNC float weight(int code) { return 1.0f / float(1 << (BITS * (code % IN_BYTE))); }
};

// The rows that are not packed, of keys and values alike.
template <typename T, int DIM> struct exact_and_tail {
    const device T* exact;
    const device T* tail;
    int exact_rows, packed_rows;
    METAL_FUNC bool packed(int row) const { return row >= exact_rows && row < packed_rows; }
    METAL_FUNC const device T* from(int row) const { return (row < exact_rows ? exact : tail) + long(row) * DIM; }
};

// Keys: a scale and a minimum for each channel of GROUP_SIZE rows.
template <typename T, int BITS, int GROUP, int DIM, bool SUBNORMAL> struct KiviKeys : code_fragments<BITS, SUBNORMAL> {
    static constexpr constant int WORDS = DIM * BITS / 32;
    const device uint* codes;
    const device T* scale;
    const device T* minimum;
    exact_and_tail<T, DIM> others;

    template <int N> struct Row {
        bool packed;
        RunOfCodes<BITS, N, WORDS> codes;
        RunOfNumbers<T, N> scale, minimum, exact;    // apart: a load into the same registers would wait for the other
    };
    template <int N> METAL_FUNC void load(int row, int first, thread Row<N>& r) const {
        r.packed = others.packed(row);
        const long group = long(row / GROUP) * DIM + first;
        if (r.packed) {
            r.codes.load(codes + long(row) * WORDS, first);
            r.scale.load(scale + group, DIM - first);
            r.minimum.load(minimum + group, DIM - first);
        } else {
            r.exact.load(others.from(row) + first, DIM - first);
        }
    }
    template <int N> METAL_FUNC void read(thread const Row<N>& r, int first, thread float (&x)[N]) const {
        for (int j = 0; j < N; j++) {
            const float value = r.packed ? float(r.codes.get(first, j)) * r.scale.get(j) + r.minimum.get(j) : r.exact.get(j);
            x[j] = first + j < DIM ? value : 0.0f;
        }
    }

    // For tiles: the same rows counted from `row`, a row's words, and what its group does to N channels of the query.
    METAL_FUNC KiviKeys from(int row) const {
        KiviKeys moved = *this;
        moved.codes += long(row) * WORDS;
        moved.scale += long(row / GROUP) * DIM;
        moved.minimum += long(row / GROUP) * DIM;
        return moved;
    }
    METAL_FUNC const device uint* words(int row) const { return codes + row * WORDS; }
    static constexpr constant bool ROW_FACTORS = false;
    template <int N> struct Fold {
        uint scales[N / 2], minima[N / 2];
        METAL_FUNC float2 scale(int pair) const { return both(scales[pair]); }
        METAL_FUNC float2 minimum(int pair) const { return both(minima[pair]); }
        static METAL_FUNC float2 both(uint word) { return float2{numbers<T>::lower(word), numbers<T>::upper(word)}; }
    };
    template <int N> METAL_FUNC void fold(int first, thread Fold<N>& f) const {
        load_words(reinterpret_cast<const device uint*>(scale + first), f.scales);
        load_words(reinterpret_cast<const device uint*>(minimum + first), f.minima);
    }
};

// Channels first..first+N-1 of a row as it reads once it has been quantised; every lane of a simdgroup asks for the N that follow
// those of the lane before, and `own` are these.
template <typename T, int BITS, int GROUP, int DIM, int N>
METAL_FUNC void read_quantized(const device T* row, thread const RunOfNumbers<T, N>& own, int first, thread float (&x)[N]) {
    GroupScale<T, BITS> scale;
    if constexpr (DIM == 32 * N && GROUP % N == 0 && (GROUP / N & (GROUP / N - 1)) == 0) {  // GROUP / N lanes share a group
        Extremes extremes;
        for (int j = 0; j < N; j++) extremes.add(own.get(j));
        extremes.end();
        for (int mask = 1; mask < GROUP / N; mask *= 2) extremes.join(ushort(mask));
        scale.set(extremes);
        for (int j = 0; j < N; j++) x[j] = scale.read(own.get(j));
    } else {  // few rows, so that every lane can look at all of a group
        int group = -1;
        for (int j = 0; j < N; j++) {
            x[j] = 0;
            if (first + j >= DIM) continue;
            if ((first + j) / GROUP != group) {
                group = (first + j) / GROUP;
                Extremes extremes;
                for (int c = 0; c < GROUP; c++) extremes.add(float(row[group * GROUP + c]));
                extremes.end();
                scale.set(extremes);
            }
            x[j] = scale.read(own.get(j));
        }
    }
}

// Values: a scale and a minimum for each GROUP channels of a row.
template <typename T, int BITS, int GROUP, int DIM, int SINKS, bool SUBNORMAL> struct KiviValues : code_fragments<BITS, SUBNORMAL> {
    static constexpr constant int WORDS = DIM * BITS / 32;
    static constexpr constant int GROUPS = DIM / GROUP;
    const device uint* codes;
    const device T* scale;
    const device T* minimum;
    int exact_from;                                  // rows of the tail from here on are read exactly
    exact_and_tail<T, DIM> others;

    template <int N> struct Row {
        bool packed;
        const device T* waits;                       // the row, if it is one that waits to be packed
        RunOfCodes<BITS, N, WORDS> codes;
        T scale, minimum, last_scale, last_minimum;  // of the groups of the first and the last channel
        RunOfNumbers<T, N> exact;
    };
    template <int N> METAL_FUNC void load(int row, int first, thread Row<N>& r) const {
        r.packed = others.packed(row);
        r.waits = nullptr;
        if (r.packed) {
            r.codes.load(codes + long(row) * WORDS, first);
            const device T* scales = scale + long(row) * GROUPS;
            const device T* minima = minimum + long(row) * GROUPS;
            const int group = metal::min(first / GROUP, GROUPS - 1), last = metal::min((first + N - 1) / GROUP, GROUPS - 1);
            r.scale = scales[group];
            r.minimum = minima[group];
            r.last_scale = scales[last];
            r.last_minimum = minima[last];
        } else {
            r.exact.load(others.from(row) + first, DIM - first);
            if (row >= SINKS && row < exact_from) r.waits = others.from(row);
        }
    }
    template <int N> METAL_FUNC void read(thread const Row<N>& r, int first, thread float (&x)[N]) const {
        if (r.waits) return read_quantized<T, BITS, GROUP, DIM>(r.waits, r.exact, first, x);
        for (int j = 0; j < N; j++) {
            const bool last = (first + j) / GROUP > first / GROUP;
            const float scale = float(last ? r.last_scale : r.scale), minimum = float(last ? r.last_minimum : r.minimum);
            const float value = r.packed ? float(r.codes.get(first, j)) * scale + minimum : r.exact.get(j);
            x[j] = first + j < DIM ? value : 0.0f;
        }
    }

    // For tiles: the same rows and channel groups counted from `row` and `group`, a row's words, and what it does to its
    // probability for every STEP-th group.
    METAL_FUNC KiviValues from(int row, int group = 0) const {
        KiviValues moved = *this;
        moved.codes += long(row) * WORDS;
        moved.scale += long(row) * GROUPS + group;
        moved.minimum += long(row) * GROUPS + group;
        return moved;
    }
    METAL_FUNC const device uint* words(int row) const { return codes + row * WORDS; }
    template <int N> struct Scales {
        uint scales[(N + 1) / 2], minima[(N + 1) / 2];
        METAL_FUNC float scale(int i) const { return i % 2 ? numbers<T>::upper(scales[i / 2]) : numbers<T>::lower(scales[i / 2]); }
        METAL_FUNC float minimum(int i) const {
            return i % 2 ? numbers<T>::upper(minima[i / 2]) : numbers<T>::lower(minima[i / 2]);
        }
    };
    template <int STEP, int N> METAL_FUNC void scales(int row, thread Scales<N>& s) const {
        load_pairs<N, STEP>(scale + row * GROUPS, s.scales);
        load_pairs<N, STEP>(minimum + row * GROUPS, s.minima);
    }
};
// --- body ---
    constexpr int KEY_WORDS = KEY_DIM * KEY_BITS / 32, VALUE_WORDS = VALUE_DIM * VALUE_BITS / 32;
    constexpr int VALUE_GROUPS = VALUE_DIM / GROUP_SIZE;
    const long key_group = (long(kv_head) * place[8] + place[4]) * KEY_DIM;
    KiviKeys<T, KEY_BITS, GROUP_SIZE, KEY_DIM, SUBNORMAL> keys;
    keys.codes = key_codes + (long(kv_head) * place[7] + place[3]) * KEY_WORDS;
    keys.scale = key_scale + key_group;
    keys.minimum = key_minimum + key_group;
    keys.others.exact = key_exact + (long(kv_head) * place[6] + place[2]) * KEY_DIM;
    keys.others.tail = key_tail + (long(kv_head) * place[9] + place[5]) * KEY_DIM;
    keys.others.exact_rows = place[0];
    keys.others.packed_rows = place[1];
    const long value_group = (long(kv_head) * place[18] + place[14]) * VALUE_GROUPS;
    KiviValues<T, VALUE_BITS, GROUP_SIZE, VALUE_DIM, SINKS, SUBNORMAL> values;
    values.codes = value_codes + (long(kv_head) * place[17] + place[13]) * VALUE_WORDS;
    values.scale = value_scale + value_group;
    values.minimum = value_minimum + value_group;
    values.others.exact = value_exact + (long(kv_head) * place[16] + place[12]) * VALUE_DIM;
    values.others.tail = value_tail + (long(kv_head) * place[19] + place[15]) * VALUE_DIM;
    values.others.exact_rows = place[10];
    values.others.packed_rows = place[11];
    values.exact_from = row_count - place[20];
