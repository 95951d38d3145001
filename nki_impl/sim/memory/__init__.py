"""The memories of the device: storages, allocation, registers."""
