"""Networks of the user's own: `my_package.my_module:build`, called with the recipe's `args`."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import reduce
from pathlib import Path
from typing import Any

from torch import nn

from compressnas.coupling import one_line
from compressnas.errors import InputError


def factory_network(path: str, args: Mapping[str, Any]) -> nn.Module:
    """Import the module, with the current directory in front, and return what its function returns.

    Args:
        path: `my_package.my_module:build`.
        args: keyword arguments.

    Raises:
        InputError: there is no such module or function, one of them raises, or the result is no nn.Module.
    """
    module_name, _, name = path.partition(":")
    with _current_directory_first():
        build = _attribute(_module(module_name), module_name, name)
        if not callable(build):
            raise InputError(f"model.factory: {path} is a {type(build).__name__}; expected something to call")
        try:
            network = build(**args)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise InputError(f"model.factory: {path} with {_written(args)} raises {_told(error)}") from error
    if not isinstance(network, nn.Module):
        raise InputError(f"model.factory: {path} returns a {type(network).__name__}; expected a torch.nn.Module")
    return network.cpu()  # where all networks start


@contextmanager
def _current_directory_first() -> Iterator[None]:
    """As `python my_script.py` finds the modules beside the script. Undone, so that they shadow no library later."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code may have taken it out
            sys.path.remove("")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # something that the module imports
            raise InputError(f"model.factory: importing {name} raises {_told(error)}") from error
        places = f"neither in {Path.cwd()} nor among the installed packages"
        raise InputError(f"model.factory: no module {error.name}, {places}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"model.factory: importing {name} raises {_told(error)}") from error


def _attribute(module: Any, module_name: str, name: str) -> Any:
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError as error:
        raise InputError(f"model.factory: module {module_name} has no {name}") from error


def _written(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in args.items()) or "no args"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
