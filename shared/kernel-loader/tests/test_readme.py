"""The README's worked example is run as it stands."""

import re
from pathlib import Path

from mlx_kv_kernels.testing import legs

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_worked_example(write_kernel):
    (metal,) = blocks("metal")
    _, example, keeping, testing = [block for block in blocks("python") if ">>>" not in block]
    package = write_kernel("normalize", metal, ["x"], ["out"]).package
    names = {}
    exec(example.replace("your_package", package), names)
    exec(testing, names)
    x = names["mx"].array([[2.0, -2.0]])
    assert names["normalize"](x, backend="reference").tolist() == [[1.0, -1.0]]
    for leg in legs():
        names.update(x=names["mx"].tile(x, (5, 4)), backend=leg.backend)
        with leg.active():
            exec(keeping, names)
            assert names["out"].tolist() == [[1.0, -1.0] * 4] * 5
