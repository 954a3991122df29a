"""Dataclasses of settings, populated from files and the command line."""
