"""Which transfers between the stages of a pipeline must not wait for each other.

NCCL knows no tags. What a process sends and receives in one of its communicators takes place in
the order of the calls, and a tensor larger than NCCL's buffers is sent when the other side has
come to its receive. A stage that has hidden states on the way to the next one, while that one has
gradients on the way back, would wait for it forever, and it for the stage. So each kind of tensor
has a communicator of its own in either direction. In these the order of sending is that of
receiving, since both sides take micro-batches in the same order.
"""

from typing import Literal, NamedTuple

What = Literal["hidden states", "gradients", "tied gradients", "tied weights"]


class Channel(NamedTuple):
    """Transfers that arrive in the order in which they are sent, whatever others do."""

    what: What
    to_later: bool
    """Whether it leads to a stage of a higher number."""


CHANNELS = (
    Channel("hidden states", to_later=True),
    Channel("hidden states", to_later=False),
    Channel("gradients", to_later=False),
    Channel("gradients", to_later=True),
    Channel("tied gradients", to_later=False),
    Channel("tied weights", to_later=True),
)
"""All that stages use; the second of hidden states and of gradients with several chunks alone."""
