"""Memories of the device: storages, allocation, registers."""
