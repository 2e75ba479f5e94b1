// Gumbel noise that depends on nothing but these numbers (accumulate_reference.py has the same).
METAL_FUNC uint mix(uint x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
METAL_FUNC uint mix(uint hash, uint next) { return mix(hash + 0x9e3779b9u + next); }
METAL_FUNC uint hash_of_head(uint seed, uint layer, uint query_head) { return mix(mix(mix(seed), layer), query_head); }
METAL_FUNC float gumbel(uint hash, uint position) {
    const float uniform = (float(mix(hash, position) >> 9) + 0.5f) * (1.0f / 8388608.0f);
    return -metal::fast::log(-metal::precise::log(uniform));  // the inner one's result may be small, where its error would count
}
