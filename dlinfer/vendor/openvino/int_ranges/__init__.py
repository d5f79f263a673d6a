"""Check that a region's integers fit the engine's integers, which have fewer bits than torch's."""
