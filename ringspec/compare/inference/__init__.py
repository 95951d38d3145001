"""Which recipe fits the errors of a kernel."""
