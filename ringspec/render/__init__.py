"""Pictures of results. Reads report records as plain data and imports nothing of ringspec but errors."""

from ringspec.render.page import page

__all__ = ["page"]
