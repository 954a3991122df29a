"""The number that stands for a prompt, and what is drawn for it.

Which step gets a prompt, and whether it is held out, are draws that depend on the prompt and on
`data.seed` alone: not on other rows, on their order, or on the files they come in.
"""

import hashlib

from pipeline.data.examples import Example


def prompt_hash(example: Example) -> int:
    """64 bits that stand for the prompt of `example`.

    The first 8 bytes, little-endian, of the SHA-256 of its first user turn (of the text itself
    where there is no prompt), in UTF-8, case-folded, with every run of white space as one space.
    Dialogues that begin alike are branches of one conversation, and share it.
    """
    users = (turn.content for turn in example.prompt if turn.role == "user")
    text = next(users, None)
    if text is None:
        text = "\n".join(turn.content for turn in (*example.prompt, *example.chosen))
    normalized = " ".join(text.split()).casefold()
    digest = hashlib.sha256(normalized.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")


def content_hash(example: Example) -> int:
    """64 bits that stand for the texts of `example`: rows of one prompt come in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for turn in (*example.prompt, *example.chosen, *example.rejected):
        text = turn.content.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little")


def draw(number: int, *, seed: int, purpose: str) -> float:
    """A uniform number in (0, 1) that follows from the prompt's hash, the seed and the purpose."""
    text = f"{seed} {purpose} {number}".encode()
    bits = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return ((bits >> 12) + 0.5) / 2**52  # of 53 bits, so that it is below 1
