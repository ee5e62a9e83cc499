"""MoEFlow's arms for benchmark tools that time several implementations of one layer in the same process.

Set-up code: it runs moeflow-gen for shapes that the cache does not hold yet. The callables it returns only enqueue.
"""
from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

from . import generator, library
from .objects import Context, Group, Layer, open, prepare, unique_id_from_torch
from .objects import unique_id as fresh_unique_id

ARCHITECTURES = {8: "sm_80", 9: "sm_90a", 10: "sm_100a", 12: "sm_120"}  # by major compute capability

YAML = """moeflow: 1
name: {name}
hidden: {hidden}
intermediate: {intermediate}
experts: {experts}
top_k: {top_k}
activation: swiglu
router: {{score: softmax}}
weights: {{dtype: bf16}}
"""


def bench_layer(spec: object) -> dict[str, Callable[[int], None]]:
    """Builds one layer for timing: a callable that takes a raw cudaStream_t for each arm of spec.arms that it can run.

    spec has library (path of libmoeflow), arms, rank, shape (hidden, intermediate, experts, topk, ep, dtype), capacity,
    the weights gate_up (E / ep, 2I, H) and down (E / ep, H, I), the inputs layer (hidden, ids, weights, out of this rank's
    tokens, or None) and experts (the same of all ranks' rows). The callables may be captured.

    "nccl"     the whole layer, from spec.layer's hidden states, ids and weights to its out: pack, one all-to-all out,
               expert index, expert prepare, gate-up, down, owner reduce, one all-to-all back, combine. Collective over
               torch.distributed, which must be initialised with ep ranks.
    "experts"  what this rank computes between the exchanges, as a group of one rank whose capacity is all ranks' rows and
               in which the other ranks' experts have no place. Counted: pack, expert index, expert prepare, gate-up,
               down, owner reduce and combine, and an exchange with nobody; the copies of pack and combine over ep * T
               rows are more than the experts alone would need, so the figure is an upper bound.

    Groups are shared by all layers of one shape, capacity and weights and live until the process ends. FP8 shapes have no
    arms yet. Library and moeflow-gen are found as `moeflow.load` and `moeflow.generator.find` say.
    """
    library.load(spec.library)
    if spec.shape.dtype != "bf16":
        return {}
    calls = {}
    if "nccl" in spec.arms and spec.layer is not None:
        calls["nccl"] = launcher(whole_layer(spec), spec.layer)
    if "experts" in spec.arms:
        calls["experts"] = launcher(experts_alone(spec), spec.experts)
    return calls


@functools.cache
def context_for(hidden: int, intermediate: int, experts: int, top_k: int, device: int) -> Context:
    """A plan for these sizes on this GPU, built if the cache has none."""
    import torch

    name = f"bench-h{hidden}-i{intermediate}-e{experts}-k{top_k}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in ARCHITECTURES:
        raise RuntimeError(f"no kernels for compute capability {major}.{minor}")
    with tempfile.TemporaryDirectory(prefix="moeflow-bench-") as folder:
        path = Path(folder, "model.yaml")
        path.write_text(YAML.format(name=name, hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k))
        generator.build(str(path), ARCHITECTURES[major])
    return open(name, device=device)


def context_of(spec: object) -> Context:
    shape = spec.shape
    return context_for(shape.hidden, shape.intermediate, shape.experts, shape.topk, spec.gate_up.device.index)


_layers: dict[tuple, Layer] = {}


def cached(kind: str, spec: object, make: Callable[[], Layer]) -> Layer:
    """One bound and prepared layer per shape, capacity and weights: the inputs differ from call to call, these do not."""
    key = (kind, spec.shape, spec.capacity, spec.rank, id(spec.gate_up), id(spec.down))  # the layer keeps both alive
    if key not in _layers:
        layer = make()
        layer.bind(spec.gate_up, spec.down)
        prepare([layer])
        _layers[key] = layer
    return _layers[key]


def whole_layer(spec: object) -> Layer:
    """The layer of a group over all ranks. Collective."""
    def make() -> Layer:
        return Layer(Group(context_of(spec), spec.rank, spec.shape.ep, capacity=spec.capacity, transport="nccl",
                           unique_id=unique_id_from_torch("nccl")))

    return cached("nccl", spec, make)


def experts_alone(spec: object) -> Layer:
    """The layer of a group of one rank, for which only this rank's experts have a place."""
    def make() -> Layer:
        shape, local = spec.shape, spec.shape.experts // spec.shape.ep
        first = spec.rank * local
        group = Group(context_of(spec), 0, 1, capacity=shape.ep * spec.capacity, transport="local", local_experts_max=local,
                      unique_id=fresh_unique_id("local"))
        return Layer(group, places=[[expert - first if 0 <= expert - first < local else -1] for expert in range(shape.experts)])

    return cached("experts", spec, make)


def launcher(layer: Layer, inputs: object) -> Callable[[int], None]:
    """One step over these tensors, checked once; a call sets the stream and enqueues."""
    args = layer.arguments(inputs.hidden, inputs.out, ids=inputs.ids, weights=inputs.weights,
                           tokens_max=int(inputs.hidden.shape[0]))
    forward, handle, pointer = library.load().moeflow_forward, layer.handle, ctypes.byref(args)

    def launch(stream: int) -> None:
        args.stream = stream
        library.check(forward(handle, pointer))

    launch.inputs = inputs  # the tensors stay as long as the callable
    return launch
