from itertools import count

import pytest

from mlx_kv_kernels import Kernel, UnavailableBackendError, resolve_backend


@pytest.fixture
def emulated():
    """Skips a test that only the emulator can run, where it cannot."""
    try:
        resolve_backend("emulator")
    except UnavailableBackendError as error:
        pytest.skip(str(error))


_numbers = count()


@pytest.fixture
def write_kernel(tmp_path, monkeypatch):
    """Writes a .metal file into a new package, and returns the Kernel."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text, input_names, output_names, **options):
        package = f"kernels_of_a_test_{next(_numbers)}"  # files of a package are read once
        folder = tmp_path / package / "kernels"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / f"{name}.metal").write_text(text)
        return Kernel(name, package, tuple(input_names), tuple(output_names), **options)

    return write
