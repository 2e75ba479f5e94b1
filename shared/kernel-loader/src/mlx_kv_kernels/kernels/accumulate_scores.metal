// One token's attention is added to the scores of the rows it sees, and where a row has to go, the lowest score decides: a
// threadgroup for each KV head of each sequence. The first pass over the logits finds every query head's logsumexp, the second
// adds the mean probability to each row's score and finds the row to go, whose place the newest row takes. A thread loads what it
// needs of several rows at once; where these are all its rows, the second pass finds them in registers. Scores of a whole room are
// copied, so that the outputs can stand in for the inputs. `steps` has of each sequence the first place of its room, the rows attended
// to, the first place behind its room, the new token's position and the window's, whether a row goes, and the temperature's bits;
// `seeds` the noise's seed, its layer, and the bits of its scale.

// Softmax statistics in base 2: the largest logit, and the sum of all relative to it.
struct Statistics {
    float largest, sum;
};
METAL_FUNC float safe(float largest) { return largest == -INFINITY ? 0.0f : largest; }   // -inf - -inf would be NaN
METAL_FUNC Statistics merge(Statistics a, Statistics b) {
    const float largest = metal::max(a.largest, b.largest), base = safe(largest);
    return Statistics{largest, a.sum * metal::exp2(a.largest - base) + b.sum * metal::exp2(b.largest - base)};
}
METAL_FUNC Statistics merge_lanes(Statistics s) {
    const float largest = simd_max(s.largest);
    return Statistics{largest, simd_sum(s.sum * metal::exp2(s.largest - safe(largest)))};
}

// The row to go: the lowest score, of equal ones the newest. A score that is no number counts as -infinity.
struct Lowest {
    float score;
    int position;
    uint row;
};
METAL_FUNC Lowest lower(Lowest a, Lowest b) {
    return b.score < a.score || (b.score == a.score && b.position > a.position) ? b : a;
}
METAL_FUNC Lowest lowest_of_lanes(Lowest l) {
    for (ushort mask = 1; mask < 32; mask *= 2) {
        l = lower(l, Lowest{simd_shuffle_xor(l.score, mask), simd_shuffle_xor(l.position, mask), simd_shuffle_xor(l.row, mask)});
    }
    return l;
}

// A thread's rows, STEP apart: of each the logits of GROUP query heads, noise included, in base 2; -infinity behind the last row.
template <int GROUP, int ROWS> struct Rows {
    float logit[ROWS][GROUP], score[ROWS];
    int position[ROWS];
};
// Loads `wanted` of them. Pointers, of whichever address space, are those of the first; `rows` and `room`, which has more places than
// rows, are counted from there. `newest` is the position of the last of `rows`, which has no score yet.
template <bool NOISE, int STEP, int GROUP, int ROWS, typename Logits, typename Scores, typename Positions>
METAL_FUNC void load_rows(
    thread Rows<GROUP, ROWS>& r, int wanted, int rows, int room, Logits logits, uint logit_rows, Scores scores, Positions positions,
    int newest, float factor, float noise, thread const uint (&hashes)[GROUP]) {
    #pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const bool older = i * STEP < room && i * STEP + 1 != rows;
        r.score[i] = older ? scores[i * STEP] : 0.0f;
        r.position[i] = older ? positions[i * STEP] : newest;
    }
    #pragma unroll
    for (int g = 0; g < GROUP; g++) {
        const auto of_head = logits + g * logit_rows;
        #pragma unroll
        for (int i = 0; i < ROWS; i++) r.logit[i][g] = i * STEP < rows ? of_head[i * STEP] : -INFINITY;
    }
    #pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (i >= wanted) break;                      // the same in all threads
        #pragma unroll
        for (int g = 0; g < GROUP; g++) {
            if (NOISE) r.logit[i][g] = precise_add(r.logit[i][g], precise_mul(noise, gumbel(hashes[g], uint(r.position[i]))));
            r.logit[i][g] *= factor;
        }
    }
}
// --- body ---
    constexpr uint THREADS = 32 * SIMDGROUPS;
    constexpr int ROWS = GROUP > 8 ? 2 : GROUP > 4 ? 4 : 9;  // of a thread: 9 are a budget of 4,096 and the room behind it
    constexpr float LOG2E = 1.44269504088896f;
    const uint thread_index = thread_position_in_threadgroup.x;
    const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
    const uint head = threadgroup_position_in_grid.x, kv_heads = scores_shape[1], total = scores_shape[2];
    const uint sequence = head / kv_heads, kv_head = head % kv_heads, logit_rows = logits_shape[3];
    const uint at = 7 * sequence;
    const uint begin = steps[at], rows = steps[at + 1], room = steps[at + 2] - steps[at];
    const int position = steps[at + 3], window = steps[at + 4];
    const bool drops = steps[at + 5] != 0;
    const float factor = LOG2E / as_type<float>(uint(steps[at + 6])), noise = as_type<float>(uint(seeds[2]));
    const ulong own = ulong(kv_head) * total + begin;
    const auto own_logits = logits + ulong(head) * GROUP * logit_rows;
    const auto own_scores = scores + own;
    const auto own_positions = positions + own;

    uint hashes[GROUP];
    Statistics seen[GROUP];
    for (uint g = 0; g < GROUP; g++) {
        hashes[g] = hash_of_head(seeds[0], seeds[1], kv_head * GROUP + g);
        seen[g] = Statistics{-INFINITY, 0};
    }
    Rows<GROUP, ROWS> r;
    for (uint base = 0; base < rows; base += ROWS * THREADS) {  // as often in every lane, so that all come to the shuffles together
        const uint first = base + thread_index;
        const int wanted = (room - base + THREADS - 1) / THREADS;
        load_rows<NOISE, THREADS>(
            r, wanted, int(rows) - int(first), int(room) - int(first), own_logits + first, logit_rows, own_scores + first,
            own_positions + first, position, factor, noise, hashes);
        #pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float highest = -INFINITY, sum = 0;
            #pragma unroll
            for (int i = 0; i < ROWS; i++) highest = metal::max(highest, r.logit[i][g]);
            const float origin = safe(highest);
            #pragma unroll
            for (int i = 0; i < ROWS; i++) sum += metal::exp2(r.logit[i][g] - origin);
            seen[g] = merge(seen[g], Statistics{highest, sum});
        }
    }
    // All shuffles first: behind a branch that one lane takes, CUDA's compiler no longer knows that all lanes come together.
    for (uint g = 0; g < GROUP; g++) seen[g] = merge_lanes(seen[g]);
    if (lane == 0) {
        for (uint g = 0; g < GROUP; g++) {
            largest[simdgroup * GROUP + g] = seen[g].largest;
            denominators[simdgroup * GROUP + g] = seen[g].sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint g = simdgroup; g < GROUP; g += SIMDGROUPS) {  // a lane for each simdgroup
        Statistics all = {-INFINITY, 0};
        if (lane < SIMDGROUPS) all = Statistics{largest[lane * GROUP + g], denominators[lane * GROUP + g]};
        all = merge(Statistics{sinks[kv_head * GROUP + g] * factor, 1}, merge_lanes(all));
        if (lane == 0) lse[g] = all.largest + metal::log2(all.sum);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    Lowest lowest = {INFINITY, -1, 0};
    for (uint base = 0; base < room; base += ROWS * THREADS) {
        const uint first = base + thread_index;
        const int wanted = (room - base + THREADS - 1) / THREADS;
        if (room > ROWS * THREADS || rows == 0) {
            load_rows<NOISE, THREADS>(
                r, wanted, int(rows) - int(first), int(room) - int(first), own_logits + first, logit_rows, own_scores + first,
                own_positions + first, position, factor, noise, hashes);
        }
        #pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (i >= wanted) break;
            const uint row = first + i * THREADS;
            if (row >= room) continue;
            float score = r.score[i];
            if (row < rows) {
                float probability = 0;
                for (uint g = 0; g < GROUP; g++) probability += metal::exp2(r.logit[i][g] - lse[g]);
                score += probability / float(GROUP);
                if (row + 1 == rows) newest_score[0] = score;
                if (r.position[i] < window) {
                    lowest = lower(lowest, Lowest{metal::isnan(score) ? -INFINITY : score, r.position[i], row});
                }
            }
            out_scores[own + row] = score;
            out_positions[own + row] = r.position[i];
        }
    }
    lowest = lowest_of_lanes(lowest);
    if (lane == 0) {
        lowest_score[simdgroup] = lowest.score;
        lowest_position[simdgroup] = lowest.position;
        lowest_row[simdgroup] = lowest.row;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    lowest = Lowest{INFINITY, -1, 0};
    if (lane < SIMDGROUPS) lowest = Lowest{lowest_score[lane], lowest_position[lane], lowest_row[lane]};
    lowest = lowest_of_lanes(lowest);
    // The thread that has written to that row does so again: nobody else need wait for what it wrote.
    if (drops && lowest.row % THREADS == thread_index) {
        out_scores[own + lowest.row] = newest_score[0];
        out_positions[own + lowest.row] = position;
    }
    if (thread_index == 0) dropped[head] = drops ? lowest.row : 0;
