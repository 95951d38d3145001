"""Pictures and HTML pages of results.

This package reads the records of a report as plain data. From the rest of ringspec it imports only ``errors``.
"""

from ringspec.render.page import page

__all__ = ["page"]
