"""libmoeflow itself: where it is, its structs as moeflow.h declares them, and its errors as exceptions."""
from __future__ import annotations

import ctypes
import json
import operator
import os
import threading
from pathlib import Path

UNIQUE_ID_BYTES = 128
BACKENDS = {"cuda": 0, "cpu": 1}
TRANSPORTS = {"auto": 0, "nccl": 1, "window": 2, "allgather": 3, "local": 4}
DTYPES = {"float32": 0, "bfloat16": 1, "int32": 2, "int64": 3}
ORDERS = {"gate_up": 0, "up_gate": 1, "interleaved": 2}
COMBINES = {"plan": 0, "ring": 1}
FORWARD_IDENTITY, FORWARD_EXPERTS = 1, 2
LOG_LEVELS = ("error", "warning", "info", "debug")
LogFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)


class Error(RuntimeError):
    """A call of libmoeflow failed: `status` is the number, `name` its name such as MOEFLOW_ERROR_CAPACITY, `message` why."""

    def __init__(self, status: int, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.status, self.name, self.message = status, name, message


def int32(value: int, what: str) -> int:
    """The value, if it is an integer that a C int holds: ctypes would keep its low 32 bits without a word."""
    if not -2**31 <= operator.index(value) < 2**31:
        raise ValueError(f"{what} is {value}, more than a 32-bit integer holds")
    return value


def number_of(table: dict[str, int], name: str, what: str) -> int:
    """The number that moeflow.h gives a name."""
    if name not in table:
        raise ValueError(f"{what} is {name!r}, not one of: {', '.join(table)}")
    return table[name]


class SizedStructure(ctypes.Structure):
    """A struct that begins with its own size, as every config of moeflow.h does. Unset fields are zero."""

    def __init__(self, **fields: object) -> None:
        for name, kind in self._fields_:
            if kind is ctypes.c_int and name in fields:
                int32(fields[name], name)
        super().__init__(size=ctypes.sizeof(type(self)), **fields)


class OpenConfig(SizedStructure):
    _fields_ = [("size", ctypes.c_size_t), ("backend", ctypes.c_int), ("device", ctypes.c_int), ("model", ctypes.c_char_p),
                ("dtype", ctypes.c_char_p), ("cache", ctypes.c_char_p), ("plan", ctypes.c_char_p), ("spec", ctypes.c_char_p),
                ("log", LogFunction), ("log_user", ctypes.c_void_p)]


class GroupConfig(SizedStructure):
    _fields_ = [("size", ctypes.c_size_t), ("rank", ctypes.c_int), ("ranks", ctypes.c_int), ("capacity", ctypes.c_int),
                ("lanes", ctypes.c_int), ("transport", ctypes.c_int), ("unique_id", ctypes.c_void_p),
                ("nccl_comm", ctypes.c_void_p), ("timeout_ms", ctypes.c_int), ("local_experts_max", ctypes.c_int),
                ("allocator", ctypes.c_void_p), ("workspace_of", ctypes.c_void_p), ("flight", ctypes.c_char_p)]


class LayerConfig(SizedStructure):
    _fields_ = [("size", ctypes.c_size_t), ("combine", ctypes.c_int), ("places", ctypes.POINTER(ctypes.c_int32)),
                ("replicas", ctypes.c_int)]


class Weights(SizedStructure):
    _fields_ = [("size", ctypes.c_size_t), ("gate_up", ctypes.c_void_p), ("gate_up_expert_stride", ctypes.c_int64),
                ("gate_up_row_stride", ctypes.c_int64), ("down", ctypes.c_void_p), ("down_expert_stride", ctypes.c_int64),
                ("down_row_stride", ctypes.c_int64), ("gate_up_experts", ctypes.c_void_p), ("down_experts", ctypes.c_void_p),
                ("lend", ctypes.c_void_p), ("lend_user", ctypes.c_void_p), ("order", ctypes.c_int),
                ("correction_bias", ctypes.c_void_p), ("gate_up_bias", ctypes.c_void_p), ("down_bias", ctypes.c_void_p),
                ("expert_load", ctypes.c_void_p), ("packed", ctypes.c_int)]


class ForwardArgs(SizedStructure):
    _fields_ = [("size", ctypes.c_size_t), ("tokens", ctypes.c_int), ("tokens_max", ctypes.c_int),
                ("hidden", ctypes.c_void_p), ("ids", ctypes.c_void_p), ("ids_dtype", ctypes.c_int),
                ("weights", ctypes.c_void_p), ("logits", ctypes.c_void_p), ("logits_dtype", ctypes.c_int),
                ("out", ctypes.c_void_p), ("lane", ctypes.c_int), ("stream", ctypes.c_void_p), ("flags", ctypes.c_uint)]


HANDLE, OUT = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
# name: (result, arguments); a result of None is a status
FUNCTIONS = {
    "moeflow_version": (ctypes.c_int, []),
    "moeflow_status_name": (ctypes.c_char_p, [ctypes.c_int]),
    "moeflow_last_error": (ctypes.c_char_p, []),
    "moeflow_build_info": (ctypes.c_char_p, []),
    "moeflow_open": (None, [ctypes.POINTER(OpenConfig), OUT]),
    "moeflow_close": (None, [HANDLE]),
    "moeflow_context_spec": (ctypes.c_char_p, [HANDLE]),
    "moeflow_get_unique_id": (None, [ctypes.c_int, ctypes.c_char_p]),
    "moeflow_group_create": (None, [OUT, ctypes.c_int, ctypes.POINTER(GroupConfig), OUT]),
    "moeflow_group_destroy": (None, [HANDLE]),
    "moeflow_poll": (None, [HANDLE, ctypes.c_int]),
    "moeflow_abort": (None, [HANDLE]),
    "moeflow_layer_create": (None, [HANDLE, HANDLE, ctypes.POINTER(LayerConfig), OUT]),
    "moeflow_layer_destroy": (None, [HANDLE]),
    "moeflow_layer_local_experts": (ctypes.c_int, [HANDLE]),
    "moeflow_layer_bind": (None, [HANDLE, ctypes.POINTER(Weights)]),
    "moeflow_layer_packed_bytes": (None, [HANDLE, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64)]),
    "moeflow_layer_pack": (None, [HANDLE, ctypes.POINTER(Weights), ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
                                  ctypes.c_void_p]),
    "moeflow_prepare": (None, [OUT, ctypes.c_int, ctypes.c_int]),
    "moeflow_forward": (None, [HANDLE, ctypes.POINTER(ForwardArgs)]),
}

_lock = threading.Lock()
_loaded: tuple[ctypes.CDLL, str] | None = None


def candidates() -> list[str]:
    """Where the library is looked for, in order, without the path a caller names."""
    package = Path(__file__).resolve().parent
    tree = package.parents[2]
    return [str(package / "libmoeflow.so.0"), str(package / "libmoeflow.so"), str(tree / "build" / "lib" / "libmoeflow.so.0")]


def choose(path: str | None) -> str:
    """MOEFLOW_LIBRARY, else `path`, else the first candidate that exists, else the soname for the system's loader."""
    named = os.environ.get("MOEFLOW_LIBRARY") or path
    return named or next((found for found in candidates() if os.path.exists(found)), "libmoeflow.so.0")


def load(path: str | None = None) -> ctypes.CDLL:
    """The library, loaded once a process. A later call that asks for another file is an error."""
    global _loaded
    with _lock:
        if _loaded is None:
            chosen = choose(path)
            try:
                library = ctypes.CDLL(chosen)
            except OSError as error:
                raise ImportError(f"libmoeflow cannot be loaded: {error}. Build it, or set MOEFLOW_LIBRARY") from error
            for name, (result, arguments) in FUNCTIONS.items():
                try:
                    function = getattr(library, name)
                except AttributeError as error:
                    raise ImportError(f"{chosen} is not the libmoeflow that this package goes with: it lacks {name}") from error
                function.restype, function.argtypes = result or ctypes.c_int, arguments
            _loaded = library, chosen
        elif path and not os.environ.get("MOEFLOW_LIBRARY") and os.path.realpath(path) != os.path.realpath(_loaded[1]):
            raise ImportError(f"{_loaded[1]} is loaded already, not {path}: set MOEFLOW_LIBRARY before the first call")
        return _loaded[0]


def loaded_path() -> str | None:
    return _loaded[1] if _loaded else None


def check(status: int) -> None:
    """Raises Error unless the status is MOEFLOW_OK."""
    if status:
        library = load()
        raise Error(status, library.moeflow_status_name(status).decode(), library.moeflow_last_error().decode(errors="replace"))


def version() -> int:
    """major * 10000 + minor * 100 + patch."""
    return load().moeflow_version()


def build_info() -> dict:
    """How the library was built: {"version", "sha", "dirty", "trees", "compiler"}."""
    return json.loads(load().moeflow_build_info().decode())
