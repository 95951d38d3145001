"""What stands between a target's author and the protocol: one module for each way to be called."""
