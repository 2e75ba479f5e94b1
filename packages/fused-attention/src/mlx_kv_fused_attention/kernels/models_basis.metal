// The basis of values that are held as the model has them: nothing is to be done.

struct ModelsBasis {
    static constexpr constant bool TURNED = false;
    template <typename Row, int N> METAL_FUNC void leave(Row, int, thread float (&)[N]) const {}
};
// --- body ---
    const ModelsBasis basis{};
