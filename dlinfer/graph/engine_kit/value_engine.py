"""A graph engine for runtimes that work on values only: without pointers, in-place writes or aliases.

The vendor's subclass implements

- ``refuses_op``, which refuses nodes and gives the reason;
- ``lower``, which translates a functionalized region into the vendor's own form, a ``Lowered``;
- ``Lowered.compile``, which compiles this form when the weights are known;
- a dataclass of the engine's options, and some class attributes.

This module and ``value_region`` do the rest. They functionalize regions, copy the new content of a written input back
into torch's tensor, and recompile when weights change. If the vendor refuses a region or a call, torch runs it under
the fallback policy, and the report shows the vendor's reason.
"""

import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, fx

from dlinfer.errors import NotAFunctionError, NotExportableError
from dlinfer.graph.engine import CompiledRegion, Engine
from dlinfer.graph.engine_kit.eager_region import computing, eager_region
from dlinfer.graph.engine_kit.options import EngineOptions
from dlinfer.graph.engine_kit.output_sizes import UnknownSizeError
from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.engine_kit.value_region import Lowered, ValueRegion, Views
from dlinfer.graph.functional.functional_ops import FunctionalCall, functional_call
from dlinfer.graph.functional.functionalize import Function, function_of, is_check, refusal
from dlinfer.graph.ir.device import HOST
from dlinfer.graph.ir.dialect import is_compute, tensors_of, written_arguments
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.selftest.case import packet_name, precision_of
from dlinfer.graph.torch_private.dispatcher import HigherOrderOperator

Options = TypeVar("Options", bound=EngineOptions)


class ValueEngine(Engine, Generic[Options]):
    """An engine for runtimes that work on values only.

    The disk cache stores none of the vendor's executables. It stores only regions that torch runs (``eager_region``).

    options_type: the dataclass of the engine's own options.
    device_type: the type of the device whose tensors the engine reads.
    refuses_writes: the reason for refusing all nodes that write in place. None if the engine accepts such nodes, and
        returns the new contents of the written tensors.
    smallest: a region with fewer computing nodes is not worth entering, unless it has a heavy node (``is_heavy``).
    """

    options_type: type[Options]
    device_type: str = HOST
    refuses_writes: str | None = None
    smallest: int = 1

    # --- what a vendor implements

    @abstractmethod
    def refuses_op(self, node: fx.Node) -> str | None:
        """Return a reason not to run a node; None if the vendor accepts the node.

        dlinfer calls this only for nodes that can be functionalized and whose tensors the engine accepts.
        """

    @abstractmethod
    def lower(self, function: Function, options: Options, policy: str) -> Lowered:
        """Translate a functionalized region into the vendor's own form. policy: the fallback policy.

        May raise RefusedError, NotAFunctionError and NotExportableError. Then torch runs the region.
        """

    def is_heavy(self, node: fx.Node) -> bool:
        """Return whether this node makes its region worth entering, even if the region is smaller than ``smallest``."""
        return False

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        """Return a reason to refuse tensors of a dtype; None if the vendor accepts the dtype."""
        return None

    def read_options(self, options: Mapping[str, object]) -> Options:
        """Return the engine's options for a dict of names and values. Raises CompileOptionError."""
        return self.options_type.of(options)

    # --- the engine

    def check_options(self, options: Mapping[str, object]) -> None:
        self.read_options(options)

    def refuses(self, node: fx.Node) -> str | None:
        """Return a reason not to run a node; None if the node is accepted.

        A node is refused if it has a tensor of another device, layout or dtype, or an effect that cannot be returned as
        a value. It is also refused if the vendor refuses it, or if its op failed the self-test on this CPU.
        """
        if node.op != "call_function":
            return None
        if isinstance(node.target, HigherOrderOperator):
            return f"{node.target} is a higher-order op"
        if node.target is operator.getitem:  # one result of a node stays with that node
            return self.refuses(node.all_input_nodes[0])
        if self.refuses_writes is not None and written_arguments(node):
            return self.refuses_writes
        reason = self._unfit(node) or refusal(node)
        # Torch makes a check before the region runs.
        if reason is not None or is_check(node):
            return reason
        return self.refuses_op(node) or self._selftest_failure(node)

    def entry_cost(self, nodes: Sequence[fx.Node]) -> str | None:
        count = sum(map(is_compute, nodes))
        if count >= self.smallest or any(map(self.is_heavy, nodes)):
            return None
        return f"running {count} nodes eagerly costs less than entering {self.name}"

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        """Compile a region. If the vendor refuses any part of it, torch runs the whole region.

        Raises GraphFallbackError under the policy ``error``, CompileOptionError, and the vendor's own errors.
        """
        chosen = self.read_options(options.wanted_engine_options)
        try:
            function = function_of(region)
            lowered = self.lower(function, chosen, options.policy) if function.outputs else Views(function)
            run = ValueRegion(region, lowered, self.name, options.policy)
        except (NotAFunctionError, NotExportableError) as error:
            reason, node = str(error.fields["reason"]), str(error.fields["node"])
        except RefusedError as error:
            reason, node = str(error), error.node
        except UnknownSizeError as error:
            reason, node = f"the size of a result cannot be computed from the inputs: {error}", ""
        else:
            placement = {node.name: lowered.placement for node in computing(region)}
            return CompiledRegion(run, placement, notes=lowered.notes)
        return eager_region(region, self.name, options, reason, node)

    def _selftest_failure(self, node: fx.Node) -> str | None:
        """Return a reason not to run a node, found by the vendor's self-test on this CPU; None if there is none.

        For a node that writes in place, the test of its functional op decides.
        """
        if self.selftest is None:
            return None
        twin = functional_call(node) if written_arguments(node) else None
        target = twin.op if isinstance(twin, FunctionalCall) else node.target
        if target is None:  # the node only copies
            return None
        tensors = [tensor for value in (node, *node.all_input_nodes) for tensor in tensors_of(value)]
        return self.selftest.failure(packet_name(target), precision_of(tensors))

    def _unfit(self, node: fx.Node) -> str | None:
        for value in (node, *node.all_input_nodes):
            for tensor in tensors_of(value):
                if (reason := self.refuses_tensor(tensor)) is not None:
                    return reason
        return None

    def refuses_tensor(self, tensor: Tensor) -> str | None:
        """Return a reason to refuse a tensor, by its device, layout and dtype; None if the vendor accepts it."""
        if tensor.device.type != self.device_type:
            return f"it uses a tensor on device {tensor.device.type!r}"
        if tensor.layout != torch.strided:
            return f"it uses a tensor of layout {tensor.layout}"
        return self.refuses_dtype(tensor.dtype)
