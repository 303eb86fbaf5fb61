"""The JSON schema of a YAML file of settings, made from the settings themselves, for editors and checks."""

from __future__ import annotations

from typing import Any

from headrace.paramserver.system.settings import Kind, Setting, settings_of
from headrace.paramserver.system.text import BYTES_BY_UNIT, SECONDS_BY_UNIT

__all__ = ["json_schema"]

_UNITS = {Kind.BYTES: BYTES_BY_UNIT, Kind.SECONDS: SECONDS_BY_UNIT}


def json_schema(cls: type[Any], title: str) -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a YAML file for the settings of a dataclass.

    No key is required: a flag or the environment may give what the file leaves out. A value with a unit is checked for
    its form alone, and for its bounds only when it is loaded.
    """
    properties: dict[str, Any] = {}
    for field, known in settings_of(cls):
        properties[field.name] = {"description": known.help, **_type_of(known)}
        if isinstance(field.default, bool | int | float | str):  # a path, or None, is no value of a file
            properties[field.name]["default"] = field.default
        if known.former is not None:
            described = f"Former name of {field.name}."
            properties[known.former] = {"description": described, "deprecated": True, **_type_of(known)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _type_of(known: Setting) -> dict[str, Any]:
    bounds = {"minimum": known.minimum, "maximum": known.maximum}
    bounds = {name: bound for name, bound in bounds.items() if bound is not None}
    match known.kind:
        case Kind.COUNT:
            return {"type": "integer", **bounds}
        case Kind.BYTES | Kind.SECONDS:
            units = "|".join(unit for unit in _UNITS[known.kind] if unit)
            number = {"type": "integer" if known.kind is Kind.BYTES else "number", **bounds}
            return {"anyOf": [number, {"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)? ?({units})?$"}]}
        case Kind.CHOICE:
            return {"enum": list(known.choices)}
        case Kind.SWITCH:
            return {"type": "boolean"}
        case Kind.RULES:
            return {"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": {"type": "object"}}]}
        case Kind.PATH | Kind.TEXT:
            return {"type": "string", "minLength": 1}
