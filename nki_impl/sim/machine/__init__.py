"""Ranks and cores: launches, scheduling, the state and counters of a core, race detection."""
