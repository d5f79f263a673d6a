"""What tests of artifacts and sessions share."""

from tests.graph.conftest import artifact_folder, graph_mode

__all__ = ["artifact_folder", "graph_mode"]
