"""The wheels as they would be published: what each holds, and what it says of itself."""

import configparser
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MEMBERS = sorted(
    project.parent for folder in ("packages", "shared") for project in ROOT.glob(f"{folder}/*/pyproject.toml")
)
METHODS = [member for member in MEMBERS if member.parent.name == "packages"]


def named(member):
    return member.name


@pytest.fixture
def wheel(wheels, member):
    """The open wheel of a member."""
    name = tomllib.loads((member / "pyproject.toml").read_text())["project"]["name"]
    (path,) = wheels.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def read(wheel, name):
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def requirements(wheel):
    return [Requirement(text) for text in HeaderParser().parsestr(read(wheel, "METADATA")).get_all("Requires-Dist")]


@pytest.mark.parametrize("member", MEMBERS, ids=named)
def test_holds_every_file_of_its_source(member, wheel):
    files = {path.relative_to(member / "src").as_posix() for path in (member / "src").rglob("*") if path.is_file()}
    source = {file for file in files if "__pycache__" not in file}
    held = {file for file in wheel.namelist() if not file.endswith("/") and ".dist-info/" not in file}
    assert held == source
    assert any(file.endswith("/py.typed") for file in held)


@pytest.mark.parametrize("member", MEMBERS, ids=named)
def test_describes_itself(wheel):
    about = HeaderParser().parsestr(read(wheel, "METADATA"))
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    assert about["Description-Content-Type"] == "text/markdown"
    for field in ("Summary", "Keywords", "Author", "Project-URL"):
        assert about[field], field
    assert "Typing :: Typed" in about.get_all("Classifier")
    assert {"cpu", "cuda12", "cuda13"} <= set(about.get_all("Provides-Extra"))


@pytest.mark.parametrize("member", MEMBERS, ids=named)
def test_bounds_the_packages_it_needs_from_here(wheel):
    """A package of this repository that breaks its interface gets a new range, and no user meets the old pair."""
    for requirement in requirements(wheel):
        if requirement.name.startswith("mlx-kv"):
            assert {">=", "<"} == {each.operator for each in requirement.specifier}, str(requirement)
            assert not requirement.url


@pytest.mark.parametrize("member", METHODS, ids=named)
def test_a_method_needs_nothing_but_mlx_and_the_two_shared_packages(wheel):
    assert {requirement.name for requirement in requirements(wheel)} <= {"mlx", "mlx-kv", "mlx-kv-kernels"}


@pytest.mark.parametrize("member", MEMBERS, ids=named)
def test_entry_points_are_in_the_wheel(member, wheel):
    points = configparser.ConfigParser(delimiters=["="])
    points.optionxform = str
    if any(name.endswith("entry_points.txt") for name in wheel.namelist()):
        points.read_string(read(wheel, "entry_points.txt"))
    for group in points.sections():
        for name, value in points[group].items():
            module = value.partition(":")[0].replace(".", "/")
            assert {f"{module}.py", f"{module}/__init__.py"} & set(wheel.namelist()), f"{group} {name}"
    if member in METHODS:
        assert {"mlx_kv.methods", "mlx_kv.attention"} & set(points.sections())


@pytest.mark.parametrize("member", MEMBERS, ids=named)
def test_a_release_can_extend_the_changelog(member):
    assert (member / "CHANGELOG.md").read_text().startswith("# Changelog\n\n<!-- towncrier release notes start -->\n")
