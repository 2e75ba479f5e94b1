// What stands before a layout's text: which rows the threadgroup reads, and loads of registers. The grid's y is the KV head, its z
// the sequence of the batch. A sequence's numbers: rows, the first and last tiled row, rows of the
// logits, splits over single rows, then the layout's own (`place`).

template <int N> METAL_FUNC void load_words(const device uint* from, thread uint (&to)[N]) {
    if constexpr (N % 4 == 0) {
        for (int i = 0; i < N; i += 4) {
            const uint4 x = *reinterpret_cast<const device uint4*>(from + i);
            to[i] = x.x;
            to[i + 1] = x.y;
            to[i + 2] = x.z;
            to[i + 3] = x.w;
        }
    } else if constexpr (N % 2 == 0) {
        for (int i = 0; i < N; i += 2) {
            const uint2 x = *reinterpret_cast<const device uint2*>(from + i);
            to[i] = x.x;
            to[i + 1] = x.y;
        }
    } else {
        for (int i = 0; i < N; i++) to[i] = from[i];
    }
}
// Every STEP-th of numbers of two bytes, N in all, two in a word.
template <int N, int STEP, typename T> METAL_FUNC void load_pairs(const device T* from, thread uint (&to)[(N + 1) / 2]) {
    if constexpr (N % 2 == 0 && STEP == 1) {
        load_words(reinterpret_cast<const device uint*>(from), to);
    } else {
        const device ushort* numbers = reinterpret_cast<const device ushort*>(from);
        for (int i = 0; i < N; i += 2) to[i / 2] = uint(numbers[i * STEP]) | (i + 1 < N ? uint(numbers[(i + 1) * STEP]) << 16 : 0u);
    }
}

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

// What a lane holds of a row as it lies in memory, N neighbouring numbers or codes. Loading is apart from reading: a row whose numbers
// were waited for would hold up the loads of the next.
template <typename T, int N, bool PAIRS = (sizeof(T) == 2 && N % 2 == 0)> struct RunOfNumbers {
    T own[N];
    METAL_FUNC void load(const device T* from, int count) {  // of which there are `count`
        for (int j = 0; j < N; j++) {
            if (j < count) own[j] = from[j];
        }
    }
    METAL_FUNC float get(int j) const { return float(own[j]); }
};
template <typename T, int N> struct RunOfNumbers<T, N, true> {  // an even N: it divides the head dim, and all lanes have N
    uint words[N / 2];
    METAL_FUNC void load(const device T* from, int) { load_words(reinterpret_cast<const device uint*>(from), words); }
    METAL_FUNC float get(int j) const { return j % 2 ? numbers<T>::upper(words[j / 2]) : numbers<T>::lower(words[j / 2]); }
};
// Codes first..first+N-1 of a row of WORDS words. A lane whose codes fill a byte, 16 or 32 bits (all lanes have N then) reads just those;
// others lie in two words.
template <int BITS, int N, int WORDS> struct RunOfCodes {
    static constexpr constant int OWN = N * BITS;
    static constexpr constant bool ALIGNED = OWN == 8 || OWN == 16 || OWN == 32;
    uint low, high;
    METAL_FUNC void load(const device uint* row, int first) {
        if constexpr (OWN == 8) low = reinterpret_cast<const device uchar*>(row)[first / N];
        else if constexpr (OWN == 16) low = reinterpret_cast<const device ushort*>(row)[first / N];
        else low = row[metal::min(first * BITS / 32, WORDS - 1)];
        if constexpr (!ALIGNED) high = row[metal::min((first * BITS + OWN - 1) / 32, WORDS - 1)];
    }
    METAL_FUNC uint get(int first, int j) const {
        const int bit = (ALIGNED ? 0 : first * BITS % 32) + j * BITS, shift = bit % 32;
        uint bits = (bit < 32 ? low : high) >> shift;
        if constexpr (!ALIGNED) {
            if (shift + BITS > 32) bits |= high << (32 - shift);
        }
        return bits & ((1u << BITS) - 1);
    }
};
// --- body ---
    const int kv_head = threadgroup_position_in_grid.y, sequence = threadgroup_position_in_grid.z;
    const device int* place = places + sequence * PLACES;
    const int row_count = place[0], tiles_begin = place[1], tiles_end = place[2];
    const int logit_rows = place[3], row_splits = place[4];
    place += 5;
