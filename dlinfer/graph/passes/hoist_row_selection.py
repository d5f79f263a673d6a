"""Hoist a selection of rows (``hidden[:, -1:]``, ``hidden.index_select(1, last)``) above ops that work row by row.

A prompt's next token needs only the last row of the hidden states. With the selection hoisted, the ops after the last
attention compute this row alone. The pass must not move a selection above an op that mixes rows, above a write, or
above a node with other readers.
"""

from collections.abc import Iterable
from operator import getitem

import torch
from torch import fx
from torch.fx.node import map_arg

from dlinfer.graph.ir.dialect import arguments, fake, is_pure
from dlinfer.graph.ir.effects import Effects, effects_of
from dlinfer.graph.ir.flops import is_product
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit, Rewriter
from dlinfer.graph.passes.row_wise import Rows, reshapes_rows, rows_of_arguments

_SLICE, _SELECT = torch.ops.aten.slice.Tensor, torch.ops.aten.index_select.default


def choose_rows_early(graph_module: fx.GraphModule) -> list[Edit]:
    """Hoist each selection up to the op that mixes rows, if this saves a matrix product. Return the edits."""
    rewriter = Rewriter(graph_module)
    for node in list(graph_module.graph.nodes):
        if node.target in (_SLICE, _SELECT) and _is_hoistable(node):
            _move_up(rewriter, node)
    return rewriter.edits


def _is_hoistable(choice: fx.Node) -> bool:
    """Return whether a selection is a graph output, or a slice that only matrix products read.

    ``index_select`` may repeat rows, as expert routing does, and hoisting would then add work. So an ``index_select``
    is hoisted only if it is a graph output. A slice must have only readers that do not depend on its strides.
    """
    if choice.target is _SELECT:
        return choice.graph.output_node() in choice.users
    return bool(choice.users) and all(map(is_product, choice.users))


def _move_up(rewriter: Rewriter, choice: fx.Node) -> None:
    call = arguments(choice)
    source, dim = call["self"], call["dim"] % fake(choice).dim()
    effects = effects_of(rewriter.graph)
    spared = _spared(choice, source, dim, effects)
    if not any(map(is_product, spared)):
        return
    computed: dict[fx.Node, fx.Node] = {}
    for node in sorted(spared, key=effects.position.__getitem__):
        computed[node] = _of_chosen_rows(rewriter, node, spared[node], choice, computed)
    new = computed[source]
    if choice.target is _SELECT and not (is_contiguous(fake(new)) and is_contiguous(fake(choice))):
        return  # the caller may read the result by its strides; DCE drops the nodes that were added
    rewriter.replace(HOIST_ROW_SELECTION.name, [choice], [new], spared)


def _spared(choice: fx.Node, source: fx.Node, dim: int, effects: Effects) -> Rows:
    """Return the nodes that need to compute only the selected rows, each with the dimension of its rows.

    These nodes lie between an op that mixes rows and the selection. No other node reads them.
    source: the selection's argument. dim: the dimension of ``source`` that counts rows.
    """
    chosen_by = [node for node in choice.all_input_nodes if node is not source]
    rows: Rows = {source: dim}
    spared: Rows = {}
    read_whole = set(chosen_by)
    for node in reversed(list(effects.position)[: effects.position[choice]]):
        if node not in rows or node in read_whole:
            continue
        if not all(user is choice or user in spared for user in node.users):
            continue
        read = rows_of_arguments(node, rows[node])
        if read is None or any(rows.get(parent, at) != at for parent, at in read.items()):
            continue
        if _may_swap(node, chosen_by, choice, effects):
            spared[node] = rows[node]
            rows |= read
            read_whole |= set(node.all_input_nodes) - read.keys()
    # Rows are selected from an item, not from the sequence that holds it.
    return {node: at for node, at in spared.items() if node.target is not getitem or node.args[0] in spared}


def _may_swap(node: fx.Node, chosen_by: Iterable[fx.Node], choice: fx.Node, effects: Effects) -> bool:
    """Return whether rows may be selected before a node instead of after it.

    choice: the selection. chosen_by: the arguments of the selection, such as indices, without the tensor of the rows.
    """
    return (
        is_pure(node)
        and not effects.ever_written(node)
        and all(effects.position[index] < effects.position[node] for index in chosen_by)
        and not effects.written_between(chosen_by, node, choice)
    )


def _of_chosen_rows(
    rewriter: Rewriter, node: fx.Node, dim: int, choice: fx.Node, computed: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Insert, before ``node``, a node that computes only the selected rows of its result. Return the new node.

    dim: the dimension of the result that counts rows. choice: the selection.
    computed: node -> the new node that this function has inserted for it.
    """
    read = rows_of_arguments(node, dim)
    assert read is not None, node.format_node()

    def chosen(parent: fx.Node) -> fx.Node:
        if parent in computed:
            return computed[parent]
        if parent not in read:
            return parent
        _, _, *which = arguments(choice).values()
        return rewriter.call(node, choice.target, parent, read[parent], *which)

    if reshapes_rows(node):
        sizes = [-1 if at == dim else size for at, size in enumerate(fake(node).shape)]
        return rewriter.call(node, torch.ops.aten.reshape.default, chosen(arguments(node)["self"]), sizes)
    args, kwargs = map_arg((node.args, node.kwargs), chosen)
    return rewriter.call(node, node.target, *args, **kwargs)


HOIST_ROW_SELECTION = Pass(
    name="hoist_row_selection",
    why="the next token depends on the last row of a prompt: after the last attention no other row is computed.",
    run=choose_rows_early,
)
