"""Code shared by the steps: settings, data, models, engine, launch, report."""

__version__ = "0.1.0"
