"""Settings of the whole suite."""

import os

# The models of the tests are so small that threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
