"""`oneOf` as `anyOf`, where no answer can satisfy several of its schemas.

llguidance takes `oneOf` only where it sees that the schemas exclude each other. It does not look at what is around
them, at optional properties that tell them apart (tagged unions of pydantic whose tags have defaults), or at which of
them requires which property. Where they do not exclude each other, they are narrowed: a tag becomes required, or a
property that another one requires is left out. Each answer to the narrower schema satisfies the one that was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

_KINDS = {
    "null": ("null",),
    "boolean": ("boolean",),
    "integer": ("integer",),
    "number": ("integer", "fraction"),
    "string": ("string",),
    "array": ("array",),
    "object": ("object",),
}
"""Kinds of values by type. Every integer is a number."""
_ALL_KINDS = frozenset(kind for kinds in _KINDS.values() for kind in kinds)
_OBJECTS = frozenset({"object"})
_MOST_SCHEMAS = 200


def narrowings(part: Mapping[str, Any], root: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the keywords by which each schema of the `oneOf` of `part` is narrowed, so that it excludes the others.

    `root`: the whole schema, for references. None if some cannot be told apart.
    """
    schemas = part["oneOf"]
    if not isinstance(schemas, list) or not 0 < len(schemas) <= _MOST_SCHEMAS:
        return None
    followed = {} if _has_ids_within(root) else root
    around = {key: value for key, value in part.items() if key != "oneOf"}
    views = [_View.of([around, each], followed) for each in schemas]
    found = []
    for number, view in enumerate(views):
        narrowing = _Narrowing(view)
        if not all(narrowing.excludes(other) for other in (*views[:number], *views[number + 1 :])):
            return None
        if narrowing.keywords and not _is_found(schemas[number], followed):
            return None
        found.append(narrowing.keywords)
    return found


def narrowed(schema: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema`, which refers to no other, with the keywords of a narrowing."""
    found = {**_mapping(schema), **keywords}
    if "required" in keywords:
        given = _mapping(schema).get("required")
        found["required"] = [*dict.fromkeys([*(given if isinstance(given, list) else []), *keywords["required"]])]
    if "properties" in keywords:
        found["properties"] = {**_mapping(_mapping(schema).get("properties")), **keywords["properties"]}
    return found


@dataclass(frozen=True)
class _View:
    """What each value that satisfies some schemas at once must be, as far as it is seen."""

    layers: tuple[Any, ...]
    """The schemas, without those that only refer to others."""
    root: Mapping[str, Any]

    @classmethod
    def of(cls, schemas: Sequence[Any], root: Mapping[str, Any]) -> _View:
        """The view of `schemas`, whose references are to parts of `root`."""
        return cls(tuple(_layers(schemas, root)), root)

    @cached_property
    def kinds(self) -> frozenset[str]:
        kinds = _ALL_KINDS
        for layer in self.layers:
            kinds &= _kinds_of(layer)
        return kinds if self.values is None else kinds & {_kind_of(value) for _, value in self.values}

    @cached_property
    def speaks_of_objects(self) -> bool:
        """Whether values of all kinds are allowed, but something is said only of objects."""
        return self.kinds == _ALL_KINDS and bool(self.properties or self.required)

    @cached_property
    def values(self) -> frozenset[Any] | None:
        """The only values, if they are listed and plain; integers and other numbers that are equal are one."""
        found: frozenset[Any] | None = None
        for layer in self.layers:
            listed = _listed(layer)
            if listed is not None:
                found = listed if found is None else found & listed
        return found

    @cached_property
    def properties(self) -> dict[str, _View]:
        """What is said of properties, by name."""
        found: dict[str, list[Any]] = {}
        for layer in self.layers:
            for name, schema in _mapping(_mapping(layer).get("properties")).items():
                found.setdefault(name, []).append(schema)
        return {name: _View.of(schemas, self.root) for name, schemas in found.items()}

    @cached_property
    def required(self) -> dict[str, None]:
        """Names of required properties, in their order."""
        lists = [_mapping(layer).get("required") for layer in self.layers]
        return {name: None for names in lists if isinstance(names, list) for name in names if isinstance(name, str)}

    def forbids(self, name: str) -> bool:
        """Whether an object with this property does not satisfy the schemas."""
        if name in self.properties and not self.properties[name].kinds:
            return True
        return any(
            layer.get("additionalProperties") is False
            and not layer.get("patternProperties")
            and name not in _mapping(layer.get("properties"))
            for layer in map(_mapping, self.layers)
        )

    def is_apart_from(self, other: _View) -> bool:
        """Whether no value is of both by its kind, or by the values that are listed."""
        if not self.kinds & other.kinds:
            return True
        return self.values is not None and other.values is not None and not self.values & other.values

    def differs_in(self, name: str, other: _View) -> bool:
        """Whether a property of this name satisfies only one of what both say of it."""
        mine, others = self.properties.get(name), other.properties.get(name)
        return mine is not None and others is not None and mine.is_apart_from(others)


@dataclass
class _Narrowing:
    """One of the schemas, and what is added to it so that none of the others is satisfied, too."""

    view: _View
    is_object: bool = False
    """Whether values of other kinds are left out."""
    required: dict[str, None] = field(default_factory=dict)
    forbidden: dict[str, None] = field(default_factory=dict)

    @property
    def keywords(self) -> dict[str, Any]:
        """What is added."""
        found: dict[str, Any] = {"type": "object"} if self.is_object else {}
        if self.required:
            found["required"] = [*self.required]
        if self.forbidden:
            found["properties"] = dict.fromkeys(self.forbidden, False)
        return found

    def excludes(self, other: _View) -> bool:
        """Whether nothing satisfies both this schema and `other`, once it is narrowed as far as that needs."""
        if self.view.is_apart_from(other):
            return True
        if self.view.kinds != _OBJECTS:
            if not self.view.speaks_of_objects:
                return False
            self.is_object = True
        return "object" not in other.kinds or self._tells_apart(other) or self._narrows(other)

    def _tells_apart(self, other: _View) -> bool:
        """Whether no object satisfies both."""
        view = self.view
        for name in (*view.required, *self.required):
            if other.forbids(name) or view.differs_in(name, other):
                return True
        return any(name in self.forbidden or view.forbids(name) for name in other.required)

    def _narrows(self, other: _View) -> bool:
        """Have a property that tells both apart required, or one that `other` requires forbidden, if there is one."""
        view = self.view
        if tags := [name for name in view.properties if name not in self.forbidden and view.differs_in(name, other)]:
            self.required[tags[0]] = None
        elif free := [name for name in other.required if name not in view.required and name not in self.required]:
            # One that it does not speak of will be missed least.
            self.forbidden[min(free, key=lambda name: name in view.properties)] = None
        else:
            return False
        return True


def _layers(schemas: Sequence[Any], root: Mapping[str, Any]) -> Iterator[Any]:
    """All schemas that values of `schemas` satisfy: these, what they refer to, and what is in their `allOf`."""
    waiting, seen = [*schemas], set[str]()
    while waiting:
        schema = waiting.pop(0)
        if not isinstance(schema, Mapping):
            yield schema
            continue
        reference = schema.get("$ref")
        if reference is None:
            yield schema
            every = schema.get("allOf")
            waiting += every if isinstance(every, list) else []
        elif isinstance(reference, str) and reference not in seen:
            # What is beside a reference is ignored up to draft 7.
            seen.add(reference)
            waiting += target(reference, root)


def _is_found(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether what `schema` refers to is there."""
    seen = set[str]()
    while isinstance(schema, Mapping) and "$ref" in schema:
        reference = schema["$ref"]
        found = target(reference, root) if isinstance(reference, str) and reference not in seen else []
        if not found:
            return False
        seen.add(reference)
        schema = found[0]
    return True


def target(reference: str, root: Mapping[str, Any]) -> list[Any]:
    """Return the schema in `root` that a reference points to; none if it cannot be followed."""
    if reference != "#" and not reference.startswith("#/"):
        return []
    found: Any = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return []
    return [found]


def _has_ids_within(root: Mapping[str, Any]) -> bool:
    """Whether references may be relative to a part of `root`."""
    waiting: list[Any] = [*root.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if any(isinstance(value.get(name), str) for name in ("$id", "id")):
                return True
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False


def _kinds_of(schema: Any) -> frozenset[str]:
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping):
        return _ALL_KINDS
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named
    kinds = _ALL_KINDS
    if isinstance(names, list) and all(name in _KINDS for name in names):
        kinds = frozenset(kind for name in names for kind in _KINDS[name])
    return kinds


def _kind_of(value: float | str | bool | None) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    return "integer" if isinstance(value, int) or value.is_integer() else "fraction"


def _listed(schema: Any) -> frozenset[Any] | None:
    """The values of `const` and `enum`, each beside whether it is a truth value; None if there are others."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    else:
        return None
    if not all(value is None or isinstance(value, (bool, int, float, str)) for value in values):
        return None
    return frozenset((isinstance(value, bool), value) for value in values)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
