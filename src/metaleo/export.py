"""Export of a trained learner to ONNX: the graph takes a support set and queries, and adapts inside.

JAX traces `adapt` and the adapted head, inner gradients included, to a jaxpr; each of its operations becomes an ONNX
operator. Whatever depends on no input is computed during export, so weights are constants of the graph.
"""

import hashlib
import string
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import symbolic_shape
from jax.extend import core
from jaxtyping import Array, Float, Int

from metaleo import __version__
from metaleo._io.files import atomic_write
from metaleo.checkpoints import TrainedModel, load_model, training_config
from metaleo.errors import BadInput, needs_extra
from metaleo.learners.leo import LEO
from metaleo.learners.registry import Structure
from metaleo.tasks.task import labelled

if TYPE_CHECKING:
    import onnx

OPSET, IR_VERSION = 18, 8
"""From December 2022: old enough for current runtimes, new enough that reductions take their axes as inputs."""
TOLERANCE = 1e-4
"""Largest allowed difference between a probability of the exported graph and that of JAX."""
INPUTS = ("support", "query")
OUTPUT = "probabilities"
QUERIES = "queries"
"""Name of the dimension whose size is known only when the graph runs."""

Predict = Callable[[Float[Array, "example dim"], Float[Array, "query dim"]], Float[Array, "query way"]]


def export_onnx(path: Path, out: Path, way: int | None = None, shot: int | None = None) -> dict[str, Any]:
    """Export the model in `path` to `out`, for one kind of task (by default that of its training); return its metadata.

    If onnxruntime is installed, the file is only written if its probabilities agree with those of JAX.
    """
    onnx = import_onnx()
    model = load_model(path)
    config = training_config(path, model)
    way, shot = config.way if way is None else way, config.shot if shot is None else shot
    check_exportable(model, path, way, shot)
    temperature = model.temperature(float(shot))
    predict = predictor(model, way, shot, temperature)
    facts = {
        "learner": model.structure.learner,
        "way": way,
        "shot": shot,
        "dim": model.structure.dim,
        "temperature": temperature,
        "trained_on": Path(config.data).name,
        "trained_for": config.kind,
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "metaleo": __version__,
        "jax": jax.__version__,
        **{name: model.header[name] for name in ("seed", "step", "validation_accuracy") if name in model.header},
    }
    made = build(predict, way * shot, model.structure, facts)
    onnx.checker.check_model(made, full_check=True)
    with atomic_write(out) as temporary:
        temporary.write_bytes(made.SerializeToString())
        difference = largest_difference(temporary, predict, way * shot, model.structure.dim)
        if difference is not None and not difference <= TOLERANCE:
            raise BadInput(f"the graph's probabilities differ from JAX's by {difference:.1e}; {out} was not written")
    size = out.stat().st_size
    return {**facts, "opset": OPSET, "nodes": len(made.graph.node), "bytes": size, "largest_difference": difference}


def check_exportable(model: TrainedModel, path: Path, way: int, shot: int) -> None:
    """Raise `BadInput` for tasks that the model cannot solve."""
    structure = model.structure
    if structure.noise is not None:
        raise BadInput(f"{path} predicts real targets; only classifiers are exported")
    if isinstance(model.learner, LEO) and model.learner.anchor is not None and model.learner.anchor.steps:
        raise BadInput(
            f"{path} cannot be exported: its regression solves linear systems, which ONNX has no operator for; a model "
            "trained with `anchor=centroid` can"
        )
    if way < 2 or shot < 1:
        raise BadInput(f"a task has at least 2 classes (`way=`) of 1 example (`shot=`), not {way} of {shot}")
    if structure.codes == "task" and way != structure.way:
        raise BadInput(f"{path} has one code for all {structure.way} classes; way={way} is not possible")


def predictor(model: TrainedModel, way: int, shot: int, temperature: float) -> Predict:
    """The function to export: from rows as they come, support set ordered by class, to calibrated probabilities."""

    def predict(support: Float[Array, "example dim"], query: Float[Array, "query dim"]) -> Float[Array, "query way"]:
        support, query = model.prepare(support), model.prepare(query)
        batch = labelled(support, np.repeat(np.arange(way), shot), way)
        logits = jax.vmap(model.learner.adapt(batch).head)(query)
        return jax.nn.softmax(logits / temperature)

    return predict


def largest_difference(path: Path, predict: Predict, examples: int, dim: int) -> float | None:
    """Largest difference between the probabilities of the file and of JAX on random rows; None without onnxruntime."""
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    support, query = (random.normal(size=(count, dim)).astype(np.float32) for count in (examples, 20))
    expected = np.asarray(jax.jit(predict)(jnp.asarray(support), jnp.asarray(query)))
    differences = []
    for queries in (1, 20):
        (found,) = session.run([OUTPUT], {"support": support, "query": query[:queries]})
        differences.append(np.abs(found - expected[:queries]).max())
    return float(np.max(differences))  # NaN if any of them is


def import_onnx() -> Any:
    with needs_extra("onnx"):
        import onnx.checker
        import onnx.helper
        import onnx.numpy_helper
    return onnx


def build(predict: Predict, examples: int, structure: Structure, facts: dict[str, Any]) -> "onnx.ModelProto":
    """The ONNX model of `predict`, for a fixed number of support examples and any number of queries."""
    helper = import_onnx().helper
    shapes = [(examples, structure.dim), (*symbolic_shape(QUERIES), structure.dim)]
    closed = jax.make_jaxpr(predict)(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    graph = Graph(structure.learner)
    (result,) = graph.add(closed, [Value(name, shape) for name, shape in zip(INPUTS, shapes, strict=True)])
    nodes, constants = graph.needed(result)
    nodes[-1].output[0] = OUTPUT

    def describe(name: str, shape: Shape, text: str) -> Any:
        sizes = [size if isinstance(size, int) else str(size) for size in shape]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype("float32")), sizes, text)

    inputs = [
        describe("support", shapes[0], "Feature vectors as they come, class by class: first all those of class 0."),
        describe("query", shapes[1], "Feature vectors as they come."),
    ]
    outputs = [describe(OUTPUT, closed.out_avals[0].shape, "Of each class, for each query.")]
    made = helper.make_graph(nodes, "metaleo", inputs, outputs, constants)
    model = helper.make_model(
        made, producer_name="metaleo", producer_version=__version__, ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )  # fmt: skip
    helper.set_model_props(model, {name: str(value) for name, value in facts.items()})
    return model


Shape = tuple[Any, ...]
"""Integers, and QUERIES as a symbolic size of JAX."""


class Value(NamedTuple):
    """An array that the graph computes. A size may be 1 where that of JAX is larger, because ONNX broadcasts too."""

    name: str
    shape: Shape


Known = np.ndarray | Value
"""A constant known during export, or a value that the graph computes; either may still need broadcasting."""

ALIKE = {
    "abs": "Abs", "add": "Add", "add_any": "Add", "and": "And", "div": "Div", "eq": "Equal", "exp": "Exp",
    "ge": "GreaterOrEqual", "gt": "Greater", "le": "LessOrEqual", "log": "Log", "logistic": "Sigmoid", "lt": "Less",
    "max": "Max", "min": "Min", "mul": "Mul", "neg": "Neg", "not": "Not", "or": "Or", "sign": "Sign",
    "sqrt": "Sqrt", "sub": "Sub", "tanh": "Tanh",
}  # fmt: skip
"""Elementwise operations that JAX and ONNX have in common."""
REDUCTIONS = {"reduce_sum": "ReduceSum", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin"}


class Graph:
    """Nodes in topological order, and constants; equal ones are shared, so nothing is computed twice."""

    def __init__(self, learner: str):
        self.onnx, self.learner = import_onnx(), learner
        self.nodes: dict[tuple[Any, ...], Any] = {}
        self.constants: dict[tuple[Any, ...], Any] = {}

    def add(self, closed: core.ClosedJaxpr, arguments: Sequence[Known]) -> list[Known]:
        """Add all operations of a jaxpr, applied to these arguments."""
        jaxpr = closed.jaxpr
        known: dict[Any, Known] = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= {var: np.asarray(value) for var, value in zip(jaxpr.constvars, closed.consts, strict=True)}

        def read(atom: Any) -> Known:
            return known[atom] if isinstance(atom, core.Var) else np.asarray(atom.val, atom.aval.dtype)

        for equation in jaxpr.eqns:
            results = self.apply(equation, [read(atom) for atom in equation.invars])
            known |= dict(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def apply(self, equation: core.JaxprEqn, arguments: list[Known]) -> list[Known]:
        """Add one operation; nested jaxprs are inlined, and operations on constants are computed now."""
        atoms: list[Any] = [*equation.invars, *equation.outvars]
        params, shapes = equation.params, [atom.aval.shape for atom in atoms]
        if equation.primitive.name == "scan":
            return self.unroll(params, arguments)
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if isinstance(inner, core.ClosedJaxpr):
            return self.add(inner, arguments)
        if all(isinstance(one, np.ndarray) for one in arguments) and all(map(is_static, shapes)):
            results = equation.primitive.bind(*map(jnp.asarray, arguments), **params)
            return [np.asarray(one) for one in (results if equation.primitive.multiple_results else [results])]
        return self.translate(equation.primitive.name, params, arguments, shapes)

    def unroll(self, params: dict[str, Any], arguments: list[Known]) -> list[Known]:
        """Unroll a loop of known length."""
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        constants, carry, rows = arguments[:first], arguments[first:last], arguments[last:]
        outputs = params["jaxpr"].out_avals[params["num_carry"] :]
        steps = []
        for step in range(params["length"])[:: -1 if params["reverse"] else 1]:
            results = self.add(params["jaxpr"], [*constants, *carry, *(self.row(one, step) for one in rows)])
            carry, seen = results[: params["num_carry"]], results[params["num_carry"] :]
            steps.append([self.whole(one, aval.shape) for one, aval in zip(seen, outputs, strict=True)])
        steps = steps[:: -1 if params["reverse"] else 1]
        if not steps:
            return [*carry, *(np.zeros((0, *aval.shape), aval.dtype) for aval in outputs)]
        return [*carry, *(self.stack(list(rows)) for rows in zip(*steps, strict=True))]

    def translate(self, name: str, params: dict[str, Any], arguments: list[Known], shapes: list[Shape]) -> list[Known]:
        """Translate one operation to ONNX; `shapes` are those of its arguments and results in JAX."""
        one, shape = arguments[0], shapes[-1]
        if name in ALIKE:
            return [self.each(ALIKE[name], *arguments)]
        if name in REDUCTIONS:
            return [self.value(REDUCTIONS[name], [self.whole(one, shapes[0]), whole_numbers(params["axes"])], shape,
                               keepdims=0)]  # fmt: skip
        match name:
            case "stop_gradient" | "copy":
                return [one]
            case "convert_element_type":
                return [self.each("Cast", one, to=self.onnx.helper.np_dtype_to_tensor_dtype(params["new_dtype"]))]
            case "square" | "integer_pow" if params.get("y", 2) == 2:
                return [self.each("Mul", one, one)]
            case "rsqrt":
                return [self.each("Reciprocal", self.each("Sqrt", one))]
            case "log1p":
                return [self.each("Log", self.each("Add", one, np.ones((), np.float32)))]
            case "ne":
                return [self.each("Not", self.each("Equal", *arguments))]
            case "is_finite":
                return [self.each("Not", self.each("Or", self.each("IsNaN", one), self.each("IsInf", one)))]
            case "select_n" if len(arguments) == 3:
                return [self.each("Where", one, arguments[2], arguments[1])]
            case "broadcast_in_dim":  # ONNX broadcasts sizes later, where needed
                return [self.unsqueeze(one, [n for n in range(len(shape)) if n not in params["broadcast_dimensions"]])]
            case "squeeze":
                left = tuple(size for axis, size in enumerate(one.shape) if axis not in params["dimensions"])
                return [self.value("Squeeze", [one, whole_numbers(params["dimensions"])], left)]
            case "transpose":
                return [self.transpose(one, params["permutation"])]
            case "reshape":
                sizes = whole_numbers(size if isinstance(size, int) else -1 for size in shape)
                return [self.value("Reshape", [self.whole(one, shapes[0]), sizes], shape)]
            case "slice" if is_static(shapes[0]):
                axes = range(len(shape))
                bounds = params["start_indices"], params["limit_indices"], axes, params["strides"] or (1 for _ in axes)
                return [self.value("Slice", [self.whole(one, shapes[0]), *map(whole_numbers, bounds)], shape)]
            case "pad" if all(min(low, high) >= 0 == inside for low, high, inside in params["padding_config"]):
                before, after, _ = zip(*params["padding_config"], strict=True)
                return [
                    self.value("Pad", [self.whole(one, shapes[0]), whole_numbers(before + after), arguments[1]], shape)
                ]
            case "split":
                return self.split(self.whole(one, shapes[0]), params["sizes"], params["axis"])
            case "concatenate":
                return [self.value("Concat", self.wholes(arguments, shapes[:-1]), shape, axis=params["dimension"])]
            case "dot_general":
                left, right = self.wholes(arguments, shapes[:2])
                return [self.product(left, right, params["dimension_numbers"], shape)]
        raise BadInput(f"{self.learner} cannot be exported: ONNX has no counterpart here of JAX's {name}")

    def each(self, operator: str, *arguments: Known, **attributes: Any) -> Value:
        """An elementwise operator on arguments that broadcast."""
        sizes = zip(*(one.shape for one in arguments if one.shape), strict=True)
        shape = tuple(next((size for size in own if size != 1), 1) for own in sizes)
        return self.value(operator, arguments, shape, **attributes)

    def transpose(self, one: Known, axes: Sequence[int]) -> Known:
        if isinstance(one, np.ndarray):
            return one.transpose(axes)
        if list(axes) == sorted(axes):
            return one
        return self.value("Transpose", [one], tuple(one.shape[axis] for axis in axes), perm=tuple(axes))

    def product(self, left: Known, right: Known, dimensions: Any, shape: Shape) -> Known:
        """A sum of products: `MatMul` where possible, as runtimes are fastest at it, otherwise `Einsum`."""
        (left_sum, right_sum), (left_batch, _) = dimensions
        if left_batch or len(left_sum) != 1 or len(right.shape) != 2:
            letters = einsum(dimensions, len(left.shape), len(right.shape))
            return self.value("Einsum", [left, right], shape, equation=letters)
        kept = [axis for axis in range(len(left.shape)) if axis not in left_sum]
        turned = [self.transpose(left, [*kept, *left_sum]), self.transpose(right, [*right_sum, 1 - right_sum[0]])]
        return self.value("MatMul", turned, shape)

    def split(self, one: Known, sizes: Sequence[int], axis: int) -> list[Known]:
        ends = np.cumsum(sizes)
        bounds = zip(ends - sizes, ends, strict=True)
        shapes = [(*one.shape[:axis], size, *one.shape[axis + 1 :]) for size in sizes]
        return [
            self.value("Slice", [one, *map(whole_numbers, ([start], [end], [axis]))], shape)
            for (start, end), shape in zip(bounds, shapes, strict=True)
        ]

    def unsqueeze(self, one: Known, axes: Sequence[int]) -> Known:
        if isinstance(one, np.ndarray):
            return np.expand_dims(one, tuple(axes))
        if not axes:
            return one
        kept = iter(one.shape)
        shape = tuple(1 if axis in axes else next(kept) for axis in range(len(one.shape) + len(axes)))
        return self.value("Unsqueeze", [one, whole_numbers(axes)], shape)

    def row(self, rows: Known, index: int) -> Known:
        """The slice of a loop's input for one step."""
        index = 0 if rows.shape[0] == 1 else index
        if isinstance(rows, np.ndarray):
            return rows[index]
        return self.value("Gather", [rows, np.array(index, np.int64)], rows.shape[1:], axis=0)

    def stack(self, rows: list[Known]) -> Known:
        """The outputs of all steps of a loop, stacked."""
        if all(isinstance(one, np.ndarray) for one in rows):
            return np.stack([np.asarray(one) for one in rows])
        shape = (len(rows), *rows[0].shape)
        return self.value("Concat", [self.unsqueeze(one, [0]) for one in rows], shape, axis=0)

    def wholes(self, arguments: Sequence[Known], shapes: Sequence[Shape]) -> list[Known]:
        return [self.whole(one, shape) for one, shape in zip(arguments, shapes, strict=True)]

    def whole(self, one: Known, shape: Shape) -> Known:
        """The same value, broadcast to its full shape."""
        if one.shape == shape:
            return one
        sizes = [1 if own == wanted else wanted for own, wanted in zip(one.shape, shape, strict=True)]
        if is_static(sizes):
            return self.value("Expand", [one, whole_numbers(sizes)], shape)
        if any(str(size) != QUERIES for size in sizes if not isinstance(size, int)):
            raise BadInput(f"{self.learner} cannot be exported: it makes an array of {sizes} numbers")
        count = self.value("Shape", [Value("query", ())], (1,), start=0, end=1)
        each = [whole_numbers([size]) if isinstance(size, int) else count for size in sizes]
        return self.value("Expand", [one, self.value("Concat", each, (len(each),), axis=0)], shape)

    def value(self, operator: str, arguments: Sequence[Known], shape: Shape, **attributes: Any) -> Value:
        """The output of an operator; equal operators share a node."""
        inputs = [one.name if isinstance(one, Value) else self.constant(one) for one in arguments]
        key = (operator, *inputs, *attributes.items())
        if key not in self.nodes:
            name = f"{operator.lower()}_{len(self.nodes)}"
            self.nodes[key] = self.onnx.helper.make_node(operator, inputs, [name], name=name, **attributes)
        return Value(self.nodes[key].output[0], shape)

    def constant(self, array: np.ndarray) -> str:
        array = np.asarray(array)
        key = array.dtype, array.shape, array.tobytes()
        if key not in self.constants:
            name = f"constant_{len(self.constants)}"
            self.constants[key] = self.onnx.numpy_helper.from_array(array, name)
        return self.constants[key].name

    def needed(self, last: Known) -> tuple[list[Any], list[Any]]:
        """Nodes and constants on which the last value depends; diagnostics of adaptation are left out."""
        assert isinstance(last, Value)
        names, nodes = {last.name}, []
        for node in reversed(self.nodes.values()):
            if names.intersection(node.output):
                names.update(node.input)
                nodes.append(node)
        return nodes[::-1], [one for one in self.constants.values() if one.name in names]


def is_static(shape: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in shape)


def whole_numbers(values: Iterable[Any]) -> Int[np.ndarray, " number"]:
    """An int64 array, as ONNX expects axes and sizes."""
    return np.array(list(values), np.int64)


def einsum(dimensions: Any, left_rank: int, right_rank: int) -> str:
    """The equation of a product, as for `numpy.einsum`: batch axes first, then the left's, then the right's."""
    (left_sum, right_sum), (left_batch, right_batch) = dimensions
    left = list(string.ascii_lowercase[:left_rank])
    right = list(string.ascii_uppercase[:right_rank])
    for own, other in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        right[other] = left[own]
    batch = [left[axis] for axis in left_batch]
    out = batch + [a for n, a in enumerate(left) if n not in (*left_sum, *left_batch)]
    out += [a for n, a in enumerate(right) if n not in (*right_sum, *right_batch)]
    return f"{''.join(left)},{''.join(right)}->{''.join(out)}"
