// The scale and minimum of a group of numbers, and the codes of these: what quantises rows, and what reads rows as they will be once
// quantised. The rules for numbers that leave the range of a dtype are reference.py's.

// The code before rounding: distance / scale as IEEE rounds it, by the inverse of the scale in two parts. The scales of half and
// bfloat have so few bits that no quotient comes as near to a border of rounding as this errs; those of float have too many.
template <typename T> METAL_FUNC float quotient(float distance, float, float inverse, float rest, float largest) {
    const float q = metal::fma(distance, inverse, distance * rest);
    return largest > 15 ? metal::min(q, largest) : q;  // a bfloat may be 1/256 too small: that is half a code of 8 bits only
}
template <> METAL_FUNC float quotient<half>(float distance, float, float inverse, float rest, float largest) {
    return metal::min(metal::fma(distance, inverse, distance * rest), largest);  // subnormal scales may be far too small
}
template <> METAL_FUNC float quotient<float>(float distance, float scale, float, float, float) { return distance / scale; }

struct Extremes {
    float low = INFINITY, high = -INFINITY, poison = 0;
    METAL_FUNC void add(float x) {
        low = metal::min(low, x);
        high = metal::max(high, x);
        poison = metal::fma(x, 0.0f, poison);        // NaN from a NaN or an infinity on
    }
    METAL_FUNC void end() { high = poison == 0 ? high : INFINITY; }  // min and max pass a NaN over
    METAL_FUNC void join(ushort mask) {              // with those of another lane, which have ended as well
        low = metal::min(low, simd_shuffle_xor(low, mask));
        high = metal::max(high, simd_shuffle_xor(high, mask));
    }
};

template <typename T, int BITS> struct GroupScale {
    static constexpr constant uint LARGEST_CODE = (1 << BITS) - 1;
    T scale, minimum;
    bool finite;
    float divisor, origin, inverse, rest;
    METAL_FUNC void set(Extremes extremes) {
        constexpr float LARGEST_INVERSE = 1.0f / float(LARGEST_CODE);
        constexpr float RANGE_LIMIT = 1.2676506002282294e30f;       // 2^100
        constexpr float SMALLEST_SCALE = 8.271806125530277e-25f;    // 2^-80
        constexpr float SMALLEST_NORMAL = 1.1754943508222875e-38f;  // 2^-126
        const float largest_rest = metal::fma(-LARGEST_INVERSE, float(LARGEST_CODE), 1.0f) * LARGEST_INVERSE;
        const float range = extremes.high - extremes.low;
        finite = range < RANGE_LIMIT;
        const T step = T(metal::fma(range, LARGEST_INVERSE, range * largest_rest));
        scale = finite && float(step) >= SMALLEST_SCALE ? step : T(1.0f);
        minimum = T(!finite ? NAN : metal::fabs(extremes.low) < SMALLEST_NORMAL ? 0.0f : extremes.low);
        divisor = float(scale);
        origin = finite ? float(minimum) : 0.0f;
        inverse = 1.0f / divisor;
        rest = metal::fma(-inverse, divisor, 1.0f) * inverse;
    }
    // From 2^23 on floats are integers: adding it rounds half to even and puts the code into the last bits, below those of 2^23.
    static constexpr constant uint ABOVE = 0x4b000000u;
    METAL_FUNC uint code_above(float x) const {
        return as_type<uint>(quotient<T>((finite ? x : 0.0f) - origin, divisor, inverse, rest, float(LARGEST_CODE)) + 8388608.0f);
    }
    // A number of the group as it reads once it has been quantised.
    METAL_FUNC float read(float x) const { return float(code_above(x) - ABOVE) * float(scale) + float(minimum); }
};
