"""The web explorer: attention step by step in a browser, served on loopback or exported as one file."""

from tilewise.explorer.page import exported_page, served_page
from tilewise.explorer.server import ExplorerServer

__all__ = ["ExplorerServer", "exported_page", "served_page"]
