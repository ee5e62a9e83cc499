"""Context, group and layer: the handles of moeflow.h as objects that close in the right order."""
from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence

from . import library
from .arrays import address, dtype_of, is_torch
from .library import check, int32, load, number_of


class Handle:
    """Owns one opaque handle. close() gives it back and may raise; a forgotten one is given back when collected."""

    _release = ""  # name of the C function

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()

    def close(self) -> None:
        if self._handle:
            check(getattr(load(), self._release)(self._handle))
            self._handle = ctypes.c_void_p()

    @property
    def handle(self) -> ctypes.c_void_p:
        if not self._handle:
            raise ValueError(f"this {type(self).__name__} is closed")
        return self._handle

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) and not sys.is_finalizing():  # at exit the driver may be gone before us
            getattr(load(), self._release)(self._handle)


class Context(Handle):
    """One plan on one device; see `open`. spec is the model's canonical description as a dict of strings."""

    _release = "moeflow_close"

    def __init__(self, config: library.OpenConfig, log: Callable[[str, str], None] | None) -> None:
        super().__init__()
        if log:
            self._log = library.LogFunction(lambda _, level, text: log(library.LOG_LEVELS[level], text.decode(errors="replace")))
            config.log = self._log
        check(load().moeflow_open(ctypes.byref(config), ctypes.byref(self._handle)))
        self.on_gpu, self.device = config.backend == library.BACKENDS["cuda"], config.device
        self.spec_text = load().moeflow_context_spec(self._handle).decode()
        self.spec = dict(line.split(" ", 1) for line in self.spec_text.splitlines())
        self.hidden, self.intermediate, self.experts, self.top_k = (
            int(self.spec[key]) for key in ("hidden", "intermediate", "experts", "top_k"))


def open(model: str | None = None, *, dtype: str = "bf16", backend: str = "cuda", device: int = 0, cache: str | None = None,
         plan: str | None = None, spec: str | None = None, log: Callable[[str, str], None] | None = None) -> Context:
    """Opens a model's plan on a device. Nothing is compiled: a missing cubin is an Error that names the command to run.

    backend "cpu" needs no cache when `spec` holds the canonical text (`moeflow-gen explain --format spec`, or
    `moeflow.spec_text`). log(level, message) is called on the thread that logs.
    """
    def text(value: str | None) -> bytes | None:
        if value is not None and (not isinstance(value, str) or "\0" in value):
            raise ValueError(f"{value!r} is no string without NUL characters")
        return None if value is None else value.encode()

    config = library.OpenConfig(backend=number_of(library.BACKENDS, backend, "backend"), device=device, model=text(model),
                                dtype=text(dtype), cache=text(cache), plan=text(plan), spec=text(spec))
    return Context(config, log)


def unique_id(transport: str = "auto") -> bytes:
    """A fresh group id for a transport, made on one rank and carried to the others by the caller."""
    made = ctypes.create_string_buffer(library.UNIQUE_ID_BYTES)
    check(load().moeflow_get_unique_id(number_of(library.TRANSPORTS, transport, "transport"), made))
    return made.raw


def unique_id_from_torch(transport: str = "nccl", group: object = None) -> bytes:
    """The same fresh id on all ranks of a torch.distributed group. Collective over it."""
    import torch.distributed as dist

    first = dist.get_global_rank(group, 0) if group is not None else 0
    carried = [unique_id(transport) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(carried, src=first, group=group)
    return carried[0]


class Group(Handle):
    """Ranks that exchange rows. Collective: every rank creates it, in its own process or (local) its own thread.

    capacity is the most tokens that a rank may bring to one step. nccl_comm adopts an ncclComm_t (an int) instead of
    unique_id. A single context, or one for each model shape that layers of this group have. workspace_of: a group of this
    rank whose activations and outputs are used instead of own ones; steps of both are then to be ordered on one stream.
    """

    _release = "moeflow_group_destroy"

    def __init__(self, contexts: Context | Sequence[Context], rank: int = 0, ranks: int = 1, *, capacity: int = 128, lanes: int = 1,
                 transport: str = "auto", unique_id: bytes | None = None, nccl_comm: int | None = None, timeout_ms: int = 0,
                 local_experts_max: int = 0, workspace_of: "Group | None" = None) -> None:
        super().__init__()
        self.workspace_of = workspace_of  # must outlive this group
        self.contexts = [contexts] if isinstance(contexts, Context) else list(contexts)
        self.rank, self.ranks, self.capacity, self.lanes = rank, ranks, capacity, lanes
        if unique_id is not None and len(unique_id) != library.UNIQUE_ID_BYTES:
            raise ValueError(f"unique_id has {len(unique_id)} bytes, not {library.UNIQUE_ID_BYTES}")
        carried = None if unique_id is None else ctypes.create_string_buffer(unique_id, library.UNIQUE_ID_BYTES)
        config = library.GroupConfig(rank=rank, ranks=ranks, capacity=capacity, lanes=lanes,
                                     transport=number_of(library.TRANSPORTS, transport, "transport"),
                                     unique_id=ctypes.addressof(carried) if carried else None, nccl_comm=nccl_comm,
                                     timeout_ms=timeout_ms, local_experts_max=local_experts_max,
                                     workspace_of=workspace_of.handle if workspace_of else None)
        handles = (ctypes.c_void_p * len(self.contexts))(*(context.handle for context in self.contexts))
        check(load().moeflow_group_create(handles, len(handles), ctypes.byref(config), ctypes.byref(self._handle)))

    def poll(self, timeout_ms: int = 0) -> None:
        """Waits for the steps enqueued so far; raises Error when they do not finish, or a peer failed. Any thread."""
        check(load().moeflow_poll(self.handle, int32(timeout_ms, "timeout_ms")))

    def abort(self) -> None:
        """Gives the group up, from any thread."""
        check(load().moeflow_abort(self.handle))


class Layer(Handle):
    """One MoE layer of a group. places[e][j] is (owner rank << 16 | local slot) of replica j of expert e, or -1."""

    _release = "moeflow_layer_destroy"

    def __init__(self, group: Group, context: Context | None = None, *, combine: str = "plan",
                 places: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__()
        self.group, self.context, self._bound = group, context or group.contexts[0], ()
        config = library.LayerConfig(combine=number_of(library.COMBINES, combine, "combine"), replicas=1)
        if places is not None:
            replicas = len(places[0]) if len(places) else 0
            if len(places) != self.context.experts or any(len(row) != replicas for row in places):
                raise ValueError(f"places needs {self.context.experts} rows of one length")
            flat = [int32(place, "a place") for row in places for place in row]
            config.places, config.replicas = (ctypes.c_int32 * len(flat))(*flat), replicas
        check(load().moeflow_layer_create(group.handle, self.context.handle, ctypes.byref(config), ctypes.byref(self._handle)))
        self.local_experts = load().moeflow_layer_local_experts(self._handle)

    @property
    def place(self) -> dict[str, object]:
        """Where arrays of this layer must be, as `address` takes it."""
        return {"on_gpu": self.context.on_gpu, "device": self.context.device}

    def plain(self, gate_up: object, down: object, order: str) -> library.Weights:
        """Plain weights of all local experts, checked."""
        c, n = self.context, self.local_experts
        return library.Weights(
            gate_up=address(gate_up, "gate_up", (n, 2 * c.intermediate, c.hidden), ("bfloat16",), **self.place),
            down=address(down, "down", (n, c.hidden, c.intermediate), ("bfloat16",), **self.place),
            order=number_of(library.ORDERS, order, "order"))

    def packed_bytes(self) -> tuple[int, int]:
        """Bytes of one local expert's packed gate_up and down; an Error where the layer takes no packed weights."""
        sizes = ctypes.c_int64(), ctypes.c_int64()
        check(load().moeflow_layer_packed_bytes(self.handle, ctypes.byref(sizes[0]), ctypes.byref(sizes[1])))
        return sizes[0].value, sizes[1].value

    def packed(self, gate_up: object, down: object, count: int, writable: bool = False) -> tuple[int, int]:
        """Addresses of packed weights of so many experts, checked: uint8 arrays [count, packed_bytes]."""
        return tuple(address(array, f"packed {name}", (count, size), ("uint8",), writable=writable, **self.place)
                     for name, array, size in zip(("gate_up", "down"), (gate_up, down), self.packed_bytes()))

    def pack(self, gate_up: object, down: object, to_gate_up: object, to_down: object, *, order: str = "gate_up",
             first: int = 0, stream: int = 0) -> None:
        """Enqueues the packing of local experts from `first` on, as many as to_gate_up and to_down have rows, from plain weights
        of all local experts; for `bind(..., packed=True)`. Only for plans built with `moeflow-gen build --packed`."""
        count = len(to_gate_up)
        to = self.packed(to_gate_up, to_down, count, writable=True)
        config = self.plain(gate_up, down, order)
        check(load().moeflow_layer_pack(self.handle, ctypes.byref(config), int32(first, "first"), count, *to, stream))

    def bind(self, gate_up: object, down: object, *, order: str = "gate_up", correction_bias: object = None,
             expert_load: object = None, packed: bool = False) -> None:
        """Borrows gate_up [local experts, 2I, H] and down [local experts, H, I], bf16, contiguous; kept alive by the layer.

        correction_bias is [E] float32, expert_load [local experts] int64 that each step adds to. With packed, both are
        uint8 arrays [local experts, packed_bytes] that `pack` has filled.
        """
        c, n, place = self.context, self.local_experts, self.place
        if packed:
            config = library.Weights(packed=1, **dict(zip(("gate_up", "down"), self.packed(gate_up, down, n))))
        else:
            config = self.plain(gate_up, down, order)
        if correction_bias is not None:
            config.correction_bias = address(correction_bias, "correction_bias", (c.experts,), ("float32",), **place)
        if expert_load is not None:
            config.expert_load = address(expert_load, "expert_load", (n,), ("int64",), writable=True, **place)
        check(load().moeflow_layer_bind(self.handle, ctypes.byref(config)))
        self._bound = (gate_up, down, correction_bias, expert_load)

    def arguments(self, hidden: object, out: object, *, ids: object = None, weights: object = None, logits: object = None,
                  tokens_max: int = 0, lane: int = 0, identity: bool = False) -> library.ForwardArgs:
        """What `forward` passes, checked; the stream is still to be set."""
        c, shape, place = self.context, getattr(hidden, "shape", ()), self.place
        tokens = int(shape[0]) if len(shape) else 0
        if (logits is None) == (ids is None) or (ids is None) != (weights is None):
            raise ValueError("give ids and weights, or logits")
        args = library.ForwardArgs(
            tokens=tokens, tokens_max=tokens_max, lane=lane, flags=library.FORWARD_IDENTITY if identity else 0,
            hidden=address(hidden, "hidden", (tokens, c.hidden), ("bfloat16",), **place),
            out=address(out, "out", (tokens, c.hidden), ("bfloat16",), writable=True, **place))
        if logits is not None:
            args.logits = address(logits, "logits", (tokens, c.experts), ("float32", "bfloat16"), **place)
            args.logits_dtype = library.DTYPES[dtype_of(logits)]
        else:
            args.ids = address(ids, "ids", (tokens, c.top_k), ("int32", "int64"), **place)
            args.ids_dtype = library.DTYPES[dtype_of(ids)]
            args.weights = address(weights, "weights", (tokens, c.top_k), ("float32",), **place)
        return args

    def experts_arguments(self, out: object = None, *, tokens_max: int = 0, lane: int = 0) -> library.ForwardArgs:
        """For measurement: what this rank alone computes between the exchanges, once more, on the rows that the last whole
        step of this lane received. With `out`, bf16 [ranks * R, H], also the weighted sums; R rows a rank are the power of two
        from tokens_max on, at most the capacity."""
        tokens = tokens_max or self.group.capacity
        rows = self.group.ranks * min(1 << (tokens - 1).bit_length(), self.group.capacity)
        args = library.ForwardArgs(tokens_max=tokens_max, lane=lane, flags=library.FORWARD_EXPERTS)
        if out is not None:
            args.out = address(out, "out", (rows, self.context.hidden), ("bfloat16",), writable=True, **self.place)
        return args

    def forward(self, hidden: object, out: object, *, stream: int | None = None, **arguments: object) -> None:
        """One step: hidden [tokens, H] to out [tokens, H], bf16, with ids and weights [tokens, K], or logits [tokens, E].

        Every rank of the group calls it, with the same tokens_max (0 means the capacity). On a GPU it only enqueues, on
        torch's current stream unless `stream` (a cudaStream_t as an int) says otherwise; the tensors must live until
        the step is done. On the CPU it runs the step.

        Bad arrays are a ValueError, and the step is joined with 0 rows and an error mark: peers finish, and their poll says so.
        """
        if stream is None and self.context.on_gpu and is_torch(hidden):
            stream = sys.modules["torch"].cuda.current_stream(self.context.device).cuda_stream
        try:
            args = self.arguments(hidden, out, **arguments)
        except ValueError:
            # as moeflow_forward does it with bad arguments of its own: tokens of -1 bring an error mark and no rows
            args = library.ForwardArgs(tokens=-1, tokens_max=arguments.get("tokens_max", 0), lane=arguments.get("lane", 0),
                                       stream=stream)
            load().moeflow_forward(self.handle, ctypes.byref(args))
            raise
        args.stream = stream
        check(load().moeflow_forward(self.handle, ctypes.byref(args)))


def prepare(layers: Sequence[Layer], tokens_max: int = 0) -> None:
    """Collective: compares the ranks' layers and loads all that forward needs for up to tokens_max tokens (0: capacity)."""
    handles = (ctypes.c_void_p * len(layers))(*(layer.handle for layer in layers))
    check(load().moeflow_prepare(handles, len(handles), int32(tokens_max, "tokens_max")))
