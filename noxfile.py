"""Checks that need environments of their own, and releases. Without a name, a check takes every package in turn.

nox -s isolated -- kivi         each wheel alone, under its package's tests
nox -s without -- kivi          what is left when a method's folder is deleted
nox -s release -- kivi minor    changelog, version, commit and tag
"""

import shutil
import tempfile
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
MEMBERS = {
    path.parent.name: path.parent
    for folder in ("packages", "shared")
    for path in sorted(ROOT.glob(f"{folder}/*/pyproject.toml"))
}
METHODS = {name: member for name, member in MEMBERS.items() if member.parent.name == "packages"}
CALLERS = ("shared/cache-interface", "shared/command-line")  # what finds methods by their entry points

nox.options.default_venv_backend = "none"
nox.options.sessions = ["isolated"]


@nox.session
@nox.parametrize("resolution", ["highest", "lowest-direct"], ids=["newest", "oldest"])
def isolated(session: nox.Session, resolution: str) -> None:
    """Run each package's tests on its wheel, outside the workspace, beside nothing of ours but what it depends on.

    Once with the newest versions of all that it and those below it name, once with the oldest that they allow.
    """
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch, "wheels")
        session.run("uv", "build", "--all-packages", "--no-sources", "--wheel", "--out-dir", str(wheels))
        for member in chosen(session, MEMBERS):
            place = Path(scratch, member.name)
            tests = place / member.relative_to(ROOT)
            shutil.copytree(member, tests, ignore=shutil.ignore_patterns("src", "__pycache__", ".*"))
            for file in ("pyproject.toml", "conftest.py"):  # pytest's options and the summary of what did not run
                shutil.copy(ROOT / file, place)
            python = environment(session, member, place, wheels, resolution)
            with session.cd(place):
                session.run(python, "-m", "pytest", str(tests))


@nox.session
def without(session: nox.Session) -> None:
    """Delete each method's folder from a clone of the last commit, and check that the rest does not miss it."""
    for member in chosen(session, METHODS):
        with tempfile.TemporaryDirectory() as scratch:
            session.run("git", "clone", "--quiet", str(ROOT), scratch)
            shutil.rmtree(Path(scratch) / member.relative_to(ROOT))
            with session.cd(scratch):
                session.run("uv", "run", "python", ".ci/boundaries.py")
                session.run("uv", "run", "pytest", "--collect-only", "-qq")
                session.run("uv", "run", "pytest", "-m", "not slow", "integration-tests", *CALLERS)
                session.run("uv", "run", "pytest", "packages", "-k", "config or cache or select or budgets")


@nox.session
def release(session: nox.Session) -> None:
    """Move a package's changelog fragments into its changelog, raise its version, commit and tag."""
    if len(session.posargs) != 2 or session.posargs[0] not in MEMBERS:
        session.error(f"expected a package ({', '.join(MEMBERS)}) and major, minor or patch")
    name, part = session.posargs
    if session.run("git", "status", "--porcelain", silent=True):
        session.error("expected a clean working tree")
    member = MEMBERS[name]
    if not any((member / "changes").glob("*.md")):
        session.error(f"expected changelog fragments in {member.relative_to(ROOT)}/changes")
    session.run("uv", "version", "--no-sync", "--package", distribution(member), "--bump", part)
    version = project(member)["version"]
    session.run("towncrier", "build", "--yes", "--dir", str(member), "--config", "pyproject.toml", "--version", version)
    session.run("git", "add", "--all")
    session.run("git", "commit", "--quiet", "--message", f"{name} {version}")
    session.run("git", "tag", "--annotate", "--message", f"{name} {version}", f"{name}-v{version}")


def chosen(session: nox.Session, members: dict[str, Path]) -> list[Path]:
    """Return the members named on the command line, or all."""
    unknown = set(session.posargs) - set(members)
    if unknown:
        session.error(f"expected packages among {', '.join(members)}, got {', '.join(unknown)}")
    return [members[name] for name in session.posargs or members]


def environment(session: nox.Session, member: Path, place: Path, wheels: Path, resolution: str) -> str:
    """Make an environment of a wheel and what its tests need, and return its Python."""
    python = str(place / "environment/bin/python")
    session.run("uv", "venv", "--python", "3.11", str(place / "environment"))
    install = ["uv", "pip", "install", "--python", python, "--no-sources", "--find-links", str(wheels)]
    # All that ours name is direct then: the oldest versions are also those of mlx and mlx-lm.
    direct = [f"--requirements={each}/pyproject.toml" for each in below(member)]
    offered = {extra for each in below(member) for extra in project(each)["optional-dependencies"]}
    extras = [f"--extra={extra}" for extra in sorted(offered & {"cpu", "testing"})]
    session.run(*install, "--resolution", resolution, *direct, *extras)
    session.run(*install, "--group", f"{ROOT}/pyproject.toml:test")
    (wheel,) = wheels.glob(f"{distribution(member).replace('-', '_')}-[0-9]*.whl")
    session.run(*install, "--no-deps", str(wheel))
    return python


def below(member: Path) -> list[Path]:
    """Return a member, those of ours that it or its tests need, and what they need."""
    table = project(member)
    needs = [*table["dependencies"], *table["optional-dependencies"].get("testing", [])]
    names = {need.partition(">")[0] for need in needs}
    needed = [each for each in MEMBERS.values() if distribution(each) in names]
    return list(dict.fromkeys([member, *(found for each in needed for found in below(each))]))


def distribution(member: Path) -> str:
    """Return the name that a member is published under."""
    return project(member)["name"]


def project(member: Path) -> dict:
    """Return the [project] table of a member."""
    return tomllib.loads((member / "pyproject.toml").read_text())["project"]
