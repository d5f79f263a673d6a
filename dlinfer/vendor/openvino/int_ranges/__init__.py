"""Check that the integers of a region (part of a graph) fit into the engine's integers, which have fewer bits."""
