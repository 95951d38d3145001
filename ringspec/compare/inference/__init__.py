"""Find the recipe whose predicted noise fits the errors of a kernel."""
