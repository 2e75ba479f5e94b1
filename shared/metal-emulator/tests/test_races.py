"""Random programs of accesses and barriers: a race is reported exactly when a comparison of all pairs finds one."""

import contextlib
import itertools
from dataclasses import dataclass

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_kv_emulator import EmulatorError, metal_kernel

THREADS, CELLS, STEPS = 64, 3, 5
NOTHING, READ, WRITE, ATOMIC = range(4)
NONE, THREADGROUP_BARRIER, SIMDGROUP_BARRIER, OTHER_MEMORY_BARRIER = range(4)

# program: per step, thread and threadgroup 4 * cell + action; between: the barrier after each step.
SOURCE = """
threadgroup atomic_int shared[CELLS];
uint i = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;
if (i < CELLS) atomic_store_explicit(&shared[i], 0, memory_order_relaxed);
threadgroup_barrier(mem_flags::mem_threadgroup);
const mem_flags flags = DEVICE ? mem_flags::mem_device : mem_flags::mem_threadgroup;
const mem_flags others = DEVICE ? mem_flags::mem_threadgroup : mem_flags::mem_device;
int sum = 0;
for (int step = 0; step < STEPS; step++) {
  const int code = program[(g * STEPS + step) * THREADS + i], cell = code / 4, action = code % 4;
  if (DEVICE) {
    device int* p = cells + cell;
    if (action == 1) sum += *p;
    if (action == 2) *p = 1;
    if (action == 3) atomic_fetch_add_explicit((device atomic_int*)p, 1, memory_order_relaxed);
  } else {
    threadgroup int* p = (threadgroup int*)&shared[cell];
    if (action == 1) sum += *p;
    if (action == 2) *p = 1;
    if (action == 3) atomic_fetch_add_explicit((threadgroup atomic_int*)p, 1, memory_order_relaxed);
  }
  if (between[step] == 1) threadgroup_barrier(flags);
  if (between[step] == 2) simdgroup_barrier(flags);
  if (between[step] == 3) threadgroup_barrier(others);
}
sums[g * THREADS + i] = sum;
"""
interpret = metal_kernel("interpret", ["program", "between"], ["cells", "sums"], SOURCE, mode="check")


@dataclass(frozen=True)
class Step:
    step: int
    group: int
    thread: int
    cell: int
    action: int


def races(a, b, between, device):
    """Whether two accesses of the program race, from the definition."""
    if a.cell != b.cell or (a.group, a.thread) == (b.group, b.thread) or (a.group != b.group and not device):
        return False
    if READ == a.action == b.action or ATOMIC == a.action == b.action:
        return False
    if a.group != b.group:
        return True
    barriers = between[min(a.step, b.step) : max(a.step, b.step)]
    same_simdgroup = a.thread // 32 == b.thread // 32
    return THREADGROUP_BARRIER not in barriers and not (same_simdgroup and SIMDGROUP_BARRIER in barriers)


# Few threads, so that they meet: two in step, two of another simdgroup.
steps = st.builds(
    Step,
    step=st.integers(0, STEPS - 1),
    group=st.integers(0, 1),
    thread=st.sampled_from([0, 1, 2, 33, 34]),
    cell=st.integers(0, CELLS - 1),
    action=st.sampled_from([READ, WRITE, ATOMIC]),
)


@pytest.mark.parametrize("device", [False, True])
@settings(deadline=None, max_examples=300)
@given(
    accesses=st.lists(steps, max_size=8, unique_by=lambda s: (s.step, s.group, s.thread)),
    between=st.lists(st.integers(0, 3), min_size=STEPS, max_size=STEPS),
    order=st.integers(0, 1),
)
def test_races_are_found_and_nothing_else(device, accesses, between, order):
    program = [0] * (2 * STEPS * THREADS)
    for a in accesses:
        program[(a.group * STEPS + a.step) * THREADS + a.thread] = 4 * a.cell + a.action
    expected = any(races(a, b, between, device) for a, b in itertools.combinations(accesses, 2))
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(pytest.raises(EmulatorError)) if expected else None
        interpret(
            inputs=[mx.array(program), mx.array(between)],
            template=[("CELLS", CELLS), ("STEPS", STEPS), ("THREADS", THREADS), ("DEVICE", device)],
            grid=(2 * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(CELLS,), (2 * THREADS,)],
            output_dtypes=[mx.int32, mx.int32],
            init_value=0,
            order=order,
        )
    if caught:
        assert {finding.kind for finding in caught.value.findings} == {"race"}
