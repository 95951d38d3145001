"""Pictures and pages of results. This package reads report records as plain data and imports only errors from ringspec."""

from ringspec.render.page import page

__all__ = ["page"]
