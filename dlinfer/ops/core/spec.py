"""OpSpec: the one definition of a fused op. Schema, checks, documentation and tests derive from it.

``@fused_op`` turns a function into an op. Its annotations are the schema, its docstring is the documentation, and its
body is the reference implementation in plain torch. The op's file adds:

- ``op.takes``: dtype, device and sizes of the tensors (``declarations.py``);
- ``@op.check``: further argument rules. These rules and the declared ones run before every kernel and before the fake
  function;
- ``@op.fake``: shapes and dtypes of the results, for compilers; ops that return nothing need none;
- ``@op.python_call``, if frameworks call with other arguments than the torch op's: unpacks objects, allocates outputs;
- ``@op.samples``: inputs with their edge cases, for opcheck, kernel tests and the conformance kit.

The functions of ``check`` and ``fake`` take any of the op's parameters, by name. So ops with the same parameters can
share one function. A function of ``check`` may also take the op's ``rules``.

A mutating op declares the arguments that it writes. It returns only fresh tensors, never an argument, and its
parameters have no default that is a list: torch's functionalisation and opcheck require both.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import (
    Library,
    infer_schema,  # pyright: ignore[reportUnknownVariableType] - torch leaves types out
    register_fake,  # pyright: ignore[reportUnknownVariableType]
)

from dlinfer.errors import DlinferError, KernelFailureError, OpArgumentError, OpCallError
from dlinfer.ops.core.checks import FLOATS, Rules
from dlinfer.ops.core.declarations import Declarations
from dlinfer.ops.core.samples import Sample, SampleMaker

NAMESPACE = "dlinfer"

_library = Library(NAMESPACE, "DEF")
_registry: dict[str, "OpSpec"] = {}


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference between a kernel's result and the reference's result in float64, and the reason for it."""

    rtol: float
    atol: float
    reason: str


class OpSpec:
    """One fused op. Frameworks and users call it: ``dlinfer.ops.rms_norm(x, weight, eps)``."""

    def __init__(
        self,
        reference: Callable[..., Any],
        mutates: Sequence[str],
        tolerances: Mapping[torch.dtype, Tolerance] | Tolerance,
        version: int = 1,
        makes_codes: bool = False,
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.mutates = tuple(mutates)
        self.version = version
        self.makes_codes = makes_codes
        self.tolerances = (
            dict.fromkeys(FLOATS, tolerances) if isinstance(tolerances, Tolerance) else dict(tolerances)
        )
        self.schema = infer_schema(reference, mutates_args=self.mutates)
        self.__doc__ = reference.__doc__
        tags = (torch.Tag.pt2_compliant_tag,)
        _library.define(self.name + self.schema, tags=tags)  # pyright: ignore[reportUnknownMemberType]
        self.overload = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        self.rules = Rules(self.name)
        self._signature = inspect.signature(reference)
        self.parameters = tuple(self._signature.parameters)
        self._declarations = self._declared({})
        self.validate = self._declarations.check(self.rules, None, ())
        """Apply the argument rules to a call's arguments. Raises OpArgumentError."""
        self._call: Callable[..., Any] = self.overload
        self._samples: Callable[[SampleMaker], Iterator[Sample]] | None = None
        if self._signature.return_annotation is None:
            self.fake(lambda: None)

    # --- what an op's file adds to the body

    def takes(self, *, returns: str = "", **tensors: str) -> None:
        """Declare the op's tensors and results, see ``declarations.py``. Call before ``check``."""
        self._declarations = self._declared(tensors)
        self.validate = self._declarations.check(self.rules, None, ())
        if returns:
            self.fake(self._declarations.fake(returns))

    def _declared(self, tensors: Mapping[str, str]) -> Declarations:
        parameters = self._signature.parameters.values()
        optional = {parameter.name for parameter in parameters if parameter.annotation is not Tensor}
        return Declarations(self.parameters, optional, tensors)

    def check(self, function: Callable[..., None]) -> Callable[..., None]:
        """Register further argument rules, which raise OpArgumentError.

        They run between the declared rules for ranks and the declared rules for sizes.
        """
        self.validate = self._declarations.check(self.rules, function, self._names(function))
        return function

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the fake function, which returns shapes and dtypes of results. The argument rules run before it."""
        names = self._names(function)

        def checked(*args: Any, **kwargs: Any) -> Any:
            self.validate(*args, **kwargs)
            bound = self._signature.bind(*args, **kwargs).arguments
            return function(*(bound[name] for name in names))

        register_fake(f"{NAMESPACE}::{self.name}", checked, lib=_library)
        return function

    def python_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function behind ``dlinfer.ops.<op>`` in place of the torch op. It must call ``op.overload``."""
        self._call = function
        self.__doc__ = function.__doc__
        return function

    def samples(
        self, function: Callable[[SampleMaker], Iterator[Sample]]
    ) -> Callable[[SampleMaker], Iterator[Sample]]:
        """Register the generator of samples, which hold the torch op's arguments."""
        self._samples = function
        return function

    def _names(self, function: Callable[..., Any]) -> tuple[str, ...]:
        names = tuple(inspect.signature(function).parameters)
        if unknown := set(names) - {*self.parameters, "rules"}:
            raise ValueError(
                f"{function.__name__} has parameters that are not parameters of op {self.name!r}: "
                f"{sorted(unknown)}"
            )
        return names

    # --- what is derived from the definition

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except (DlinferError, torch.OutOfMemoryError):  # schedulers free memory and go on
            raise
        except (RuntimeError, TypeError, AttributeError, IndexError, ValueError) as cause:
            # Dynamo reports the cause itself, and cannot trace the explanation.
            if torch.compiler.is_dynamo_compiling():
                raise
            raise self._explained(cause, args, kwargs) from cause

    def _explained(self, cause: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DlinferError:
        detail = str(cause).split("\n", 1)[0]
        signature = self.signature()
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as misfit:
            return OpCallError(op=self.name, schema=signature, detail=misfit)
        for name, value in bound.items():
            if signature.parameters[name].annotation is Tensor and not isinstance(value, Tensor):
                return OpArgumentError(op=self.name, argument=name, expected="a tensor", given=repr(value))
        if detail.startswith(f"{NAMESPACE}::{self.name}()"):  # torch's own check of the schema
            return OpCallError(op=self.name, schema=signature, detail=detail)
        return KernelFailureError(op=self.name, detail=f"{type(cause).__name__}: {detail}")

    def signature(self) -> inspect.Signature:
        """Return the signature of ``dlinfer.ops.<op>``."""
        return inspect.signature(self.reference if self._call is self.overload else self._call)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a call of the torch op, all by position."""
        return tuple(self._signature.bind(*args, **kwargs).arguments.values())

    def sample_inputs(self, make: SampleMaker) -> Iterator[Sample]:
        """Yield the op's samples for the maker's device, dtype and cache layout."""
        if self._samples is None:
            raise ValueError(f"op {self.name!r} has no samples")
        return self._samples(make)

    def __repr__(self) -> str:
        return f"<dlinfer op {self.name}{self.schema}>"


def fused_op(
    *,
    tolerances: Mapping[torch.dtype, Tolerance] | Tolerance,
    mutates: Sequence[str] = (),
    version: int = 1,
    makes_codes: bool = False,
) -> Callable[[Callable[..., Any]], OpSpec]:
    """Turn the decorated function into an op: its body is the reference, its annotations are the schema.

    mutates: names of the tensor parameters that the op writes.
    tolerances: how far a kernel's results may be from the reference's in float64: one for all dtypes, or one for each.
    version: to be incremented when the schema or the meaning of the op changes; artifacts store the version they need.
    makes_codes: the op quantises. The codes depend on the input's dtype, so the oracle computes the expected results in
        that dtype, not in float64.
    """

    def decorate(reference: Callable[..., Any]) -> OpSpec:
        spec = OpSpec(reference, mutates, tolerances, version, makes_codes)
        if spec.name in _registry:
            raise ValueError(f"op {spec.name!r} is defined twice")
        _registry[spec.name] = spec
        return spec

    return decorate


def registry() -> Mapping[str, OpSpec]:
    """Return all ops by name, in the order of their definition."""
    return _registry
