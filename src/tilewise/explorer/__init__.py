"""The web explorer: a lesson and benches on attention in a browser, served on loopback or exported as one file."""

from tilewise.explorer.page import chapter_names, exported_page, served_page
from tilewise.explorer.server import ExplorerServer

__all__ = ["ExplorerServer", "chapter_names", "exported_page", "served_page"]
