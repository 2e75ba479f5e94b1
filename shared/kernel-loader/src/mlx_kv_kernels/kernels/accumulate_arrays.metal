// What the threads of accumulate_scores share: softmax statistics of each simdgroup, the logsumexp of each query head, the row to go.
// --- body ---
    threadgroup float largest[SIMDGROUPS * GROUP];
    threadgroup float denominators[SIMDGROUPS * GROUP];
    threadgroup float lse[GROUP];
    threadgroup float lowest_score[SIMDGROUPS];
    threadgroup int lowest_position[SIMDGROUPS];
    threadgroup uint lowest_row[SIMDGROUPS];
    threadgroup float newest_score[1];
