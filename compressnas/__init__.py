"""A trained network goes in, the slimmest verified ONNX model comes out, with the price of every FLOP saved.

    import compressnas as cn
    slim = cn.decide(model, example_inputs, target={"flops": 0.5})
    small, proof = cn.remove(model, example_inputs, slim)

Nothing is imported before it is asked for, so that commands which need no torch do not wait for it.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "BayesPruner", "Check", "Cost", "Found", "InputError", "Proof", "RunFailed", "SlimArch", "carry_optimizer",
    "decide", "export_onnx", "find_groups", "load", "measure", "reachable", "reconstruct",
    "remove", "save",
]  # fmt: skip

if TYPE_CHECKING:
    from compressnas.api import remove
    from compressnas.bayes.pruner import BayesPruner
    from compressnas.carry import carry_optimizer
    from compressnas.decide import decide
    from compressnas.errors import InputError, RunFailed
    from compressnas.export import Check, export_onnx
    from compressnas.measure import Cost
    from compressnas.measure import cost as measure
    from compressnas.proof import Proof
    from compressnas.reachable import reachable
    from compressnas.reconstruct import reconstruct
    from compressnas.slim import SlimArch
    from compressnas.store import load, save
    from compressnas.surgery import Found, find_groups
else:
    _WHERE = {
        "BayesPruner": "bayes.pruner",
        "Check": "export",
        "Cost": "measure",
        "Found": "surgery",
        "InputError": "errors",
        "Proof": "proof",
        "RunFailed": "errors",
        "SlimArch": "slim",
        "carry_optimizer": "carry",
        "decide": "decide",
        "export_onnx": "export",
        "find_groups": "surgery",
        "load": "store",
        "measure": "measure:cost",
        "reachable": "reachable",
        "reconstruct": "reconstruct",
        "remove": "api",
        "save": "store",
    }

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _WHERE[name].partition(":")
        value = getattr(import_module(f"{__name__}.{module}"), attribute or name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    class _Package(ModuleType):
        """Importing compressnas.measure binds that module to the name `measure` here, which is a function's."""

        def __setattr__(self, name: str, value: object) -> None:
            if not (name in _WHERE and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package
