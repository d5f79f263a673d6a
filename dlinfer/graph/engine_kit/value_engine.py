"""A graph engine for runtimes that know values: no pointers, no writes, no aliases.

A vendor's engine is a subclass. What only the vendor knows is

- ``refuses_op``: which nodes it does not take, and why;
- ``lower``: a function of values in the vendor's own form, ``Lowered``;
- ``Lowered.compile``: what runs, when the weights are known;
- a dataclass of its options, and some facts as class attributes.

All else is here and in ``value_region``: regions become functions of values, weights that change are compiled in again,
what is written goes where torch has it, and what the vendor does not take after all, or not at one call, torch runs
under the fallback policy, with the vendor's reason in the report.
"""

import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx

from dlinfer.errors import NotAFunctionError, NotExportableError
from dlinfer.graph.engine import CompiledRegion, Engine
from dlinfer.graph.engine_kit.eager_region import eager_region
from dlinfer.graph.engine_kit.options import EngineOptions
from dlinfer.graph.engine_kit.output_sizes import UnknownSizeError
from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.engine_kit.value_region import Lowered, ValueRegion, Views
from dlinfer.graph.functional.functional_ops import Twin, twin_of
from dlinfer.graph.functional.functionalize import Function, function_of, is_check, refusal
from dlinfer.graph.ir.device import HOST
from dlinfer.graph.ir.dialect import is_compute, tensors_of, written_arguments
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.selftest.case import packet_name, precision_of
from dlinfer.graph.torch_private.dispatcher import HigherOrderOperator

Options = TypeVar("Options", bound=EngineOptions)


class ValueEngine(Engine, Generic[Options]):
    """The engine without its vendor. One object serves the whole process, from any thread.

    Its only programs are those of regions that it gives back to torch (``eager_region``), so a stored program has only
    steps of torch in it.

    options_type: the engine's own options.
    device_type: of the tensors that it reads; the host where it does not say.
    refuses_writes: why nodes that write are not taken; None where they are, as new contents of what they write.
    smallest: nodes that compute which a region needs to be worth entering.
    """

    options_type: type[Options]
    device_type: str = HOST
    refuses_writes: str | None = None
    smallest: int = 1

    # --- what a vendor says

    @abstractmethod
    def refuses_op(self, node: fx.Node) -> str | None:
        """Why a node is not taken, that has a meaning as values and tensors that fit; None where it is."""

    @abstractmethod
    def lower(self, function: Function, options: Options, policy: str) -> Lowered:
        """A function in the vendor's own form. policy: the fallback policy.

        Raises RefusedError, and what ``graph.onnx.export`` raises.
        """

    def is_heavy(self, node: fx.Node) -> bool:
        """Whether a node makes its region worth entering, however small that is."""
        return False

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        """Why tensors of a dtype are not taken; None where they are."""
        return None

    def read_options(self, given: Mapping[str, Any]) -> Options:
        """Options from names and values. Raises CompileOptionError."""
        return self.options_type.of(given)

    # --- what an engine is

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise CompileOptionError."""
        self.read_options(options)

    def refuses(self, node: fx.Node) -> str | None:
        """Why a node is not taken: its tensors do not fit, its effect is no value, the vendor's own reason, or that the
        vendor does not compute it rightly on this CPU."""
        if node.op != "call_function":
            return None
        if isinstance(node.target, HigherOrderOperator):
            return f"{node.target} is a higher-order op"
        if node.target is operator.getitem:  # one result of a node, which stays with it
            return self.refuses(node.all_input_nodes[0])
        if self.refuses_writes is not None and written_arguments(node):
            return self.refuses_writes
        reason = self._unfit(node) or refusal(node)
        # A check is made by torch before the region runs.
        if reason is not None or is_check(node):
            return reason
        return self.refuses_op(node) or self._selftest_failure(node)

    def entry_cost(self, nodes: Sequence[fx.Node]) -> str | None:
        """A few nodes cost less one by one than entering the engine does."""
        count = sum(map(is_compute, nodes))
        if count >= self.smallest or any(map(self.is_heavy, nodes)):
            return None
        return f"{count} nodes cost less than entering {self.name}"

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        """The region, or what torch runs in its place under the policy where the vendor does not take the whole of it.

        Raises GraphFallbackError under the policy ``error``, CompileOptionError, and what the vendor raises.
        """
        chosen = self.read_options(options.wanted_engine_options)
        try:
            function = function_of(region)
            lowered = self.lower(function, chosen, options.policy) if function.outputs else Views(function)
            run = ValueRegion(region, lowered, self.name, options.policy)
        except (NotAFunctionError, NotExportableError) as error:
            return self._left(region, options, str(error.fields["reason"]), str(error.fields["node"]))
        except RefusedError as error:
            return self._left(region, options, str(error), error.node)
        except UnknownSizeError as error:
            return self._left(region, options, f"a result's size does not follow from the inputs: {error}")
        computing = [node for node in region.graph_module.graph.nodes if is_compute(node)]
        placement = {node.name: lowered.placement for node in computing}
        return CompiledRegion(run, placement, notes=lowered.notes)

    def _left(self, region: Subgraph, options: CompileOptions, reason: str, node: str = "") -> CompiledRegion:
        if not node:
            return eager_region(region, self.name, options, reason)
        return eager_region(region, self.name, options, f"{node}: {reason}", {node: reason})

    def _selftest_failure(self, node: fx.Node) -> str | None:
        """Why the vendor's self-test on this CPU forbids a node, seen as the op that returns what the node writes."""
        if self.selftest is None:
            return None
        twin = twin_of(node) if written_arguments(node) else None
        target = twin.op if isinstance(twin, Twin) else node.target
        if target is None:  # a copy
            return None
        tensors = [tensor for one in (node, *node.all_input_nodes) for tensor in tensors_of(one)]
        return self.selftest.failure(packet_name(target), precision_of(tensors))

    def _unfit(self, node: fx.Node) -> str | None:
        for one in (node, *node.all_input_nodes):
            for tensor in tensors_of(one):
                if (reason := self.refuses_tensor(tensor)) is not None:
                    return reason
        return None

    def refuses_tensor(self, tensor: Tensor) -> str | None:
        """Why a tensor is not taken; None where it is."""
        if tensor.device.type != self.device_type:
            return f"a tensor on device {tensor.device.type!r}"
        if tensor.layout != torch.strided:
            return f"a tensor of layout {tensor.layout}"
        return self.refuses_dtype(tensor.dtype)
