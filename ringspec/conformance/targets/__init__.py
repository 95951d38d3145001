"""Targets that ship. Their dependencies are optional, and imported when a target is used."""
