"""Ranks and cores: launch, turns, what a core does and counts, races."""
