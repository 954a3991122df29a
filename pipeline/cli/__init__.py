"""Command lines: options, help, exit codes."""
