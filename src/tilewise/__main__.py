"""`python -m tilewise`, also installed as `tilewise`."""

from __future__ import annotations


def main() -> None:
    """Run the command line. Its libraries (typer, rich) are loaded here and nowhere else in the package."""
    from tilewise.cli import build_app

    build_app()(prog_name="tilewise")


if __name__ == "__main__":
    main()
