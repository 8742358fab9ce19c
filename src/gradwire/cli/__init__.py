"""The command line: ``gradwire --help``."""

from gradwire.cli.app import app, main

__all__ = ["app", "main"]
