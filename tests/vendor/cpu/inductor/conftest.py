"""The fixtures of graph mode."""

from tests.graph.conftest import artifact_folder, graph_mode

__all__ = ["artifact_folder", "graph_mode"]
