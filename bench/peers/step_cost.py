"""What a step of MoEFlow costs beside its experts, on one GPU: EP = 1, so that no row leaves the GPU and no peer is late.

Arms: `fused` (three launches) and `stepwise` (a kernel after the other) from ids and weights, the same from router logits
(`fused_logits`, `stepwise_logits`), `control` (`fused` once more) and `experts`, the experts kernel alone on the same rows. Each
arm is one graph of 16 layers with routings of their own. A layer minus `experts` is what routing, rows and flags cost; over two
GPUs the wire comes on top. Checked before and after timing: fused and stepwise give the same bits, and some rows agree with a
plain float32 reference. Writes JSON of kind "layer".
"""
from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import moeflow_arm
import torch
from bandwidth import build, read_rates
from common import (DEVICE, ROUTINGS, add_arguments, arm_record, captured, check, make_routings, point_header, print_point,
                    shape_from, sizes_to_read, time_graphs, write_result)
from moeflow import bench, library
from moeflow.objects import Group, Layer, prepare

STEPWISE = 4  # MOEFLOW_FORWARD_STEPWISE
ARMS = {"fused": ("ids", 0), "control": ("ids", 0), "stepwise": ("ids", STEPWISE), "fused_logits": ("logits", 0),
        "stepwise_logits": ("logits", STEPWISE)}
SAME_BITS = (("fused", "stepwise"), ("fused_logits", "stepwise_logits"))
CHECKED_ROWS = 2


@dataclass(frozen=True)
class Inputs:
    """Of one layer."""

    hidden: torch.Tensor  # (T, H) bf16
    ids: torch.Tensor  # (T, K) int32
    weights: torch.Tensor  # (T, K) float32
    logits: torch.Tensor  # (T, E) float32


class Model:
    """One layer's weights, the group whose steps are timed, and one group a routing that holds rows for `experts`."""

    def __init__(self, shape, capacity: int) -> None:
        self.context = bench.context_for(shape.hidden, shape.intermediate, shape.experts, shape.topk, 0)
        count, width, inner = shape.experts, shape.hidden, shape.intermediate
        self.gate_up = torch.empty(count, 2 * inner, width, dtype=torch.bfloat16, device=DEVICE).normal_(0, width**-0.5)
        self.down = torch.empty(count, width, inner, dtype=torch.bfloat16, device=DEVICE).normal_(0, inner**-0.5)
        self.layer = self.make_layer(capacity, None)
        self.holders = [self.make_layer(capacity, self.layer.group) for _ in range(ROUTINGS)]

    def make_layer(self, capacity: int, lender: Group | None) -> Layer:
        layer = Layer(Group(self.context, 0, 1, capacity=capacity, transport="local", workspace_of=lender))
        layer.bind(self.gate_up, self.down)
        prepare([layer])
        return layer

    def reference(self, inputs: Inputs, row: int) -> torch.Tensor:
        """One output row in float32, the activation rounded to bf16."""
        total = torch.zeros(inputs.hidden.shape[1], device=DEVICE)
        for expert, weight in zip(inputs.ids[row].tolist(), inputs.weights[row].tolist()):
            gate, up = (self.gate_up[expert].float() @ inputs.hidden[row].float()).chunk(2)
            total += weight * (self.down[expert].float() @ (torch.nn.functional.silu(gate) * up).bfloat16().float())
        return total


def launcher(layer: Layer, args: library.ForwardArgs) -> Callable[[], None]:
    def launch() -> None:
        args.stream = torch.cuda.current_stream().cuda_stream
        library.check(library.load().moeflow_forward(layer.handle, ctypes.byref(args)))

    return launch


def make_inputs(shape, tokens: int, ids: torch.Tensor, seed: int) -> Inputs:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    hidden = torch.randn(tokens, shape.hidden, device=DEVICE, generator=generator).bfloat16()
    weights = torch.randn(tokens, shape.topk, device=DEVICE, generator=generator).softmax(1)
    logits = torch.randn(tokens, shape.experts, device=DEVICE, generator=generator)
    logits.scatter_(1, ids.to(DEVICE).long(), 8 + weights.log())  # so that the router chooses them too
    return Inputs(hidden, ids.to(DEVICE), weights, logits)


def make_arms(model: Model, layers: list[Inputs], tokens: int, outs: dict[str, list[torch.Tensor]]) -> dict[str, list]:
    arms: dict[str, list] = {}
    for name, (kind, flags) in ARMS.items():
        arms[name] = []
        for inputs, out in zip(layers, outs[name]):
            given = {"logits": inputs.logits} if kind == "logits" else {"ids": inputs.ids, "weights": inputs.weights}
            args = model.layer.arguments(inputs.hidden, out, tokens_max=tokens, **given)
            args.flags = flags
            arms[name].append(launcher(model.layer, args))
    arms["experts"] = []
    for holder, inputs, out in zip(model.holders, layers, outs["experts"]):
        holder.forward(inputs.hidden, out[:tokens], ids=inputs.ids, weights=inputs.weights, tokens_max=tokens)
        arms["experts"].append(launcher(holder, holder.experts_arguments(out, tokens_max=tokens)))
    torch.cuda.synchronize()
    return arms


def measure_point(model: Model, shape, tokens: int, args: argparse.Namespace, rates) -> dict:
    routings = make_routings(shape, tokens, args.skew, args.seed)
    layers = [make_inputs(shape, tokens, ids, args.seed + number) for number, ids in enumerate(routings)]
    rows = 1 << (tokens - 1).bit_length()
    outs = {name: [torch.empty(rows if name == "experts" else tokens, shape.hidden, dtype=torch.bfloat16, device=DEVICE)
                   for _ in layers] for name in (*ARMS, "experts")}

    def check_outputs(graphs) -> None:
        for name, graph in graphs.items():
            for out in outs[name]:
                out.fill_(float("nan"))
            graph.replay()
        torch.cuda.synchronize()
        for left, right in SAME_BITS:
            for number, (one, other) in enumerate(zip(outs[left], outs[right])):
                if not torch.equal(one, other):
                    raise SystemExit(f"T={tokens}, routing {number}: {left} and {right} differ")
        for number, inputs in enumerate(layers[:CHECKED_ROWS]):
            row = (tokens - 1) * (number % 2)
            for name in ("fused", "experts"):
                check(f"T={tokens} {name}, routing {number}", outs[name][number][row], model.reference(inputs, row), 1e-2)

    with captured(make_arms(model, layers, tokens, outs)) as graphs:
        check_outputs(graphs)
        samples = time_graphs(graphs, ROUTINGS, args.rounds, args.seed)
        check_outputs(graphs)
    point = point_header(tokens, args, shape, rates, "floor_us")
    records = {name: arm_record(values, samples["fused"], point["floor_us"]) for name, values in samples.items()}
    return {**point, "experts_us": records["experts"]["us"], "arms": records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, rounds=40)
    args = parser.parse_args()
    if not args.moeflow:
        parser.error("--moeflow: the path of libmoeflow")
    shape = shape_from(parser, args, 1)
    library.load(args.moeflow)
    rates = [[rate] for rate in read_rates(args.read_bandwidth or build(), 0, sizes_to_read(args, shape))]
    model, points = Model(shape, max(args.tokens)), []
    for place, tokens in enumerate(args.tokens):
        points.append(measure_point(model, shape, tokens, args, rates[place]))
        print_point(points[-1], "floor_us")
        beside = {name: points[-1]["arms"][name]["us"] - points[-1]["experts_us"] for name in ARMS}
        print("  beside the experts: " + ", ".join(f"{name} {us:.1f} us" for name, us in beside.items()), flush=True)
        if args.json:
            write_result(args.json, "layer", moeflow_arm.git_of(moeflow_arm.load()), shape, args, points)
    model.layer.group.poll(1000)


if __name__ == "__main__":
    main()
