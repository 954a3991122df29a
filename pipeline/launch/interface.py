"""By which address and network interface this machine reaches another one."""

import socket

import psutil

ANY_PORT = 9
"""Nothing is sent to it: connecting a datagram socket only looks up the way."""


def own_address(other: str) -> str | None:
    """This machine's address on the way to another one, given by name or address.

    None where there is no way, or the name is not known.
    """
    try:
        candidates = socket.getaddrinfo(other, ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in candidates:
        with socket.socket(family, kind, protocol) as way:
            try:
                way.connect(place)
            except OSError:
                continue
            return way.getsockname()[0]
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None
