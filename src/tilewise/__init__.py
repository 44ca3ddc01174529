"""tilewise: exact, IO-aware attention."""
