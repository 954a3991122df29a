"""Command lines: options, help, how commands end."""
