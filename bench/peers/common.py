"""What the Python tools share: sizes of a layer, rotated routings, graph timing, statistics and the result file."""
from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

DEVICE = "cuda"
ROUTINGS = 16  # layers in one graph, each with its own routing and hidden states
SPIN_CYCLES = 800_000  # about 0.4 ms on the device, in which the host enqueues a whole sample
SAME = float("inf")  # --skew same


@dataclass(frozen=True)
class Shape:
    """Sizes of one routed layer: H, I, E, K, the number of expert-parallel ranks, and the weight type."""

    hidden: int
    intermediate: int
    experts: int
    topk: int
    ep: int
    dtype: str  # "bf16", or "fp8": e4m3 with one scale per 128 x 128 weights and per 128 activations

    def __post_init__(self) -> None:
        if self.hidden % 128 or self.intermediate % 128:
            raise ValueError("hidden and intermediate must be multiples of 128")
        if self.experts % self.ep or not 0 < self.topk <= self.experts:
            raise ValueError("experts must be a multiple of ep, and topk at most experts")

    @property
    def fp8(self) -> bool:
        return self.dtype == "fp8"

    @property
    def local_experts(self) -> int:
        return self.experts // self.ep

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's three matrices, with their scales."""
        weights = 3 * self.hidden * self.intermediate
        return weights + weights // (128 * 128) * 4 if self.fp8 else 2 * weights


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The options that both tools share; `rounds` is the default of --rounds."""
    parser.add_argument("--model", default="glm-5.3-flash", help="name written to the result (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=4096, help="H (default: %(default)s)")
    parser.add_argument("--intermediate", type=int, default=2048, help="I, per expert (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=288, help="E, of all ranks (default: %(default)s)")
    parser.add_argument("--topk", type=int, default=8, help="K (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="weights (default: %(default)s)")
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")],
                        default=[1, 2, 4, 8, 16, 32, 64, 128],
                        help="T, tokens per rank, comma-separated (default: 1,2,4,8,16,32,64,128)")
    parser.add_argument("--budget", type=float, default=120, help="seconds of tuning in all (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="timed replays per arm (default: %(default)s)")
    parser.add_argument("--skew", type=lambda text: SAME if text == "same" else float(text), default=0.0,
                        help="expert popularity 1/place^SKEW; 0 is uniform; same: all rows pick the same experts of one rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--moeflow", metavar="LIB", help="path of libmoeflow: add MoEFlow's arms (moeflow_arm.py)")
    parser.add_argument("--read-bandwidth", type=Path, metavar="BINARY",
                        help="compiled read_bandwidth.cu (default: build it with nvcc, once)")
    parser.add_argument("--json", type=Path, help="also write the result here")


def shape_from(parser: argparse.ArgumentParser, args: argparse.Namespace, ep: int) -> Shape:
    """The layer that the options describe; a usage error if there is no such layer."""
    try:
        return Shape(args.hidden, args.intermediate, args.experts, args.topk, ep, args.dtype)
    except ValueError as error:
        parser.error(str(error))


def make_routings(shape: Shape, tokens: int, skew: float, seed: int, count: int = ROUTINGS) -> list[torch.Tensor]:
    """Expert ids (ep * tokens, K) int32 on the host, the same on every rank.

    Each row draws K different experts without replacement, by popularity: top-K of log-popularity plus Gumbel noise. With
    SAME, all rows of a routing have the same K experts of one rank, others in the next routing.
    """
    generator = torch.Generator().manual_seed(seed)
    place = torch.randperm(shape.experts, generator=generator) + 1
    rows = shape.ep * tokens
    routings = []
    for _ in range(count):
        if skew == SAME:
            same = torch.randperm(shape.local_experts, generator=generator)[:shape.topk]
            routings.append(same.int().expand(rows, -1).contiguous())
            continue
        gumbel = -torch.empty(rows, shape.experts).exponential_(generator=generator).log()
        routings.append((gumbel - skew * place.log()).topk(shape.topk).indices.int())
    return routings


def routing_name(skew: float) -> str:
    return "same" if skew == SAME else f"zipf-{skew}" if skew else "uniform"


def active_experts(ids: torch.Tensor, shape: Shape) -> list[int]:
    """How many experts have a row, for each rank."""
    hit = torch.bincount(ids.flatten().long(), minlength=shape.experts) > 0
    return hit.view(shape.ep, shape.local_experts).sum(1).tolist()


def slowest_rank(ids: torch.Tensor, shape: Shape) -> int:
    """The rank with the most weights to read."""
    active = active_experts(ids, shape)
    return active.index(max(active))


def as_slowest(ids: torch.Tensor, shape: Shape, rank: int) -> torch.Tensor:
    """The same routing with the ranks renumbered, so that `rank` is the one with the most weights to read."""
    return (ids + (rank - slowest_rank(ids, shape)) * shape.local_experts) % shape.experts


def floor_bytes(routings: Sequence[torch.Tensor], shape: Shape) -> int:
    """Weight bytes that the slowest rank must read, mean over the routings."""
    return sum(max(active_experts(ids, shape)) for ids in routings) * shape.expert_bytes // len(routings)


def sizes_to_read(args: argparse.Namespace, shape: Shape) -> list[int]:
    """floor_bytes() of the routings of each T."""
    return [floor_bytes(make_routings(shape, tokens, args.skew, args.seed), shape) for tokens in args.tokens]


def floor_us(routings: Sequence[torch.Tensor], shape: Shape, rates: Sequence[float]) -> float:
    """Time of the slowest rank to only read its active experts, mean over the routings; `rates` in GB/s, by rank."""
    return statistics.fmean(max(active * shape.expert_bytes / rate / 1e3
                                for active, rate in zip(active_experts(ids, shape), rates)) for ids in routings)


def point_header(tokens: int, args: argparse.Namespace, shape: Shape, rates: Sequence[float], bound: str) -> dict:
    """What a point says before its arms. `bound` is what its kind of result calls the floor."""
    routings = make_routings(shape, tokens, args.skew, args.seed)
    return {"tokens": tokens, "dtype": args.dtype, "routing": routing_name(args.skew),
            "bytes": floor_bytes(routings, shape), "read_gbs": round(min(rates), 1),
            bound: round(floor_us(routings, shape, rates), 2)}


def capture(layers: Sequence[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """One graph of all the layers in order. They run twice before, so that nothing compiles or connects inside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for layer in layers:
                layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for layer in layers:
            layer()
    torch.cuda.synchronize()
    return graph


def release(graphs: Iterable[torch.cuda.CUDAGraph]) -> None:
    """Destroys graphs now: left to the garbage collector, they may go while another is captured, which CUDA refuses."""
    torch.cuda.synchronize()
    for graph in graphs:
        graph.reset()


@contextlib.contextmanager
def captured(launchers: dict[str, list[Callable[[], None]]]) -> Iterator[dict[str, torch.cuda.CUDAGraph]]:
    """One graph per arm, destroyed at the end."""
    graphs = {name: capture(layers) for name, layers in launchers.items()}
    try:
        yield graphs
    finally:
        release(graphs.values())


def hold_stream() -> None:
    """Occupies the stream for a moment, so that launching costs nothing inside the timed interval."""
    torch.cuda._sleep(SPIN_CYCLES)


def time_graphs(graphs: dict[str, torch.cuda.CUDAGraph], layers: int, rounds: int, seed: int,
                line_up: Callable[[], None] = hold_stream) -> dict[str, list[float]]:
    """Microseconds per layer of each replay of each graph.

    Every round replays all graphs once, in an order that the seed decides and that all ranks share.
    """
    order, shuffler = list(graphs), random.Random(seed)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(rounds + 2):  # two to warm up
        shuffler.shuffle(order)
        for name in order:
            line_up()
            begin.record()
            graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            if round_ >= 2:
                samples[name].append(begin.elapsed_time(end) * 1e3 / layers)
    return samples


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and its sign-test interval, which covers at least 95 % whatever the distribution (from 6 values on)."""
    ordered, count = sorted(values), len(values)
    below, tail = 0, 0.0
    while tail + math.comb(count, below) / 2**count <= 0.025:
        tail += math.comb(count, below) / 2**count
        below += 1
    median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return median, ordered[max(below - 1, 0)], ordered[min(count - below, count - 1)]


def arm_record(samples: list[float], first: list[float], floor: float) -> dict:
    """One arm of a result: microseconds, interval, floor / us, and the paired difference from the table's first arm."""
    median, low, high = median_interval(samples)
    delta, delta_low, delta_high = median_interval([mine - other for mine, other in zip(samples, first)])
    return {"us": round(median, 2), "ci95": [round(low, 2), round(high, 2)], "checked": True,
            "fraction": round(floor / median, 4),
            "minus_first_us": round(delta, 2), "minus_first_ci95": [round(delta_low, 2), round(delta_high, 2)],
            "samples_us": [round(value, 2) for value in samples]}


def print_point(point: dict, bound: str) -> None:
    """The floor, called `bound` in the point; per arm us per layer, interval, over the floor, against the first arm."""
    floor = point[bound]
    print(f"T={point['tokens']}: {bound} {floor:.1f}, {point['bytes'] / 1e9:.3f} GB at {point['read_gbs']:.0f} GB/s")
    for name, arm in point["arms"].items():
        (low, high), (minus_low, minus_high) = arm["ci95"], arm["minus_first_ci95"]
        print(f"  {name:14s} {arm['us']:9.1f} us  [{low:.1f}, {high:.1f}]  {arm['us'] / floor:6.3f} x floor  "
              f"{arm['minus_first_us']:+8.1f} [{minus_low:+.1f}, {minus_high:+.1f}]", flush=True)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 norm of the difference over that of `expected`, a float32 tensor."""
    return ((actual.float() - expected).norm() / expected.norm()).item()


def check(what: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Ends the tool with exit code 4 when the relative error is above the tolerance; NaN never passes."""
    error = relative_error(actual, expected)
    if not error <= tolerance:
        print(f"{what}: relative error {error:.2e} is above {tolerance:.0e}", file=sys.stderr, flush=True)
        raise SystemExit(4)


def command_output(*command: str) -> str:
    """Standard output of a command, or nothing if it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip()


def git_state() -> dict:
    """Commit of the current folder and whether its tree is dirty; nulls outside a repository."""
    sha = command_output("git", "rev-parse", "--verify", "--quiet", "HEAD")
    return {"sha": sha or None, "dirty": bool(command_output("git", "status", "--porcelain")) if sha else None}


def short_path(argument: str) -> str:
    """An absolute path from the current folder if it lies below, else its last name: a result names no folders of its machine."""
    name, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    if not value.startswith("/"):
        return argument
    path = Path(value)
    return name + equals + (str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name)


def write_result(path: Path, kind: str, git: dict, shape: Shape, args: argparse.Namespace, points: list[dict]) -> None:
    """Writes a result of this kind in the form that bench/README.md gives, with what is needed to repeat it.

    `git` tells which MoEFlow was measured.
    """
    query = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    environment = {
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "triton": triton.__version__, "nccl": torch.cuda.nccl.version(),
        "nccl_env": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "gpus": command_output("nvidia-smi", f"--query-gpu={query}", "--format=csv").splitlines(),
        "topology": command_output("nvidia-smi", "topo", "-m").splitlines(),
    }
    gpu = torch.cuda.get_device_name(0).removeprefix("NVIDIA ").lower().replace(" ", "-")
    document = {
        "schema": "moeflow-bench/1", "kind": kind, "git": git,
        "machine": f"{gpu}x{torch.cuda.device_count()}", "model": args.model, "ep": shape.ep,
        "command": shlex.join([Path(sys.argv[0]).name, *map(short_path, sys.argv[1:])]), "seed": args.seed, "shape": asdict(shape),
        "layers_per_replay": ROUTINGS, "environment": environment, "points": points,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
