"""Where only some rows of a result are read, the layers behind the last attention compute these rows alone.

A model that reads a prompt gives the hidden states of all its tokens, and the next token comes of the last one. The
choice of rows (``hidden[:, -1:]``, ``hidden.index_select(1, last)``) stands at the end of the graph. It moves up here
through whatever treats each row by itself: of a model's last layer nothing but attention is left that needs all rows.
"""

from collections.abc import Iterable
from operator import getitem

import torch
from torch import fx
from torch.fx.node import map_arg

from dlinfer.graph.ir.dialect import arguments, fake, is_pure
from dlinfer.graph.ir.effects import Effects, effects_of
from dlinfer.graph.ir.flops import flops_of
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit, Rewriter
from dlinfer.graph.passes.row_wise import Rows, reshapes_rows, rows_of_arguments

_SLICE, _SELECT = torch.ops.aten.slice.Tensor, torch.ops.aten.index_select.default


def choose_rows_early(graph_module: fx.GraphModule) -> list[Edit]:
    """Move each choice of rows up to where rows are mixed; gives one edit for each that spares a product."""
    rewriter = Rewriter(graph_module)
    for node in list(graph_module.graph.nodes):
        if node.target in (_SLICE, _SELECT) and _is_last(node):
            _move_up(rewriter, node)
    return rewriter.edits


def _is_last(choice: fx.Node) -> bool:
    """Whether what is chosen takes the place of what it is chosen from, and is read by no strides of a view.

    An index may name a row many times, as experts' do; one that is a graph's last step names those that are wanted.
    """
    if choice.target is _SELECT:
        return choice.graph.output_node() in choice.users
    return bool(choice.users) and all(flops_of(user) for user in choice.users)


def _move_up(rewriter: Rewriter, choice: fx.Node) -> None:
    given = arguments(choice)
    source, dim = given["self"], given["dim"] % fake(choice).dim()
    effects = effects_of(rewriter.graph)
    spared = _spared(choice, source, dim, effects)
    if not any(flops_of(node) for node in spared):
        return
    computed: dict[fx.Node, fx.Node] = {}
    for node in sorted(spared, key=effects.position.__getitem__):
        computed[node] = _of_chosen_rows(rewriter, node, spared[node], choice, computed)
    new = computed[source]
    if choice.target is _SELECT and not (is_contiguous(fake(new)) and is_contiguous(fake(choice))):
        return  # whoever is given the result reads it by its strides; what was added is dropped as unused
    rewriter.replace(HOIST_ROW_SELECTION.name, [choice], [new], spared)


def _spared(choice: fx.Node, source: fx.Node, dim: int, effects: Effects) -> Rows:
    """The nodes between what mixes rows and a choice that nothing reads but the choice and each other."""
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
        if _may_be_anew(node, chosen_by, choice, effects):
            spared[node] = rows[node]
            rows |= read
            read_whole |= set(node.all_input_nodes) - read.keys()
    # An item is chosen from, not the sequence that it is taken out of.
    return {node: at for node, at in spared.items() if node.target is not getitem or node.args[0] in spared}


def _may_be_anew(node: fx.Node, chosen_by: Iterable[fx.Node], choice: fx.Node, effects: Effects) -> bool:
    """Whether rows may be chosen in front of a node as well as behind it."""
    return (
        is_pure(node)
        and not effects.ever_written(node)
        and all(effects.position[one] < effects.position[node] for one in chosen_by)
        and not effects.written_between(chosen_by, node, choice)
    )


def _of_chosen_rows(
    rewriter: Rewriter, node: fx.Node, dim: int, choice: fx.Node, computed: dict[fx.Node, fx.Node]
) -> fx.Node:
    """A new node in front of one, which gives the chosen rows of its result."""
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
    why="only the last token of a prompt says what follows: the layers behind the last attention compute no others.",
    run=choose_rows_early,
)
