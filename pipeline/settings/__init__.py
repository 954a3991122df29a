"""Dataclasses of settings, filled from files and the command line."""
