"""Find the recipe (where a kernel rounds, and to which formats) whose predicted noise fits the errors of a kernel."""
