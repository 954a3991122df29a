"""Assignment of rows to steps and to evaluation, by prompt."""
