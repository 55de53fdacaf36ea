"""Replacement of `oneOf` by `anyOf`, where no answer can satisfy several of its schemas.

llguidance accepts `oneOf` only if it can tell that the schemas exclude each other. It does not look at what is around
them, at optional properties that distinguish them (tagged unions of pydantic whose tags have defaults), or at which of
them requires which property. If they do not exclude each other, they are narrowed: a tag becomes required, or a
property that another schema requires is forbidden. Each answer to the narrower schema satisfies the original one.
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
_SILENT = frozenset({"title", "description", "discriminator", "default", "examples", "deprecated"})
"""Keywords that forbid no value."""
_OF_DOCUMENTS = frozenset({"$id", "id", "$schema", "$defs", "definitions", "$anchor"})
"""Keywords of a schema that are about its place in a document."""
_MOST_SCHEMAS = 200
"""Most schemas of a `oneOf` that are compared, each with every other."""
_MOST_FORBIDDEN = 1000
"""Most properties that are forbidden in all schemas together; each makes the grammar larger."""
_LONGEST_INDEX = 6
"""Most digits of a list index in a reference."""


@dataclass(frozen=True, slots=True)
class Option:
    """One schema of a `oneOf`, and what narrows it so that it excludes the others."""

    where: str
    """Its place below the `oneOf`."""
    schema: Any
    keywords: Mapping[str, Any]
    """Keywords to add (see `narrowed`); empty if none are needed."""


def options(part: Mapping[str, Any], root: Mapping[str, Any], draft: str, *, may_narrow: bool) -> list[Option] | None:
    """Return the schemas of the `oneOf` of `part`, and how to narrow each so that no value satisfies two.

    A schema that is only a `oneOf` or `anyOf` is replaced by the schemas in it. `root`: the whole schema, for
    references; `draft`: its `$schema`. None if some cannot be distinguished; without `may_narrow`, also if they would
    have to be narrowed.
    """
    leaves = list(_leaves("oneOf", part, part["oneOf"]))
    if not 0 < len(leaves) <= _MOST_SCHEMAS or "$ref" in part:
        return None
    around = {key: value for key, value in part.items() if key != "oneOf"}
    document = _Document(root, draft)
    views = [_View.of([around, schema], document) for _, schema, _ in leaves]
    found, forbidden = [], 0
    for number, (where, schema, tags) in enumerate(leaves):
        narrowing = _Narrowing(views[number])
        may_add = may_narrow and _can_be_narrowed(schema, root)
        if may_add:
            narrowing.require(tags)
        if not all(narrowing.excludes(other) for other in (*views[:number], *views[number + 1 :])):
            return None
        forbidden += len(narrowing.forbidden)
        if narrowing.keywords and not may_add:
            return None
        found.append(Option(where, schema, narrowing.keywords))
    return found if forbidden <= _MOST_FORBIDDEN else None


def narrowed(schema: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `schema`, which is not a reference, with the keywords of a narrowing."""
    given = _mapping(schema)
    found: dict[str, Any] = {key: value for key, value in given.items() if key not in _OF_DOCUMENTS}
    found.update(keywords)
    if "required" in keywords:
        found["required"] = [*dict.fromkeys([*given.get("required", ()), *keywords["required"]])]
    if "properties" in keywords:
        found["properties"] = {**given.get("properties", {}), **keywords["properties"]}
    return found


def target(reference: Any, root: Mapping[str, Any]) -> list[Any]:
    """Return the schema in `root` that a reference points to, in a list; an empty list if it cannot be followed."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return []
    found: Any = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) <= _LONGEST_INDEX and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return []
    return [found]


def _leaves(where: str, part: Mapping[str, Any], schemas: Any) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield the schemas of a list of `part`, with places and tags; for one that is only such a list, those in it.

    Tags: properties that a `discriminator` names. In OpenAPI they are required, whatever the schema says.
    """
    tag = _mapping(part.get("discriminator")).get("propertyName")
    tags = (tag,) if isinstance(tag, str) else ()
    for number, schema in enumerate(schemas) if isinstance(schemas, list) else ():
        keywords = schema.keys() - _SILENT if isinstance(schema, Mapping) else set()
        inner = next(iter(keywords)) if len(keywords) == 1 else ""
        if inner in ("oneOf", "anyOf") and isinstance(schema[inner], list) and schema[inner]:
            for place, leaf, more in _leaves(f"{where}/{number}/{inner}", schema, schema[inner]):
                yield place, leaf, (*tags, *more)
        else:
            yield f"{where}/{number}", schema, tags


def _can_be_narrowed(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return whether `schema`, or what it refers to, exists and has lists and mappings where keywords are added."""
    seen = list[Any]()
    while isinstance(schema, Mapping) and "$ref" in schema:
        found = target(schema["$ref"], root)
        if not found or schema["$ref"] in seen or not isinstance(root.get("$defs", {}), Mapping):
            return False
        seen.append(schema["$ref"])
        schema = found[0]
    given = _mapping(schema)
    return isinstance(given.get("required", []), list) and isinstance(given.get("properties", {}), Mapping)


@dataclass(frozen=True, slots=True)
class _Document:
    """The document that schemas are part of."""

    root: Mapping[str, Any]
    draft: str


@dataclass(frozen=True)
class _View:
    """What is known of the values that satisfy several schemas at once."""

    layers: tuple[Any, ...]
    """The schemas, without those that only refer to others."""
    document: _Document

    @classmethod
    def of(cls, schemas: Sequence[Any], document: _Document) -> _View:
        """Return the view of `schemas`."""
        return cls(tuple(_layers(schemas, document)), document)

    @cached_property
    def kinds(self) -> frozenset[str]:
        kinds = _ALL_KINDS
        for layer in self.layers:
            kinds &= _kinds_of(layer)
        return kinds if self.values is None else kinds & {_kind_of(value) for _, value in self.values}

    @cached_property
    def speaks_of_objects(self) -> bool:
        """Whether values of all kinds are allowed, although there are keywords for objects."""
        is_untyped = not any("type" in _mapping(layer) for layer in self.layers)
        return is_untyped and self.kinds == _ALL_KINDS and bool(self.properties or self.required)

    @cached_property
    def values(self) -> frozenset[Any] | None:
        """The only values allowed, if they are listed and are scalars; an integer and an equal float are one value."""
        found: frozenset[Any] | None = None
        for layer in self.layers:
            listed = _listed(layer, has_const="draft-04" not in self.document.draft)
            if listed is not None:
                found = listed if found is None else found & listed
        return found

    @cached_property
    def properties(self) -> dict[str, _View]:
        """Views of the properties, by name."""
        found: dict[str, list[Any]] = {}
        for layer in self.layers:
            for name, schema in _mapping(_mapping(layer).get("properties")).items():
                found.setdefault(name, []).append(schema)
        return {name: _View.of(schemas, self.document) for name, schemas in found.items()}

    @cached_property
    def required(self) -> dict[str, None]:
        """Names of required properties, in their order."""
        lists = [_mapping(layer).get("required") for layer in self.layers]
        return {name: None for names in lists if isinstance(names, list) for name in names if isinstance(name, str)}

    def forbids(self, name: str) -> bool:
        """Return whether an object with this property cannot satisfy the schemas."""
        if name in self.properties and not self.properties[name].kinds:
            return True
        return any(
            layer.get("additionalProperties") is False
            and not layer.get("patternProperties")
            and name not in _mapping(layer.get("properties"))
            for layer in map(_mapping, self.layers)
        )

    def is_apart_from(self, other: _View) -> bool:
        """Return whether the kinds of values, or the listed values, show that no value belongs to both."""
        if not self.kinds & other.kinds:
            return True
        return self.values is not None and other.values is not None and not self.values & other.values

    def differs_in(self, name: str, other: _View) -> bool:
        """Return whether no value of the property of this name satisfies both."""
        mine, others = self.properties.get(name), other.properties.get(name)
        return mine is not None and others is not None and mine.is_apart_from(others)


@dataclass
class _Narrowing:
    """One of the schemas, and what is added to it so that no value also satisfies another one."""

    view: _View
    is_object: bool = False
    """Whether values of other kinds are excluded."""
    required: dict[str, None] = field(default_factory=dict)
    forbidden: dict[str, None] = field(default_factory=dict)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords to add."""
        found: dict[str, Any] = {"type": "object"} if self.is_object else {}
        if self.required:
            found["required"] = [*self.required]
        if self.forbidden:
            found["properties"] = dict.fromkeys(self.forbidden, False)
        return found

    def require(self, names: Sequence[str]) -> None:
        """Require those of these properties that the schema describes."""
        if self.view.kinds == _OBJECTS:
            known = [name for name in names if name in self.view.properties and name not in self.view.required]
            self.required.update(dict.fromkeys(known))

    def excludes(self, other: _View) -> bool:
        """Narrow this schema as far as needed, and return whether nothing satisfies both it and `other`."""
        if self.view.is_apart_from(other):
            return True
        if self.view.kinds != _OBJECTS:
            if not self.view.speaks_of_objects:
                return False
            self.is_object = True
        return "object" not in other.kinds or self._tells_apart(other) or self._narrows(other)

    def _tells_apart(self, other: _View) -> bool:
        """Return whether no object satisfies both."""
        view = self.view
        for name in (*view.required, *self.required):
            if other.forbids(name) or view.differs_in(name, other):
                return True
        return any(
            name in self.forbidden or view.forbids(name) or view.differs_in(name, other) for name in other.required
        )

    def _narrows(self, other: _View) -> bool:
        """Require a property that distinguishes both, or forbid one that `other` requires; return whether it did."""
        view = self.view
        if tags := [name for name in view.properties if name not in self.forbidden and view.differs_in(name, other)]:
            self.required[tags[0]] = None
        elif free := [name for name in other.required if name not in view.required and name not in self.required]:
            # One that the schema does not mention will be missed least.
            self.forbidden[min(free, key=lambda name: name in view.properties)] = None
        else:
            return False
        return True


def _layers(schemas: Sequence[Any], document: _Document) -> Iterator[Any]:
    """Yield all schemas that values of `schemas` satisfy: these, those they refer to, and those in their `allOf`."""
    waiting, seen = [*schemas], list[Any]()
    while waiting:
        schema = waiting.pop(0)
        if not isinstance(schema, Mapping):
            yield schema
        elif "$ref" in schema:
            # Up to draft 7, keywords beside a reference are ignored.
            if schema["$ref"] not in seen:
                seen.append(schema["$ref"])
                waiting += target(schema["$ref"], document.root)
        elif str(schema.get("$schema", document.draft)).rstrip("#") == document.draft:
            # In another draft its keywords could mean something else.
            yield schema
            every = schema.get("allOf")
            waiting += every if isinstance(every, list) else []


def _kinds_of(schema: Any) -> frozenset[str]:
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping):
        return _ALL_KINDS
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named
    kinds = _ALL_KINDS
    if isinstance(names, list) and all(isinstance(name, str) and name in _KINDS for name in names):
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


def _listed(schema: Any, *, has_const: bool) -> frozenset[Any] | None:
    """Return the values of `const` or `enum`, each with whether it is a boolean; None if others are possible."""
    if not isinstance(schema, Mapping):
        return None
    if has_const and "const" in schema:
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
