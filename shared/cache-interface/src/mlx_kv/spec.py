"""Method specs: `policy`, `store` or `policy+store`, each `name(key=value, ...)`."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any, Self, cast

from .dense import Dense
from .errors import SpecError
from .plugins import Method, load_method
from .policy import KeepAll, Policy
from .store import Geometry, Store


@dataclasses.dataclass(frozen=True)
class Spec:
    """A policy over a store, by their names and configs."""

    policy_name: str
    policy: Method
    store_name: str
    store: Method

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a spec such as "snapkv(budget=1024)+kivi(bits=2)".

        A policy alone stands over dense rows, a store alone keeps all rows. Values are Python literals or bare words.

        Raises:
            SpecError: with what was expected and what was found.
        """
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise SpecError(f"[mlx_kv] expected a spec such as 'kivi(bits=2)', got {text!r}") from error
        parts = [tree.left, tree.right] if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add) else [tree]
        named = [_config(part, text) for part in parts]
        kinds = [config.kind for _, config in named]
        if kinds == ["policy", "store"]:
            return cls(*named[0], *named[1])
        if kinds == ["policy"]:
            return cls(*named[0], "dense", cast("Method", Dense()))
        if kinds == ["store"]:
            return cls("keep_all", cast("Method", KeepAll()), *named[0])
        raise SpecError(f"[mlx_kv] expected a policy, a store or policy+store, got {'+'.join(kinds)} in {text!r}")

    def create(self, geometry: Geometry) -> tuple[Policy, Store]:
        """Make the policy and the store of one layer."""
        policy, store = self.policy.create(geometry), self.store.create(geometry)
        assert isinstance(policy, Policy)  # the kinds were checked; for the type checker
        assert isinstance(store, Store)
        return policy, store

    def __str__(self) -> str:
        """Write the spec out, without what is at its default: equal specs have equal texts."""
        parts = [(self.policy_name, self.policy), (self.store_name, self.store)]
        named = [_write(name, config) for name, config in parts if not _is_plain(config)]
        return "+".join(named) or "dense"


def _is_plain(config: object) -> bool:
    return type(config) in (KeepAll, Dense)  # not a class derived from them: that is another method


def _config(node: ast.expr, text: str) -> tuple[str, Method]:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise SpecError(f"[mlx_kv] expected name(key=value, ...), got {ast.unparse(node)!r} in {text!r}")
    name = call.func.id
    method = load_method(name)
    options = {str(keyword.arg): _value(keyword.value, text) for keyword in call.keywords}
    if len(options) < len(call.keywords):
        raise SpecError(f"[{name}] expected each option once, got {ast.unparse(node)!r}")
    known = [field.name for field in dataclasses.fields(cast("Any", method))]
    for option in options:
        if option not in known:
            raise SpecError(f"[{name}] expected options among {', '.join(known) or 'none'}, got {option!r}")
    try:
        return name, method(**options)
    except TypeError as error:  # an option of a type that the config's own checks cannot compare
        raise SpecError(f"[{name}] {error}, got {text!r}") from error


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise SpecError(f"[mlx_kv] expected a literal or a word, got {ast.unparse(node)!r} in {text!r}") from error


def _write(name: str, config: Method) -> str:
    fields = dataclasses.fields(cast("Any", config))
    values = [(field.name, getattr(config, field.name), field.default) for field in fields]
    options = ", ".join(f"{option}={value!r}" for option, value, default in values if value != default)
    return f"{name}({options})" if options else name
