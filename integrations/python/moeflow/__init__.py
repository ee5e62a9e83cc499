"""MoEFlow from Python: the fixed-capacity expert-parallel layer through ctypes, on torch tensors or numpy arrays.

    context = moeflow.open(model="glm-5.3-flash")                       # torch tensors on a GPU
    group = moeflow.Group(context, rank, ranks, capacity=128, unique_id=moeflow.unique_id_from_torch())
    layer = moeflow.Layer(group)
    layer.bind(gate_up, down)                                           # borrowed: keep them as long as the layer
    moeflow.prepare([layer])
    layer.forward(hidden, out, ids=ids, weights=weights)                # torch's current stream; may be captured

With `open(backend="cpu", spec=text)` the same calls take numpy arrays. A bf16 array is a torch.bfloat16 tensor, or a numpy
array of uint16 bit patterns (`to_bf16`, `from_bf16`). Every failing call raises `moeflow.Error`, which carries the status.

The library is found through MOEFLOW_LIBRARY, then beside this package, then in the source tree's build/lib, then by soname.
"""
from __future__ import annotations

from .arrays import from_bf16, to_bf16
from .bench import bench_layer
from .generator import build, spec_text
from .library import Error, build_info, load, version
from .objects import Context, Group, Layer, open, prepare, unique_id, unique_id_from_torch

__all__ = ["Context", "Error", "Group", "Layer", "bench_layer", "build", "build_info", "from_bf16", "load", "open", "prepare",
           "spec_text", "to_bf16", "unique_id", "unique_id_from_torch", "version"]
