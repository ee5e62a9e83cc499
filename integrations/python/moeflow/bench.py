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

    "nccl"       the whole layer, from spec.layer's hidden states, ids and weights to its out: pack, one all-to-all out,
                 expert index, expert prepare, gate-up, down, owner reduce, one all-to-all back, combine. Collective
                 over torch.distributed, which must be initialised with ep ranks.
    "allgather"  the same over an all-gather out and a reduce-scatter back.
    "experts"    what this rank computes between the exchanges, on the rows of spec.experts. Counted: the experts (gate-
                 up, activation, down) and the weighted sums into out, rows without an expert of this rank written as
                 zeros. Beforehand and not counted: packing of rows, expert index and expert prepare, which one whole
                 step does when the arm is built, in a group of one rank in which other ranks' experts have no place.
                 Each call has a group of its own, which keeps its rows and lists until the callable is dropped.

    Whole layers share a group per transport, shape, capacity and weights, which lives until the process ends. FP8 shapes
    have no arms yet. Library and moeflow-gen are found as `moeflow.load` and `moeflow.generator.find` say.
    """
    library.load(spec.library)
    if spec.shape.dtype != "bf16":
        return {}
    calls = {}
    for transport in ("nccl", "allgather"):
        if transport not in spec.arms or spec.layer is None:
            continue
        layer, inputs = whole_layer(spec, transport), spec.layer
        args = layer.arguments(inputs.hidden, inputs.out, ids=inputs.ids, weights=inputs.weights,
                               tokens_max=int(inputs.hidden.shape[0]))
        calls[transport] = launcher(layer, args, inputs)
    if "experts" in spec.arms:
        layer, rows = experts_alone(spec), int(spec.experts.hidden.shape[0])
        calls["experts"] = launcher(layer, layer.experts_arguments(spec.experts.out, tokens_max=rows), spec.experts)
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


def whole_layer(spec: object, transport: str) -> Layer:
    """The layer of a group over all ranks. Collective when it is made; the inputs differ from call to call, it does not."""
    key = (transport, spec.shape, spec.capacity, spec.rank, id(spec.gate_up), id(spec.down))  # the layer keeps both alive
    if key not in _layers:
        group = Group(context_of(spec), spec.rank, spec.shape.ep, capacity=spec.capacity, transport=transport,
                      unique_id=unique_id_from_torch(transport))
        _layers[key] = ready(Layer(group), spec)
    return _layers[key]


def ready(layer: Layer, spec: object) -> Layer:
    layer.bind(spec.gate_up, spec.down)
    prepare([layer])
    return layer


_workspaces: dict[tuple, Group] = {}


def experts_alone(spec: object) -> Layer:
    """A layer of one rank that holds the rows of spec.experts as received: only this rank's experts have a place in it."""
    shape, rows = spec.shape, int(spec.experts.hidden.shape[0])
    local = shape.experts // shape.ep
    first = spec.rank * local
    context = context_of(spec)
    group = Group(context, 0, 1, capacity=rows, transport="local", local_experts_max=local,
                  unique_id=fresh_unique_id("local"), workspace_of=_workspaces.get((context, rows)))
    if group.workspace_of is None:  # the layers of a model share one, as they do here
        _workspaces.clear()
        _workspaces[context, rows] = group
    places = [[expert - first if 0 <= expert - first < local else -1] for expert in range(shape.experts)]
    layer = ready(Layer(group, places=places), spec)
    unread = spec.experts.out.clone() if layer.context.on_gpu else spec.experts.out.copy()
    layer.forward(spec.experts.hidden, unread, ids=spec.experts.ids, weights=spec.experts.weights, tokens_max=rows)
    if layer.context.on_gpu:
        import torch

        torch.cuda.synchronize(layer.context.device)  # before another stream reads the rows, and `unread` goes
    return layer


def launcher(layer: Layer, args: library.ForwardArgs, inputs: object) -> Callable[[int], None]:
    """A call sets the stream and enqueues; the layer and the tensors stay as long as the callable."""
    forward, handle, pointer = library.load().moeflow_forward, layer.handle, ctypes.byref(args)

    def launch(stream: int) -> None:
        args.stream = stream
        library.check(forward(handle, pointer))

    launch.inputs, launch.layer = inputs, layer
    return launch
