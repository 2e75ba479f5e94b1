"""Methods that only a test has."""

from importlib.metadata import EntryPoint

import pytest

from mlx_kv import plugins


@pytest.fixture
def add_method(monkeypatch):
    """Register a config class as an installed method, or an exception as what loading its package raises."""
    added = {}
    points, load = dict(plugins._points()), plugins._load

    def loaded(point):
        found = added[point.name] if point.name in added else load(point)
        if isinstance(found, Exception):
            raise found
        return found

    def add(name, config):
        added[name] = config
        points[name] = EntryPoint(name, f"package_of_{name}:Config", plugins.GROUP)

    monkeypatch.setattr(plugins, "_points", lambda: points)
    monkeypatch.setattr(plugins, "_load", loaded)
    return add
