"""Who may import whom, and whether each package declares what it imports.

The contracts are made from the folders that are there, so that a new method needs no entry in any list.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEMBERS = sorted(path.parent for folder in ("packages", "shared") for path in ROOT.glob(f"{folder}/*/pyproject.toml"))
METHODS = sorted(path.parent.name for path in ROOT.glob("packages/*/src/*/__init__.py"))
BELOW = ["mlx_kv", "mlx_kv_kernels", "mlx_kv_emulator"]


def listed(*modules: str) -> str:
    """Return the modules as an option's lines."""
    return "".join(f"\n    {module}" for module in modules)


CONTRACTS = f"""
[importlinter]
root_packages = {listed(*METHODS, "mlx_kv_cli", *BELOW)}

[importlinter:contract:layers]
name = Methods and the command line never import each other; they meet in mlx_kv, and that in mlx_kv_kernels
type = layers
layers = {listed(" | ".join([*METHODS, "mlx_kv_cli"]), *BELOW)}

[importlinter:contract:emulator]
name = Only the kernel loader knows the emulator
type = forbidden
source_modules = {listed(*METHODS, "mlx_kv_cli", "mlx_kv")}
forbidden_modules = mlx_kv_emulator
allow_indirect_imports = True
"""


def main() -> int:
    """Run import-linter over all packages together and deptry over each alone; return 1 if anything is wrong."""
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as config:
        config.write(CONTRACTS)
        config.flush()
        wrong = subprocess.run(["lint-imports", "--no-cache", "--config", config.name]).returncode
    for member in MEMBERS:
        print(member.relative_to(ROOT), flush=True)
        wrong |= subprocess.run(["deptry", "--no-ansi", "src"], cwd=member).returncode
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
