"""The name of a bug: where a wrong answer is wrong, and which known bug gives it."""
