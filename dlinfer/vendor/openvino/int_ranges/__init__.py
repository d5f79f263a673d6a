"""Check that the integers of a region fit into the engine's integers, which have fewer bits than torch's."""
