"""Declarations of an op's tensors, one line each, and the functions that are generated from them.

An example: ``op.takes(x="float [..., in_features]", weight="like x [out_features, in_features]")``. A declaration is
``DTYPE [on NAME] [SIZES]``:

- DTYPE: ``float`` (float32, float16 or bfloat16), ``int`` (int32 or int64), a dtype of torch, or ``any``. ``float`` and
  ``float32`` also take float64, for the oracle (``oracle.py``). ``like NAME`` is the dtype and device of another
  argument. ``cache like NAME`` is the same for a KV cache; its SIZES are in the order [blocks, block_size, kv_heads,
  head_size].
- ``on NAME``: the device of another argument.
- SIZES: one entry for each dimension.

  - A name without a value, such as ``in_features`` of x, takes the dimension's size as its value.
  - A name with a value, such as ``in_features`` of weight, is the size that the dimension must have. The same holds for
    an int parameter of the op, a number, and an expression such as ``2 * in_features``. Expressions may call
    ``groups(size, group_size)``.
  - ``A = B``: the dimension's size must equal A and B.
  - ``...``, only as the first entry: any number of dimensions.
  - ``*NAME``: all sizes of another argument.

An argument that is None is not checked. Results are declared in the same way, ``returns="like x [..., out_features]"``.
The DTYPE of a result may be a dtype parameter. ``...`` of a result stands for the same sizes as in the argument that
``like`` or ``on`` names.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dlinfer.ops.attention.kv_cache import canonical
from dlinfer.ops.core.checks import Rules

_GRAMMAR = re.compile(
    r"(?P<cache>cache )?(?P<dtype>like \w+|\w+)(?: on (?P<device>\w+))? \[(?P<sizes>[^]]*)\]"
)
_COMMA = re.compile(r",(?![^(]*\))")  # not inside of parentheses


class _Declared(NamedTuple):
    """One parsed declaration. has_any: whether its sizes begin with ``...``, which ``sizes`` leaves out."""

    name: str
    is_cache: bool
    dtype: str
    device: str | None
    has_any: bool
    sizes: tuple[str, ...]

    @property
    def variable(self) -> str:
        """The name, in the generated source, of the tensor to check; for a cache it is the canonical view."""
        return f"canonical_{self.name}" if self.is_cache else self.name

    @property
    def dimensions(self) -> dict[int, str]:
        """Dimension -> its declared size; dimensions after ``...`` are negative and count from the end."""
        return dict(enumerate(self.sizes, -len(self.sizes) if self.has_any else 0))

    def dtype_rules(self, parameters: Collection[str]) -> Iterator[str]:
        """Yield source lines that check dtype and device."""
        argument = f"{self.name!r}, {self.name}"
        if self.dtype.startswith("like "):
            model = self.dtype.removeprefix("like ")
            yield f"rules.like({argument}, {model!r}, {model})"
        elif self.dtype in ("float", "int"):
            yield f"rules.{'floating' if self.dtype == 'float' else 'integer'}({argument})"
        elif self.dtype == "float32":
            yield f"rules.dtype({argument}, torch.float32, torch.float64)"
        elif self.dtype != "any":
            yield f"rules.dtype({argument}, {'' if self.dtype in parameters else 'torch.'}{self.dtype})"
        if self.device:
            yield f"rules.same_device({argument}, {self.device!r}, {self.device})"

    def rank_rules(self) -> Iterator[str]:
        """Yield source lines that check the rank, and that define ``variable`` for a cache."""
        argument = f"{self.name!r}, {self.name}"
        if self.has_any and self.sizes:
            yield f"rules.least_rank({argument}, {len(self.sizes)})"
        elif self.sizes and not self.sizes[0].startswith("*"):
            yield f"rules.rank({argument}, {len(self.sizes)})"
        if self.is_cache:
            yield f"{self.variable} = canonical({self.name})"


def _read(name: str, text: str) -> Iterator[_Declared]:
    matches = list(_GRAMMAR.finditer(text))
    if ", ".join(match[0] for match in matches) != text:
        raise ValueError(f"the declaration of {name} is not DTYPE [on NAME] [SIZES]: {text!r}")
    for match in matches:
        sizes = tuple(size.strip() for size in _COMMA.split(match["sizes"]) if size)
        has_any, is_cache = sizes[:1] == ("...",), match["cache"] is not None
        yield _Declared(name, is_cache, match["dtype"], match["device"], has_any, sizes[has_any:])


class Declarations:
    """The declared tensors of an op. parameters: all parameters of the op. optional: those that may be None."""

    def __init__(
        self, parameters: Sequence[str], optional: Collection[str], declarations: Mapping[str, str]
    ) -> None:
        self._parameters = parameters
        self._optional = optional
        self._declared = [tensor for name, text in declarations.items() for tensor in _read(name, text)]
        self._owners = {name: name for name in parameters if name not in declarations}
        self._first: list[str] = []  # source lines that check dtypes and ranks and set named sizes
        self._rest: list[str] = []  # source lines for dtypes that a parameter names, and for sizes
        for tensor in self._declared:
            guard = f"if {tensor.name} is not None: " if tensor.name in optional else ""
            rules = self._rest if tensor.dtype in parameters else self._first
            rules += [guard + rule for rule in tensor.dtype_rules(parameters)]
            self._first += [guard + rule for rule in tensor.rank_rules()]
            for dim, size in tensor.dimensions.items():
                if size.isidentifier() and size not in self._owners and not guard:
                    self._owners[size] = f"{size} of {tensor.name}"
                    self._first.append(f"{size} = {tensor.variable}.shape[{dim}]")
        self._rest += [line for tensor in self._declared for line in self._size_rules(tensor)]

    def check(
        self, rules: Rules, extra: Callable[..., None] | None, names: Sequence[str]
    ) -> Callable[..., None]:
        """Return the function that checks a call's arguments. Its source is generated, so that it runs fast.

        extra: a function to call between the rules for ranks and the rules for sizes.
        names: the names of ``extra``'s parameters. Each is ``rules``, or also a parameter of the op.
        """
        between = [] if extra is None else [f"extra({', '.join(names)})"]
        lines = [*self._first, *between, *self._rest] or ["pass"]
        return self._function(lines, rules=rules, extra=extra)

    def _size_rules(self, tensor: _Declared) -> Iterator[str]:
        guard = f"{tensor.name} is not None and " if tensor.name in self._optional else ""
        for dim, size in (
            (dim, size) for dim, sizes in tensor.dimensions.items() for size in sizes.split(" = ")
        ):
            owner = self._owners.get(size)
            if size.startswith("*"):
                yield f"rules.same_sizes({tensor.name!r}, {tensor.name}, {size[1:]!r}, {size[1:]})"
            elif owner != f"{size} of {tensor.name}" and (owner or not size.isidentifier()):
                why = owner or ("fixed" if size.isdigit() else size)
                yield (
                    f"if {guard}({tensor.variable}.shape[{dim}] == {size}) is not True: "
                    f"rules.size({tensor.name!r}, {tensor.variable}, {dim}, {size}, {why!r})"
                )

    def fake(self, returns: str) -> Callable[..., Any]:
        """Return the fake function for the declared results."""
        lines = [line for line in self._first if not re.match(r"rules|if ", line)]
        results = [self._result(result) for result in _read("a result", returns)]
        return self._function([*lines, f"return {', '.join(results)}"])

    def _result(self, result: _Declared) -> str:
        model = result.device or result.dtype.removeprefix("like ")
        sizes = [f"*{size[1:]}.shape" if size.startswith("*") else size for size in result.sizes]
        if result.has_any:
            known = next(len(other.sizes) for other in self._declared if other.name == model)
            sizes.insert(0, f"*{model}.shape[:{-known}]")
        dtype = result.dtype if result.dtype in self._parameters else f"torch.{result.dtype}"
        return f"{model}.new_empty(({', '.join(sizes)},){f', dtype={dtype}' if result.device else ''})"

    def _function(self, lines: Sequence[str], **scope: Any) -> Callable[..., Any]:
        source = f"def function({', '.join(self._parameters)}):\n" + "".join(
            f"    {line}\n" for line in lines
        )
        scope.update(canonical=canonical, groups=groups, torch=torch)
        exec(source, scope)
        return scope["function"]


def groups(size: int, group_size: int) -> int:
    """Return how many groups cover ``size``; the last may be shorter. A ``group_size`` of 0 means one group."""
    whole = group_size or max(size, 1)
    return (size + whole - 1) // whole
