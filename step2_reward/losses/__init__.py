"""The losses of step 2, a file for each kind of label."""
