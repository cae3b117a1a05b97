"""YAML as people write it: `1e-3` is a number, `010` is ten, and a key stands only once."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_NUMBER_TAGS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}


class _Loader(yaml.SafeLoader):
    """SafeLoader with other numbers. PyYAML reads YAML 1.1: there `1e-3` is text, `010` is 8 and `1:30` is 90."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (typed by the base class)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBER_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As SafeLoader, but a tag that does not fit its value (`!!int ten`) is an error with a line."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            problem = f"cannot read {node.value!r:.60}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_int(self, node: yaml.ScalarNode) -> int:
        return int(node.value.replace("_", ""))


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text which `_Loader` would read as a number."""


for _class in (_Loader, _Dumper):
    for _tag, _pattern in (("int", _INT), ("float", _FLOAT)):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern.pattern})$"), list("-+.0123456789")
        )
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)


def read_yaml(text: str) -> tuple[Any, list[str]]:
    """The value of one YAML document, and one line for each key that stands twice (the last one counts).

    Raises:
        ValueError: the text is no YAML; the message is one line, with the line number where there is one.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, []
        twice = [f"{path}: this key stands twice (line {line})" for path, line in _repeated_keys(node, "", set())]
        return loader.construct_document(node), twice
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{' '.join((error.problem or str(error)).split())}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"line {line}: the character {chr(error.character)!r} is not allowed in YAML") from error
    except RecursionError as error:
        raise ValueError("nested too deeply, or an alias that contains itself") from error
    finally:
        if loader is not None:
            loader.dispose()


def write_yaml(value: object) -> str:
    """YAML in the order given, which `read_yaml` and any YAML 1.1 reader read back alike."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120))


def _repeated_keys(node: yaml.Node, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """(path, line) of each key that already stands in the same mapping, anywhere below `node`."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated_keys(item, f"{path}[{index}]", seen)
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            inner = f"{path}.{name}" if path else name
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    yield inner, key.start_mark.line + 1
                keys.add((key.tag, key.value))
            yield from _repeated_keys(value, inner, seen)
