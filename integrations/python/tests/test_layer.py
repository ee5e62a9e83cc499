"""The binding on the CPU backend, against a plain numpy layer. Needs numpy, libmoeflow and moeflow-gen; no GPU."""
from __future__ import annotations

import json
import sys
import tempfile
import threading
import unittest
import unittest.mock
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

try:
    import numpy as np
except ImportError:
    raise unittest.SkipTest("numpy is not installed") from None

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import moeflow  # noqa: E402

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 256, 128, 6, 2, 5
YAML = f"""moeflow: 1
name: python-test
hidden: {HIDDEN}
intermediate: {INTERMEDIATE}
experts: {EXPERTS}
top_k: {TOP_K}
activation: swiglu
router: {{score: softmax}}
weights: {{dtype: bf16}}
"""
TOLERANCE = 2e-3  # relative L2 of a row


def random_bf16(generator, *shape, deviation=1.0):
    return moeflow.to_bf16(generator.standard_normal(shape, dtype=np.float32) * np.float32(deviation))


def rounded(values):
    return moeflow.from_bf16(moeflow.to_bf16(values))


def reference(hidden, ids, weights, gate_up, down, ranks):
    """Token by token: bf16 activations, each owner's sum rounded to bf16, owners added in ascending rank."""
    hidden, gate_up, down = (moeflow.from_bf16(array).astype(np.float64) for array in (hidden, gate_up, down))
    owner = [next(r for r in range(ranks) if r * EXPERTS // ranks <= e < (r + 1) * EXPERTS // ranks) for e in range(EXPERTS)]
    out = np.zeros(hidden.shape, np.float32)
    for token, row in enumerate(hidden):
        sums = {}
        for expert, weight in zip(ids[token], weights[token]):
            if not 0 <= expert < EXPERTS or weight == 0:
                continue
            gate, up = np.split(gate_up[expert] @ row, 2)
            value = down[expert] @ rounded(gate / (1 + np.exp(-gate)) * up)
            sums[owner[expert]] = sums.get(owner[expert], 0) + np.float64(weight) * value
        for rank in sorted(sums):
            out[token] += rounded(sums[rank])
    return out


class Inputs:
    def __init__(self, seed, tokens):
        generator = np.random.default_rng(seed)
        self.hidden = random_bf16(generator, tokens, HIDDEN)
        self.ids = np.stack([generator.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
        self.weights = generator.random((tokens, TOP_K), dtype=np.float32)
        self.out = np.full((tokens, HIDDEN), 0x7FC0, np.uint16)


def make_weights():
    generator = np.random.default_rng(0)
    return (random_bf16(generator, EXPERTS, 2 * INTERMEDIATE, HIDDEN, deviation=HIDDEN**-0.5),
            random_bf16(generator, EXPERTS, HIDDEN, INTERMEDIATE, deviation=INTERMEDIATE**-0.5))


def spec_text():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.yaml")
        path.write_text(YAML)
        return moeflow.spec_text(str(path))


class LayerTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.spec = spec_text()
        cls.gate_up, cls.down = make_weights()

    def assert_close(self, bits, expected):
        actual = moeflow.from_bf16(bits)
        error = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
        self.assertTrue(np.all(error <= TOLERANCE), f"relative L2 by row: {error}")

    def run_rank(self, context, rank, ranks, unique_id, inputs, errors, gate_up):
        """One rank of a local group, in its thread."""
        try:
            with moeflow.Group(context, rank, ranks, capacity=8, transport="local", unique_id=unique_id) as group:
                with moeflow.Layer(group) as layer:
                    first, last = rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks
                    layer.bind(gate_up[first:last], self.down[first:last])
                    moeflow.prepare([layer])
                    layer.forward(inputs.hidden, inputs.out, ids=inputs.ids, weights=inputs.weights)
                    group.poll(10000)
        except Exception as error:  # reported by the main thread
            errors.append(error)

    def run_ranks(self, ranks, tokens, gate_up=None):
        inputs = [Inputs(rank + 1, tokens[rank]) for rank in range(ranks)]
        unique_id, errors = moeflow.unique_id("local"), []
        gate_up = self.gate_up if gate_up is None else gate_up
        with moeflow.open(backend="cpu", spec=self.spec) as context:
            threads = [threading.Thread(target=self.run_rank, args=(context, rank, ranks, unique_id, inputs[rank], errors, gate_up))
                       for rank in range(ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return inputs

    def expected(self, inputs, ranks):
        return reference(inputs.hidden, inputs.ids, inputs.weights, self.gate_up, self.down, ranks)

    def test_one_rank(self):
        inputs, = self.run_ranks(1, [TOKENS])
        self.assert_close(inputs.out, self.expected(inputs, 1))

    def test_two_ranks_of_uneven_size(self):
        for inputs in self.run_ranks(2, [TOKENS, 1]):
            self.assert_close(inputs.out, self.expected(inputs, 2))

    def test_comparison_can_fail(self):
        swapped = np.concatenate(np.split(self.gate_up, 2, axis=1)[::-1], axis=1).copy()
        inputs, = self.run_ranks(1, [TOKENS], swapped)
        with self.assertRaises(AssertionError):
            self.assert_close(inputs.out, self.expected(inputs, 1))

    def test_skipped_choices(self):
        """ids out of range and weights of zero contribute nothing; a token with none of its choices left gives zeros."""
        with moeflow.open(backend="cpu", spec=self.spec) as context, self.group(context) as group, self.layer(group) as layer:
            inputs = Inputs(9, 3)
            inputs.ids[0] = [-1, EXPERTS]
            inputs.weights[1] = [0, 1]
            layer.forward(inputs.hidden, inputs.out, ids=inputs.ids, weights=inputs.weights)
            self.assertFalse(inputs.out[0].any())
            self.assert_close(inputs.out[1:], self.expected(inputs, 1)[1:])

    def test_places_leave_experts_out(self):
        """A group of one rank in which only experts 2 and 3 have a place: what one of three ranks computes."""
        with moeflow.open(backend="cpu", spec=self.spec) as context, self.group(context) as group:
            places = [[e - 2 if e in (2, 3) else -1] for e in range(EXPERTS)]
            with moeflow.Layer(group, places=places) as layer:
                self.assertEqual(layer.local_experts, 2)
                layer.bind(self.gate_up[2:4], self.down[2:4])
                moeflow.prepare([layer])
                inputs = Inputs(4, TOKENS)
                inputs.ids[0], inputs.ids[1] = [2, 0], [0, 1]
                layer.forward(inputs.hidden, inputs.out, ids=inputs.ids, weights=inputs.weights)
                inputs.weights[(inputs.ids != 2) & (inputs.ids != 3)] = 0
                expected = self.expected(inputs, 1)
                some = np.any(expected != 0, axis=1)
                self.assertFalse(some[1])
                self.assertFalse(inputs.out[~some].any())
                self.assert_close(inputs.out[some], expected[some])

    def test_router_and_expert_load(self):
        with moeflow.open(backend="cpu", spec=self.spec) as context, self.group(context) as group, moeflow.Layer(group) as layer:
            load = np.zeros(EXPERTS, np.int64)
            layer.bind(self.gate_up, self.down, expert_load=load)
            moeflow.prepare([layer])
            inputs = Inputs(5, TOKENS)
            logits = np.random.default_rng(6).standard_normal((TOKENS, EXPERTS), dtype=np.float32)
            layer.forward(inputs.hidden, inputs.out, logits=logits)
            inputs.ids = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K].astype(np.int32)
            scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            inputs.weights = np.take_along_axis(scores, inputs.ids, 1)
            self.assert_close(inputs.out, self.expected(inputs, 1))
            self.assertEqual(load.tolist(), np.bincount(inputs.ids.ravel(), minlength=EXPERTS).tolist())

    def group(self, context, **config):
        return moeflow.Group(context, capacity=8, transport="local", unique_id=moeflow.unique_id("local"), **config)

    def layer(self, group):
        layer = moeflow.Layer(group)
        layer.bind(self.gate_up, self.down)
        moeflow.prepare([layer])
        return layer

    def test_errors_carry_status_and_message(self):
        with moeflow.open(backend="cpu", spec=self.spec) as context, self.group(context) as group, self.layer(group) as layer:
            inputs = Inputs(7, TOKENS)
            with self.assertRaises(moeflow.Error) as caught:
                layer.forward(inputs.hidden, inputs.out, ids=inputs.ids, weights=inputs.weights, tokens_max=9)
            self.assertEqual((caught.exception.name, caught.exception.status), ("MOEFLOW_ERROR_CAPACITY", 4))
            self.assertIn("9", caught.exception.message)
            self.assertIn("8", caught.exception.message)
            with self.assertRaises(moeflow.Error) as caught:
                context.close()
            self.assertEqual(caught.exception.name, "MOEFLOW_ERROR_STATE")
            with self.assertRaises(moeflow.Error) as caught, moeflow.Layer(group) as unbound:
                unbound.forward(inputs.hidden, inputs.out, ids=inputs.ids, weights=inputs.weights)
            self.assertEqual(caught.exception.name, "MOEFLOW_ERROR_STATE")

    def test_bad_spec(self):
        with self.assertRaises(moeflow.Error) as caught:
            moeflow.open(backend="cpu", spec="hidden lots\n")
        self.assertEqual(caught.exception.name, "MOEFLOW_ERROR_FORMAT")

    def test_wrong_arrays(self):
        with moeflow.open(backend="cpu", spec=self.spec) as context, self.group(context) as group, self.layer(group) as layer:
            i = Inputs(8, TOKENS)
            good = {"hidden": i.hidden, "out": i.out, "ids": i.ids, "weights": i.weights}
            bad = {"hidden": i.hidden[:, ::2], "out": i.out[:3], "ids": i.ids.astype(np.int16), "weights": i.weights.tolist()}
            for name, array in bad.items():
                with self.subTest(name), self.assertRaises(ValueError):
                    layer.forward(**{**good, name: array})
            with self.assertRaises(ValueError):
                layer.forward(i.hidden, i.out, ids=i.ids)
            with self.assertRaises(ValueError):
                layer.bind(self.gate_up[:2], self.down[:2])

    def test_wrong_names_and_numbers(self):
        """A name that does not exist is told with those that do; an integer beyond 32 bits is not cut to them."""
        with moeflow.open(backend="cpu", spec=self.spec) as context, self.group(context) as group, self.layer(group) as layer:
            i = Inputs(9, TOKENS)
            wrong = {"backend": lambda: moeflow.open(backend="tpu", spec=self.spec),
                     "a name with a NUL": lambda: moeflow.open(backend="cpu", model="a\0b"),
                     "a model that is no string": lambda: moeflow.open(backend="cpu", model=3),
                     "transport": lambda: moeflow.Group(context, transport="nvlink"),
                     "capacity": lambda: moeflow.Group(context, capacity=2**32 + 8, transport="local"),
                     "combine": lambda: moeflow.Layer(group, combine="tree"),
                     "places": lambda: moeflow.Layer(group, places=[[2**32 + e] for e in range(EXPERTS)]),
                     "order": lambda: layer.bind(self.gate_up, self.down, order="down"),
                     "prepare": lambda: moeflow.prepare([layer], 2**32),
                     "tokens_max": lambda: layer.forward(i.hidden, i.out, ids=i.ids, weights=i.weights, tokens_max=2**32),
                     "no hidden": lambda: layer.forward(None, i.out, ids=i.ids, weights=i.weights)}
            for name, call in wrong.items():
                with self.subTest(name), self.assertRaises(ValueError):
                    call()
            moeflow.Layer(group, places=np.arange(EXPERTS, dtype=np.int32).reshape(EXPERTS, 1)).close()

    def test_packed_weights_are_for_gpus(self):
        with moeflow.open(backend="cpu", spec=self.spec) as context, self.group(context) as group, self.layer(group) as layer:
            empty = np.zeros((1, 16), np.uint8)
            for call in (layer.packed_bytes, lambda: layer.bind(empty, empty, packed=True),
                         lambda: layer.pack(self.gate_up, self.down, empty, empty)):
                with self.assertRaises(moeflow.Error) as caught:
                    call()
                self.assertEqual(caught.exception.name, "MOEFLOW_ERROR_UNSUPPORTED")
                self.assertIn("CPU backend", caught.exception.message)

    def test_experts_once_more(self):
        """Needs a whole step first; an `out` of another shape than [ranks * R, H] is told."""
        with moeflow.open(backend="cpu", spec=self.spec) as context, self.group(context) as group, self.layer(group) as layer:
            forward = lambda args: moeflow.library.check(moeflow.load().moeflow_forward(layer.handle, args))  # noqa: E731
            inputs, out = Inputs(9, TOKENS), np.full((8, HIDDEN), 0x7FC0, np.uint16)
            args = layer.experts_arguments(out, tokens_max=TOKENS)
            with self.assertRaises(moeflow.Error) as caught:
                forward(args)
            self.assertEqual(caught.exception.name, "MOEFLOW_ERROR_STATE")
            layer.forward(inputs.hidden, inputs.out, ids=inputs.ids, weights=inputs.weights, tokens_max=TOKENS)
            forward(args)
            np.testing.assert_array_equal(out[:TOKENS], inputs.out)
            self.assertFalse(out[TOKENS:].any())
            with self.assertRaisesRegex(ValueError, "shape"):
                layer.experts_arguments(out[:TOKENS], tokens_max=TOKENS)

    def test_wrong_arrays_join_the_step(self):
        """Else the peers would wait for this rank until their time is out."""
        unique_id, polled = moeflow.unique_id("local"), [None, None]

        def rank(context, number):
            inputs = Inputs(number, TOKENS)
            with moeflow.Group(context, number, 2, capacity=8, transport="local", unique_id=unique_id) as group, \
                    moeflow.Layer(group) as layer:
                first = number * (EXPERTS // 2)
                layer.bind(self.gate_up[first:first + EXPERTS // 2], self.down[first:first + EXPERTS // 2])
                moeflow.prepare([layer])
                try:
                    layer.forward(inputs.hidden, inputs.out, ids=inputs.ids if number else inputs.ids[:2], weights=inputs.weights)
                except ValueError as error:
                    polled[number] = error
                else:
                    with self.assertRaises(moeflow.Error) as caught:
                        group.poll(5000)
                    polled[number] = caught.exception

        with moeflow.open(backend="cpu", spec=self.spec) as context:
            threads = [threading.Thread(target=rank, args=(context, number)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertIsInstance(polled[0], ValueError)
        self.assertEqual(polled[1].name, "MOEFLOW_ERROR_PEER")
        self.assertIn("rank 0", polled[1].message)


class BenchTest(unittest.TestCase):
    """bench_layer's "experts" arm on the CPU backend; the arms that need GPUs are run by the tools that time them."""

    def spec(self, dtype="bf16", seed=3):
        generator, ranks, tokens = np.random.default_rng(seed), 2, 3
        rows, (gate_up, down) = ranks * tokens, make_weights()
        ids = np.stack([generator.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.int32)
        ids[2] = [0, 1]  # all of rank 0's
        experts = SimpleNamespace(hidden=random_bf16(generator, rows, HIDDEN), scale=None, ids=ids,
                                  weights=generator.random((rows, TOP_K), dtype=np.float32),
                                  out=np.full((rows, HIDDEN), 0x7FC0, np.uint16))
        first = EXPERTS // ranks
        Shape = namedtuple("Shape", "hidden intermediate experts topk ep dtype")
        return SimpleNamespace(library=moeflow.load()._name, arms=("nccl", "experts"), rank=1, capacity=4, layer=None,
                               shape=Shape(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, ranks, dtype),
                               gate_up=gate_up[first:], down=down[first:], experts=experts), gate_up, down

    def test_experts_arm(self):
        """Two arms at a time: each keeps the rows and lists of its own routing, and writes every row."""
        made = [self.spec(seed=seed) for seed in (3, 4)]
        with unittest.mock.patch.object(moeflow.bench, "context_of", lambda _: moeflow.open(backend="cpu", spec=spec_text())):
            calls = [moeflow.bench_layer(spec) for spec, _, _ in made]
        for _ in range(2):
            for call, (spec, gate_up, down) in zip(calls, made):
                self.assertEqual(list(call), ["experts"])
                weights = np.where(spec.experts.ids >= EXPERTS // 2, spec.experts.weights, 0)
                expected = reference(spec.experts.hidden, spec.experts.ids, weights, gate_up, down, 1)
                spec.experts.out[:] = 0x7FC0
                call["experts"](0)
                actual = moeflow.from_bf16(spec.experts.out)
                self.assertFalse(actual[2].any())
                self.assertLessEqual(np.linalg.norm(actual - expected), TOLERANCE * np.linalg.norm(expected))

    def test_fp8_has_no_arms_yet(self):
        self.assertEqual(moeflow.bench_layer(self.spec("fp8")[0]), {})


class LibraryTest(unittest.TestCase):
    def test_build_info(self):
        info = moeflow.build_info()
        self.assertLessEqual({"version", "sha", "dirty", "trees"}, info.keys())
        self.assertIsInstance(info["dirty"], bool)
        json.dumps(info)

    def test_bf16_round_trip(self):
        values = np.array([0, -0.0, 1, -2.5, 3.140625, np.inf, -np.inf], np.float32)
        self.assertTrue(np.array_equal(moeflow.from_bf16(moeflow.to_bf16(values)), values))
        self.assertTrue(np.isnan(moeflow.from_bf16(moeflow.to_bf16(np.array([np.nan], np.float32)))[0]))
        halfway = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)  # ties to even
        self.assertEqual(moeflow.to_bf16(halfway).tolist(), [0x3F80, 0x3F82])

    def test_torch_is_not_imported(self):
        import subprocess
        code = "import sys; sys.path.insert(0, sys.argv[1]); import moeflow; sys.exit('torch' in sys.modules)"
        self.assertEqual(subprocess.call([sys.executable, "-c", code, str(Path(__file__).resolve().parents[1])]), 0)


if __name__ == "__main__":
    unittest.main()
