"""The one seam to torch's private parts: every private name that graph mode needs, and why.

``tests/graph/test_torch_seam.py`` uses each of them on a small case, so that a torch release which moves or
changes one fails there, by name, before anything else does.
"""

import inspect
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "ShapeEnv",
    "dynamo_fake_mode",
    "fakes_of_inputs",
    "free_unbacked_symbols",
    "input_sources",
    "is_static_input",
    "is_traceable_wrapper_subclass",
    "storage_id",
    "trace_coarse",
]


def dynamo_fake_mode() -> FakeTensorMode | None:
    """The fake mode that Dynamo made for the backend it is calling; None outside such a call."""
    context = TracingContext.try_get()
    return context.fake_mode if context is not None else None


def fakes_of_inputs(mode: FakeTensorMode, inputs: Sequence[Any]) -> list[Any]:
    """Fake twins of a Dynamo graph's inputs, with the symbolic sizes that Dynamo chose for them.

    Dynamo hands the backend a fresh fake mode, because its own fakes may have been changed by the tracing.
    The symbols come back through the symbolic context that it kept for each tensor.
    """
    context = TracingContext.try_get()
    assert context is not None, "called outside a Dynamo backend"

    def twin(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        symbolic = context.tensor_to_context.get(value)
        # Symbols are found again by the name of the place that the tensor came from.
        source = getattr(symbolic, "tensor_source", None)
        return mode.from_tensor(
            value, symbolic_context=symbolic, source=source, static_shapes=symbolic is None
        )

    return [twin(value) for value in inputs]


def input_sources(graph: fx.Graph) -> list[str]:
    """For each placeholder of a Dynamo graph, the Python expression over ``L`` that Dynamo reads it from."""
    names = []
    for node in graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        names.append(argument.source.name if argument is not None else "")
    return names


def is_static_input(placeholder: fx.Node) -> bool:
    """Whether Dynamo knows this input as a parameter or buffer of a module, the same tensor at each call."""
    return "_dynamo_static_input_type" in (placeholder.meta.get("tensor_dict") or {})


def storage_id(fake: torch.Tensor) -> int:
    """An identity of the memory behind a fake tensor: views of each other share it."""
    return fake.untyped_storage()._cdata


@contextmanager
def _admits_real_constants(mode: FakeTensorMode) -> Iterator[None]:
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def trace_coarse(
    function: Callable[..., Any], fakes: Sequence[Any], mode: FakeTensorMode, *, decomposed: bool = False
) -> fx.GraphModule:
    """Run ``function`` on fake inputs and record the ATen and custom ops that it calls, uncomposed.

    Before dispatch, ``linear``, ``layer_norm`` and ``scaled_dot_product_attention`` are one node each and writes
    stay in place. ``decomposed`` records what reaches the kernels instead, which autocast needs: its casts happen
    between the two.
    """
    with torch.no_grad(), mode, _admits_real_constants(mode):
        return make_fx(function, pre_dispatch=not decomposed, _allow_non_fake_inputs=True)(*fakes)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that inductor applies before it lowers."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_calls_library(op: Any) -> bool:
    """Whether inductor has no loop of its own for an op and calls torch's kernel from its code."""
    from torch._inductor import lowering

    return op not in lowering.lowerings or op in lowering.fallbacks


def trace_decomposed(
    function: Callable[..., Any],
    fakes: Sequence[Any],
    mode: FakeTensorMode,
    table: dict[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """Record ``function`` on fakes as the ops that are left after dispatch and the decompositions in ``table``."""
    # As AOTAutograd does: kernels in C++ that take no symbolic sizes (pad) are decomposed in Python instead.
    with torch.no_grad(), mode, _admits_real_constants(mode), enable_python_dispatcher():
        return make_fx(function, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)


def compile_loops(graph_module: fx.GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> Any:
    """Compile a functional graph by inductor: a callable with the graph's inputs, that can be saved.

    Guards that inductor puts on the symbols land in the mode's ShapeEnv: see ``guards_of``.
    """
    from torch._guards import tracing
    from torch._inductor import standalone_compile

    patches = {
        "fallback_random": True,
        "size_asserts": False,
        # Round to bfloat16 after each op as the model written in torch does, so that results agree with eager's.
        "emulate_precision_casts": True,
        # Its constant folding also turns ``x + zeros`` into x, so that two results, or a result and an input,
        # would share memory; a later write to one would show in the other.
        "joint_graph_constant_folding": False,
    }
    # Loading an artifact finds its code in inductor's own cache by a key and takes whatever lies there first: a graph
    # that was compiled for other sizes has the same key but for the tag.
    settings: Any = torch.compiler.config
    unique = settings.patch(cache_key_tag=f"dlinfer {uuid.uuid4().hex}")
    with unique, tracing(TracingContext(mode)):
        return standalone_compile(
            graph_module,
            list(fakes),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": patches},
        )


def save_loops(artifact: Any, path: str) -> None:
    """Write what ``compile_loops`` gave to a file. Raises where torch cannot save it."""
    artifact.save(path=path, format="binary")


def load_loops(path: str) -> Callable[..., Any]:
    """What ``save_loops`` wrote. Raises on a damaged file or one of another torch."""
    from torch._inductor.standalone_compile import CompiledArtifact

    return CompiledArtifact.load(path=path, format="binary")


@contextmanager
def results_from(large: Callable[..., torch.Tensor], least: int) -> Iterator[None]:
    """Loops that are compiled or loaded meanwhile take results of ``least`` bytes and more from ``large(size, stride,
    dtype, bytes of an element)``.

    Code that torch had loaded before is shared, and stays as it is.
    """
    from torch._inductor.codecache import PyCodeCache

    def make(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if math.prod(size) * dtype.itemsize < least:
            return plain(size, stride, dtype)
        return large(size, stride, dtype, dtype.itemsize)

    plain = torch._C._dynamo.guards._empty_strided_cpu  # pyright: ignore[reportAttributeAccessIssue]
    known = {id(module) for module in PyCodeCache.modules}
    yield
    for module in PyCodeCache.modules:
        if id(module) not in known and vars(module).get("empty_strided_cpu") is plain:
            vars(module)["empty_strided_cpu"] = make


def symbol_ranges(fakes: Sequence[Any]) -> dict[str, str]:
    """The range that each symbol in the inputs' sizes may take, as text."""
    ranges: dict[str, str] = {}
    for value in fakes:
        numbers = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
        for number in numbers:
            if isinstance(number, torch.SymInt):
                for symbol in number.node.expr.free_symbols:
                    limits = number.node.shape_env.var_to_range.get(symbol)
                    ranges[str(symbol)] = str(limits)
    return ranges


def free_symbols(value: Any) -> set[Any]:
    """The symbols in a fake tensor's sizes and strides, or in a symbolic number."""
    numbers = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
    return {s for n in numbers if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}


def plain_symbol(value: Any) -> Any:
    """The symbol that a symbolic number is, where it is nothing but one; else None."""
    if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
        return value.node.expr
    return None


def recompilation_cause() -> str:
    """Why Dynamo compiles a function again; empty at the first time."""
    from torch._dynamo.utils import get_metrics_context

    return get_metrics_context()._metrics.get("recompile_reason") or ""


def mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """The fake mode that fake tensors belong to."""
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def fresh_mode() -> FakeTensorMode:
    """A fake mode with symbols of its own."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fresh_symbol(mode: FakeTensorMode, symbol: Any, environment: ShapeEnv, number: int) -> Any:
    """A symbol of ``mode`` with the range of ``symbol`` and, where it has one, its example value."""
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env = mode.shape_env
    assert env is not None
    limits = environment.var_to_range[symbol]
    hint = environment.backed_var_to_val.get(symbol)
    if hint is None:
        with env.ignore_fresh_unbacked_symbols():  # it comes from an input, not from a node
            made = env.create_unbacked_symint().node.expr
    else:
        made = env.create_symbol(
            int(hint),
            LocalSource(f"n{number}"),
            DimDynamic.DYNAMIC,
            positive=bool(limits.lower > 0) or None,
            do_not_specialize_zero_one=bool(limits.lower < 2),
        )
    ranges: dict[Any, Any] = env.var_to_range
    ranges[made] = limits
    return made


def symbolic_number(mode: FakeTensorMode, value: torch.SymInt, fresh: dict[Any, Any]) -> Any:
    """``value`` over the fresh symbols."""
    assert mode.shape_env is not None
    expression = value.node.expr.xreplace(fresh)
    return mode.shape_env.create_symintnode(expression, hint=value.node.hint)


def guards_of(mode: FakeTensorMode) -> list[str]:
    """The guards that were put on the symbols of a mode, as sympy's text."""
    import sympy

    assert mode.shape_env is not None
    return [sympy.srepr(guard.expr) for guard in mode.shape_env.guards]


def guard_all(guards: Sequence[str], original: dict[Any, Any], environment: ShapeEnv | None) -> bool:
    """Put guards (of ``guards_of``) on the original symbols; False where one does not hold for their example."""
    import sympy
    from torch.utils._sympy import functions

    if not guards:
        return True
    assert environment is not None
    by_name = {str(fresh): symbol for fresh, symbol in original.items()}
    names: dict[str, Any] = {name: getattr(functions, name) for name in functions.__all__}
    mapped = []
    for text in guards:
        expression: Any = sympy.sympify(text, locals=names)  # pyright: ignore[reportCallIssue, reportArgumentType]
        mapped.append(expression.xreplace({s: by_name[str(s)] for s in expression.free_symbols}))
    # A look first: to evaluate one that is false would guard the graph by its contrary.
    if any(one.xreplace(environment.backed_var_to_val) != sympy.true for one in mapped):
        return False
    return all(environment.evaluate_expr(one) for one in mapped)


def dynamo_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises where it cannot capture a function."""
    from torch._dynamo import exc

    return (exc.TorchDynamoException,)


def explain_dynamo_error(cause: Exception) -> tuple[str, str]:
    """(reason, the model's line) of such an error."""
    inner = getattr(cause, "inner_exception", None)  # of an error that the backend raised
    cause = inner if isinstance(inner, Exception) else cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    places = [line for line in lines if line.startswith("File ")]
    return lines[0] if lines else type(cause).__name__, places[-1] if places else "an unknown line"


def mark_unbacked(tensor: torch.Tensor, dim: int, counted: str) -> None:
    """Tell Dynamo to assume nothing of a size, not even that it is not 1; sizes that count the same are equal."""
    from torch._dynamo.decorators import mark_unbacked as mark

    mark(tensor, dim, shape_id=counted)


def forget_compiled(method: Callable[..., Any]) -> None:
    """Drop what Dynamo has compiled for a function."""
    from torch._dynamo.eval_frame import reset_code

    reset_code(inspect.unwrap(method).__code__)


def shape_guards(mode: FakeTensorMode) -> list[str]:
    """What a compilation assumed about its sizes and folded scalars, and the model's line that asked for it."""
    environment = mode.shape_env
    assert environment is not None
    sources: dict[Any, Any] = environment.var_to_sources
    found = []
    for guard in environment.guards:
        text = str(guard.expr)
        for symbol in guard.expr.free_symbols:
            if not symbol.is_integer:  # a folded float says more by its name in the model
                text = text.replace(str(symbol), source_name(sources[symbol][0].name))
        line = guard.sloc.maybe_user_loc
        found.append(f"{text}  {line}" if line else text)
    return found


def conditions(mode: FakeTensorMode, inputs: Sequence[tuple[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
    """What a compilation assumed about sizes and integers, as (Python text over v0, v1, ..., where to read those).

    inputs: an expression and the fake of each input of the graph. Guards, and sizes that were equal when the graph
    was captured or are computed from others; sizes marked as unknown are equal only where that was said. Guards on
    floats are left out: a float is a constant of the graph.
    """
    import sympy
    from torch.utils._sympy.printers import PythonPrinter

    environment = mode.shape_env
    assert environment is not None

    def text(expression: Any, symbols: Sequence[Any], start: int) -> str:
        numbered = {
            symbol: sympy.Symbol(f"v{index}", integer=True) for index, symbol in enumerate(symbols, start)
        }
        return PythonPrinter().doprint(expression.xreplace(numbered))

    places: dict[Any, str] = {}
    for source, example in inputs:
        if (symbol := plain_symbol(example)) is not None:
            places.setdefault(symbol, source)
    sizes = [
        (f"{source}.size()[{dim}]", size.node.expr)
        for source, example in inputs
        for dim, size in enumerate(example.shape if isinstance(example, torch.Tensor) else ())
        if isinstance(size, torch.SymInt)
    ]
    found = []
    for place, expression in sizes:
        is_first = not expression.is_symbol or places.setdefault(expression, place) == place
        if not is_first and expression in environment.backed_var_to_val:
            found.append(("v0 == v1", (places[expression], place)))
    for place, expression in sizes:
        symbols = sorted(expression.free_symbols, key=str)
        if not expression.is_symbol and symbols and all(symbol in places for symbol in symbols):
            found.append(
                (f"v0 == {text(expression, symbols, 1)}", (place, *map(places.__getitem__, symbols)))
            )
    origin: dict[Any, Any] = environment.var_to_sources
    for guard in environment.guards:
        symbols = sorted(guard.expr.free_symbols, key=str)
        if all(symbol.is_integer for symbol in symbols):
            read = (places.get(symbol) or origin[symbol][0].name for symbol in symbols)
            found.append((text(guard.expr, symbols, 0), tuple(read)))
    return found


def inputs_given_twice() -> list[tuple[str, str]]:
    """Dynamo's expressions for inputs that are one tensor, of which its graph takes only the first."""
    context = TracingContext.try_get()
    assert context is not None, "called outside a Dynamo backend"
    return [
        (guard.name, guard.create_fn.keywords["source_b"].name)  # pyright: ignore[reportFunctionMemberAccess]
        for guard in context.guards_context.dynamo_guards
        if guard.create_fn_name() == "DUPLICATE_INPUT"
    ]


def fixed_size(size: Any) -> int | None:
    """A size that is a number, or a symbol that became one; None for one that may vary."""
    if isinstance(size, torch.SymInt):
        return int(size.node.expr) if size.node.expr.is_number else None
    return size


def sized_symbols(mode: FakeTensorMode) -> dict[str, str]:
    """Each symbolic integer that comes in: the values it may take and where it is read from."""
    from torch.utils._sympy.numbers import int_oo

    environment = mode.shape_env
    assert environment is not None
    found = {}
    for symbol, sources in environment.var_to_sources.items():
        limits = environment.var_to_range.get(symbol)
        if limits is None or not sources or not symbol.is_integer:
            continue
        values = f"{limits.lower} to {limits.upper}"
        if limits.lower == limits.upper:
            values = str(limits.lower)
        elif limits.upper == int_oo:
            values = "any" if limits.lower == -int_oo else f"{limits.lower} and more"
        found[str(symbol)] = f"{values}, {source_name(sources[0].name)}"
    return found


def example_number(number: int | torch.SymInt, unknown: int = 0) -> int:
    """The value that a symbolic number had in the call that was captured; ``unknown`` where it had none."""
    if not isinstance(number, torch.SymInt):
        return number
    return int(number.node.hint) if number.node.has_hint() else unknown


def source_name(source: str) -> str:
    """Dynamo's expression for an input, ``L['self']._modules['norm'].eps``, as people write it: ``self.norm.eps``."""
    return re.sub(
        r"^L\['(\w+)'\]", r"\1", re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", source)
    )


def graph_breaks() -> list[tuple[str, str]]:
    """(reason, ``file:line, in function``) of each graph break of this process, in order; ``reset`` empties it."""
    from torch._dynamo.utils import graph_break_reasons

    found = []
    for broken in graph_break_reasons:
        frame = broken.user_stack[-1] if broken.user_stack else None
        line = f"{frame.filename}:{frame.lineno}, in {frame.name}" if frame is not None else ""
        found.append((broken.reason, line))
    return found


def compile_apart(function: Callable[..., Any], backend: Callable[..., Any], dynamic: bool | None) -> Any:
    """``torch.compile`` whose cache entries are its own: nothing compiled before is used, counted or replaced."""
    apart: dict[str, Any] = {"isolate_recompiles": True}
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        apart = {}  # torch 2.12: a backend object of its own has entries of its own too, under one common limit
    return torch.compile(function, backend=backend, dynamic=dynamic, **apart)


def export_kinds(exported: Any) -> list[tuple[str, str, Any]]:
    """For each input of an exported graph: ``user`` or ``weight``, the name of its tensor, its constant value."""
    from torch.export.graph_signature import ConstantArgument, InputKind

    kinds = []
    for spec in exported.graph_signature.input_specs:
        user = spec.kind == InputKind.USER_INPUT
        constant = spec.arg.value if isinstance(spec.arg, ConstantArgument) else None
        kinds.append(("user" if user else "weight", spec.target or "", constant))
    return kinds


def export_gives_results_only(exported: Any) -> bool:
    """Whether the outputs of an exported graph are what the module returns, and none stands for a write."""
    from torch.export.graph_signature import OutputKind

    return all(spec.kind == OutputKind.USER_OUTPUT for spec in exported.graph_signature.output_specs)


def size_range(size: Any) -> int | tuple[int, int | None]:
    """A size, or the range that a symbolic one may have."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    limits = size.node.shape_env.bound_sympy(size.node.expr)
    high = limits.upper
    return int(limits.lower), int(high) if high.is_Integer else None
