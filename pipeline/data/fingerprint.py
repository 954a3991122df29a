"""What tells one set of rows from another."""

import hashlib
from collections.abc import Iterable

from pipeline.data.examples import Example


def fingerprint(examples: Iterable[Example]) -> str:
    """A hash that is the same for the same dialogues in the same order, and for no others."""
    digest = hashlib.sha256()
    for example in examples:
        for dialogue in (example.prompt, example.chosen, example.rejected):
            for message in dialogue:
                for text in (message.role, message.content):
                    encoded = text.encode()
                    digest.update(len(encoded).to_bytes(8, "little") + encoded)
                if not message.trained:
                    digest.update(b"\xfd" * 8)
            digest.update(b"\xff" * 8)  # no text is as long
        if (example.label, example.tie, example.ranks) != (None, False, ()):
            learned = (example.label, example.tie, example.ranks, example.responses)
            digest.update(repr(learned).encode())
        if example.steps:
            digest.update(repr((example.steps, example.step_labels)).encode())
        digest.update(b"\xfe" * 8)
    return digest.hexdigest()[:16]
