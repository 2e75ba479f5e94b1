// The logits that are written have had noise added, of each row and query head its own, for the scores that are made of them: here
// threadgroups all over the device share the work. One sequence. `positions`, `steps` and `seeds` as in accumulate_scores.metal.
template <typename Positions> struct RowNoise {
    Positions positions;
    int newest_row, newest_position, first_head;
    uint seed, layer;
    float scale;
    METAL_FUNC float added(float logit, int head, int row) const {
        const int position = row == newest_row ? newest_position : positions[row];
        // Rounded as in accumulate_scores.metal, whose scores must be these to the bit.
        return precise_add(logit, precise_mul(scale, gumbel(hash_of_head(seed, layer, first_head + head), position)));
    }
};
// --- body ---
    const auto own_positions = positions + kv_head * positions_shape[2];
    const RowNoise<decltype(positions + 0)> noise = {
        own_positions, row_count - 1, steps[3], kv_head * GROUP, uint(seeds[0]), uint(seeds[1]), as_type<float>(uint(seeds[2]))};
