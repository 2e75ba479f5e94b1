"""What a launch costs the host, by the length of the kernel's text.

    python launch.py [--output FILE] [--commit HASH]

A kernel that does next to nothing, and the same with comments of some kilobytes, through MLX's own function and through
`mlx_kv_kernels.Kernel`. Microseconds a launch, medians of evaluations of 200 launches each. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from mlx_kv_kernels import Kernel, resolve_backend

LAUNCHES, ROUNDS, KILOBYTES = 200, 15, (0, 15, 30, 60)
BODY = "    out[thread_position_in_grid.x] = x[thread_position_in_grid.x] + 1;\n"
OWN_NAMES = "    const uint3 thread_position_in_grid = make_uint3(threadIdx.x, 0, 0);\n"  # MLX's CUDA has CUDA's
SIZES = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(32,)], "output_dtypes": [mx.float32]}


def microseconds(launch, x):
    """Of building and evaluating one launch; the GPU's share is next to nothing."""
    taken = []
    for _ in range(ROUNDS + 2):
        mx.synchronize()
        begin = time.perf_counter()
        mx.eval([launch(x) for _ in range(LAUNCHES)])
        mx.synchronize()
        taken.append((time.perf_counter() - begin) / LAUNCHES * 1e6)
    return statistics.median(taken[2:])


def through_mlx(backend, kilobytes):
    """MLX's own function, its launches compiled as Kernel's are, so that the text is not put together each time."""
    make = mx.fast.cuda_kernel if backend == "cuda" else mx.fast.metal_kernel
    body = "//" + "x" * 1024 * kilobytes + "\n" + (OWN_NAMES if backend == "cuda" else "") + BODY
    kernel = make(name=f"plain_{kilobytes}", input_names=["x"], output_names=["out"], source=body)
    compiled = mx.compile(lambda x: kernel(inputs=[x], **SIZES)[0])
    return lambda x: compiled(x)


def through_kernel(folder, kilobytes):
    """`Kernel`, from a package made for it."""
    name = f"launch_{kilobytes}"
    package = folder / f"package_{kilobytes}"
    (package / "kernels").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kernels" / f"{name}.metal").write_text("//" + "x" * 1024 * kilobytes + "\n// --- body ---\n" + BODY)
    kernel = Kernel(name, package.name, ("x",), ("out",))
    return lambda x: kernel(inputs=[x], **SIZES)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="default: what git says")
    arguments = parser.parse_args()
    if arguments.commit is None:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        arguments.commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    backend = resolve_backend()
    if backend not in ("metal", "cuda"):
        parser.error(f"expected a GPU, got the backend {backend}")
    x = mx.arange(32, dtype=mx.float32)
    device = str(mx.device_info().get("device_name"))
    results = {"device": device, "backend": backend, "mlx": mx.__version__, "commit": arguments.commit, "texts": []}
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for kilobytes in KILOBYTES:
            plain, kernel = through_mlx(backend, kilobytes), through_kernel(Path(folder), kilobytes)
            row = {"kilobytes": kilobytes, "mlx": microseconds(plain, x), "kernel": microseconds(kernel, x)}
            results["texts"].append(row)
            print(f"{kilobytes:3} KiB: MLX's function {row['mlx']:5.1f} us, Kernel {row['kernel']:5.1f} us a launch")
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
