"""Which revision of this project was measured."""

import subprocess


def revision() -> str:
    """The commit of the working directory; empty where git or its history is not there."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return output.stdout.strip()
