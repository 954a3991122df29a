"""Settings of the whole suite."""

import os
import signal

# The models of the tests are so small that threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the suite in the background has it ignore Ctrl-C, and every process that a
# test starts and interrupts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
