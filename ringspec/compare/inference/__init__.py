"""Find the recipe that fits the errors of a kernel."""
