"""Checks JSON values against the part of JSON Schema that the API's description uses.

Callers read the same schemas at /openapi.json, so the description cannot differ from what is checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from swarm.errors import RequestError

Schema = Mapping[str, Any]
_MAX_QUOTED = 60
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "number": (int, float),
    "integer": (int, float),
    "null": (type(None),),
}


def check(value: Any, schema: Schema, path: str) -> None:
    """Raises RequestError that names `path`, the value and what it must be."""
    if "anyOf" in schema:
        _check_any(value, schema["anyOf"], path)
        return
    _check_type(value, schema, path)
    if "enum" in schema and value not in schema["enum"]:
        raise _invalid(
            path, value, f"it must be {' or '.join(repr(each) for each in schema['enum'] if each is not None)}", schema
        )
    match value:
        case bool() | None:
            pass
        case int() | float():
            _check_number(value, schema, path)
        case str():
            if len(value) > schema.get("maxLength", math.inf) or len(value) < schema.get("minLength", 0):
                raise _invalid(path, value, f"it must have {_range(schema, 'Length')} characters")
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _invalid(path, value, "it must be Unicode without lone surrogates") from None
        case list():
            _check_list(value, schema, path)
        case dict():
            check_object(value, schema, path)


def check_object(value: Mapping[str, Any], schema: Schema, path: str) -> None:
    """Check an object, as `check` does. `path` is "" for the whole request. A null field counts as absent."""
    properties: Mapping[str, Schema] = schema.get("properties", {})
    additional = schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if value.get(name) is None:
            raise RequestError(
                f"{_join(path, name)} is missing", reason="missing_required_parameter", param=_join(path, name)
            )
    if len(value) > schema.get("maxProperties", math.inf):
        raise _invalid(path, f"{len(value)} entries", f"it must have at most {schema['maxProperties']}")
    names = re.compile(schema.get("propertyNames", {}).get("pattern", ""))
    for name, item in value.items():
        if not names.search(name):
            raise _invalid(path, name, f"its names must be like {names.pattern}")
        field = _join(path, name)
        if name in properties:
            if item is not None:
                check(item, properties[name], field)
        elif additional is False:
            raise RequestError(
                f"{_short(field)} is not a parameter of this API; leave it out",
                reason="unknown_parameter",
                param=_short(field),
            )
        elif isinstance(additional, Mapping):
            check(item, additional, field)


def _check_any(value: Any, schemas: list[Schema], path: str) -> None:
    problems = []
    for schema in schemas:
        try:
            check(value, schema, path)
            return
        except RequestError as problem:
            problems.append(problem)
    # The alternative that matched furthest into the value gives the most useful message.
    raise max(problems, key=lambda problem: len(problem.param or ""))


def _check_type(value: Any, schema: Schema, path: str) -> None:
    allowed = schema.get("type")
    if allowed is None:
        return
    names = [allowed] if isinstance(allowed, str) else list(allowed)
    for name in names:
        if isinstance(value, bool) and name in ("number", "integer"):
            continue
        if name == "integer" and isinstance(value, float) and not value.is_integer():
            continue
        if isinstance(value, _PYTHON_TYPES[name]):
            return
    names = [name for name in names if name != "null"]
    raise _invalid(path, value, f"it must be {' or '.join(_type_phrase(name) for name in names)}", schema)


def _check_number(value: float, schema: Schema, path: str) -> None:
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above = schema.get("exclusiveMinimum", -math.inf)
    if not (low <= value <= high and value > above):
        lower = f"over {above:g}" if above > -math.inf else f"from {low}"
        raise _invalid(path, value, f"it must be {lower}" + (f" to {high}" if high < math.inf else " on"))


def _check_list(value: list[Any], schema: Schema, path: str) -> None:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
        raise _invalid(path, f"{len(value)} entries", f"it must have {_range(schema, 'Items')}", schema)
    if "items" in schema:
        for index, item in enumerate(value):
            check(item, schema["items"], f"{path}[{index}]")


def _invalid(path: str, value: Any, must: str, schema: Schema | None = None) -> RequestError:
    if schema is not None and schema.get("x-unsupported"):
        return RequestError(
            f"{path} is not supported by this gateway; leave it out", reason="unsupported_parameter", param=path
        )
    return RequestError(f"{path} is {_short(repr(value))}; {must}", param=path)


def _range(schema: Schema, what: str) -> str:
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if high is None:
        return f"at least {low}"
    return f"{low} to {high}" if high else "none"


def _type_phrase(name: str) -> str:
    return {"array": "a list", "integer": "a whole number", "object": "an object"}.get(name, f"a {name}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _short(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."
