// Reads KIVI's rows for attention: exact first rows, packed rows, full-precision tail (packed.py). `place` holds for the keys,
// then for the values: exact rows held, rows packed; first row in `exact`, in `codes`, in `scale`, and in `tail` less its row; and
// all rows of each of the four (a kernel that asked for shapes would pass an argument more for each array).

// The two numbers of type T in a word, without the vector types that not every language has for them.
template <typename T> struct numbers;
template <> struct numbers<bfloat> {
    static METAL_FUNC float lower(uint word) { return as_type<float>(word << 16); }
    static METAL_FUNC float upper(uint word) { return as_type<float>(word & 0xffff0000u); }
};
template <> struct numbers<half> {
    static METAL_FUNC float lower(uint word) { return float(as_type<half2>(word).x); }
    static METAL_FUNC float upper(uint word) { return float(as_type<half2>(word).y); }
};

// Codes first..first+N-1 of a packed row. A lane whose codes fill a byte, 16 or 32 bits reads just those.
template <int BITS, int N> METAL_FUNC void read_codes(const device uint* words, int first, thread uint (&codes)[N]) {
    constexpr uint MASK = (1u << BITS) - 1;
    constexpr int OWN = N * BITS;
    if constexpr (OWN == 8 || OWN == 16 || OWN == 32) {
        uint bits;
        if constexpr (OWN == 8) bits = reinterpret_cast<const device uchar*>(words)[first / N];
        else if constexpr (OWN == 16) bits = reinterpret_cast<const device ushort*>(words)[first / N];
        else bits = words[first / N];
        for (int j = 0; j < N; j++) codes[j] = (bits >> (BITS * j)) & MASK;
    } else {
        for (int j = 0; j < N; j++) {
            const int bit = (first + j) * BITS, shift = bit % 32;
            codes[j] = words[bit / 32] >> shift;
            if (shift + BITS > 32) codes[j] |= words[bit / 32 + 1] << (32 - shift);
            codes[j] &= MASK;
        }
    }
}

// In a matrix fragment codes stand as half numbers times 2^(BITS * place in the byte): the bits of a subnormal, in units of 2^-24,
// where the hardware keeps subnormals, else the difference of two numbers above 1024.
template <int BITS, bool SUBNORMAL> struct code_fragments {
    static constexpr constant int IN_BYTE = 8 / BITS;
    static constexpr constant float UNIT = SUBNORMAL ? 16777216.0f : 1.0f;
    static METAL_FUNC half2 fragment(uint units, int code) {
        constexpr uint MASK = ((1u << BITS) - 1) * 0x00010001u;
        const uint bits = (units >> (8 * (code / IN_BYTE))) & (MASK << (BITS * (code % IN_BYTE)));
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
    template <int N> METAL_FUNC void read(int row, int first, thread float (&x)[N]) const {
        const device T* from = (row < exact_rows ? exact : tail) + long(row) * DIM;
        for (int j = 0; j < N; j++) x[j] = first + j < DIM ? float(from[first + j]) : 0.0f;
    }
};

// Keys: a scale and a minimum for each channel of GROUP_SIZE rows.
template <typename T, int BITS, int GROUP, int DIM, bool SUBNORMAL> struct KiviKeys : code_fragments<BITS, SUBNORMAL> {
    static constexpr constant int WORDS = DIM * BITS / 32;
    const device uint* codes;
    const device T* scale;
    const device T* minimum;
    exact_and_tail<T, DIM> others;

    template <int N> METAL_FUNC void read(int row, int first, thread float (&x)[N]) const {
        if (!others.packed(row)) return others.read(row, first, x);
        uint own[N];
        for (int j = 0; j < N; j++) x[j] = 0;
        if (first >= DIM) return;
        read_codes<BITS>(codes + long(row) * WORDS, first, own);
        const long group = long(row / GROUP) * DIM + first;
        for (int j = 0; j < N; j++) {
            if (first + j < DIM) x[j] = float(own[j]) * float(scale[group + j]) + float(minimum[group + j]);
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

// Values: a scale and a minimum for each GROUP channels of a row.
template <typename T, int BITS, int GROUP, int DIM, bool SUBNORMAL> struct KiviValues : code_fragments<BITS, SUBNORMAL> {
    static constexpr constant int WORDS = DIM * BITS / 32;
    static constexpr constant int GROUPS = DIM / GROUP;
    const device uint* codes;
    const device T* scale;
    const device T* minimum;
    exact_and_tail<T, DIM> others;

    template <int N> METAL_FUNC void read(int row, int first, thread float (&x)[N]) const {
        if (!others.packed(row)) return others.read(row, first, x);
        uint own[N];
        for (int j = 0; j < N; j++) x[j] = 0;
        if (first >= DIM) return;
        read_codes<BITS>(codes + long(row) * WORDS, first, own);
        const long groups = long(row) * GROUPS;
        for (int j = 0; j < N; j++) {
            const long group = groups + (first + j) / GROUP;
            if (first + j < DIM) x[j] = float(own[j]) * float(scale[group]) + float(minimum[group]);
        }
    }

    // For tiles: the same rows counted from `row`, a row's words, and what it does to its probability for the channel groups
    // first, first + STEP, ...
    METAL_FUNC KiviValues from(int row) const {
        KiviValues moved = *this;
        moved.codes += long(row) * WORDS;
        moved.scale += long(row) * GROUPS;
        moved.minimum += long(row) * GROUPS;
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
    template <int STEP, int N> METAL_FUNC void scales(int row, int first, thread Scales<N>& s) const {
        load_pairs<N, STEP>(scale + row * GROUPS + first, s.scales);
        load_pairs<N, STEP>(minimum + row * GROUPS + first, s.minima);
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
    KiviValues<T, VALUE_BITS, GROUP_SIZE, VALUE_DIM, SUBNORMAL> values;
    values.codes = value_codes + (long(kv_head) * place[17] + place[13]) * VALUE_WORDS;
    values.scale = value_scale + value_group;
    values.minimum = value_minimum + value_group;
    values.others.exact = value_exact + (long(kv_head) * place[16] + place[12]) * VALUE_DIM;
    values.others.tail = value_tail + (long(kv_head) * place[19] + place[15]) * VALUE_DIM;
    values.others.exact_rows = place[10];
    values.others.packed_rows = place[11];
