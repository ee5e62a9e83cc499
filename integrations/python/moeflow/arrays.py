"""What the binding needs to know of an array, be it torch's or numpy's: address, shape, dtype, and that it is contiguous."""
from __future__ import annotations

import sys

# what an array calls its dtype -> the name in moeflow.h; uint16 holds bf16 bit patterns, which numpy has no type for
NAMES = {"torch.bfloat16": "bfloat16", "torch.float32": "float32", "torch.int32": "int32", "torch.int64": "int64",
         "torch.uint8": "uint8", "bfloat16": "bfloat16", "uint16": "bfloat16", "float32": "float32", "int32": "int32", "int64": "int64"}


def is_torch(array: object) -> bool:
    """Whether this is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def dtype_of(array: object) -> str:
    """bfloat16, float32, int32 or int64; the array's own name of any other dtype."""
    name = str(array.dtype)
    return NAMES.get(name, name)


def address(array: object, what: str, shape: tuple[int, ...], dtypes: tuple[str, ...], on_gpu: bool,
            device: int = 0, writable: bool = False) -> int:
    """The array's address, after checking all that the C interface would have to trust. Raises ValueError."""
    if not is_torch(array) and not hasattr(array, "__array_interface__"):
        raise ValueError(f"{what} is a {type(array).__name__}, not a torch tensor or a numpy array")
    if tuple(array.shape) != shape:
        raise ValueError(f"{what} has shape {tuple(array.shape)}, not {shape}")
    if dtype_of(array) not in dtypes:
        raise ValueError(f"{what} is {array.dtype}, not {' or '.join(dtypes)}")
    if is_torch(array):
        where = array.device
        if (where.type == "cuda") != on_gpu or (on_gpu and where.index != device):
            raise ValueError(f"{what} is on {where}, but the context is on {f'cuda:{device}' if on_gpu else 'the CPU'}")
        contiguous, start = array.is_contiguous(), array.data_ptr()
    else:
        if on_gpu:
            raise ValueError(f"{what} is a numpy array, but the context is on cuda:{device}")
        if writable and not array.flags.writeable:
            raise ValueError(f"{what} is read-only")
        contiguous, start = bool(array.flags.c_contiguous), array.__array_interface__["data"][0]
    if not contiguous:
        raise ValueError(f"{what} is not contiguous")
    return start


def to_bf16(values: object) -> object:
    """A numpy float array as bf16 bit patterns (uint16), rounded to nearest even; NaN stays NaN."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), np.uint16(0x7FC0), rounded)


def from_bf16(bits: object) -> object:
    """bf16 bit patterns (uint16) as a numpy float32 array."""
    import numpy as np

    return (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
