// Packed tiles as 8x8 matrices: S^T = K q^T and O^T = V^T P^T, so that a fragment of scores is already the right
// operand of the second product, and codes go from their words into the left operands with one AND for two of them.
//
// A lane of an 8x8 fragment holds the columns 2 quad and 2 quad + 1 of one row. The rows of K fragments (and of P^T) are tokens:
// row r is token r / 2 + 4 (r % 2) of eight. Their columns are channels: each quad of lanes shares a token's words out, and a fragment
// takes one code from the lower and one from the upper half of a word. The columns of S^T and O^T are query heads; where there are
// fewer than eight, they stand there several times (copies), and each copy serves another group of value channels.

METAL_FUNC float row_sum(float x) {                  // over the eight rows of a fragment
    x += simd_shuffle_xor(x, 2);
    x += simd_shuffle_xor(x, 4);
    return x + simd_shuffle_xor(x, 16);
}
METAL_FUNC float row_max(float x) {
    x = metal::max(x, simd_shuffle_xor(x, 2));
    x = metal::max(x, simd_shuffle_xor(x, 4));
    return metal::max(x, simd_shuffle_xor(x, 16));
}
// 2^exponent(x), with x held where its inverse is finite.
METAL_FUNC float power_of_two(float x) { return as_type<float>(as_type<uint>(metal::clamp(x, 1e-30f, 1e30f)) & 0x7f800000u); }
METAL_FUNC float inverse_of_power(float x) { return as_type<float>(0x7f000000u - as_type<uint>(x)); }

// 16-bit units of a row's codes that one lane takes side by side: as many as keep a block of eight lanes' channels within the
// value groups that the copies can serve.
METAL_FUNC constexpr int units_of_chunk(int dim, int bits, int value_group, int copies) {
    int units = 1;
    while (units < 8 && dim * bits / 128 % (2 * units) == 0 && 8 * 2 * units * (16 / bits) <= value_group * copies) units *= 2;
    return units;
}
// Codes whose numbers have no even steps are read in two planes that have, whose products add up.
template <typename Rows> METAL_FUNC constexpr auto planes_of(int) -> decltype(int(Rows::PLANES)) { return Rows::PLANES; }
template <typename Rows> METAL_FUNC constexpr int planes_of(long) { return 1; }
// How many codes are read together where the last one of 16 bits is asked for: so many last ones, or it alone.
template <typename Rows> METAL_FUNC constexpr auto lump_of(int) -> decltype(int(Rows::LUMP)) { return Rows::LUMP; }
template <typename Rows> METAL_FUNC constexpr int lump_of(long) { return 1; }
template <int PLANE, typename Matrix, typename Rows> METAL_FUNC Matrix fragment_of(thread const Rows& rows, uint units, int code) {
    Matrix m;
    if constexpr (planes_of<Rows>(0) == 1) m.thread_elements() = rows.fragment(units, code);
    else m.thread_elements() = rows.template fragment<PLANE>(units, code);
    return m;
}
METAL_FUNC constexpr int at_least_one(int x) { return x < 1 ? 1 : x; }
METAL_FUNC constexpr int smaller(int a, int b) { return a < b ? a : b; }

template <int HEADS, int KEY_DIM, int VALUE_DIM, int KEY_BITS, int VALUE_BITS, int VALUE_GROUP> struct Tiling {
    static constexpr constant int COLUMNS = HEADS == 1 ? 1 : HEADS == 2 ? 2 : HEADS <= 4 ? 4 : 8;
    static constexpr constant int COPIES = 8 / COLUMNS;
    static constexpr constant int KEY_RUN = 16 / KEY_BITS;                      // channels side by side in half a word
    static constexpr constant int KEY_FRAGMENTS = KEY_DIM / 8;
    static constexpr constant int KEY_WORDS = KEY_DIM * KEY_BITS / 128;         // of a lane
    static constexpr constant int FOLD_STRIDE = KEY_FRAGMENTS / 2 + 1;          // of quads, which then read from banks of their own
    static constexpr constant int VALUE_RUN = 16 / VALUE_BITS;
    static constexpr constant int UNITS = units_of_chunk(VALUE_DIM, VALUE_BITS, VALUE_GROUP, COPIES);
    static constexpr constant int CHUNK = UNITS * VALUE_RUN;                    // value channels side by side in a lane
    static constexpr constant int BLOCK = 8 * CHUNK;                            // of the eight rows of fragments
    static constexpr constant int BLOCKS = VALUE_DIM / BLOCK;
    static constexpr constant int CHUNK_WORDS = at_least_one(UNITS / 2);
    static constexpr constant int BLOCK_GROUPS = at_least_one(BLOCK / VALUE_GROUP);
    static constexpr constant int SPAN = smaller(BLOCK_GROUPS, COPIES);         // value groups served by one set of probabilities
    static constexpr constant int REPEATS = BLOCK_GROUPS / SPAN;                // products a block needs where the copies are too few
    static constexpr constant int GROUPS = VALUE_DIM / VALUE_GROUP;
    static constexpr constant int SETS = GROUPS / SPAN;
    static constexpr constant bool COPIES_DIFFER = COLUMNS == 1 && SPAN > 1;    // between the two columns of a lane
    static METAL_FUNC constexpr int set_of(int block, int repeat) {
        return BLOCK_GROUPS == 1 ? block * BLOCK / VALUE_GROUP : block * REPEATS + repeat;
    }
};

// Where a lane stands in a fragment: its row, and the query head and the copy of its two columns.
template <typename Shape> struct FragmentPlace {
    int row, quad, column0, column1, copy0, copy1;
    METAL_FUNC FragmentPlace(int lane) {
        row = ((lane / 4) & 4) + (lane / 2) % 4;
        quad = ((lane / 4) & 2) + lane % 2;
        column0 = 2 * quad % Shape::COLUMNS;
        column1 = (2 * quad + 1) % Shape::COLUMNS;
        copy0 = 2 * quad / Shape::COLUMNS;
        copy1 = (2 * quad + 1) / Shape::COLUMNS;
    }
    METAL_FUNC int token() const { return row / 2 + 4 * (row % 2); }
    // The first channel of row `row` of the query fragments in word `word` of a quarter of the key.
    static METAL_FUNC int channel(int row, int word) {
        return (row / 2 * Shape::KEY_WORDS + word) * 2 * Shape::KEY_RUN + row % 2 * Shape::KEY_RUN;
    }
};

template <int N> METAL_FUNC void set_to_zero(thread simdgroup_float8x8 (&matrices)[N]) {
    #pragma unroll
    for (int i = 0; i < N; i++) {
        matrices[i].thread_elements().x = 0;
        matrices[i].thread_elements().y = 0;
    }
}

// Online softmax of the two columns. The maximum is of score + log2(value scale): what 2^-maximum then brings into half's range is
// the probability times the scale.
template <typename Shape> struct TileState {
    float maximum0, maximum1, sum0, sum1, minimum0[Shape::SETS], minimum1[Shape::SETS];
    simdgroup_float8x8 value[Shape::REPEATS][Shape::BLOCKS * Shape::CHUNK];
    METAL_FUNC void clear() {
        maximum0 = maximum1 = LOWEST;
        sum0 = sum1 = 0;
        #pragma unroll
        for (int s = 0; s < Shape::SETS; s++) minimum0[s] = minimum1[s] = 0;
        #pragma unroll
        for (int n = 0; n < Shape::REPEATS; n++) set_to_zero(value[n]);
    }
    METAL_FUNC void raise(float new_maximum0, float new_maximum1) {
        const float scale0 = metal::fast::exp2(maximum0 - new_maximum0), scale1 = metal::fast::exp2(maximum1 - new_maximum1);
        maximum0 = new_maximum0;
        maximum1 = new_maximum1;
        sum0 *= scale0;
        sum1 *= scale1;
        #pragma unroll
        for (int s = 0; s < Shape::SETS; s++) {
            minimum0[s] *= scale0;
            minimum1[s] *= scale1;
        }
        #pragma unroll
        for (int n = 0; n < Shape::REPEATS; n++) {
            #pragma unroll
            for (int i = 0; i < Shape::BLOCKS * Shape::CHUNK; i++) {
                value[n][i].thread_elements().x *= scale0;
                value[n][i].thread_elements().y *= scale1;
            }
        }
    }
};

// A lane's chunks of the values of one token.
template <typename Shape, int VALUE_BITS> struct ValueWords {
    uint words[Shape::BLOCKS][Shape::CHUNK_WORDS];
    METAL_FUNC void load(const device ushort* units) {
        #pragma unroll
        for (int b = 0; b < Shape::BLOCKS; b++) {
            if constexpr (Shape::UNITS == 1) words[b][0] = units[8 * b];
            else load_words(reinterpret_cast<const device uint*>(units + 8 * b * Shape::UNITS), words[b]);
        }
    }
    // Unit i of this token, and of another one in the upper half.
    METAL_FUNC uint unit_of_both(thread const ValueWords& other, int block, int i) const {
        const uint own = words[block][i / 2], others = other.words[block][i / 2];
        return i % 2 ? upper_halves(own, others) : lower_halves(own, others);
    }
};
// The scales of a token's value groups, for each set of probabilities: of the groups that this lane's copies serve.
template <typename Shape, typename Values> struct TileScales {
    static constexpr constant int COLUMNS = Shape::COPIES_DIFFER ? 2 : 1;
    typename Values::template Scales<Shape::SETS> column[COLUMNS];
};
// The values of eight tokens as products take them: a token's units beside those of the token four on, scales and minima as floats.
template <typename Shape, typename Values> struct ValueOperands {
    static constexpr constant int COLUMNS = TileScales<Shape, Values>::COLUMNS;
    uint units[Shape::BLOCKS][Shape::UNITS];
    float scale[COLUMNS][Shape::SETS], minimum[COLUMNS][Shape::SETS];
    template <typename Words> METAL_FUNC void read(thread const Words (&words)[2], thread const TileScales<Shape, Values>& scales) {
        #pragma unroll
        for (int b = 0; b < Shape::BLOCKS; b++) {
            #pragma unroll
            for (int i = 0; i < Shape::UNITS; i++) {
                units[b][i] = words[0].unit_of_both(words[1], b, i);
                settle(units[b][i]);
            }
        }
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            #pragma unroll
            for (int set = 0; set < Shape::SETS; set++) {
                scale[c][set] = scales.column[c].scale(set);
                minimum[c][set] = scales.column[c].minimum(set);
                settle(scale[c][set]);
                settle(minimum[c][set]);
            }
        }
    }
    METAL_FUNC float scale0(int set) const { return scale[0][set]; }
    METAL_FUNC float scale1(int set) const { return scale[COLUMNS - 1][set]; }
    METAL_FUNC float minimum0(int set) const { return minimum[0][set]; }
    METAL_FUNC float minimum1(int set) const { return minimum[COLUMNS - 1][set]; }
    METAL_FUNC float largest0() const { return largest(0); }
    METAL_FUNC float largest1() const { return largest(COLUMNS - 1); }
    METAL_FUNC float largest(int i) const {
        float x = scale[i][0];
        #pragma unroll
        for (int set = 1; set < Shape::SETS; set++) x = metal::max(x, scale[i][set]);
        return x;
    }
};

// Where a lane reads values: the codes of tokens quad and quad + 4 of eight, the scales of its fragments' own row and copies.
template <typename Shape, typename Values> struct ValuePlace {
    const device ushort* units;
    Values scales0, scales1;
    METAL_FUNC ValuePlace(Values values, int row, FragmentPlace<Shape> place)
        : units(reinterpret_cast<const device ushort*>(values.words(row + place.quad)) + place.row * Shape::UNITS),
          scales0(values.from(row + place.token(), place.copy0 % Shape::SPAN)),
          scales1(values.from(row + place.token(), place.copy1 % Shape::SPAN)) {}
    METAL_FUNC void advance(int rows) {
        units += rows * 2 * Values::WORDS;
        scales0 = scales0.from(rows);
        scales1 = scales1.from(rows);
    }
    template <int VALUE_BITS>
    METAL_FUNC void load(int row, thread ValueWords<Shape, VALUE_BITS> (&own)[2], thread TileScales<Shape, Values>& factors) const {
        own[0].load(units + row * 2 * Values::WORDS);
        own[1].load(units + (row + 4) * 2 * Values::WORDS);
        scales0.template scales<Shape::SPAN>(row, factors.column[0]);
        if constexpr (Shape::COPIES_DIFFER) scales1.template scales<Shape::SPAN>(row, factors.column[1]);
    }
};

template <typename Matrix> METAL_FUNC Matrix matrix_of(half2 elements) {
    Matrix m;
    m.thread_elements() = elements;
    return m;
}

// The query of each column as the lanes use it, divided by a power of two: two fragments of halves. Rounded are only numbers below a
// 16,384th of the largest.
template <typename Shape, typename Query, typename Pairs, typename Units>
METAL_FUNC void spread_query(Query query, int stride, int heads, Units units, Pairs pairs, int lane, int simdgroup, int simdgroups) {
    constexpr bool BY_COLUMNS = reads_right_by_columns<half>();
    const FragmentPlace<Shape> place(lane);
    const int row0 = BY_COLUMNS ? 2 * place.quad : place.row, row1 = BY_COLUMNS ? 2 * place.quad + 1 : place.row;
    const int head0 = metal::min(BY_COLUMNS ? place.row % Shape::COLUMNS : place.column0, heads - 1);
    const int head1 = metal::min(BY_COLUMNS ? place.row % Shape::COLUMNS : place.column1, heads - 1);
    const float inverse0 = inverse_of_power(units[head0]), inverse1 = inverse_of_power(units[head1]);
    for (int i = simdgroup; i < Shape::KEY_FRAGMENTS / 2; i += simdgroups) {
        const int word = 2 * i / Shape::KEY_RUN, code = 2 * i % Shape::KEY_RUN;
        const int c0 = head0 * stride + place.channel(row0, word) + code, c1 = head1 * stride + place.channel(row1, word) + code;
        uint2 pair;
        pair.x = as_type<uint>(pack_half2(query[c0] * inverse0, query[c1] * inverse1));
        pair.y = as_type<uint>(pack_half2(query[c0 + 1] * inverse0, query[c1 + 1] * inverse1));
        pairs[i * 32 + lane] = pair;
    }
}
