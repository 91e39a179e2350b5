"""The base of what reads pickles that nobody trusts. It runs nothing that such a file names."""

import pickle
from collections.abc import Mapping
from typing import Any, Callable, ClassVar


def opcodes(*names: bytes) -> dict[int, Callable[[Any], None]]:
    """Return what Python's unpickler does at these opcodes."""
    return {name[0]: pickle._Unpickler.dispatch[name[0]] for name in names}


class PlainUnpickler(pickle._Unpickler):
    """Makes None, booleans, numbers, byte strings and empty lists and dicts,
    and of all else what is `allowed`.

    Subclasses add the opcodes that they need to `dispatch`; at others load() raises KeyError.

    It extends the unpickler that is written in Python: the memo of the C version takes memory up to any index
    in a file.
    """

    allowed: Mapping[tuple[str, str], Any] = {}  # {(module, name): what is meant}
    dispatch: ClassVar[Any] = opcodes(
        pickle.PROTO, pickle.STOP, pickle.MARK, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE,
        pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.NONE, pickle.NEWTRUE,
        pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.BINSTRING,
        pickle.SHORT_BINSTRING, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET,
        pickle.GLOBAL,
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        """Return what `allowed` has for this name; UnpicklingError for any other."""
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {module[:80]}.{name[:80]}")
        return self.allowed[module, name]
