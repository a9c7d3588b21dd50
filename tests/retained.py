"""How much an object keeps, whatever it is made of: for tests of what must stay bounded."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Final

#: Not followed: they lead to the rest of the program.
CODE: Final = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)


def retained(thing: object, kind: type = object) -> int:
    """The number of objects of a kind that `thing` keeps alive, itself included.

    What a function or method keeps is not counted.
    """
    seen: dict[int, object] = {}
    waiting = [thing]
    while waiting:
        found = waiting.pop()
        if id(found) not in seen and not isinstance(found, CODE):
            seen[id(found)] = found
            waiting += gc.get_referents(found)
            if isinstance(found, dict):  # of one whose keys are text, the collector tells the values alone
                waiting += found
    return sum(isinstance(found, kind) for found in seen.values())
