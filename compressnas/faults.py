"""The faults of a document that a pydantic model refuses, told in the user's words: path, value, what was expected."""

import re
import reprlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

Model = type[BaseModel]

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "text that matches {pattern}",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "too_long": "a list of {max_length}",
    "greater_than": "a number > {gt}",
    "greater_than_equal": "a number >= {ge}",
    "less_than": "a number < {lt}",
    "less_than_equal": "a number <= {le}",
    "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
}
# What `settle_tags` has told already.
_TAG_FAULTS = {"union_tag_invalid", "union_tag_not_found"}


def shown(value: object) -> str:
    """The value as it stands in a message: short, one line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    return short.repr(value)


def suggestion(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'lam'?`, or nothing when no known name is close."""
    close = _closest(name, known)
    return f"; did you mean {close!r}?" if close else ""


def members(field: FieldInfo) -> dict[str, Model]:
    """Tag -> model of a union with a discriminator, in the order of the union; empty for any other field."""
    if not isinstance(field.discriminator, str):
        return {}
    by_tag = {}
    for model in _models_in(field.annotation):
        for tag in get_args(model.model_fields[field.discriminator].annotation):
            by_tag[tag] = model
    return by_tag


def settle_tags(model: Model, document: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
    """Say which unions of `document` have no known tag, and put the closest known one there.

    pydantic looks no further into a union whose tag it does not know. With the closest tag in place, the other
    faults of that section are found as well.
    """
    settled, faults = dict(document), []
    for name, field in model.model_fields.items():
        known, key, section = members(field), field.discriminator, document.get(name)
        if not known or not isinstance(section, Mapping):
            continue
        tag = section.get(key)
        if isinstance(tag, str) and tag in known:
            continue
        expected = f"expected {_one_of(known)}"
        got = f"{expected}, got {shown(tag)}{suggestion(tag, known)}" if key in section else f"missing; {expected}"
        faults.append(f"{name}.{key}: {got}")
        if close := _closest(tag, known):
            settled[name] = {**section, key: close}
    return settled, faults


def faults_of(error: ValidationError, model: Model, document: Mapping[Any, Any]) -> list[str]:
    """One line per fault that pydantic found when it validated `document` as `model`."""
    return [
        _line(details, model, document)
        for details in error.errors(include_url=False)
        if details["type"] not in _TAG_FAULTS
    ]


def _line(details: ErrorDetails, model: Model, document: Mapping[Any, Any]) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    path, parent = _place(details["loc"], model, document)
    known = list(parent.model_fields) if parent else []
    if kind == "value_error":  # raised by a validator of ours: its text says everything
        return f"{path}: {context['error']}" if path else str(context["error"])
    if kind == "missing":
        field = parent.model_fields.get(str(details["loc"][-1])) if parent else None
        return f"{path}: missing; expected {_wanted(field)}"
    if kind == "extra_forbidden":
        return f"{path}: unknown key{suggestion(details['loc'][-1], known) or '; known here: ' + ', '.join(known)}"
    if kind == "invalid_key":
        return f"{path}: expected a key that is text, got {shown(value)}"
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'", context["expected"])
        expected = _one_of(names) if names else context["expected"].lower()
        return f"{path}: expected {expected}, got {shown(value)}{suggestion(value, names)}"
    if kind in _EXPECTED:
        limits = {key: f"{x:g}" if isinstance(x, float) else x for key, x in context.items()}
        return f"{path}: expected {_EXPECTED[kind].format(**limits)}, got {shown(value)}"
    return f"{path}: {details['msg']}, got {shown(value)}"


def _place(loc: tuple[int | str, ...], model: Model, document: Mapping[Any, Any]) -> tuple[str, Model | None]:
    """The path as the user wrote it (pydantic's `loc` also holds union tags), and the model its last key is in."""
    path, here = "", cast(Any, document)
    parent, inner = None, cast(Model | None, model)
    parts = iter(loc)
    for part in parts:
        if isinstance(part, int) and not isinstance(here, Mapping):
            # a single value may stand for a list of one; then it has no index
            path += f"[{part}]" if isinstance(here, list) else ""
            here = here[part] if isinstance(here, list) and part < len(here) else here
            continue
        key = part if isinstance(part, str) and re.fullmatch(r"[\w-]+", part) else reprlib.repr(part)
        path += f".{key}" if path else key
        here = here.get(part) if isinstance(here, Mapping) else None
        parent, field = inner, inner.model_fields.get(str(part)) if inner else None
        inner = None
        if field is not None and (tagged := members(field)):
            inner = tagged.get(str(next(parts, "")))
        elif field is not None:
            inner = next(iter(_models_in(field.annotation)), None)
    return path, parent


def _models_in(annotation: Any) -> list[Model]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _wanted(field: FieldInfo | None) -> str:
    """What a required field is, in words."""
    if field is not None and field.annotation is str:
        return "text"
    if field is not None and _models_in(field.annotation):
        return "a mapping (key: value)"
    names = [str(name) for name in get_args(field.annotation)] if field is not None else []
    return _one_of(names) if names else "a value"


def _closest(name: object, known: Iterable[str]) -> str | None:
    by_lower = {k.lower(): k for k in known}
    close = get_close_matches(name.lower(), by_lower, n=1) if isinstance(name, str) else []
    return by_lower[close[0]] if close else None


def _one_of(names: Iterable[str]) -> str:
    names = list(names)
    return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
