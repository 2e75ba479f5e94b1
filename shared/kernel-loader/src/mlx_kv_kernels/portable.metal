// Arithmetic that no compiler may fuse: a product is rounded before it is added. Kernels that promise the bits of their
// reference use these; on CUDA, where the pragma means nothing, prelude.cuh has the same three.
METAL_FUNC float precise_mul(float a, float b) {
#pragma METAL fp contract(off)
    return a * b;
}
METAL_FUNC float precise_add(float a, float b) {
#pragma METAL fp contract(off)
    return a + b;
}
METAL_FUNC float precise_sub(float a, float b) {
#pragma METAL fp contract(off)
    return a - b;
}

METAL_FUNC half2 pack_half2(float a, float b) { return half2(half(a), half(b)); }
METAL_FUNC uint lower_halves(uint a, uint b) { return (a & 0xffffu) | b << 16; }
METAL_FUNC uint upper_halves(uint a, uint b) { return a >> 16 | (b & 0xffff0000u); }
METAL_FUNC uint upper_bytes(uint halves) { return halves >> 8 & 0x00ff00ffu; }
template <typename T> METAL_FUNC void settle(thread T&) {}
